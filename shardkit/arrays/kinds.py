"""The kinds of reduction a Partial waits for, as arithmetic: which dtypes, which identity, which function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit.placements import REDUCE_KINDS

_CLASSES = (("bool", np.bool_), ("integer", np.integer), ("float", np.floating), ("complex", np.complexfloating))

# A mean of integers is no integer, complex numbers have no order, a sum of bools is no bool.
_ALLOWED = {
    "sum": ("integer", "float", "complex"),
    "prod": ("integer", "float", "complex"),
    "mean": ("float", "complex"),
    "max": ("bool", "integer", "float"),
    "min": ("bool", "integer", "float"),
    "any": ("bool",),
    "all": ("bool",),
}

_HINTS = {
    ("sum", "bool"): 'use Partial("any"), or cast to an integer to count',
    ("prod", "bool"): 'use Partial("all")',
    ("mean", "bool"): "cast to float first",
    ("mean", "integer"): 'an integer mean isn\'t exact: cast to float first, or use Partial("sum")',
    ("max", "complex"): "complex numbers have no order: reduce the real part, imag part or abs()",
    ("min", "complex"): "complex numbers have no order: reduce the real part, imag part or abs()",
}


def check_dtype(kind: str, dtype: Any, what: str) -> None:
    """Refuses a reduction that the dtype doesn't have.

    Args:
      kind: one of "sum", "mean", "max", "min", "prod", "any", "all".
      dtype: of the contributions.
      what: who asks; the message starts with it.

    Raises:
      TypeError: the kind isn't defined on the dtype, or isn't kept by it (an integer mean).
      ValueError: an unknown kind.
    """
    _check_kind(kind, what)
    found = next((name for name, scalar in _CLASSES if jnp.issubdtype(dtype, scalar)), None)
    if found in _ALLOWED[kind]:
        return
    allowed = [k for k in REDUCE_KINDS if found in _ALLOWED[k]]
    hint = _HINTS.get((kind, found or ""), "use another dtype or kind")
    raise TypeError(
        f"{what}: Partial({kind!r}) of dtype {np.dtype(dtype).name} isn't defined; this dtype can wait for "
        f"{allowed}; {hint}"
    )


def identity(kind: str, dtype: Any) -> Any:
    """The contribution that changes nothing, as a NumPy scalar of ``dtype``.

    Zeros would be wrong for all but sums: a max of negative values with a zero among them is zero.

    Raises:
      TypeError: the kind isn't defined on the dtype.
      ValueError: a mean, which has none: there every device holds the value itself; an unknown kind.
    """
    _check_kind(kind, "identity")
    if kind == "mean":
        raise ValueError('Partial("mean") has no identity: a device without a contribution must hold the value itself')
    check_dtype(kind, dtype, "identity")
    dtype = np.dtype(dtype)
    if kind in ("sum", "any"):
        return dtype.type(0)
    if kind in ("prod", "all"):
        return dtype.type(1)
    return _highest(dtype) if kind == "min" else _lowest(dtype)


def _lowest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return dtype.type(False)
    if jnp.issubdtype(dtype, np.integer):
        return dtype.type(jnp.iinfo(dtype).min)
    return _infinite(dtype, -1) or dtype.type(jnp.finfo(dtype).min)


def _highest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return dtype.type(True)
    if jnp.issubdtype(dtype, np.integer):
        return dtype.type(jnp.iinfo(dtype).max)
    return _infinite(dtype, 1) or dtype.type(jnp.finfo(dtype).max)


def _infinite(dtype: np.dtype, sign: int) -> Any:
    """Infinity, or None where the float type has none (several 8-bit ones turn it into nan or their largest)."""
    value = np.array(sign * np.inf, np.float32).astype(dtype)
    return dtype.type(value) if np.isinf(value.astype(np.float32)) else None


def reduce_stack(kind: str, stack: Any, axes: Sequence[int]) -> jax.Array:
    """The reduction of contributions stacked along ``axes``; the dtype stays as it is (an int8 sum is int8)."""
    _check_kind(kind, "reduce_stack")
    check_dtype(kind, stack.dtype, "reduce_stack")
    axes = tuple(axes)
    if kind in ("sum", "prod", "mean"):
        return getattr(jnp, kind)(stack, axis=axes, dtype=stack.dtype)
    return getattr(jnp, kind)(stack, axis=axes)


def _check_kind(kind: str, what: str) -> None:
    if kind not in REDUCE_KINDS:
        raise ValueError(f"{what}: reduce kind {kind!r} is unknown; use one of {REDUCE_KINDS}")
