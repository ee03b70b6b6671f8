"""From two layouts to the cheapest moves between them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from shardkit.arrays.kinds import check_dtype
from shardkit.placements import Layout
from shardkit.reshard.factors import Factors, split_for, whole
from shardkit.reshard.local import Step, as_steps
from shardkit.reshard.moves import Move
from shardkit.reshard.regions import Names, Region
from shardkit.reshard.search import Cost, cheaper, least_bytes
from shardkit.reshard.states import Problem, State

Ends = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]  # the axes that cut each dim, the Partial ones


@dataclasses.dataclass(frozen=True)
class Route:
    """The moves between two states, and all that is needed to do them.

    Attributes:
      problem: the array, the mesh and the kinds, in integers.
      source, goal: the states at its ends.
      moves: from the search.
    """

    problem: Problem
    source: State
    goal: State
    moves: tuple[Move, ...]

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The moves as steps, each with the states it leads from and to."""
        return as_steps(self.source, self.moves)

    @property
    def cost(self) -> tuple[int, int]:
        """Bytes that one device receives, and the number of collectives."""
        return sum(m.bytes for m in self.moves), sum(m.collectives for m in self.moves)


def route(region: Region, shape: tuple[int, ...], dtype: np.dtype, source: Layout, goal: Layout) -> Route:
    """The cheapest moves between two layouts.

    Args:
      region: from ``region_between`` the layouts' meshes.
      shape: logical shape. In a manual region: of this device's block along the manual axes.
      dtype: of the array.
      source, goal: layouts, resolved for the rank.

    Raises:
      ValueError: two kinds of Partial.
      TypeError: a dtype that has no such reduction.
    """
    for layout in (source, goal):
        if layout.reduce is not None:
            check_dtype(layout.reduce, dtype, "reshard")
    ends = [ends_of(layout, len(shape), names) for layout, names in ((source, region.source), (goal, region.goal))]
    return between(region.sizes, shape, np.dtype(dtype).itemsize, ends[0], ends[1], source.reduce, goal.reduce)


def ends_of(layout: Layout, ndim: int, names: Names) -> Ends:
    """The axes of a region that cut each dim, and those over which the array is Partial."""
    made_of = dict(names)
    dims = layout.dim_axes(ndim)
    cut = tuple(tuple(n for axis in dims.get(d, ()) for n in made_of[axis]) for d in range(ndim))
    return cut, tuple(n for axis in layout.partial_axes for n in made_of[axis])


@functools.lru_cache(4096)
def between(
    sizes: tuple[tuple[str, int], ...],
    shape: tuple[int, ...],
    itemsize: int,
    source: Ends,
    goal: Ends,
    reduce: str | None,
    wanted: str | None,
) -> Route:
    """The same, of ends that are given by axis names alone.

    Args:
      sizes: (name, size) of the axes that take part.
      shape, itemsize: of the array.
      source, goal: the axes that cut each dim, and the Partial ones.
      reduce, wanted: the kinds that the Partial axes of the source, of the goal wait for.
    """
    axis_sizes = dict(sizes)
    changed = [name for name, size in sizes if size > 1 and _role(source, name) != _role(goal, name)]
    coarse = whole(axis_sizes)
    found = _way(coarse, shape, itemsize, source, goal, reduce, wanted, None)
    assert found is not None  # there's always a way
    least = least_bytes(found.problem, found.source, found.goal)
    # Parts of axes may do better, or as well in fewer collectives; that is worth a search among moves, but not among
    # reductions, of which there are many more. Where they gain nothing, whole axes are easier to read.
    good = (least, found.cost[1] if found.source.partial else min(least, 1))
    if found.cost > good:
        fine = split_for(axis_sizes, changed, most=3 if found.source.partial else 4)
        if fine != coarse:
            found = _way(fine, shape, itemsize, source, goal, reduce, wanted, (*found.cost, 0, 0)) or found
    return found


def _way(
    factors: Factors,
    shape: tuple[int, ...],
    itemsize: int,
    source: Ends,
    goal: Ends,
    reduce: str | None,
    wanted: str | None,
    limit: Cost | None,
) -> Route | None:
    problem = Problem(factors, shape, itemsize, reduce, wanted)
    start, end = state_of(factors, *source), state_of(factors, *goal)
    moves = cheaper(problem, start, end, limit)
    return None if moves is None else Route(problem, start, end, tuple(moves))


def _role(ends: Ends, name: str) -> Any:
    dims, partial = ends
    if name in partial:
        return "partial"
    return next(((d, axes) for d, axes in enumerate(dims) if name in axes), None)


def state_of(factors: Factors, dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> State:
    """A layout's state: each axis all of its factors."""
    of = factors.of_axis
    return State(
        tuple(tuple(f for a in axes for f in of[a]) for axes in dims), tuple(sorted(f for a in partial for f in of[a]))
    )


def state_in(problem: Problem, layout: Layout) -> State:
    """A layout's state on a problem's mesh, whose axes are those of the layout."""
    dims = layout.dim_axes(len(problem.shape))
    cut = tuple(dims.get(d, ()) for d in range(len(problem.shape)))
    return state_of(problem.factors, cut, layout.partial_axes)
