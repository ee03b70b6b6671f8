"""How one dim of a resize is done on every shard: what arrives, and the weights each multiplies it with.

Pure NumPy, no JAX: from the band of a dim's weights to an ``Exchange`` and tables with one row a shard.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import numpy as np

from shardkit.spatial.resizing.weights import Band, dense
from shardkit.spatial.windows import Exchange, Span, block_size, ceil_div, plan_exchange

# A long block of outputs is cut into chunks of about this many, each multiplied with the inputs it reads: a
# matrix unit's side, so that the products stay large while the zeros of the matrix aren't multiplied.
_CHUNK = 128
_MOST_CHUNKS = 32  # each is a product of its own in the program

# A matrix is stored where it has at most this many elements, or this many times those of its band.
_STORED_ELEMENTS, _STORED_RATIO = 1 << 18, 4


class Dim(Protocol):
    """How one dim is resampled: sizes before and after, and the weights; hashable."""

    @property
    def size(self) -> int: ...
    @property
    def out(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def band(self) -> Band: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive outputs of every block, and the slice of the line that they read.

    Attributes:
      start, length: the slice, the same on all shards.
      outputs: number of outputs.
      offsets: ``[shards, outputs]``, first input of each, within the slice.
      weights: ``[shards, outputs, taps]``.
      matrix: ``[shards, length, outputs]``, or None where it's too large to be stored.
    """

    start: int
    length: int
    outputs: int
    offsets: np.ndarray
    weights: np.ndarray
    matrix: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class DimPlan:
    """One dim: the exchange, whether its whole line is used, and the chunks of outputs."""

    exchange: Exchange
    whole_line: bool
    out_block: int
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """The band with one row a shard: ``starts`` and ``counts`` are ``[shards, out_block]``."""

    starts: np.ndarray
    counts: np.ndarray
    weights: np.ndarray


def _rows(dim: Dim, shards: int) -> _Rows:
    band = dim.band
    block = block_size(dim.out, shards)
    missing = block * shards - dim.out

    def cut(a: np.ndarray) -> np.ndarray:
        filled = np.concatenate([a, np.zeros((missing, *a.shape[1:]), a.dtype)])
        return filled.reshape(shards, block, *a.shape[1:])

    return _Rows(cut(band.starts), cut(band.counts), cut(band.weights))


def _exchange(dim: Dim, shards: int, rows: _Rows) -> tuple[Exchange, np.ndarray, bool]:
    """The exchange, the input that stands first in what each shard then holds, and if that's its whole line."""
    block = block_size(dim.size, shards)
    needs = []
    for i, (starts, counts) in enumerate(zip(rows.starts, rows.counts, strict=True)):
        busy = counts > 0
        lo, hi = (starts[busy].min(), (starts + counts)[busy].max()) if busy.any() else (i * block, i * block)
        needs.append((int(lo), int(hi)))
    length = max(1, max(hi - lo for lo, hi in needs))
    spans = [Span(lo, lo, hi) for lo, hi in needs]
    exchange = plan_exchange(dim.size, shards, "zeros", spans, length)
    line = exchange.reach_lo + block + exchange.reach_hi
    if line <= length + max(length // 4, 8):
        # Hardly longer than what is needed: no slice of its own on each shard, and equal offsets on all.
        firsts = np.arange(shards) * block - exchange.reach_lo
        spans = [Span(int(first), lo, hi) for first, (lo, hi) in zip(firsts, needs, strict=True)]
        return plan_exchange(dim.size, shards, "zeros", spans, line), firsts, True
    # Shards without outputs look where shard 0 does (see windows.py); they have no weights.
    return exchange, np.array([lo for lo, _ in needs]), False


def _chunk(lo: int, hi: int, offsets: np.ndarray, counts: np.ndarray, weights: np.ndarray) -> Chunk:
    offsets, counts, weights = offsets[:, lo:hi], counts[:, lo:hi], weights[:, lo:hi]
    busy = counts > 0
    start = int(offsets[busy].min()) if busy.any() else 0
    stop = int((offsets + counts)[busy].max()) if busy.any() else 1
    taps = max(1, int(counts.max()))
    offsets, weights = np.where(busy, offsets - start, 0), weights[..., :taps]
    elements = offsets.size * (stop - start)
    stored = elements <= max(_STORED_ELEMENTS, _STORED_RATIO * weights.size)
    matrix = dense(offsets, weights, stop - start) if stored else None
    return Chunk(start, stop - start, hi - lo, offsets.astype(np.int32), weights, matrix)


@functools.lru_cache(maxsize=256)
def plan_dim(dim: Dim, shards: int) -> DimPlan:
    """The plan of one dim, cut over ``shards`` (1 where it isn't sharded)."""
    rows = _rows(dim, shards)
    exchange, firsts, whole = _exchange(dim, shards, rows)
    block = rows.starts.shape[1]
    offsets = rows.starts - firsts[:, None]
    split = functools.partial(_chunk, offsets=offsets, counts=rows.counts, weights=rows.weights)
    chunks = (split(0, block),)
    count = min(_MOST_CHUNKS, ceil_div(block, _CHUNK))
    if count > 1 and dim.method != "nearest":
        each = ceil_div(block, count)
        cut = tuple(split(lo, min(lo + each, block)) for lo in range(0, block, each))
        if 2 * sum(c.length * c.outputs for c in cut) <= chunks[0].length * chunks[0].outputs:
            chunks = cut
    return DimPlan(exchange, whole, block, chunks)
