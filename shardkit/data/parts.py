"""Which part of an array each process holds; integer arithmetic only, without JAX.

A mesh cuts an array into a grid of equal blocks: ``counts[d]`` of them along dim ``d``, and each device has one. What a
process holds is what its devices have, put together in the order of the blocks. Where those aren't neighbours (a mesh
whose order interleaves the processes) the process's part is still one array: its blocks one after another, without what
lies between them in the whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

Block = tuple[int, ...]  # where it stands in the grid, one number a dim
Grid = tuple[tuple[int, ...], ...]  # the numbers of the blocks that a process holds, ascending, a tuple a dim


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a mesh cuts an array.

    Attributes:
      counts: blocks along each dim.
      blocks: the block of each device, in mesh order.
    """

    counts: tuple[int, ...]
    blocks: tuple[Block, ...]


def cut(sizes: Mapping[str, int], axes: Mapping[int, Sequence[str]], ndim: int) -> Cut:
    """The grid that mesh axes make.

    Args:
      sizes: of the mesh axes, in mesh order.
      axes: which of them cut which dim, major first.
      ndim: rank of the array.

    Example:
      >>> cut({"dp": 2, "sp": 2}, {0: ("dp",)}, 1)
      Cut(counts=(2,), blocks=((0,), (0,), (1,), (1,)))
    """
    counts = tuple(math.prod(sizes[a] for a in axes.get(dim, ())) for dim in range(ndim))
    blocks = []
    for place in itertools.product(*(range(size) for size in sizes.values())):
        index = dict(zip(sizes, place, strict=True))
        block = []
        for dim in range(ndim):
            number = 0
            for axis in axes.get(dim, ()):
                number = number * sizes[axis] + index[axis]
            block.append(number)
        blocks.append(tuple(block))
    return Cut(counts, tuple(blocks))


def grids(given: Cut, owners: Sequence[int]) -> dict[int, Grid]:
    """What each process holds.

    Args:
      given: how the array is cut.
      owners: the process of each device, in mesh order.

    Raises:
      ValueError: a process's blocks aren't the product of some numbers along each dim (a diagonal), so that no array
        has just those.

    Example:
      >>> grids(cut({"dp": 2, "sp": 2}, {0: ("dp",), 1: ("sp",)}, 2), [0, 0, 1, 1])
      {0: ((0,), (0, 1)), 1: ((1,), (0, 1))}
    """
    held: dict[int, set[Block]] = {}
    for block, process in zip(given.blocks, owners, strict=True):
        held.setdefault(process, set()).add(block)
    found = {}
    for process, blocks in sorted(held.items()):
        grid = tuple(tuple(sorted({b[dim] for b in blocks})) for dim in range(len(given.counts)))
        if math.prod(map(len, grid)) != len(blocks):
            raise ValueError(
                f"the devices of process {process} hold blocks {sorted(blocks)} of a grid {given.counts}, which don't "
                "make one array; give the mesh its devices in an order that keeps those of a process together, or "
                "cut fewer dims"
            )
        found[process] = grid
    return found


def inside(block: Block, grid: Grid, sizes: Sequence[int]) -> tuple[slice, ...]:
    """Where a block lies in a process's own part.

    Args:
      block: one that the process holds.
      grid: what it holds.
      sizes: of a block, in elements.

    Example:
      >>> inside((2, 0), ((0, 2), (0,)), (4, 3))
      (slice(4, 8, None), slice(0, 3, None))
    """
    starts = [held.index(number) * size for number, held, size in zip(block, grid, sizes, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def intervals(held: Sequence[int], size: int) -> list[tuple[int, int]]:
    """The intervals of a dim that blocks of ``size`` elements cover, neighbours joined.

    Example:
      >>> intervals((0, 1, 3), 2)
      [(0, 4), (6, 8)]
    """
    found: list[tuple[int, int]] = []
    for number in held:
        start, stop = number * size, (number + 1) * size
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


def shared(given: Cut, owners: Sequence[int]) -> dict[Block, tuple[int, ...]]:
    """The blocks that several processes hold, and which."""
    held: dict[Block, set[int]] = {}
    for block, process in zip(given.blocks, owners, strict=True):
        held.setdefault(block, set()).add(process)
    return {block: tuple(sorted(who)) for block, who in held.items() if len(who) > 1}


def row_units(cuts: Sequence[Cut], owners: Sequence[int]) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Dim 0 of several arrays in one unit, for rows that must mean the same in all of them.

    Args:
      cuts: of the arrays; each has a dim 0.
      owners: the process of each device, in mesh order.

    Returns:
      How many units the dim has, and the units that each process holds.

    Raises:
      ValueError: a process holds other rows of one array than of another.

    Example:
      >>> by_two, whole = cut({"dp": 2}, {0: ("dp",)}, 1), cut({"dp": 2}, {}, 1)
      >>> row_units([by_two, whole], [0, 0])
      (2, {0: (0, 1)})
    """
    total = math.lcm(*(c.counts[0] for c in cuts))
    found: dict[int, tuple[int, ...]] = {}
    for given in cuts:
        each = total // given.counts[0]
        for process, grid in grids(given, owners).items():
            units = tuple(number * each + k for number in grid[0] for k in range(each))
            if found.setdefault(process, units) != units:
                raise ValueError(
                    f"process {process} would hold other rows of one leaf than of another; to pad, cut dim 0 of all "
                    "leaves over the same mesh axes as far as these go across processes"
                )
    return total, found
