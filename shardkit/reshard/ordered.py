"""Floats as integers in the same order, NaNs beyond the end, so that every backend's all-reduce takes extremes alike.

What an all-reduce of maxima makes of NaNs is up to the backend: XLA's CPU drops them, NCCL promises nothing. Integers
have no such freedom, and cost no more bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def to_ordered(x: jax.Array, kind: str) -> jax.Array:
    """Integers that compare as ``x`` does: for max (or any) a NaN above all, for min (or all) below all."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = lax.bitcast_convert_type(x, _integer(x.dtype))
    greatest = np.array(np.iinfo(bits.dtype).max, bits.dtype)
    ordered = jnp.where(bits < 0, bits ^ greatest, bits)  # of negative floats, larger bits are smaller numbers
    beyond = greatest if kind == "max" else np.array(np.iinfo(bits.dtype).min, bits.dtype)
    return jnp.where(jnp.isnan(x), beyond, ordered)


def from_ordered(ordered: jax.Array, dtype: Any) -> jax.Array:
    """The floats again."""
    if dtype == jnp.bool_:
        return ordered.astype(jnp.bool_)
    if not jnp.issubdtype(dtype, jnp.floating):
        return ordered
    greatest = np.array(np.iinfo(ordered.dtype).max, ordered.dtype)
    return lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ greatest, ordered), dtype)


def _integer(dtype: Any) -> Any:
    return {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[jnp.dtype(dtype).itemsize]
