"""``conv_general_dilated``: batch and features by letters, space with halos."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jax import Array

from shardkit.spatial.convolution.apply import convolve
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.exchange import clear_tail
from shardkit.spatial.windows import ShardedWindow, Window, shard_window
from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.factored import Custom, Cut, Dim, Factored, Local, Together, strategies
from shardkit.spmd.rules.halos import AfterReading, Read, axis_name, halo_of, traffic, worthwhile
from shardkit.spmd.rules.strategy import Case, Op, Strategy

_GROUPS = {"fg": "feature_group_count", "bg": "batch_group_count"}


def conv_general_dilated(op: Op) -> Custom:
    """Batch, features and groups are letters, and so is space: of input and output, or else of input and kernel.

    Cut space of the input is cut space of the output, the kernel whole; neighbours' edges travel. Where the "kernel"
    is as long as the input (reverse mode writes a kernel's gradient as a convolution of the input with the output's
    gradient) both are cut, and the output is whole and Partial.
    """
    sizes = {f"s{k}": op.operands[0].shape[d] for k, d in enumerate(_space(op, "lhs"))}
    return Custom(_factored(op, sizes, contracted=False), functools.partial(_cut_kernels, op))


def _cut_kernels(op: Op, case: Case) -> Sequence[Strategy]:
    """Ways in which the kernel is cut in space, together with the input."""
    # Input and kernel differ in size, and nothing but the blocks has to match: the letter counts devices.
    sizes = {f"s{k}": math.prod(case.sizes.values()) for k in range(len(_space(op, "lhs")))}
    found = strategies(case, _factored(op, sizes, contracted=True))
    return [s for s in found if any(s.operands[0].dims[d] for d in _space(op, "lhs"))]


def _space(op: Op, which: str) -> tuple[int, ...]:
    """Spatial dims of an operand ("lhs", "rhs") or of the result ("out")."""
    return getattr(op.params["dimension_numbers"], f"{which}_spec")[2:]


def _factored(op: Op, space: dict[str, int], *, contracted: bool) -> Factored:
    """The letters: "fg" and "bg" feature and batch groups, "n" batch, "i" and "o" features of a group, "s" space.

    Args:
      op: the convolution.
      space: the size of each letter of space.
      contracted: space of the kernel has the letters of the input's; else the output's has.
    """
    lhs, rhs = op.operands
    numbers = op.params["dimension_numbers"]
    groups = {x: op.params[name] for x, name in _GROUPS.items() if op.params[name] > 1}
    sizes = {
        **space,
        **groups,
        "n": lhs.shape[numbers.lhs_spec[0]] // groups.get("bg", 1),
        "i": rhs.shape[numbers.rhs_spec[1]],
        "o": rhs.shape[numbers.rhs_spec[0]] // math.prod(groups.values()),
    }
    sizes |= {f"k{k}": (op.results[0] if contracted else rhs).shape[d] for k, d in enumerate(_whole(op, contracted))}
    fg, bg = (tuple(x for x in groups if x == wanted) for wanted in _GROUPS)
    taps = [(x,) for x in space] if contracted else [(f"k{k}",) for k in range(len(space))]
    outs = [(f"k{k}",) for k in range(len(space))] if contracted else [(x,) for x in space]
    operands = (
        _ordered(numbers.lhs_spec, [(*bg, "n"), (*fg, "i"), *((x,) for x in space)]),
        _ordered(numbers.rhs_spec, [(*fg, *bg, "o"), ("i",), *taps]),
    )
    results = (_ordered(numbers.out_spec, [("n",), (*fg, *bg, "o"), *outs]),)
    merged = {x for dims in (*operands, *results) for d in dims if len(d) > 1 for x in d}

    def local(cut: Cut, mesh: Sizes) -> Local | None:
        if any(sizes[x] % parts(axes, mesh) for x, axes in cut.items() if x in merged):
            return None  # a block would end within a group
        local_groups = {name: op.params[name] // parts(cut.get(x, ()), mesh) for x, name in _GROUPS.items()}
        if not any(x in cut for x in space):
            return Local({**op.params, **local_groups})
        axes = [cut.get(x, ()) for x in space]
        shape = _block(lhs.shape, operands[0], cut, mesh)
        return _in_space(op, axes, local_groups, shape, mesh, contracted)

    return Factored(
        operands,
        results,
        sizes,
        whole=frozenset(f"k{k}" for k in range(len(space))),
        contracted=dict.fromkeys(("i", *(space if contracted else ())), "sum"),
        linear=(Together(frozenset({0})), Together(frozenset({1}))),
        local=local,
        uneven=True,
        work=_flops(op),
    )


def _whole(op: Op, contracted: bool) -> tuple[int, ...]:
    return _space(op, "out" if contracted else "rhs")


def _ordered(spec: Sequence[int], dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Dims given in the order (batch, feature, *space), as the array has them."""
    return tuple(dim for _, dim in sorted(zip(spec, dims, strict=True)))


