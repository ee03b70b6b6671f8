"""What a halo exchange brings to each block. Pure integer arithmetic on the exchanges of ``spatial.windows``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from shardkit.spatial.windows import Exchange


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive elements of one dim that a part receives from another.

    Attributes:
      start, stop: which elements.
      source: the part that holds them.
      before: they're laid out before the part's own elements, not after.
    """

    start: int
    stop: int
    source: int
    before: bool


def runs_of(exchange: Exchange) -> tuple[tuple[Run, ...], ...]:
    """What each part of a dim receives, in the order in which it's laid out; padding that travels is left out.

    >>> from shardkit.spatial.windows import shard_halo
    >>> [[(run.start, run.stop, run.source) for run in runs] for runs in runs_of(shard_halo(6, 3, 1, 0))]
    [[], [(1, 2, 0)], [(3, 4, 1)]]
    """
    found: list[list[Run]] = [[] for _ in range(exchange.shards)]
    messages = [(m, True) for m in exchange.before] + [(m, False) for m in exchange.after]
    for message, before in messages:
        for source, target in message.pairs:
            start = source * exchange.block + message.offsets[source]
            stop = min(start + message.length, exchange.size)
            if start < stop and source != target:
                left = _nearer_left(source, target, exchange.shards) if exchange.table is not None else before
                found[target].append(Run(start, stop, source, left))
    return tuple(tuple(runs) for runs in found)


def _nearer_left(source: int, target: int, parts: int) -> bool:
    """Where a local gather picks what it needs, the layout tells no side; the shorter way round the ring does."""
    left, right = (target - source) % parts, (source - target) % parts
    return left < right or (left == right and source < target)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of elements that a block receives.

    Attributes:
      spans: dim -> (start, stop) where it differs from the block's own.
      cell: the block it comes from.
    """

    spans: Mapping[int, tuple[int, int]]
    cell: tuple[int, ...]


Runs = Mapping[int, tuple[tuple[Run, ...], ...]]


def pieces_of(cell: tuple[int, ...], runs: Runs) -> list[Piece]:
    """All that a block receives: from its neighbours in each dim, and, where several dims have halos, the corners.

    Args:
      cell: the block.
      runs: what each part receives, for each dim with a halo.

    Example:
      >>> from shardkit.spatial.windows import shard_halo
      >>> runs = runs_of(shard_halo(4, 2, 1, 1))
      >>> [(dict(p.spans), p.cell) for p in pieces_of((0, 1), {0: runs, 1: runs})]
      [({1: (1, 2)}, (0, 0)), ({0: (2, 3)}, (1, 1)), ({0: (2, 3), 1: (1, 2)}, (1, 0))]
    """
    choices = [[None, *runs[dim][cell[dim]]] for dim in runs]
    found = []
    for choice in itertools.product(*choices):
        taken = {dim: run for dim, run in zip(runs, choice, strict=True) if run is not None}
        if taken:
            source = tuple(taken[d].source if d in taken else part for d, part in enumerate(cell))
            found.append(Piece({dim: (run.start, run.stop) for dim, run in taken.items()}, source))
    return found
