"""Every step from one state to another that is one collective, or none, and what it costs. Integers only."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.reshard.cost import wire_bytes
from shardkit.reshard.states import Problem, State


class Move(NamedTuple):
    """One step.

    Attributes:
      kind: "slice", "all_gather", "all_to_all", "reduce", "reduce_scatter", "permute" or "contribute".
      after: the state it leads to.
      bytes: what one device receives.
      collectives: 0 or 1.
      peak: bytes one device holds during it.
    """

    kind: str
    after: State
    bytes: int
    collectives: int
    peak: int


# Reductions that a device can embed its own block in: elsewhere it contributes what changes nothing.
EMBEDS = ("sum", "max", "min", "prod", "any", "all")


def moves(problem: Problem, state: State, goal: State, made: bool = False, budget: float = math.inf) -> Iterator[Move]:
    """All steps from a state but permutes.

    Args:
      problem: the array, the mesh and the kinds.
      state: where it is.
      goal: where it shall get to; only contributions that it has are made.
      made: the state's Partial factors wait for the goal's kind of reduction, not for the source's.
      budget: steps that surely cost more bytes may be left out.
    """
    held = problem.local_bytes(state)
    yield from _slices(problem, state, goal, held)
    yield from _exchanges(problem, state, held, budget)
    waits, same = problem.reduce is not None, problem.reduce == problem.wanted
    if state.partial and problem.reduce is not None and (same or not made):
        yield from _reductions(problem, state, held, problem.reduce, budget)
    if problem.wanted is not None and (same or made or not (waits and state.partial)):
        yield from _contributions(problem, state, goal, held, problem.wanted)


def permute(problem: Problem, before: State, after: State) -> Move:
    """The step between two states of one signature: every device passes its whole block on."""
    held = problem.local_bytes(before)
    moved = bool((problem.contents(before) != problem.contents(after)).any())
    return Move("permute", after, held if moved else 0, int(moved), 2 * held)


def _slices(problem: Problem, state: State, goal: State, held: int) -> Iterator[Move]:
    free = problem.free(state)
    for dim, factors in enumerate(state.dims):
        # Where sizes don't divide, blocks cut one factor at a time needn't be pieces of one another: then all at once.
        longest = 1 if problem.shape[dim] % problem.parts(factors + free) == 0 else len(free)
        for count in range(1, longest + 1):
            for added in itertools.permutations(free, count):
                if problem.block(dim, factors) <= 1 and not set(added) <= set(goal.dims[dim]):
                    continue  # there is nothing to cut
                if problem.nests(dim, factors, added) and not _in_turn(problem, dim, factors, added):
                    after = _replaced(state, {dim: (*factors, *added)})
                    yield Move("slice", after, 0, 0, held + problem.local_bytes(after))


def _in_turn(problem: Problem, dim: int, factors: tuple[int, ...], added: tuple[int, ...]) -> bool:
    """Whether two slices do what one by all of ``added`` does."""
    return any(
        problem.nests(dim, factors, added[:n]) and problem.nests(dim, factors + added[:n], added[n:])
        for n in range(1, len(added))
    )


def _exchanges(problem: Problem, state: State, held: int, budget: float) -> Iterator[Move]:
    """all_gather of the last factors of some dims, and all_to_all of these to other dims."""
    choices = [
        [
            n
            for n in range(len(factors) + 1)
            if problem.nests(dim, factors[: len(factors) - n], factors[len(factors) - n :])
        ]
        for dim, factors in enumerate(state.dims)
    ]
    for counts in itertools.product(*choices):
        if not any(counts):
            continue
        kept = {d: state.dims[d][: len(state.dims[d]) - n] for d, n in enumerate(counts) if n}
        taken = [f for d, n in enumerate(counts) if n for f in state.dims[d][len(state.dims[d]) - n :]]
        group = problem.parts(tuple(taken))
        if wire_bytes("all_to_all", held, group) > budget:  # the least that any of these costs
            continue
        gathered = _replaced(state, kept)
        result = problem.local_bytes(gathered)
        # What travels are blocks as they lie: `group` of them, the padding with them.
        yield Move("all_gather", gathered, wire_bytes("all_gather", held * group, group), 1, held + result)
        targets = tuple(d for d, n in enumerate(counts) if not n)
        for put in _assignments(problem, state, tuple(taken), targets):
            after = _replaced(state, kept | put)
            # Each device sends `group` pieces; where target dims don't divide, pieces are padded first.
            sent = problem.local_bytes(_replaced(state, put)) * group
            yield Move("all_to_all", after, wire_bytes("all_to_all", sent, group), 1, 2 * sent)


def _reductions(problem: Problem, state: State, held: int, reduce: str, budget: float) -> Iterator[Move]:
    for count in range(1, len(state.partial) + 1):
        for chosen in itertools.combinations(state.partial, count):
            group = problem.parts(chosen)
            if held * (group - 1) // group > budget:
                continue
            left = tuple(f for f in state.partial if f not in chosen)
            # There is no all-reduce of products in JAX: contributions are gathered and multiplied.
            kind, result = ("all_gather", held * group) if reduce == "prod" else ("all_reduce", held)
            yield Move("reduce", State(state.dims, left), wire_bytes(kind, result, group), 1, held + result)
            for put in _assignments(problem, state, chosen, tuple(range(len(state.dims)))):
                after = State(_replaced(state, put).dims, left)
                result = problem.local_bytes(after)
                yield Move(
                    "reduce_scatter", after, wire_bytes("reduce_scatter", result, group), 1, held + group * result
                )


def _contributions(problem: Problem, state: State, goal: State, held: int, wanted: str) -> Iterator[Move]:
    """Each device keeps its block, or nothing, as its contribution."""
    missing = [f for f in goal.partial if f not in state.partial]
    for count in range(1, len(missing) + 1):
        for chosen in itertools.combinations(missing, count):
            kept = [_without_last(factors, chosen) for factors in state.dims]
            if any(f in chosen for factors in kept for f in factors):
                continue
            cut = [(d, k, f[len(k) :]) for d, (k, f) in enumerate(zip(kept, state.dims, strict=True)) if k != f]
            if (cut and wanted not in EMBEDS) or not all(problem.nests(*each) for each in cut):
                continue
            after = State(tuple(kept), tuple(sorted((*state.partial, *chosen))))
            yield Move("contribute", after, 0, 0, held + problem.local_bytes(after))


def _without_last(factors: tuple[int, ...], chosen: tuple[int, ...]) -> tuple[int, ...]:
    """The factors but those of ``chosen`` that are the last ones."""
    while factors and factors[-1] in chosen:
        factors = factors[:-1]
    return factors


def _assignments(
    problem: Problem, state: State, factors: tuple[int, ...], targets: tuple[int, ...]
) -> Iterator[dict[int, tuple[int, ...]]]:
    """Every way to append all of these factors to the target dims, in every order within a dim."""
    for way in _ways(len(factors), targets):
        added = [(dim, tuple(factors[i] for i in chosen)) for dim, chosen in way]
        if all(problem.nests(dim, state.dims[dim], new) for dim, new in added):
            yield {dim: (*state.dims[dim], *new) for dim, new in added}


@functools.lru_cache(1024)
def _ways(count: int, targets: tuple[int, ...]) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Every way to put ``count`` things into dims, in every order within a dim."""
    found = {}
    for order in itertools.permutations(range(count)):
        for places in itertools.product(targets, repeat=count):
            added: dict[int, tuple[int, ...]] = {}
            for thing, dim in zip(order, places, strict=True):
                added[dim] = (*added.get(dim, ()), thing)
            found[tuple(sorted(added.items()))] = None
    return tuple(found)


def _replaced(state: State, dims: dict[int, tuple[int, ...]]) -> State:
    return State(tuple(dims.get(d, f) for d, f in enumerate(state.dims)), state.partial)
