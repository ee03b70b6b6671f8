"""The windowed reduction one device runs on its block and its halos.

Local code for a manual region: blocks in, blocks out. Three computations are monoids that lax reduces
natively (add, max, min): where no element exists they see their identity. Every other computation, whose
identity nobody knows, is folded over the window's taps, one dim after the other; taps that are no element are
left out by index arithmetic. Either way an initial value is folded in once, at the end, as XLA does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from shardkit.spatial.block_op import At
from shardkit.spatial.exchange import AxisName, Fill, Index, clear_tail, extend, per_shard, receive
from shardkit.spatial.windows import ShardedWindow

Halos = tuple[tuple[Array, ...], ...]


@dataclasses.dataclass(frozen=True)
class WindowedDim:
    """One dim that windows move along.

    Attributes:
      dim: the array dim.
      window: its window, cut over the shards (one where the dim isn't cut).
      axis_name: the mesh axes that cut it; None where none does.
      mode: what lies beyond its ends.
    """

    dim: int
    window: ShardedWindow
    axis_name: AxisName
    mode: str

    @property
    def stride(self) -> int:
        return self.window.window.stride


def identity(computation: Callable[..., Any], dtype: Any) -> np.ndarray | None:
    """The element that changes nothing, for the computations lax knows as monoids; else None."""
    dtype = np.dtype(dtype)
    if computation is lax.add and dtype != np.bool_:
        return np.zeros((), dtype)
    sign = {lax.max: -1, lax.min: 1}.get(computation) if computation in (lax.max, lax.min) else None
    if sign is None or jnp.issubdtype(dtype, np.complexfloating):
        return None
    if dtype == np.bool_:
        return np.asarray(sign > 0)
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, np.integer) else None
    if info is not None:
        return np.asarray(info.min if sign < 0 else info.max, dtype)
    infinite = np.asarray(sign * np.inf, dtype)
    if np.isinf(infinite):
        return infinite
    finite = jnp.finfo(dtype)  # an 8-bit float without infinities
    return np.asarray(finite.min if sign < 0 else finite.max, dtype)


@dataclasses.dataclass(frozen=True)
class WindowReduction:
    """A block operator (see ``BlockOp``): ``out_block`` windows in every dim of ``dims``, reduced.

    Attributes:
      dims: the dims that windows move along, in array order; others pass through.
      computation: an associative function of two scalars.
    """

    dims: tuple[WindowedDim, ...]
    computation: Callable[..., Any]

    def __call__(self, at: At, block: Array, *whole: Array) -> Array:
        fill = identity(self.computation, block.dtype)
        where = tuple(at.get(d.dim, 0) for d in self.dims)
        block = _clear(self.dims, where, block, fill)
        halos = _exchange(self.dims, where, block, fill)
        reduce = functools.partial(_reduce, self)
        if self.computation is not lax.add and jnp.issubdtype(block.dtype, jnp.inexact):
            # The backward pass looks at the elements again: keep the block and its thin halos, not their
            # concatenation, nor one mask a tap.
            reduce = jax.checkpoint(reduce)
        return reduce(where, block, halos, *whole)


def _clear(dims: Sequence[WindowedDim], where: Sequence[Index], x: Array, fill: Fill) -> Array:
    for d, index in zip(dims, where, strict=True):
        x = clear_tail(x, d.window.exchange.size, d.window.exchange.shards, index, d.dim, fill)
    return x


def _exchange(dims: Sequence[WindowedDim], where: Sequence[Index], x: Array, fill: Fill) -> Halos:
    """Halos of every dim; a later dim's carry the corners of the earlier ones."""
    halos = []
    for d, index in zip(dims, where, strict=True):
        halos.append(receive(x, d.window.exchange, d.axis_name, index, d.dim, fill))
        x = extend(x, halos[-1], d.window, index, d.dim, fill)
    return tuple(halos)


def _reduce(op: WindowReduction, where: Sequence[Index], x: Array, halos: Halos, *init: Array) -> Array:
    computation = op.computation
    fill = identity(computation, x.dtype)
    for d, halo, index in zip(op.dims, halos, where, strict=True):
        x = extend(x, halo, d.window, index, d.dim, fill)
    if fill is None:
        computation = _elementwise(computation, x.ndim)
        out = _fold(op.dims, where, x, computation)
    elif computation is lax.add:
        out = _native(op, where, x)
    else:
        out = _extreme(op, where, x)
    if not init:
        return out
    first = jnp.broadcast_to(init[0], out.shape)
    folded = computation(first, out)
    return folded if fill is not None else _any_real(op.dims, where, folded, first)


def _elementwise(computation: Callable[..., Any], ndim: int) -> Callable[..., Any]:
    """A function of scalars as one of arrays of rank ``ndim``; no reshape, which would move sharded dims."""
    for _ in range(ndim):
        computation = jax.vmap(computation)
    return computation


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _extreme(op: WindowReduction, where: Sequence[Index], line: Array) -> Array:
    """Maximum or minimum of windows: lax's value, and a derivative of our own.

    lax's backward pass (select-and-scatter) gathers what XLA shards in other dims, knows no dilated windows, and
    its forward and reverse modes may choose different ones of equal elements.
    """
    return _native(op, where, line)


@_extreme.defjvp
def _extreme_jvp(op: WindowReduction, primals: Any, tangents: Any) -> Any:
    (where, line), (_, dline) = primals, tangents
    combine = _first_largest if op.computation is lax.max else _first_smallest
    fold = functools.partial(_fold, op.dims, where, combine=combine, fill=identity(op.computation, line.dtype))
    _, tangent = jax.jvp(fold, (line,), (dline,))
    return _extreme(op, where, line), tangent


def _first_largest(a: Array, b: Array) -> Array:
    # Of equal elements the first in window order gets the gradient, as in lax. A NaN wins against anything.
    return jnp.where((a >= b) | (a != a), a, b)


def _first_smallest(a: Array, b: Array) -> Array:
    return jnp.where((a <= b) | (a != a), a, b)


# --- natively -----------------------------------------------------------------------------------------


def _native(op: WindowReduction, where: Sequence[Index], line: Array) -> Array:
    """``lax.reduce_window`` of an assembled block."""
    fill, ndim = identity(op.computation, line.dtype), line.ndim
    sizes, strides, dilations, bases = ([1] * ndim for _ in range(4))
    padding, slices = [(0, 0)] * ndim, []
    for d, index in zip(op.dims, where, strict=True):
        w = d.window.window
        sizes[d.dim], strides[d.dim], dilations[d.dim] = w.kernel, w.stride, w.rhs_dilation
        if d.window.slices_output:
            slices.append((d, index))
            line, lo, length = line, 0, d.window.dilated_length
        else:
            line, lo, length = _aligned(d, index, line, fill)
        base = w.lhs_dilation if lo is not None else 1
        lo = lo or 0
        hi = length - lo - ((line.shape[d.dim] - 1) * base + 1)
        if min(lo, hi) < 0:
            line, lo, hi, base = _pad(line, d.dim, lo, hi, base, fill), 0, 0, 1
        padding[d.dim], bases[d.dim] = (lo, hi), base
    out = lax.reduce_window(line, fill, op.computation, sizes, strides, padding, bases, dilations)
    for d, index in slices:
        phase = per_shard(d.window.phases, index)
        out = lax.dynamic_slice_in_dim(out, phase, d.window.out_block, axis=d.dim)
    return out


def _needed(d: WindowedDim) -> int:
    """Dilated positions that this shard's windows cover, from the first one's beginning."""
    return (d.window.out_block - 1) * d.stride + d.window.window.reach


def _aligned(d: WindowedDim, index: Index, line: Array, fill: Fill) -> tuple[Array, int | None, int]:
    """The line, the padding before it with which its windows begin at 0, and how many positions they cover.

    Where every shard's windows begin at another phase of a dilated dim no padding says so: the line comes
    back dilated and sliced, with None.
    """
    window = d.window
    if window.kept_whole:
        return line, -(window.exchange.starts[0] * window.window.lhs_dilation + window.phases[0]), _needed(d)
    if window.static_phase:
        return line, -window.phases[0], _needed(d)
    base = window.window.lhs_dilation
    line = _pad(line, d.dim, 0, base - 1, base, fill)
    phase = per_shard(window.phases, index)
    return lax.dynamic_slice_in_dim(line, phase, _needed(d), axis=d.dim), None, _needed(d)


def _pad(x: Array, dim: int, lo: int, hi: int, dilation: int, fill: Fill) -> Array:
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (lo, hi, dilation - 1)
    return lax.pad(x, jnp.asarray(0 if fill is None else fill, x.dtype), config)


# --- tap by tap ---------------------------------------------------------------------------------------


def _fold(
    dims: Sequence[WindowedDim], where: Sequence[Index], x: Array, combine: Callable[..., Any], fill: Fill = None
) -> Array:
    """Windows folded in row-major order.

    A window is the product of its dims' windows, and so is what's real in it: dims are folded one after the
    other, the last one first. Where an identity stands wherever no element is (``fill``), nothing is left out.
    """
    for d, index in reversed(list(zip(dims, where, strict=True))):
        line, lo, length = _aligned(d, index, x, fill)
        if lo is not None:
            base = d.window.window.lhs_dilation
            line = _pad(line, d.dim, lo, length - lo - ((line.shape[d.dim] - 1) * base + 1), base, fill)
        span = (d.window.out_block - 1) * d.stride + 1
        real = real_taps(d) if fill is None else np.ones((d.window.window.kernel, 1, 1), bool)
        seen = np.logical_or.accumulate(real)
        for tap in range(d.window.window.kernel):
            first = tap * d.window.window.rhs_dilation
            piece = lax.slice_in_dim(line, first, first + span, d.stride, axis=d.dim)
            if not tap:
                x = piece
                continue
            before, here = seen[tap - 1], real[tap]
            alone = _choose(before, index, d.dim, x, piece)
            x = _choose(before & here, index, d.dim, combine(x, piece), alone)
    return x


def _choose(table: np.ndarray, index: Index, dim: int, yes: Array, no: Array) -> Array:
    """``yes`` where this shard's row of the table, laid along ``dim``, is True."""
    if table.all():
        return yes
    return jnp.where(lax.broadcast_in_dim(shard_row(table, index), yes.shape, (dim,)), yes, no)


def _any_real(dims: Sequence[WindowedDim], where: Sequence[Index], yes: Array, no: Array) -> Array:
    """``yes`` for windows that hold an element, ``no`` for those that lie in padding altogether."""
    for d, index in zip(dims, where, strict=True):
        yes = _choose(np.logical_or.reduce(real_taps(d)), index, d.dim, yes, no)
    return yes


def real_taps(d: WindowedDim) -> np.ndarray:
    """bool [taps, shards, out_block]: is the tap of that output an element (or one that the mode repeats)?

    Outputs beyond the logical size mean nothing; they count as if all of their taps were real.
    """
    w, shards = d.window.window, d.window.exchange.shards
    outputs = np.arange(shards * d.window.out_block)
    position = outputs * w.stride - w.pad_lo + np.arange(w.kernel)[:, None] * w.rhs_dilation
    real = position % w.lhs_dilation == 0
    if d.mode == "zeros":
        real &= (position >= 0) & (position < w.dilated_size)
    return (real | (outputs >= w.output_size)).reshape(w.kernel, shards, d.window.out_block)


def shard_row(table: np.ndarray, index: Index) -> Array:
    """This shard's row of a static table; a constant where all rows are equal."""
    rows = jnp.asarray(table)
    return rows[0] if (table == table[:1]).all() else rows[index]
