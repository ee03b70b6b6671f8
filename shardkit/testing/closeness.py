"""When two numbers count as equal: the tolerances of each element type."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

# Sums in another order differ by some roundings; short floats by one or two of theirs, which are large.
_RELATIVE = {"float64": 1e-10, "complex128": 1e-10, "float32": 1e-5, "complex64": 1e-5}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Elements may differ by ``atol + rtol * |wanted|``. None: by dtype, and ``atol`` by the largest element."""

    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"{name} must be a number, or None for the tolerance of the dtype; got {value!r}")
            if not 0 <= value < np.inf:
                raise ValueError(f"{name} must be at least 0 and finite; got {value!r}")

    def of(self, dtype: str, wanted: np.ndarray) -> tuple[float, float]:
        """``(rtol, atol)`` for these elements; zeros for what must be exactly equal."""
        known = relative(dtype)
        rtol = known if self.rtol is None else float(self.rtol)
        if self.atol is not None:
            return rtol, float(self.atol)
        # Where terms cancel, what rounding leaves is as small as the terms were, not as the result is.
        sizes = np.abs(wide(wanted)) if known else np.zeros(())
        return rtol, rtol * float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))


def relative(dtype: str) -> float:
    """The relative tolerance of a dtype: 1e-10 for double, 1e-5 for single precision, 0 for integers, bools and keys.

    Shorter floats: four times the distance from 1 to the next number.

    Example:
      >>> relative("float64"), relative("float32"), relative("bfloat16"), relative("int32")
      (1e-10, 1e-05, 0.03125, 0.0)
    """
    if dtype in _RELATIVE:
        return _RELATIVE[dtype]
    if dtype.startswith(("key<", "bool", "int", "uint")):
        return 0.0
    return 4 * float(jnp.finfo(dtype).eps)


def wide(x: np.ndarray) -> np.ndarray:
    """The same numbers in a type in which their differences can be taken."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def errors(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The absolute errors: 0 where equal, or where both are NaN; infinite where only one is finite."""
    with np.errstate(all="ignore"):
        same = (got == wanted) | (_nan(got) & _nan(wanted))
        off = np.abs(wide(got) - wide(wanted))
    off = np.where(np.isfinite(off), off, np.inf)
    return np.where(same, 0.0, np.maximum(off, np.finfo(float).tiny))  # unequal integers may be so beyond 2**53


def wrong(got: np.ndarray, wanted: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    """Which elements differ by more than ``atol + rtol * |wanted|``."""
    off = errors(got, wanted)
    if rtol == atol == 0:
        return off > 0
    with np.errstate(all="ignore"):
        allowed = atol + rtol * np.abs(wide(wanted))
    return (off > 0) & ~(off <= np.where(np.isfinite(allowed), allowed, 0.0))


def _nan(x: Any) -> np.ndarray:
    return x != x  # of every dtype, those of ml_dtypes too
