"""A value of a region as one device holds it: its block, margins of its neighbours' elements, perhaps in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from shardkit.spatial.convolution.blocks import from_chunks, pass_on, to_chunks
from shardkit.spatial.convolution.spec import Chunks
from shardkit.spatial.exchange import Fill, Index, cut_span, join, receive
from shardkit.spatial.regions.margins import NONE, Margin, suffices
from shardkit.spatial.windows import shard_halo

# What stands at positions beyond the ends of a dim, and in padded tails.
ZEROS, CIRCULAR, ANYTHING = "zeros", "circular", "anything"


@dataclasses.dataclass(frozen=True)
class CutDim:
    """How one dim lies in blocks.

    Attributes:
      axes: mesh axes that cut it, major first.
      shards: devices along them.
      size: logical elements.
    """

    axes: tuple[str, ...]
    shards: int
    size: int

    @property
    def axis_name(self) -> Any:
        """As collectives take it."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def block(self) -> int:
        """Elements of a block."""
        return -(-self.size // self.shards)

    @property
    def has_tail(self) -> bool:
        """The last block holds positions that are no elements."""
        return self.block * self.shards != self.size


Cuts = Mapping[int, CutDim]
Where = Callable[[tuple[str, ...]], Index]  # this device's position along mesh axes


@dataclasses.dataclass(frozen=True)
class InChunks:
    """A block's dim cut into chunks that lie in a batch dim (see convolution/blocks.py).

    Attributes:
      dim, batch: array dims.
      count: chunks a device.
      major: as in ``Chunks``.
    """

    dim: int
    batch: int
    count: int
    major: bool = False

    @property
    def as_chunks(self) -> Chunks:
        """For the functions that move them."""
        return Chunks(0, self.count, self.major)


@dataclasses.dataclass(frozen=True)
class Block:
    """One value on one device.

    Attributes:
      array: of the block, or each of its chunks, with its margins.
      cuts: how its dims lie in blocks.
      margins: of each cut dim, elements held beyond the block (beyond each chunk). They are never stale: what
        a device can't know it doesn't hold.
      beyond: of each cut dim, what stands beyond its ends and in padded tails.
      chunks: None where the block lies whole.
    """

    array: Array
    cuts: Cuts
    margins: Mapping[int, Margin]
    beyond: Mapping[int, str]
    chunks: InChunks | None = None

    def unit(self, dim: int) -> int:
        """Elements of a dim that lie together, margins aside: a block's or a chunk's."""
        chunked = self.chunks is not None and self.chunks.dim == dim
        return self.cuts[dim].block // (self.chunks.count if chunked else 1)  # type: ignore[union-attr]

    def parts(self, dim: int) -> int:
        """Blocks, or chunks, of all devices."""
        chunked = self.chunks is not None and self.chunks.dim == dim
        return self.cuts[dim].shards * (self.chunks.count if chunked else 1)  # type: ignore[union-attr]

    def has_outside(self, dim: int) -> bool:
        """Some device holds positions that are no elements, nor show one."""
        if self.beyond[dim] == CIRCULAR and not self.cuts[dim].has_tail:
            return False
        return self.margins[dim] != NONE or self.cuts[dim].has_tail


def cropped(block: Block, margins: Mapping[int, Margin]) -> Block:
    """With no more than ``margins``."""
    x, left = block.array, dict(block.margins)
    for dim, (lo, hi) in block.margins.items():
        wanted = margins.get(dim, NONE)
        keep = min(lo, wanted[0]), min(hi, wanted[1])
        if keep != (lo, hi):
            x = lax.slice_in_dim(x, lo - keep[0], x.shape[dim] - (hi - keep[1]), axis=dim)
            left[dim] = keep
    return dataclasses.replace(block, array=x, margins=left)


def positions(block: Block, dim: int, where: Where) -> Array:
    """Of every element its position in the dim: negative, or beyond the size, outside; shaped to broadcast."""
    cut, x, chunks = block.cuts[dim], block.array, block.chunks
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    at = lax.broadcasted_iota(np.int32, shape, dim) - block.margins[dim][0] + where(cut.axes) * cut.block
    if chunks is None or chunks.dim != dim:
        return at
    shape = [1] * x.ndim
    shape[chunks.batch] = x.shape[chunks.batch]
    images = x.shape[chunks.batch] // chunks.count
    number = lax.broadcasted_iota(np.int32, shape, chunks.batch)
    number = number // images if chunks.major else number % chunks.count
    return at + number * block.unit(dim)


def inside(block: Block, dim: int, where: Where) -> Array:
    """Of every element whether it's one of the dim's; shaped to broadcast."""
    at = positions(block, dim, where)
    return (at >= 0) & (at < block.cuts[dim].size)


def cleared(block: Block, where: Where, fill: Fill = None, dims: Collection[int] | None = None) -> Block:
    """``fill`` (zero) wherever no element of ``dims`` (all) stands."""
    x, beyond = block.array, dict(block.beyond)
    for dim in block.cuts if dims is None else dims:
        if not block.has_outside(dim) or (block.beyond[dim] == ZEROS and fill is None):
            continue
        x = jnp.where(inside(block, dim, where), x, jnp.asarray(0 if fill is None else fill, x.dtype))
        beyond[dim] = ZEROS if fill is None else ANYTHING
    return dataclasses.replace(block, array=x, beyond=beyond)


def holds(block: Block, dim: int, margin: Margin, mode: str) -> bool:
    """The margin is there, and goes on beyond the ends as ``mode`` says (zeros can be put there at any time)."""
    return suffices(block.margins[dim], margin) and (mode == ZEROS or margin == NONE or block.beyond[dim] == CIRCULAR)


def widened(block: Block, wanted: Mapping[int, Margin], modes: Mapping[int, str], where: Where) -> Block:
    """With at least the margins ``wanted``: what is missing is fetched from the neighbours, and no more.

    Dims one after the other, so that a later one's strips carry the corners of the earlier ones; a chunked
    dim last, since chunks with margins hold some elements twice.
    """
    lacking = [d for d in block.cuts if not holds(block, d, wanted.get(d, NONE), modes.get(d, ZEROS))]
    if not lacking:
        return block
    chunks = block.chunks
    if chunks is not None and chunks.dim in lacking and max(wanted[chunks.dim]) > block.unit(chunks.dim):
        block, chunks = out_of_chunks(block, where), None
        lacking = [d for d in block.cuts if not holds(block, d, wanted.get(d, NONE), modes.get(d, ZEROS))]
    for dim in sorted(lacking, key=lambda d: (chunks is not None and chunks.dim == d, d)):
        block = _widened_in(block, dim, wanted[dim], modes.get(dim, ZEROS), where)
    return block


def _widened_in(block: Block, dim: int, wanted: Margin, mode: str, where: Where) -> Block:
    cut = block.cuts[dim]
    if mode == ZEROS:
        block = cleared(block, where) if cut.has_tail else block
    same = block.beyond[dim] == mode or block.margins[dim] == NONE
    lo, hi = block.margins[dim] if same else NONE
    # A side that is wide enough stays; another is fetched as a whole.
    lo, hi = (lo if lo >= wanted[0] else 0), (hi if hi >= wanted[1] else 0)
    block = cropped(block, {**block.margins, dim: (lo, hi)})
    get = (wanted[0] if not lo else 0, wanted[1] if not hi else 0)
    core = cropped(block, {**block.margins, dim: NONE})
    exchange = shard_halo(cut.size, block.parts(dim), *get, mode)
    if block.chunks is not None and block.chunks.dim == dim:
        x = _between_chunks(core, exchange, dim)
    else:
        halos = receive(core.array, exchange, cut.axis_name, where(cut.axes), dim)
        x = cut_span(join(core.array, halos, exchange, where(cut.axes), dim), exchange, where(cut.axes), dim)
    if lo or hi:  # put back what was there
        held = block.array
        parts = [lax.slice_in_dim(held, 0, lo, axis=dim)] if lo else []
        parts += [x] + ([lax.slice_in_dim(held, held.shape[dim] - hi, held.shape[dim], axis=dim)] if hi else [])
        x = lax.concatenate(parts, dim)
    margins = {**block.margins, dim: (lo or get[0], hi or get[1])}
    known = mode if not (lo or hi) or block.beyond[dim] == mode else ANYTHING
    return dataclasses.replace(block, array=x, margins=margins, beyond={**block.beyond, dim: known})


def _between_chunks(core: Block, exchange: Any, dim: int) -> Array:
    chunks, cut, x = core.chunks, core.cuts[dim], core.array
    assert chunks is not None
    pieces = [x]
    for message, towards in [(m, +1) for m in exchange.before] + [(m, -1) for m in exchange.after]:
        begin = message.offsets[0]
        edges = lax.slice_in_dim(x, begin, begin + message.length, axis=dim)
        halo = pass_on(edges, chunks.batch, chunks.as_chunks, message, cut.axis_name, exchange.shards, towards)
        pieces = [halo, *pieces] if towards > 0 else [*pieces, halo]
    line = lax.concatenate(pieces, dim) if len(pieces) > 1 else x
    return cut_span(line, exchange, 0, dim)


# --- chunks ---------------------------------------------------------------------------------------------------


def into_chunks(block: Block, chunks: InChunks, where: Where) -> Block:
    """The block's dim cut into chunks; its margins along that dim go."""
    if block.chunks is not None:
        block = out_of_chunks(block, where)
    block = cropped(block, {**block.margins, chunks.dim: NONE})
    block = cleared(block, where) if block.cuts[chunks.dim].has_tail else block
    x = to_chunks(block.array, chunks.batch, chunks.dim, chunks.as_chunks)
    return dataclasses.replace(block, array=x, chunks=chunks)


def out_of_chunks(block: Block, where: Where) -> Block:
    """The block in one piece; its margins along the chunks' dim go."""
    chunks = block.chunks
    if chunks is None:
        return block
    block = cropped(block, {**block.margins, chunks.dim: NONE})
    x = from_chunks(block.array, chunks.batch, chunks.dim, chunks.as_chunks)
    return dataclasses.replace(block, array=x, chunks=None)


def chunked_alike(blocks: list[Block], where: Where) -> list[Block]:
    """All in the chunks of the first that has some; of two kinds of chunks none."""
    kinds = {b.chunks for b in blocks}
    if len(kinds) == 1:
        return blocks
    named = {k for k in kinds if k is not None}
    (kind,) = named if len(named) == 1 else (None,)
    if kind is not None and all(b.chunks == kind or _can_be_cut(b, kind) for b in blocks):
        return [b if b.chunks == kind else into_chunks(b, kind, where) for b in blocks]
    return [out_of_chunks(b, where) for b in blocks]


def _can_be_cut(block: Block, chunks: InChunks) -> bool:
    cut = block.cuts.get(chunks.dim)
    return cut is not None and cut.block % chunks.count == 0 and chunks.batch not in block.cuts


# --- what every device has as a whole -------------------------------------------------------------------------


def part_of(whole: Array, like: Block, where: Where) -> Array:
    """This device's part of an array that every device holds, laid out as ``like``; dims of size 1 stay so."""
    x = whole
    for dim, cut in like.cuts.items():
        if x.shape[dim] == 1 and cut.size != 1:
            continue
        lo, hi = like.margins[dim]
        x = _with_ends(x, dim, lo, cut.block * cut.shards - cut.size + hi, like.beyond[dim])
        if like.chunks is not None and like.chunks.dim == dim:
            continue  # below, where the chunks are told apart
        x = lax.dynamic_slice_in_dim(x, where(cut.axes) * cut.block, lo + cut.block + hi, axis=dim)
    chunks = like.chunks
    if chunks is None:
        return x
    dim, batch = chunks.dim, chunks.batch
    if x.shape[dim] == 1 and x.shape[batch] == 1:
        return x
    if x.shape[dim] > 1:
        lo, hi = like.margins[dim]
        first = where(like.cuts[dim].axes) * like.cuts[dim].block
        unit = like.unit(dim)
        parts = [lax.dynamic_slice_in_dim(x, first + i * unit, lo + unit + hi, axis=dim) for i in range(chunks.count)]
    else:
        parts = [x] * chunks.count
    stacked = jnp.stack(parts, batch if chunks.major else batch + 1)
    shape = list(parts[0].shape)
    shape[batch] *= chunks.count
    return stacked.reshape(shape)


def part_along(whole: Array, like: Block, moves: Mapping[int, int], where: Where) -> Array:
    """This device's part of a whole array of which dims become dims of ``like``, as ``moves`` says; not of chunks."""
    source = {to: d for d, to in moves.items() if to in like.cuts}
    margins = {d: like.margins[to] for to, d in source.items()}
    beyond = {d: like.beyond[to] for to, d in source.items()}
    lies = Block(whole, {d: like.cuts[to] for to, d in source.items()}, margins, beyond)
    return part_of(whole, lies, where)


def _with_ends(x: Array, dim: int, lo: int, hi: int, beyond: str) -> Array:
    if not (lo or hi):
        return x
    widths = [(lo, hi) if d == dim else (0, 0) for d in range(x.ndim)]
    return jnp.pad(x, widths, "wrap") if beyond == CIRCULAR else jnp.pad(x, widths)


def local_shape(shape: tuple[int, ...], like: Block) -> tuple[int, ...]:
    """Of a value of logical ``shape`` that lies as ``like``: what a device holds."""
    found = list(shape)
    for dim in like.cuts:
        lo, hi = like.margins[dim]
        found[dim] = lo + like.unit(dim) + hi
    if like.chunks is not None:
        found[like.chunks.batch] *= like.chunks.count
    return tuple(found)
