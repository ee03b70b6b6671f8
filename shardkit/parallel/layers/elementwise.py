"""Layers that work element by element: a Padded stays one, which their own code would unpad or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from shardkit.arrays import Padded, pad_to
from shardkit.parallel.layers.operands import array_of, cleared, like, placed_along
from shardkit.parallel.plans import Applied
from shardkit.spatial.operands import explicit_axes


def elementwise(x: Any, applied: Applied, run: Callable[[Any], Any]) -> Any:
    """``run`` (a layer's own code) of what a Padded holds."""
    return like(x, run(cleared(applied, x).array))


def dropout(x: Any, rate: float, run: Callable[[Any], Any]) -> Any:
    """A dropout layer that drops the elements it would drop of the whole.

    On Explicit axes Flax's own code would refuse to choose between what is sharded by what isn't.

    Args:
      x: an array or ``sk.Padded``.
      rate: part of the elements to drop.
      run: the layer's own code; given ones, it says what it keeps, or gives them back if it drops nothing.
    """
    array = array_of(x)
    if not isinstance(x, Padded) and not explicit_axes(jax.typeof(array).sharding.mesh):
        return run(array)
    inside = any(held < size for held, size in zip(array.shape, x.shape, strict=True))
    # Inside a manual region each device draws for its block, as it does of plain arrays.
    ones = jnp.ones(array.shape if inside else x.shape, np.float32)
    drawn = run(ones)
    if drawn is ones:
        return x
    if rate == 1:
        return like(x, jnp.zeros_like(array))
    kept = placed_along(array, pad_to(drawn != 0, array.shape))
    return like(x, lax.select(kept, array / (1 - rate), jnp.zeros_like(array)))
