"""Reductions over windows, and the two operations that derivatives of max pooling are made of."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array

from shardkit.spatial.pooling.window_args import moves
from shardkit.spatial.windows import ShardedWindow, Window, shard_window
from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.factored import SUMS, Cut, Factored, Local, Together, names, one_letter_each
from shardkit.spmd.rules.halos import AfterReading, Halo, Read, extended, fitted, halo_of, traffic, worthwhile
from shardkit.spmd.rules.strategy import Op, Type

_KINDS = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min"}

Over = Sequence[tuple[Halo, ShardedWindow]]  # of dims that are read across blocks

# What a device does once halos are there: ``(bind, over, here, *blocks)``, where ``bind`` is the primitive with the
# parameters for what ``fitted`` lays out.
Run = Callable[..., Array]


def reduce_window_monoid(op: Op) -> Factored:
    """Sum, maximum or minimum: neighbours' edges travel; of a dim that one window covers the result is Partial."""
    kind, operand = _KINDS[op.name], op.operands[0]
    windows, letters = _windows(op.params, operand), names(operand.ndim)
    # Contributions of bools are other kinds ("any", "all"), and nobody pools bools.
    gone = {x for x, w in zip(letters, windows, strict=True) if _covers(w) and operand.dtype != bool}

    def run(bind: Callable[..., Any], over: Over, here: Any, line: Array) -> Array:
        return bind(fitted(here, line, over, kind))

    def local(cut: Cut, mesh: Sizes) -> Local | None:
        covered = {d: -(-windows[d].size // parts(cut[x], mesh)) for d, x in enumerate(letters) if x in gone & set(cut)}
        kernels = tuple(covered.get(d, w.kernel) for d, w in enumerate(windows))
        axes = {d: cut[x] for d, x in enumerate(letters) if x in cut and x not in gone}
        params = {**op.params, "window_dimensions": kernels}
        return _local(op, params, axes, _block(operand, letters, cut, mesh), mesh, run, {0: kind})

    return Factored(
        one_letter_each(letters),
        (tuple(() if x in gone else (x,) for x in letters),),
        dict(zip(letters, operand.shape, strict=True)),
        contracted=dict.fromkeys(gone, kind),
        linear=(Together(frozenset({0}), SUMS if kind == "sum" else (kind,)),),
        local=local,
        uneven=True,
        work=_work(op, windows),
    )


def select_and_gather_add(op: Op) -> Factored:
    """Of each window of the second operand the largest (or smallest) is chosen, and the first operand read there."""
    kind = _chosen(op)

    def run(bind: Callable[..., Any], over: Over, here: Any, tangents: Array, line: Array) -> Array:
        return bind(fitted(here, tangents, over), fitted(here, line, over, kind))

    return _choosing(op, run, {0: "sum", 1: kind})


def select_and_scatter_add(op: Op) -> Factored:
    """Of each window of the second operand the largest (or smallest) is chosen, and the first operand added there.

    Every device scatters the sources of its own windows over its block and halos; what lands in a halo goes back to
    whose element it is, by the transpose of the exchange. So each window is seen whole, and of equal elements the
    same one is chosen as on one device.
    """
    kind = _chosen(op)

    def run(bind: Callable[..., Any], over: Over, here: Any, source: Array, line: Array) -> Array:
        # Sources beyond the last one are nobody's.
        fills = [(halo.dim, halo.axes, window.window.output_size, "sum") for halo, window in over]
        there = bind(here.mask(source, fills), fitted(here, line, over, kind))
        halos = [halo for halo, _ in over]
        block = list(line.shape)
        for halo in halos:
            block[halo.dim] = halo.exchange.block

        def forth(x: Array) -> Array:
            return fitted(here, extended(here, x, halos), over)

        (back,) = jax.linear_transpose(forth, jax.ShapeDtypeStruct(block, line.dtype))(there)
        return back

    return _choosing(op, run, {1: kind})


def _chosen(op: Op) -> str:
    """Which element of a window is chosen, as a kind of reduction."""
    return {"ge": "max", "le": "min"}[op.params["select_prim"].name]


def _choosing(op: Op, run: Run, reads: Mapping[int, str]) -> Factored:
    """The second operand decides, the first is passed on. ``reads``: as for ``_local``."""
    operand = op.operands[1]
    windows, letters = _windows(op.params, operand), names(operand.ndim)

    def local(cut: Cut, mesh: Sizes) -> Local | None:
        axes = {d: cut[x] for d, x in enumerate(letters) if x in cut}
        return _local(op, op.params, axes, _block(operand, letters, cut, mesh), mesh, run, reads, travels=2)

    return Factored(
        one_letter_each(letters, letters),
        one_letter_each(letters),
        dict(zip(letters, operand.shape, strict=True)),
        linear=(Together(frozenset({0})),),
        local=local,
        uneven=True,
        work=_work(op, windows),
    )


def _local(
    op: Op,
    params: Mapping[str, Any],
    axes: Mapping[int, tuple[str, ...]],
    block: tuple[int, ...],
    mesh: Sizes,
    run: Run,
    reads: Mapping[int, str],
    travels: int = 1,
) -> Local | None:
    """A window operation on blocks; None where windows would read (nearly) all of a dim.

    Args:
      op: the operation; its last operand is what windows move over.
      params: for blocks, as far as dims are concerned that aren't read across blocks.
      axes: of dims, the mesh axes that cut them.
      block: shape of the operand's.
      mesh: sizes of its axes.
      run: what a device does where windows move along a cut dim.
      reads: operands whose halos it needs, and the kind of reduction that doesn't see what isn't there.
      travels: how often halos of the operand's shape do.
    """
    operand = op.operands[-1]
    windows = _windows(op.params, operand)
    cut = {d: shard_window(windows[d], parts(names, mesh)) for d, names in axes.items() if moves(windows[d])}
    if not cut:
        return Local(params)
    if not all(map(worthwhile, cut.values())) or not all(w.output_size and w.size for w in windows):
        return None
    over = tuple((halo_of(d, axes[d], window), window) for d, window in cut.items())
    halos = tuple(halo for halo, _ in over)
    # What's laid out holds the windows without padding, dilated as they see it.
    params = {**params, "padding": tuple((0, 0) if d in cut else p for d, p in enumerate(params["padding"]))}
    if "base_dilation" in params:
        params["base_dilation"] = tuple(1 if d in cut else b for d, b in enumerate(params["base_dilation"]))
    work = functools.partial(run, functools.partial(op.primitive.bind, **params), over)
    once = traffic(halos, block, operand.dtype)
    return Local(
        run=AfterReading(tuple(Read(i, halos, kind) for i, kind in reads.items()), work),
        traffic=tuple(dataclasses.replace(t, count=t.count * travels) for t in once),
        why="halo exchange",
    )


def _windows(params: Mapping[str, Any], operand: Type) -> list[Window]:
    """One window an array dim."""
    ones = (1,) * operand.ndim
    dilations = params.get("base_dilation", ones), params.get("window_dilation", ones)
    rows = zip(
        operand.shape,
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        *dilations,
        strict=True,
    )
    return [Window(size, kernel, stride, lo, hi, base, dil) for size, kernel, stride, (lo, hi), base, dil in rows]


def _covers(window: Window) -> bool:
    """One window, which holds the dim and nothing else."""
    plain = Window(window.size, window.size, window.stride)
    return moves(window) and window == plain


def _block(operand: Type, letters: list[str], cut: Cut, mesh: Sizes) -> tuple[int, ...]:
    return tuple(-(-s // parts(cut.get(x, ()), mesh)) for s, x in zip(operand.shape, letters, strict=True))


def _work(op: Op, windows: list[Window]) -> float:
    return float(math.prod(w.output_size * w.kernel for w in windows))


def reduce_window(op: Op) -> Factored:
    """Any computation, of any number of operands: dims that windows move along stay whole."""
    count = len(op.operands) // 2
    return _unmoved(op, op.operands[:count], (True,) * count + (False,) * count)


def select_and_scatter(op: Op) -> Factored:
    """Any selection: dims that windows move along stay whole. Operand, source, initial value."""
    return _unmoved(op, op.operands[:1], (True, True, False))


def _unmoved(op: Op, moved: tuple[Type, ...], arrays: tuple[bool, ...]) -> Factored:
    """Letters of dims along which no window moves.

    Args:
      op: the operation.
      moved: what windows move over; all of one shape.
      arrays: of each operand, whether it's an array; else a scalar.
    """
    windows = _windows(op.params, moved[0])
    letters, sizes, whole = names(len(windows)), {}, set()

    def dims(of: Type) -> list[str]:
        found = []
        for x, w, size in zip(letters, windows, of.shape, strict=True):
            # Windows and elements are other things where they move, and as many only by chance.
            letter = f"{x}{size}" if moves(w) else x
            sizes[letter] = size
            if moves(w):
                whole.add(letter)
            found.append(letter)
        return found

    operands = tuple(dims(t) if array else [] for t, array in zip(op.operands, arrays, strict=True))
    results = tuple(dims(t) for t in op.results)
    return Factored(one_letter_each(*operands), one_letter_each(*results), sizes, frozenset(whole), uneven=True)


RULES = {
    **dict.fromkeys(_KINDS, reduce_window_monoid),
    "reduce_window": reduce_window,
    "select_and_gather_add": select_and_gather_add,
    "select_and_scatter_add": select_and_scatter_add,
    "select_and_scatter": select_and_scatter,
}
