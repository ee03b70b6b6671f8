"""Which device holds which block. Pure integer arithmetic: no JAX, no arrays.

A dim is cut into parts; a *cell* names one block by the number of its part in every dim. A *holder* is one device
(one position of the mesh) and the cell it holds. Several holders of a cell are copies of each other, or contributions
to one value (Partial), or both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one dim is cut.

    Attributes:
      size: elements that count; None where no shape is known, and parts are only numbered.
      stored: (start, stop) of each part, in elements, its padding included; empty where no shape is known.
      parts: how many.
      axes: the mesh axes that cut it, major first; empty where it's whole, or where no mesh is known.
    """

    size: int | None
    stored: tuple[tuple[int, int], ...]
    parts: int
    axes: tuple[str, ...] = ()

    def interval(self, part: int) -> tuple[int, int]:
        """(start, stop) of the elements of a part that count; empty where it holds only padding."""
        start, stop = self.stored[part]
        size = self.size or 0
        return min(start, size), min(stop, size)

    def padding(self, part: int) -> int:
        """Elements of a part that don't count: they follow those that do."""
        if self.size is None:
            return 0
        (start, stop), (low, high) = self.stored[part], self.interval(part)
        return (stop - start) - (high - low)


def even_cut(size: int | None, stored: int | None, parts: int, axes: Sequence[str] = ()) -> Cut:
    """A dim of ``stored`` elements, ``size`` of which count, in equal parts.

    >>> cut = even_cut(5, 6, 3)
    >>> cut.stored, cut.interval(2), cut.padding(2)
    (((0, 2), (2, 4), (4, 6)), (4, 5), 1)
    """
    if size is None or stored is None:
        return Cut(None, (), parts, tuple(axes))
    block = stored // parts
    return Cut(size, tuple((i * block, (i + 1) * block) for i in range(parts)), parts, tuple(axes))


@dataclasses.dataclass(frozen=True)
class Holder:
    """One device, and the block it holds.

    Attributes:
      number: its position, counted in mesh order.
      coordinates: its position on each mesh axis; empty where no mesh is known.
      cell: the part it holds, in each dim.
      rest: its position among the holders of the same cell: on the axes that cut nothing.
      contribution: its position on each Partial axis.
    """

    number: int
    coordinates: Mapping[str, int]
    cell: tuple[int, ...]
    rest: tuple[int, ...]
    contribution: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Holdings:
    """The cuts of all dims, and every holder."""

    cuts: tuple[Cut, ...]
    holders: tuple[Holder, ...]

    @functools.cached_property
    def cells(self) -> dict[tuple[int, ...], tuple[Holder, ...]]:
        """The holders of each block."""
        found: dict[tuple[int, ...], list[Holder]] = {}
        for holder in self.holders:
            found.setdefault(holder.cell, []).append(holder)
        return {cell: tuple(holders) for cell, holders in found.items()}

    @functools.cached_property
    def _by_place(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], Holder]:
        return {(holder.cell, holder.rest): holder for holder in self.holders}

    def neighbour(self, holder: Holder, cell: tuple[int, ...]) -> Holder:
        """Who holds another block at the same place on the axes that cut nothing."""
        return self._by_place[cell, holder.rest]

    def block_shape(self, cell: tuple[int, ...]) -> tuple[int, ...] | None:
        """Elements stored of one block, padding included; None where no shape is known."""
        if any(cut.size is None for cut in self.cuts):
            return None
        stored = [cut.stored[part] for cut, part in zip(self.cuts, cell, strict=True)]
        return tuple(stop - start for start, stop in stored)

    def is_padding(self, cell: tuple[int, ...]) -> bool:
        """Nothing of the block counts, though it is stored."""
        pairs = list(zip(self.cuts, cell, strict=True))
        return any(c.padding(part) > 0 and c.interval(part)[0] == c.interval(part)[1] for c, part in pairs)


def mesh_holdings(
    axis_sizes: Mapping[str, int],
    cuts: Sequence[Cut],
    partial_axes: Sequence[str] = (),
) -> Holdings:
    """Every position of a mesh, in mesh order, and its block.

    Args:
      axis_sizes: size of each mesh axis, in mesh order.
      cuts: of each dim; ``axes`` say which mesh axes number its parts.
      partial_axes: the mesh axes whose devices hold contributions.

    Example:
      >>> cut = even_cut(4, 4, 4, ("sp", "dp"))  # sp is the major one
      >>> [holder.cell for holder in mesh_holdings({"dp": 2, "sp": 2}, [cut]).holders]
      [(0,), (2,), (1,), (3,)]
    """
    names = tuple(axis_sizes)
    cutting = {axis for cut in cuts for axis in cut.axes}
    holders = []
    for number, position in enumerate(itertools.product(*map(range, axis_sizes.values()))):
        at = dict(zip(names, position, strict=True))
        cell = tuple(_part(cut.axes, axis_sizes, at) for cut in cuts)
        rest = tuple(at[n] for n in names if n not in cutting)
        holders.append(Holder(number, at, cell, rest, {n: at[n] for n in names if n in partial_axes}))
    return Holdings(tuple(cuts), tuple(holders))


def _part(axes: Sequence[str], sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    part = 0
    for axis in axes:
        part = part * sizes[axis] + at[axis]
    return part


def listed_holdings(shape: Sequence[int], blocks: Sequence[Sequence[tuple[int, int]]]) -> Holdings:
    """Holders that say their (start, stop) in each dim, as ``Sharding.devices_indices_map`` has it.

    >>> holdings = listed_holdings((4,), [[(2, 4)], [(0, 2)], [(2, 4)]])
    >>> [(holder.cell, holder.rest) for holder in holdings.holders]
    [((1,), (0,)), ((0,), (0,)), ((1,), (1,))]
    """
    cuts = []
    for dim, size in enumerate(shape):
        stored = tuple(sorted({block[dim] for block in blocks}))
        cuts.append(Cut(size, stored, len(stored)))
    part = [{interval: i for i, interval in enumerate(cut.stored)} for cut in cuts]
    seen: dict[tuple[int, ...], int] = {}
    holders = []
    for number, block in enumerate(blocks):
        cell = tuple(part[dim][interval] for dim, interval in enumerate(block))
        copy = seen.get(cell, 0)
        seen[cell] = copy + 1
        holders.append(Holder(number, {}, cell, (copy,)))
    return Holdings(tuple(cuts), tuple(holders))
