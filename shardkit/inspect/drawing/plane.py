"""Which dims of an array of any rank make rows and columns, which are drawn as small multiples, which not at all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from shardkit.inspect.drawing.blocks import Cut


@dataclasses.dataclass(frozen=True)
class Plane:
    """The part each dim plays.

    Attributes:
      row, column: the dims of the grid; None where there's only one line of blocks.
      multiples: further dims that are cut: one grid for each combination of their parts.
    """

    row: int | None
    column: int | None
    multiples: tuple[int, ...] = ()


def choose_plane(cuts: Sequence[Cut], first: Collection[int] = ()) -> Plane:
    """Ranks 1 and 2 are drawn as they are; of higher ones the last two dims that are cut.

    Args:
      cuts: of each dim.
      first: dims that come into the plane before others (those with halos).

    Example:
      >>> from shardkit.inspect.drawing.blocks import even_cut
      >>> choose_plane([even_cut(8, 8, parts) for parts in (2, 4, 1, 2)])
      Plane(row=1, column=3, multiples=(0,))
    """
    if len(cuts) <= 2:
        return Plane(0 if len(cuts) == 2 else None, len(cuts) - 1 if cuts else None)
    cut = [dim for dim, c in enumerate(cuts) if c.parts > 1]
    wanted = sorted(cut, key=lambda dim: (dim not in first, -dim))[:2]
    inside = sorted(wanted)
    row = inside[0] if len(inside) == 2 else None
    return Plane(row, inside[-1] if inside else None, tuple(dim for dim in cut if dim not in wanted))


def cell_at(rank: int, at: dict[int, int]) -> tuple[int, ...]:
    """The cell with the given parts, and the only part of all other dims."""
    return tuple(at.get(dim, 0) for dim in range(rank))


def cell_in(plane: Plane, rank: int, at: dict[int, int], row: int, column: int) -> tuple[int, ...]:
    """The cell of a row and a column of the grid that has the given parts."""
    here = dict(at)
    for dim, part in ((plane.row, row), (plane.column, column)):
        if dim is not None:
            here[dim] = part
    return cell_at(rank, here)


def parts_of(cuts: Sequence[Cut], dim: int | None) -> int:
    """How many rows or columns a dim of the plane makes."""
    return 1 if dim is None else cuts[dim].parts


def panel_count(cuts: Sequence[Cut], plane: Plane) -> int:
    """How many grids there are."""
    return math.prod(cuts[dim].parts for dim in plane.multiples)


def panels(cuts: Sequence[Cut], plane: Plane, limit: int) -> Iterator[dict[int, int] | None]:
    """The parts of the small multiples' dims, grid by grid; None once, for those left out in the middle."""
    sizes = [range(cuts[dim].parts) for dim in plane.multiples]
    shown = elided(panel_count(cuts, plane), limit)
    wanted = {number for number in shown if number is not None}
    gap_after = shown.index(None) - 1 if None in shown else -1
    for number, parts in enumerate(itertools.product(*sizes)):
        if number in wanted:
            yield dict(zip(plane.multiples, parts, strict=True))
        if number == gap_after:
            yield None


def elided(count: int, limit: int) -> list[int | None]:
    """``range(count)``, with None in place of the middle where that's more than ``limit`` entries.

    >>> elided(4, 4), elided(9, 4)
    ([0, 1, 2, 3], [0, 1, None, 8])
    """
    if count <= limit:
        return list(range(count))
    kept = max(limit - 1, 1)
    head = (kept + 1) // 2
    return [*range(head), None, *range(count - (kept - head), count)]