def _block(shape: Sequence[int], dims: Sequence[Dim], cut: Cut, mesh: Sizes) -> tuple[int, ...]:
    axes = [[a for x in letters for a in cut.get(x, ())] for letters in dims]
    return tuple(-(-s // parts(names, mesh)) for s, names in zip(shape, axes, strict=True))


def _flops(op: Op) -> float:
    """Two for each tap of each output; zeros of a dilated input aren't counted."""
    kernel, numbers = op.operands[1].shape, op.params["dimension_numbers"]
    taps = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
    return 2.0 * math.prod(op.results[0].shape) * taps / math.prod(op.params["lhs_dilation"])


# --- in space -----------------------------------------------------------------------------------------


def _in_space(
    op: Op, axes: Sequence[tuple[str, ...]], groups: dict[str, int], block: Sequence[int], mesh: Sizes, contracted: bool
) -> Local | None:
    """The convolution of blocks whose space is cut; None where it would read (nearly) all of a dim.

    Args:
      op: the convolution.
      axes: of each spatial dim the mesh axes that cut it, none for most.
      groups: feature and batch groups of a block.
      block: shape of the input's.
      mesh: sizes of its axes.
      contracted: the kernel is cut, too.
    """
    if not all(math.prod(t.shape) for t in (*op.operands, *op.results)):
        return None
    windows, halos, tails = [], [], []
    for k, names in enumerate(axes):
        window, shards = _window(op, k), parts(names, mesh)
        sharded = _over_kernel(window, op, k, shards) if names and contracted else shard_window(window, shards)
        windows.append(sharded)
        if not names:
            continue
        if not worthwhile(sharded):
            return None
        halos.append(halo_of(_space(op, "lhs")[k], names, sharded))
        if contracted:
            tails.append((_space(op, "rhs")[k], names, window.kernel, shards))
    numbers = op.params["dimension_numbers"]
    conv = LocalConv(
        lhs_spec=tuple(numbers.lhs_spec),
        rhs_spec=tuple(numbers.rhs_spec),
        out_spec=tuple(numbers.out_spec),
        windows=tuple(windows),
        axes=tuple(map(axis_name, axes)),
        modes=("zeros",) * len(axes),
        feature_groups=groups["feature_group_count"],
        batch_groups=groups["batch_group_count"],
        precision=op.params["precision"],
        preferred_element_type=op.params["preferred_element_type"],
    )
    work = functools.partial(_convolve, conv, tuple(axes), tuple(tails))
    run = AfterReading((Read(0, tuple(halos), "sum"),), work)
    return Local(run=run, traffic=traffic(halos, block, op.operands[0].dtype), why="halo exchange")


def _window(op: Op, k: int) -> Window:
    """The window over one spatial dim; its size is that of the result."""
    params = op.params
    lo, hi = params["padding"][k]
    return Window(
        size=op.operands[0].shape[_space(op, "lhs")[k]],
        kernel=op.operands[1].shape[_space(op, "rhs")[k]],
        stride=params["window_strides"][k],
        pad_lo=lo,
        pad_hi=hi,
        lhs_dilation=params["lhs_dilation"][k],
        rhs_dilation=params["rhs_dilation"][k],
    )


def _over_kernel(window: Window, op: Op, k: int, shards: int) -> ShardedWindow:
    """A window whose kernel is cut: each device applies its taps, and has all outputs.

    Tap j of output k reads position ``k * stride + j * rhs_dilation - pad_lo``. So what a block of taps reads is what
    a block of outputs does if outputs and taps, stride and dilation change places. (Of a kernel's gradient that is
    the convolution whose gradient it is: its halos are the same.)
    """
    outputs = op.results[0].shape[_space(op, "out")[k]]
    swapped = Window(
        window.size, outputs, window.rhs_dilation, window.pad_lo, 0, window.lhs_dilation, rhs_dilation=window.stride
    )
    covered = (window.kernel - 1) * swapped.stride + swapped.reach
    swapped = dataclasses.replace(swapped, pad_hi=covered - swapped.pad_lo - swapped.dilated_size)
    cut = shard_window(swapped, shards)
    return ShardedWindow(dataclasses.replace(window, kernel=cut.out_block), cut.exchange, outputs, cut.phases)


def _convolve(
    conv: LocalConv,
    axes: tuple[tuple[str, ...], ...],
    tails: tuple[tuple[int, tuple[str, ...], int, int], ...],
    here: Any,
    line: Array,
    kernel: Array,
) -> Array:
    """What a device does once the halos are there.

    Args:
      conv: its convolution.
      axes: of each spatial dim, the mesh axes that cut it.
      tails: (dim, axes, size, blocks) of cut dims of the kernel, whose padded taps must be zero.
      here: this device.
      line: its block of the input with the halos.
      kernel: the kernel, or its block.
    """
    for dim, names, size, shards in tails:
        kernel = clear_tail(kernel, size, shards, here.index(names), dim)
    return convolve(conv, tuple(here.index(names) for names in axes), line, kernel)


RULES = {"conv_general_dilated": conv_general_dilated}
