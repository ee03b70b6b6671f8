"""Values in manual regions whose types say that they may differ from device to device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax import lax

from shardkit._compat import varying_axes


def varying(x: Any, names: Iterable[str]) -> Any:
    """``x`` as a value that may differ along mesh axes: its gradient is each device's own. Nothing travels.

    Args:
      x: an array in a region where the axes are manual.
      names: the axes; those that it varies along already are passed over.
    """
    missing = tuple(n for n in names if n not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
