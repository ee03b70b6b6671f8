"""Values in manual regions whose types say that they may differ from device to device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from shardkit._compat import varying_axes


def varying(x: Any, names: Iterable[str]) -> Any:
    """``x`` as a value that may differ along mesh axes: its gradient is each device's own. Nothing travels.

    Args:
      x: an array in a region where the axes are manual.
      names: the axes; those that it varies along already are passed over.
    """
    missing = tuple(n for n in names if n not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def alike(arrays: Sequence[Any], *more: Any) -> list[Any]:
    """Arrays that all vary over every mesh axis that one of them (or of ``more``) varies over.

    The transpose sums over the axes that an array did not vary over: of 16-bit floats in float32, which is more
    exact, and XLA's CPU backend aborts on some 16-bit sums in regions that leave other axes to the compiler.
    """
    union = frozenset[str]().union(*(varying_axes(a) for a in (*arrays, *more) if isinstance(a, jax.Array)))

    def vary(a: Any) -> Any:
        missing = sorted(union - varying_axes(a))
        if missing and a.dtype.itemsize < 4 and jnp.issubdtype(a.dtype, jnp.floating):
            return varying(a.astype(jnp.float32), missing).astype(a.dtype)
        return varying(a, missing)

    return [vary(a) for a in arrays]
