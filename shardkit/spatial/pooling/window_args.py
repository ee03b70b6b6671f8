"""Reading the arguments of windowed operators: lax's spellings, checked, as one window a dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array

from shardkit.spatial.block_op import BlockOp, Operand, read_operand, run_block_op
from shardkit.spatial.operands import as_array, clear_tails
from shardkit.spatial.pooling.reduce_window import WindowedDim
from shardkit.spatial.window_reading import check_window, per_dim, read_padding
from shardkit.spatial.windows import Window, shard_window


@dataclasses.dataclass
class WindowCall:
    """One call of a windowed operator, read and checked; nothing has moved yet.

    Attributes:
      operand: what it works on.
      dims: the dims that windows move along.
      out_shape: the logical shape of the result.
      what: the caller, for messages.
    """

    operand: Operand
    dims: tuple[WindowedDim, ...]
    out_shape: tuple[int, ...]
    what: str

    def run(self, op: BlockOp, *whole: Array) -> Any:
        """The result of ``op`` on every device, ``whole`` handed to it as it is."""
        mixed = [d.dim for d in self.dims]
        return run_block_op(op, self.operand, self.out_shape, mixed=mixed, what=self.what, whole=whole)


def read_call(
    x: Any,
    windows_of: Callable[[Sequence[int]], Sequence[Window]],
    modes: Mapping[int, str],
    *,
    spatial_axes: Any,
    mesh: Any,
    letters: Mapping[str, int],
    what: str,
) -> WindowCall:
    """The operand and its windows.

    Args:
      x, spatial_axes, mesh, letters, what: as for ``read_operand``.
      windows_of: one window an array dim, from the logical sizes.
      modes: the padding mode of each dim that windows may move along.
    """
    x = as_array(x)
    # Which windows move can be told from any sizes: from those of a block, too.
    mixed = [d for d, w in enumerate(windows_of(x.shape)) if moves(w)]
    operand = read_operand(x, spatial_axes, mesh, letters=letters, mixed=mixed, what=what)
    others = [d for d in range(x.ndim) if d not in mixed and d not in operand.cuts]
    # Garbage in other padded tails stays there, but its derivative may be a NaN that meets a zero.
    operand.array = clear_tails(operand.array, operand.shape, others)
    windows = windows_of(operand.shape)
    dims = []
    for d in mixed:
        if not windows[d].size:
            raise ValueError(f"{what}: dim {d} is empty; there is nothing for a window to move over")
        check_window(windows[d], modes[d], f"dim {d}", what)
        dims.append(
            WindowedDim(d, shard_window(windows[d], operand.shards(d), modes[d]), operand.axis_name(d), modes[d])
        )
    out_shape = list(operand.shape)
    for d in mixed:
        out_shape[d] = windows[d].output_size
    return WindowCall(operand, tuple(dims), tuple(out_shape), what)


def read_windows(
    sizes: Sequence[int],
    window: Any,
    strides: Any,
    padding: Any,
    base_dilation: Any,
    window_dilation: Any,
    *,
    names: tuple[str, str],
    what: str,
) -> list[Window]:
    """One window a dim, as ``lax.reduce_window`` reads its arguments: names of paddings ignore base dilation.

    Args:
      sizes: logical size of each dim.
      window, strides, padding, base_dilation, window_dilation: as the caller gave them.
      names, what: what the caller calls the window's sizes, its strides, and itself, for messages.
    """
    count = len(sizes)
    kernels = per_dim(window, count, names[0], what)
    strides = per_dim(strides, count, names[1], what)
    base = per_dim(base_dilation, count, "base_dilation", what)
    dilation = per_dim(window_dilation, count, "window_dilation", what)
    pads = read_padding(padding, sizes, kernels, strides, (1,) * count, dilation, what)
    return [
        Window(size, kernel, stride, lo, hi, b, d)
        for size, kernel, stride, (lo, hi), b, d in zip(sizes, kernels, strides, pads, base, dilation, strict=True)
    ]


def moves(window: Window) -> bool:
    """False for a window that leaves its dim as it is."""
    return window != Window(window.size, 1)
