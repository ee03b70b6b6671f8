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
from typing import Any

import numpy as np

from shardkit.reshard.moves import Move, moves, permute
from shardkit.reshard.states import Problem, State

Cost = tuple[int, int, int, int]  # bytes, collectives, peak bytes, steps
# A state, whether a permute led there, and, where the kind of reduction changes, whether its contributions are those of
# the goal's kind.
_Node = tuple[State, bool, bool]


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
    limit = limit or (_cost_by_gathering(problem, source, goal) + 1, 0, 0, 0)
    if problem.signature(source) == problem.signature(goal) and not _changes_kind(problem, source, goal):
        direct = [permute(problem, source, goal)]
        if way_cost(direct) < limit:
            way, limit = direct, way_cost(direct)
    way = _search(problem, source, goal, bound, limit, permuting=False) or way
    if way is None or way_cost(way)[:2] > (bound(source), min(bound(source), 1)):
        # Something may be cheaper, or as cheap in fewer collectives, by a permute.
        way = _search(problem, source, goal, bound, limit if way is None else way_cost(way), permuting=True) or way
    return way


def _cost_by_gathering(problem: Problem, source: State, goal: State) -> int:
    """Bytes of the way that's always there: reduce, gather all, take one's own."""
    held, cost = problem.local_bytes(source), 0
    if set(source.partial) - set(goal.partial) or _changes_kind(problem, source, goal):
        group = problem.parts(source.partial)
        cost = held * (group - 1) if problem.reduce == "prod" else 2 * held * (group - 1) // group
    return cost + held * (problem.parts(tuple(f for factors in source.dims for f in factors)) - 1)


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
    problem: Problem, source: State, goal: State, bound: _Bound, limit: Cost, *, permuting: bool
) -> list[Move] | None:
    """The cheapest way, if it's cheaper than ``limit``; with a permute at most where ``permuting``."""
    changes = _changes_kind(problem, source, goal)
    start: _Node = (source, False, False)
    best: dict[_Node, Cost] = {start: (0, 0, 0, 0)}
    came: dict[_Node, tuple[_Node, Move]] = {}
    count = itertools.count()
    queue: list[tuple[Cost, int, _Node]] = [((bound(source), 0, 0, 0), next(count), start)]
    done = set()
    alike = _Alike(problem)
    while queue:
        estimate, _, node = heapq.heappop(queue)
        if estimate >= limit:
            return None
        if node in done:
            continue
        done.add(node)
        state, permuted, made = node
        if state == goal and made == changes:
            way = []
            while node != start:
                node, move = came[node]
                way.append(move)
            return way[::-1]
        received = best[node][0]

        def offer(move: Move, permuted: bool, made: bool, node: Any = node, so_far: Any = best[node]) -> None:
            target = (move.after, permuted, made)
            if target in done:
                return
            received, collectives, peak, steps = so_far
            cost = (received + move.bytes, collectives + move.collectives, max(peak, move.peak), steps + 1)
            if target in best and best[target] <= cost:
                return
            estimate = (cost[0] + bound(move.after, made), *cost[1:])
            if estimate >= limit:
                return
            best[target] = cost
            came[target] = (node, move)
            heapq.heappush(queue, (estimate, next(count), target))

        for move in moves(problem, state, goal, made, limit[0] - received):
            offer(move, permuted, made or (changes and move.kind == "contribute"))
        if permuting and not permuted:
            held = problem.local_bytes(state)
            if received + held <= limit[0]:
                for other in alike(state):
                    if received + held + bound(other, made) <= limit[0]:
                        offer(permute(problem, state, other), True, made)
    return None


class _Bound:
    """The fewest bytes that some device must still receive, from a state on."""

    def __init__(self, problem: Problem, goal: State):
        self._problem = problem
        self._goal = goal
        self._known: dict[tuple[State, bool], int] = {}
        self._ends = [problem.interval(d, f) for d, f in enumerate(goal.dims)]
        self._wanted = np.full(problem.coordinates.shape[1], problem.itemsize)
        for low, high in self._ends:
            self._wanted = self._wanted * (high - low)

    def __call__(self, state: State, made: bool = False) -> int:
        key = (state, made)
        if key not in self._known:
            self._known[key] = self._compute(state, made)
        return self._known[key]

    def _compute(self, state: State, made: bool) -> int:
        goal, problem = self._goal, self._problem
        changes = bool(goal.partial) and problem.reduce != problem.wanted
        if state == goal and not (changes and problem.reduce is not None):
            return 0
        if state.partial and problem.reduce is not None and not made and (changes or not goal.partial):
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

    def __init__(self, problem: Problem):
        self._problem = problem
        self._found: dict[tuple[int, ...], list[State]] | None = None

    def __call__(self, state: State) -> list[State]:
        problem = self._problem
        if self._found is None:
            self._found = defaultdict(list)
            partial = problem.reduce is not None or problem.wanted is not None
            for other in all_states(len(problem.factors.sizes), len(state.dims), partial):
                self._found[problem.signature(other)].append(other)
        return [s for s in self._found.get(problem.signature(state), ()) if s != state]


def all_states(factors: int, ndim: int, partial: bool) -> Iterator[State]:
    """Every way to place so many factors on so many dims."""
    places = [*range(ndim), "free", *(["partial"] if partial else [])]
    for where in itertools.product(places, repeat=factors):
        left = tuple(f for f, w in enumerate(where) if w == "partial")
        orders = [itertools.permutations([f for f, w in enumerate(where) if w == d]) for d in range(ndim)]
        for dims in itertools.product(*orders):
            yield State(tuple(map(tuple, dims)), left)
