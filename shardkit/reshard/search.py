"""The cheapest way from one state to another. Integers only.

A* (P. Hart, N. Nilsson, B. Raphael, "A Formal Basis for the Heuristic Determination of Minimum Cost Paths", IEEE
Trans. SSC 4(2), 1968) over states, with costs compared in the order bytes received, collectives, peak memory, steps.
The bound that guides it is what a device must receive in any case: the part of its block that it doesn't hold.

Permutes lead from a state to all that hold the same blocks on other devices. One is enough on any cheapest way:
all other steps cost the same wherever the blocks lie, so two permutes can be made into one at the smaller of their
blocks. So the search has two levels, before and after it, and tries the first alone before.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from shardkit.reshard.moves import Move, moves, permute
from shardkit.reshard.states import Problem, State

Cost = tuple[int, int, int, int]  # bytes, collectives, peak bytes, steps


def cheapest(problem: Problem, source: State, goal: State) -> list[Move]:
    """The steps from ``source`` to ``goal``, none if they are the same."""
    way = cheaper(problem, source, goal, None)
    if way is None:
        raise RuntimeError(f"no way from {source} to {goal} of {problem}; please report this")
    return way


def cheaper(problem: Problem, source: State, goal: State, limit: Cost | None) -> list[Move] | None:
    """The cheapest steps, if they cost less than ``limit``."""
    if source == goal and not _changes_kind(problem, source, goal):
        return []
    bound = _Bound(problem, goal)
    if limit is not None and (bound(source), 0, 0, 0) >= limit:
        return None
    way = None
    if problem.signature(source) == problem.signature(goal) and not _changes_kind(problem, source, goal):
        direct = [permute(problem, source, goal)]
        if limit is None or way_cost(direct) < limit:
            way, limit = direct, way_cost(direct)
    way = _search(problem, source, goal, bound, limit, permuting=False) or way
    if way is None or way_cost(way)[0] > bound(source):
        # Something may be cheaper, by a permute.
        way = _search(problem, source, goal, bound, limit if way is None else way_cost(way), permuting=True) or way
    return way


def least_bytes(problem: Problem, source: State, goal: State) -> int:
    """What some device must receive, whatever the way."""
    return _Bound(problem, goal)(source)


def _changes_kind(problem: Problem, source: State, goal: State) -> bool:
    return bool(source.partial and goal.partial) and problem.reduce != problem.wanted


def way_cost(way: list[Move]) -> Cost:
    """The costs of steps together."""
    peak = max((m.peak for m in way), default=0)
    return (sum(m.bytes for m in way), sum(m.collectives for m in way), peak, len(way))


def _search(
    problem: Problem, source: State, goal: State, bound: _Bound, limit: Cost | None, *, permuting: bool
) -> list[Move] | None:
    """The cheapest way, if it's cheaper than ``limit``; with a permute at most where ``permuting``."""
    # Where the kind changes, only what "contribute" leads to is the goal: a state doesn't say its kind.
    made, end = 2, (2,) if _changes_kind(problem, source, goal) else (0, 1, 2)
    start: tuple[State, int] = (source, 0)
    best: dict[tuple[State, int], Cost] = {start: (0, 0, 0, 0)}
    came: dict[tuple[State, int], tuple[tuple[State, int], Move]] = {}
    count = itertools.count()
    queue: list[tuple[Cost, int, tuple[State, int]]] = [((bound(source), 0, 0, 0), next(count), start)]
    done = set()
    alike = _Alike(problem, goal) if permuting else None
    while queue:
        estimate, _, node = heapq.heappop(queue)
        if limit is not None and estimate >= limit:
            return None
        if node in done:
            continue
        done.add(node)
        state, level = node
        if state == goal and level in end:
            way = []
            while node != start:
                node, move = came[node]
                way.append(move)
            return way[::-1]
        received, collectives, peak, steps = best[node]

        def offer(move: Move, to: int, node=node, received=received, collectives=collectives, peak=peak, steps=steps):
            target = (move.after, to)
            if target in done:
                return
            cost = (received + move.bytes, collectives + move.collectives, max(peak, move.peak), steps + 1)
            if target in best and best[target] <= cost:
                return
            estimate = (cost[0] + bound(move.after), *cost[1:])
            if limit is not None and estimate >= limit:
                return
            best[target] = cost
            came[target] = (node, move)
            heapq.heappush(queue, (estimate, next(count), target))

        for move in moves(problem, state, goal):
            offer(move, made if move.kind == "contribute" else level)
        if alike is not None and level == 0:
            held = problem.local_bytes(state)
            if limit is None or received + held <= limit[0]:
                for other in alike(state):
                    if limit is None or received + held + bound(other) <= limit[0]:
                        offer(permute(problem, state, other), 1)
    return None


class _Bound:
    """The fewest bytes that some device must still receive, from a state on."""

    def __init__(self, problem: Problem, goal: State):
        self._problem = problem
        self._goal = goal
        self._known: dict[State, int] = {}
        self._ends = [problem.interval(d, f) for d, f in enumerate(goal.dims)]
        self._wanted = np.full(problem.coordinates.shape[1], problem.itemsize)
        for low, high in self._ends:
            self._wanted = self._wanted * (high - low)

    def __call__(self, state: State) -> int:
        if state not in self._known:
            self._known[state] = self._compute(state)
        return self._known[state]

    def _compute(self, state: State) -> int:
        goal, problem = self._goal, self._problem
        if state == goal:
            return 0
        if state.partial and (not goal.partial or problem.reduce != problem.wanted):
            # Over all devices: to put n contributions together takes n - 1 receptions of each element; then each other
            # device that wants the sum must receive something more.
            devices = problem.coordinates.shape[1]
            elements = math.prod(problem.shape) * problem.itemsize
            copies = 1 if goal.partial else devices // math.prod(problem.parts(f) for f in goal.dims)
            together = elements * (problem.parts(state.partial) - 1 + copies - 1) // devices
            return max(together, 0 if goal.partial else int(self._wanted.max()))
        if goal.partial:
            return 0  # what a contribution holds is free to choose
        kept = np.full_like(self._wanted, problem.itemsize)
        for dim, (factors, (low, high)) in enumerate(zip(state.dims, self._ends, strict=True)):
            own_low, own_high = problem.interval(dim, factors)
            kept = kept * np.maximum(np.minimum(high, own_high) - np.maximum(low, own_low), 0)
        return int((self._wanted - kept).max())


class _Alike:
    """The states that hold the same blocks on other devices."""

    def __init__(self, problem: Problem, goal: State):
        self._problem = problem
        self._goal = goal
        self._found: dict[tuple[int, ...], list[State]] | None = None

    def __call__(self, state: State) -> list[State]:
        if self._found is None:
            self._found = defaultdict(list)
            for other in all_states(len(self._problem.factors.sizes), len(state.dims), bool(state.partial)):
                self._found[self._problem.signature(other)].append(other)
        return [s for s in self._found.get(self._problem.signature(state), ()) if s != state]


def all_states(factors: int, ndim: int, partial: bool) -> Iterator[State]:
    """Every way to place so many factors on so many dims."""
    places = [*range(ndim), "free", *(["partial"] if partial else [])]
    for where in itertools.product(places, repeat=factors):
        left = tuple(f for f, w in enumerate(where) if w == "partial")
        orders = [itertools.permutations([f for f, w in enumerate(where) if w == d]) for d in range(ndim)]
        for dims in itertools.product(*orders):
            yield State(tuple(map(tuple, dims)), left)
