"""Between meshes of other devices: what the source mesh does, the transfer, what the destination mesh does."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit.placements import AnyMesh, Layout
from shardkit.reshard.describe import ReshardStep, describe
from shardkit.reshard.factors import whole
from shardkit.reshard.moves import Move, moves
from shardkit.reshard.regions import region_between
from shardkit.reshard.route import Route, ends_of, route, state_of
from shardkit.reshard.search import all_states
from shardkit.reshard.states import Problem, State


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A way from one mesh to another.

    Attributes:
      first: on the source mesh, from the source to ``leave``.
      leave, enter: the layouts, on either mesh, between which the array is transferred.
      bytes: what one device of the destination mesh receives from others in the transfer.
      peak_bytes: its block before and after.
      second: on the destination mesh, from ``enter`` to the goal.
    """

    first: Route
    leave: Layout
    enter: Layout
    bytes: int
    peak_bytes: int
    second: Route

    def describe(self) -> tuple[ReshardStep, ...]:
        """The lines of the plan."""
        names = [f"{dict(layout.mesh.shape)} {_spec_text(layout)}" for layout in (self.leave, self.enter)]
        line = ReshardStep("transfer", (), self.bytes, self.peak_bytes, *names)
        return (*describe(self.first), line, *describe(self.second))


def _spec_text(layout: Layout) -> str:
    dims = layout.dim_axes()
    return f"[{', '.join('*'.join(dims.get(d, ())) or '-' for d in range(len(layout.spec)))}]"


@functools.lru_cache(1024)
def crossing(shape: tuple[int, ...], dtype: np.dtype, source: Layout, goal: Layout) -> Crossing:
    """The cheapest way between meshes that don't have the same devices in one order.

    Contributions are reduced before the transfer, and made after it. Compared are bytes received, then those of them
    that are transferred between the meshes (the slower way, on most machines), then collectives.
    """
    ends = []
    for layout in (source, goal):
        region = region_between(layout.mesh, layout.mesh)
        assert region is not None  # a mesh has its own devices
        factors = whole(dict(region.sizes))
        ends.append((factors, state_of(factors, *ends_of(layout, len(shape), region.source)), region))
    (ours, start, source_region), (theirs, end, goal_region) = ends
    here = Problem(ours, shape, np.dtype(dtype).itemsize, source.reduce, None)
    there = Problem(theirs, shape, np.dtype(dtype).itemsize, None, goal.reduce)
    before, after = _costs_from(here, start), _costs_to(there, end)
    held = _held(here, there, source.mesh, goal.mesh)
    best: tuple[tuple[int, ...], State, State, int] | None = None
    for (leave, cost), (enter, more) in itertools.product(sorted(before.items(), key=_by_cost), after.items()):
        if best is not None and cost[0] + more[0] > best[0][0]:
            continue
        received = held(leave, enter)
        total = (cost[0] + more[0] + received, received, cost[1] + more[1], cost[2] + more[2])
        if best is None or total < best[0]:
            best = (total, leave, enter, received)
    assert best is not None  # there's always a way
    _, leave, enter, received = best
    out, into = _layout(source.mesh, here, leave), _layout(goal.mesh, there, enter)
    return Crossing(
        first=route(source_region, shape, dtype, source, out),
        leave=out,
        enter=into,
        bytes=received,
        peak_bytes=here.local_bytes(leave) + there.local_bytes(enter),
        second=route(goal_region, shape, dtype, into, goal),
    )


def _by_cost(item: tuple[State, tuple[int, int, int]]) -> tuple[int, int, int]:
    return item[1]


def _layout(mesh: AnyMesh, problem: Problem, state: State) -> Layout:
    named = [problem.factors.whole_axes(factors) or () for factors in state.dims]
    return Layout(mesh, PartitionSpec(*[n if n else None for n in named])).resolved(len(named))


Costs = Mapping[State, tuple[int, int, int]]  # bytes, collectives, steps


def _costs_from(problem: Problem, source: State) -> Costs:
    """What it costs to get from the source to each state without contributions."""
    nowhere = State(source.dims, ())
    costs = _dijkstra(source, lambda state: [(m.after, m) for m in moves(problem, state, nowhere)])
    return {state: cost for state, cost in costs.items() if not state.partial}


def _costs_to(problem: Problem, goal: State) -> Costs:
    """What it costs to get from each state without contributions to the goal."""
    back: dict[State, list[tuple[State, Move]]] = defaultdict(list)
    for state in all_states(len(problem.factors.sizes), len(goal.dims), False):
        for move in moves(problem, state, goal):
            back[move.after].append((state, move))
    costs = _dijkstra(goal, lambda state: back[state])
    return {state: cost for state, cost in costs.items() if not state.partial}


def _dijkstra(start: State, edges: Callable[[State], list[tuple[State, Move]]]) -> dict[State, tuple[int, int, int]]:
    costs = {start: (0, 0, 0)}
    queue = [((0, 0, 0), start)]
    done = set()
    while queue:
        cost, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        for other, move in edges(state):
            total = (cost[0] + move.bytes, cost[1] + move.collectives, cost[2] + 1)
            if other not in costs or total < costs[other]:
                costs[other] = total
                heapq.heappush(queue, (total, other))
    return costs


def _held(here: Problem, there: Problem, source: AnyMesh, goal: AnyMesh):
    """A function: the bytes that a device must receive to go from a state here to one there, at most."""
    shared = np.empty((0, 2), int)
    if isinstance(source, Mesh) and isinstance(goal, Mesh):
        at = {device: i for i, device in enumerate(source.devices.flat)}
        pairs = [(i, at[d]) for i, d in enumerate(goal.devices.flat) if d in at]
        shared = np.array(pairs, int).reshape(-1, 2)

    def received(leave: State, enter: State) -> int:
        count = there.coordinates.shape[1]
        wanted, kept = np.full(count, there.itemsize), np.full(len(shared), there.itemsize)
        for dim, (mine, theirs) in enumerate(zip(leave.dims, enter.dims, strict=True)):
            low, high = there.interval(dim, theirs)
            wanted = wanted * (high - low)
            own_low, own_high = here.interval(dim, mine)
            targets, sources = shared[:, 0], shared[:, 1]
            overlap = np.minimum(high[targets], own_high[sources]) - np.maximum(low[targets], own_low[sources])
            kept = kept * np.maximum(overlap, 0)
        np.subtract.at(wanted, shared[:, 0], kept)
        return int(wanted.max())

    return received
