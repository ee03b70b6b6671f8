"""Padding, cropping and rolling dims that are sharded: only what changes its device travels."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from jax.core import Tracer

from shardkit.spatial.block_op import At, channels_last_letters, read_operand, run_block_op
from shardkit.spatial.exchange import AxisName, Index, clear_tail, cut_span, join, receive
from shardkit.spatial.windows import PADDING_MODES, Exchange, Message, Span, block_size, plan_exchange

# jnp.pad's names for what we call otherwise.
_ALIASES = {"constant": "zeros", "wrap": "circular", "edge": "replicate"}
_MODES = (*PADDING_MODES, "symmetric")
_LOCAL = {"circular": "wrap", "reflect": "reflect", "replicate": "edge", "symmetric": "symmetric"}


def ring_pad(
    x: Any,
    pad_width: Any,
    mode: str = "zeros",
    *,
    constant_values: Any = 0,
    spatial_axes: Any,
    mesh: Any = None,
) -> Any:
    """``jnp.pad`` of an array that is sharded in some dims. The result is cut into equal blocks again.

    Args:
      x: the array, or a ``Padded``; inside a manual region of the mesh axes, this device's block.
      pad_width: elements before and after: one integer, one pair, one pair a dim, or ``{dim: integer or pair}``.
        Negative ones crop: the result is a piece of the extended dim, whatever the mode.
      mode: "zeros" (or "constant"), "circular" ("wrap"), "reflect", "replicate" ("edge") or "symmetric".
      constant_values: what "zeros" puts there: a number, a (before, after) pair, or one pair a dim. Where dims
        meet in a corner the later one's counts, as in jnp.pad. Concrete.
      spatial_axes: mesh axis to array dim, a number or a letter of a channels-last image: ``{"sp": "W"}``.
      mesh: the mesh; by default the array's, else the ambient one.

    Returns:
      The new array, sharded as the old one in blocks of ``ceil(new / n)``; a Padded where the array was
      one, or where JAX can't hold the uneven blocks (Explicit axes, manual regions).

    Raises:
      ValueError: an unknown mode, widths that don't fit or crop everything, a reflection wider than the array.
      TypeError: traced constant_values.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> sk.ring_pad(jnp.arange(4), (1, 2), "circular", spatial_axes={"sp": 0}, mesh=mesh).tolist()
      [3, 0, 1, 2, 3, 0, 1]
    """
    what = "ring_pad"
    x = x if hasattr(x, "ndim") else jnp.asarray(x)
    named = _ALIASES.get(mode, mode)
    if named not in _MODES:
        raise ValueError(f"{what}: mode={mode!r} is unknown; use one of {(*_MODES, *_ALIASES)}")
    widths = _read_widths(pad_width, x.ndim, what)
    values = _read_values(constant_values, x.ndim, what)
    if named != "zeros" and any(v != (0, 0) for v in values):
        raise ValueError(f"{what}: constant_values={constant_values!r} has no meaning with mode={mode!r}")
    touched = [d for d, pair in enumerate(widths) if pair != (0, 0)]
    letters = channels_last_letters(x.ndim) if x.ndim > 2 else {}
    operand = read_operand(x, spatial_axes, mesh, letters=letters, mixed=touched, what=what)
    out_shape = tuple(s + lo + hi for s, (lo, hi) in zip(operand.shape, widths, strict=True))
    for d in touched:
        lo, hi = widths[d]
        size = operand.shape[d]
        if out_shape[d] < 1:
            raise ValueError(f"{what}: pad_width {widths[d]} leaves nothing of the {size} elements of dim {d}")
        if named == "reflect" and max(lo, hi) >= size > 1:
            raise ValueError(
                f"{what}: pad_width {widths[d]} reflects more than the {size} elements of dim {d} hold; pad at most "
                f"{size - 1}, or use mode='symmetric'"
            )
        if named != "zeros" and size == 0:
            raise ValueError(f"{what}: dim {d} is empty, there is nothing to extend; use mode='zeros'")
    steps = tuple(
        Padding(d, operand.axis_name(d), operand.shards(d), operand.shape[d], *widths[d], named, values[d])
        for d in touched
    )
    return run_block_op(_InTurn(steps), operand, out_shape, mixed=touched, what=what)


def ring_roll(x: Any, shift: Any, axis: Any = None, *, spatial_axes: Any, mesh: Any = None) -> Any:
    """``jnp.roll`` of an array that is sharded in some dims: blocks, or pieces of them, go where they belong.

    Of an evenly cut dim, every device receives one or two pieces in one permute each: as many as don't come
    from itself. A shift smaller than a block sends only ``shift`` elements.

    Args:
      x: the array, or a ``Padded``; inside a manual region of the mesh axes, this device's block.
      shift: elements to roll by, towards higher positions: an integer or one a dim. Concrete.
      axis: the dim or dims; a dim named twice rolls by the sum.
      spatial_axes: mesh axis to array dim, a number or a letter of a channels-last image: ``{"sp": "W"}``.
      mesh: the mesh; by default the array's, else the ambient one.

    Returns:
      The rolled array, sharded as the old one; a Padded where the array was one.

    Raises:
      ValueError: no axis (a roll of the flattened array moves elements between all dims), dims out of range,
        numbers of shifts and dims that don't go together, a shift that is no integer.
      TypeError: a traced shift or axis.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> sk.ring_roll(jnp.arange(4), 1, 0, spatial_axes={"sp": 0}, mesh=mesh).tolist()
      [3, 0, 1, 2]
    """
    what = "ring_roll"
    x = x if hasattr(x, "ndim") else jnp.asarray(x)
    shifts = _read_shifts(shift, axis, x.ndim, what)
    letters = channels_last_letters(x.ndim) if x.ndim > 2 else {}
    operand = read_operand(x, spatial_axes, mesh, letters=letters, mixed=list(shifts), what=what)
    shifts = {d: s % operand.shape[d] for d, s in shifts.items() if operand.shape[d] and s % operand.shape[d]}
    steps = tuple(_Roll(d, operand.axis_name(d), operand.shards(d), operand.shape[d], s) for d, s in shifts.items())
    return run_block_op(_InTurn(steps), operand, operand.shape, mixed=list(shifts), what=what)


# --- reading a call ------------------------------------------------------------------------------------------


def _pair(value: Any) -> tuple[Any, Any]:
    """An integer or a pair (of one or two) as two; raises TypeError or ValueError for anything else."""
    if isinstance(value, Sequence | np.ndarray) and np.ndim(value) == 1:
        before, after = value if len(value) == 2 else (value[0],) * (2 if len(value) == 1 else 0)
        return before, after
    return value, value


def _read_widths(given: Any, ndim: int, what: str) -> list[tuple[int, int]]:
    shown = f"{what}: pad_width={given!r}"
    try:
        if isinstance(given, Mapping):
            found = [(0, 0)] * ndim
            for key, value in given.items():
                dim = operator.index(key)
                if not -ndim <= dim < ndim:
                    raise ValueError(f"{shown} names dim {dim}, but the array has {ndim} dims")
                found[dim % ndim] = _pair(value)
        elif np.ndim(given) == 2:
            found = [_pair(list(p)) for p in given]
            found = found * ndim if len(found) == 1 else found
        else:
            found = [_pair(given)] * ndim
        pairs = [(operator.index(lo), operator.index(hi)) for lo, hi in found]
    except TypeError:
        raise ValueError(
            f"{shown} must be an integer, a (before, after) pair, one pair a dim, or {{dim: pair}}"
        ) from None
    except ValueError as err:
        if what in str(err):
            raise
        raise ValueError(
            f"{shown} must be an integer, a (before, after) pair, one pair a dim, or {{dim: pair}}"
        ) from None
    if len(pairs) != ndim:
        raise ValueError(f"{shown} has {len(pairs)} pairs for {ndim} dims")
    return pairs


def _read_values(given: Any, ndim: int, what: str) -> list[tuple[Any, Any]]:
    if any(isinstance(v, Tracer) for v in jax.tree.leaves(given)):
        raise TypeError(f"{what}: constant_values is traced; give a number, or pad with zeros and use jnp.where")
    values = np.asarray(given)
    if values.ndim > 2 or (values.ndim and values.shape[-1] not in (1, 2)):
        raise ValueError(
            f"{what}: constant_values={given!r} must be a number, a (before, after) pair, or one pair a dim"
        )
    try:
        return [(lo.item(), hi.item()) for lo, hi in np.broadcast_to(values, (ndim, 2))]
    except ValueError:
        raise ValueError(f"{what}: constant_values={given!r} has another number of pairs than {ndim} dims") from None


def _read_shifts(shift: Any, axis: Any, ndim: int, what: str) -> dict[int, int]:
    if axis is None:
        raise ValueError(
            f"{what}: axis=None rolls the flattened array, which moves elements between all dims and devices; "
            "name the dims, for example axis=1 (or use jnp.roll)"
        )
    if any(isinstance(v, Tracer) for v in jax.tree.leaves((shift, axis))):
        raise TypeError(f"{what}: shift and axis decide who sends what, so they can't be traced; give integers")
    try:
        many = np.broadcast(np.asarray(shift), np.asarray(axis))
        pairs = [(operator.index(s), operator.index(a)) for s, a in many]
    except (TypeError, ValueError):
        raise ValueError(
            f"{what}: shift={shift!r} and axis={axis!r} must be integers, or one shift for each of several dims"
        ) from None
    found: dict[int, int] = {}
    for s, a in pairs:
        if not -ndim <= a < ndim:
            raise ValueError(f"{what}: axis={a} is out of range for an array with {ndim} dims")
        found[a % ndim] = found.get(a % ndim, 0) + s
    return found


# --- on one device -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _plan_cut(size: int, shards: int, start: int, new: int, mode: str) -> Exchange:
    """Elements ``[start, start + new)`` of the extended dim, in blocks of ``ceil(new / shards)``."""
    block = block_size(new, shards)
    spans = []
    for i in range(shards):
        lo, hi = min(i * block, new) + start, min((i + 1) * block, new) + start
        spans.append(Span(i * block + start, lo, hi))
    return plan_exchange(size, shards, mode, spans, block)


def _cut_out(x: Array, exchange: Exchange, axis_name: AxisName, index: Index, dim: int) -> Array:
    x = clear_tail(x, exchange.size, exchange.shards, index, dim)
    line = join(x, receive(x, exchange, axis_name, index, dim), exchange, index, dim)
    return cut_span(line, exchange, index, dim)


@dataclasses.dataclass(frozen=True)
class Padding:
    """What one padded dim needs on each shard."""

    dim: int
    axis_name: AxisName
    shards: int
    size: int
    lo: int
    hi: int
    mode: str
    values: tuple[Any, Any]

    def __call__(self, index: Index, x: Array) -> Array:
        if self.shards == 1 and self.lo >= 0 and self.hi >= 0 and self.mode != "zeros":
            widths = [(self.lo, self.hi) if d == self.dim else (0, 0) for d in range(x.ndim)]
            return jnp.pad(x, widths, _LOCAL[self.mode])
        new = self.size + self.lo + self.hi
        exchange = _plan_cut(self.size, self.shards, -self.lo, new, self.mode)
        out = _cut_out(x, exchange, self.axis_name, index, self.dim)
        before, after = self.values
        if self.mode == "zeros" and (before != 0 or after != 0):
            position = index * out.shape[self.dim] + lax.broadcasted_iota(np.int32, out.shape, self.dim) - self.lo
            out = jnp.where(position < 0, jnp.asarray(before, x.dtype), out)
            out = jnp.where(position >= self.size, jnp.asarray(after, x.dtype), out)
        return out


@dataclasses.dataclass(frozen=True)
class _Roll:
    dim: int
    axis_name: AxisName
    shards: int
    size: int
    shift: int  # in [1, size)

    def __call__(self, index: Index, x: Array) -> Array:
        if self.shards == 1:
            return jnp.roll(x, self.shift, self.dim)
        if self.size % self.shards:
            start = -self.shift if 2 * self.shift <= self.size else self.size - self.shift
            exchange = _plan_cut(self.size, self.shards, start, self.size, "circular")
            return _cut_out(x, exchange, self.axis_name, index, self.dim)
        # The end of shard i - hops - 1, then the beginning of shard i - hops.
        block = self.size // self.shards
        hops, rest = divmod(self.shift, block)
        pieces = [(hops + 1, block - rest, rest), (hops, 0, block - rest)]
        parts = [self._from(x, index, *p) for p in pieces if p[2]]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, self.dim)

    def _from(self, x: Array, index: Index, hops: int, offset: int, length: int) -> Array:
        """Elements from ``offset`` on of the block ``hops`` shards before."""
        pairs = tuple((i, (i + hops) % self.shards) for i in range(self.shards))
        message = Message(pairs, (offset,) * self.shards, length)
        block = self.size // self.shards
        alone = Exchange(self.shards, block, self.size, (message,), (), length, 0, (0,) * self.shards, length)
        return receive(x, alone, self.axis_name, index, self.dim)[0]


@dataclasses.dataclass(frozen=True)
class _InTurn:
    """One dim after the other."""

    steps: tuple[Padding | _Roll, ...]

    def __call__(self, at: At, block: Array) -> Array:
        for step in self.steps:
            block = step(at.get(step.dim, 0), block)
        return block
