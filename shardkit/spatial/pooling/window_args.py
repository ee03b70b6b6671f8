"""Reading the arguments of windowed operators: lax's spellings, checked, as one window a dim."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array

from shardkit.spatial.block_op import BlockOp, Operand, read_operand, run_block_op
from shardkit.spatial.convolution.args import read_padding
from shardkit.spatial.operands import as_array, clear_tails
from shardkit.spatial.pooling.reduce_window import WindowedDim
from shardkit.spatial.windows import PADDING_MODES, Window, shard_window


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
        check_window(windows[d], modes[d], d, what)
        dims.append(
            WindowedDim(d, shard_window(windows[d], operand.shards(d), modes[d]), operand.axis_name(d), modes[d])
        )
    out_shape = list(operand.shape)
    for d in mixed:
        out_shape[d] = windows[d].output_size
    return WindowCall(operand, tuple(dims), tuple(out_shape), what)


def per_dim(given: Any, count: int, name: str, what: str) -> tuple[int, ...]:
    """One positive integer a dim; 1 each where nothing is given."""
    if given is None:
        return (1,) * count
    try:
        values = tuple(operator.index(v) for v in given)
    except TypeError:
        raise ValueError(f"{what}: {name} takes one integer a dim, got {given!r}") from None
    if len(values) != count:
        raise ValueError(f"{what}: {name}={values} has {len(values)} entries for {count} dims")
    if any(v < 1 for v in values):
        raise ValueError(f"{what}: {name}={values} must be at least 1")
    return values


def read_modes(given: Any, dims: Sequence[int], letters: Mapping[str, int], what: str) -> tuple[str, ...]:
    """What lies beyond the ends of each of ``dims``: one mode for all, one a dim, or a mapping by letter or dim."""
    if isinstance(given, str):
        modes = [given] * len(dims)
    elif isinstance(given, Mapping):
        by_dim = {}
        for key, mode in given.items():
            dim = letters.get(key) if isinstance(key, str) else key
            if dim not in dims:
                raise ValueError(f"{what}: padding_mode names dim {key!r}, but windows move along dims {tuple(dims)}")
            by_dim[dim] = mode
        modes = [by_dim.get(d, "zeros") for d in dims]
    else:
        modes = list(given)
        if len(modes) != len(dims):
            raise ValueError(f"{what}: padding_mode={given!r} has {len(modes)} entries for {len(dims)} dims")
    for mode in modes:
        if mode not in PADDING_MODES:
            raise ValueError(f"{what}: padding_mode={mode!r} is unknown; use one of {PADDING_MODES}")
    return tuple(modes)


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


def check_window(window: Window, mode: str, dim: int, what: str) -> None:
    """The window has an output, and what its mode mirrors exists."""
    if not window.size:
        raise ValueError(f"{what}: dim {dim} is empty; there is nothing for a window to move over")
    if window.output_size < 1:
        raise ValueError(
            f"{what}: no output in dim {dim}: {window.size} elements"
            f"{f' dilated to {window.dilated_size}' if window.lhs_dilation > 1 else ''} with padding "
            f"({window.pad_lo}, {window.pad_hi}) are fewer than the {window.reach} that the window covers"
        )
    beyond = max(-(-max(p, 0) // window.lhs_dilation) for p in (window.pad_lo, window.pad_hi))
    if mode == "reflect" and beyond >= window.size > 1:
        raise ValueError(
            f"{what}: padding ({window.pad_lo}, {window.pad_hi}) reflects more than the {window.size} elements of dim "
            f"{dim} hold; pad at most {(window.size - 1) * window.lhs_dilation}"
        )


def moves(window: Window) -> bool:
    """False for a window that leaves its dim as it is."""
    return window != Window(window.size, 1)
