"""What window operations share: blocks with the edges of their neighbours, and what that costs.

The exchange is kept apart from what then reads it. Two operations that read a block through equal ``Halo``s (a
convolution and its kernel's gradient, max pooling and its gradient) need one exchange, not two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from shardkit.arrays.kinds import identity
from shardkit.spatial.exchange import AxisName, clear_tail, cut_span, join, per_shard, receive
from shardkit.spatial.windows import Exchange, ShardedWindow
from shardkit.spmd.rules.strategy import Traffic


@dataclasses.dataclass(frozen=True)
class Halo:
    """What a device reads of its neighbours along one dim. Integers and names only: it is a key.

    Attributes:
      dim: of the array.
      axes: mesh axes that cut it, major first.
      exchange: who sends what.
      line: the whole line of the plan is laid out, the same on every device; else each device's span of it.
    """

    dim: int
    axes: tuple[str, ...]
    exchange: Exchange
    line: bool

    @property
    def length(self) -> int:
        """Elements of the dim that are then laid out."""
        plan = self.exchange
        return plan.reach_lo + plan.block + plan.reach_hi if self.line else plan.length


def halo_of(dim: int, axes: tuple[str, ...], window: ShardedWindow) -> Halo:
    """The halo that a window over a cut dim reads."""
    return Halo(dim, axes, window.exchange, window.kept_whole)


def worthwhile(window: ShardedWindow) -> bool:
    """Less travels than if every device got the whole dim (a window as long as the dim reads all of it)."""
    plan = window.exchange
    return plan.received < (plan.shards - 1) * plan.block or not plan.received


def axis_name(axes: Sequence[str]) -> AxisName:
    """The axes as collectives take them."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def extended(here: Any, block: Array, halos: Sequence[Halo], kind: str = "sum") -> Array:
    """A block with its halos, linear in the block where ``kind`` is "sum".

    Dims are exchanged one after the other, so that a later one's halos carry the corners of the earlier ones.

    Args:
      here: this device.
      block: what it holds.
      halos: of each dim that is read across blocks.
      kind: the reduction that doesn't see what stands where no element is: beyond the ends, in padded tails.
    """
    fill = None if kind == "sum" else identity(kind, block.dtype)
    for halo in halos:
        plan = halo.exchange
        block = clear_tail(block, plan.size, plan.shards, here.index(halo.axes), halo.dim, fill)
    for halo in halos:
        plan, index = halo.exchange, here.index(halo.axes)
        got = receive(block, plan, axis_name(halo.axes), index, halo.dim, fill)
        line = join(block, got, plan, index, halo.dim, fill)
        block = line if halo.line else cut_span(line, plan, index, halo.dim, fill)
    return block


def traffic(halos: Sequence[Halo], block: Sequence[int], dtype: Any) -> tuple[Traffic, ...]:
    """The permutes of ``extended``.

    Args:
      halos: as there.
      block: its shape.
      dtype: its dtype.
    """
    shape, found = list(block), dict[tuple[tuple[str, ...], int], int]()
    for halo in halos:
        slab = math.prod(s for d, s in enumerate(shape) if d != halo.dim) * dtype.itemsize
        for message in halo.exchange.messages:
            if message.travels:
                key = (halo.axes, message.length * slab)
                found[key] = found.get(key, 0) + 1
        shape[halo.dim] = halo.length
    return tuple(Traffic("collective_permute", axes, size, count) for (axes, size), count in found.items())


class Read(NamedTuple):
    """One exchange of an operation. ``(halos, kind)`` is the key: of one block, equal keys give equal arrays.

    Attributes:
      operand: its position.
      halos, kind: as in ``extended``.
    """

    operand: int
    halos: tuple[Halo, ...]
    kind: str

    def extended(self, here: Any, block: Array) -> Array:
        """The operand's block with its halos."""
        return extended(here, block, self.halos, self.kind)

    def traffic(self, block: Sequence[int], dtype: Any) -> tuple[Traffic, ...]:
        """The permutes of it, for a block of this shape."""
        return traffic(self.halos, block, dtype)


def read_key(value: Any, placed: Any, read: Read) -> Any:
    """Equal for exchanges that give equal arrays."""
    return value.number, placed, read.halos, read.kind


@dataclasses.dataclass(frozen=True)
class AfterReading:
    """The ``run`` of a strategy that reads across blocks: first the exchanges, then work that needs no more of them.

    Attributes:
      reads: the exchanges, at most one an operand.
      work: ``work(here, *blocks)`` gives the block of the result; operands of ``reads`` have their halos by then.
    """

    reads: tuple[Read, ...]
    work: Callable[..., Array]

    def __call__(self, here: Any, *blocks: Array) -> list[Array]:
        """The block of the result, alone in a list."""
        given = list(blocks)
        for read in self.reads:
            given[read.operand] = read.extended(here, given[read.operand])
        return [self.work(here, *given)]


def fitted(here: Any, line: Array, windows: Sequence[tuple[Halo, ShardedWindow]], kind: str = "sum") -> Array:
    """What ``extended`` gives, such that windows of cut dims lie in it without padding, the first one at 0.

    For operators that know no phases of a dilated input, and whose padding mustn't be negative.
    """
    for halo, window in windows:
        line = _fitted(line, halo.dim, window, here.index(halo.axes), identity(kind, line.dtype))
    return line


def _fitted(line: Array, dim: int, window: ShardedWindow, index: Any, fill: Any) -> Array:
    """The positions that a device's windows cover: dilated, continued with ``fill``, cropped."""
    base, plan = window.window.lhs_dilation, window.exchange
    starts = tuple((s if window.kept_whole else 0) * base + p for s, p in zip(plan.starts, window.phases, strict=True))
    needed = (window.out_block - 1) * window.window.stride + window.window.reach
    lo = max(0, -min(starts))
    hi = max(0, max(starts) + needed - ((line.shape[dim] - 1) * base + 1))
    if lo or hi or base > 1:
        config = [(0, 0, 0)] * line.ndim
        config[dim] = (lo, hi, base - 1)
        line = lax.pad(line, jnp.asarray(fill, line.dtype), config)
    first = per_shard(tuple(s + lo for s in starts), index)
    if isinstance(first, int):
        return lax.slice_in_dim(line, first, first + needed, axis=dim)
    return lax.dynamic_slice_in_dim(line, first, needed, axis=dim)
