"""The planner against an exhaustive search that shares no code with it.

The oracle knows what each device holds: along each dim an interval (padded to its block), and the number of a
contribution. From that alone it decides which step leads from one of all placements to another, counts the bytes by the
ring formulas, and takes the shortest ways between all of them at once (Floyd-Warshall), with any number of permutes.
"""

import functools
import itertools
import math
import random
from typing import NamedTuple

import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardkit as sk
from shardkit._compat import partition_spec
from shardkit.reshard.factors import Factors, split_for
from shardkit.reshard.moves import moves
from shardkit.reshard.search import _Bound, all_states, cheapest
from shardkit.reshard.states import Problem, State

ITEM = 4
UNIT = 1 << 10  # bytes count UNIT, a collective 1: no way has that many
NEVER = 1 << 50


# --- the oracle -----------------------------------------------------------------------------------


class Held(NamedTuple):
    """What each device holds, by position on the mesh: (start, stop) along each dim, and which contribution."""

    boxes: tuple[tuple[tuple[int, int], ...], ...]
    part: tuple[int, ...]
    parts: int


def placements_of(count: int, ndim: int):
    """Every (factors of each dim, major first; Partial factors, ascending)."""
    for kept in range(count + 1):
        for cut in itertools.permutations(range(count), kept):
            for ends in itertools.combinations_with_replacement(range(kept + 1), ndim - 1):
                bounds = (0, *ends, kept)
                dims = tuple(cut[low:high] for low, high in itertools.pairwise(bounds))
                left = [f for f in range(count) if f not in cut]
                for n in range(len(left) + 1):
                    for partial in itertools.combinations(left, n):
                        yield dims, partial


def held_by(sizes, shape, placement) -> Held:
    """What the devices of a mesh of these factors hold."""
    dims, partial = placement
    boxes, part = [], []
    for at in itertools.product(*map(range, sizes)):
        box = []
        for length, cut in zip(shape, dims, strict=True):
            parts = math.prod(sizes[f] for f in cut)
            block = -(-length // parts)
            index = sum(at[f] * math.prod(sizes[g] for g in cut[i + 1 :]) for i, f in enumerate(cut))
            box.append((index * block, (index + 1) * block))
        boxes.append(tuple(box))
        part.append(sum(at[f] * math.prod(sizes[g] for g in partial[i + 1 :]) for i, f in enumerate(partial)))
    return Held(tuple(boxes), tuple(part), math.prod(sizes[f] for f in partial))


def groups_over(sizes, chosen):
    """The devices that differ in the chosen factors only, by position."""
    found = {}
    for position, at in enumerate(itertools.product(*map(range, sizes))):
        found.setdefault(tuple(c for f, c in enumerate(at) if f not in chosen), []).append(position)
    return list(found.values())


def inside(small, large, length):
    """Whether an interval is part of another; everything is part of the whole dim."""
    return large == (0, length) or (large[0] <= small[0] and small[1] <= large[1])


def tile(pieces, whole, length):
    """Whether intervals lie side by side and make up a block, or the whole dim (then padding may stick out)."""
    pieces = sorted(pieces)
    if any(high != low for (_, high), (low, _) in itertools.pairwise(pieces)) or pieces[0][0] != whole[0]:
        return False
    return pieces[-1][1] == whole[1] or (whole == (0, length) and pieces[-1][1] >= length)


def makes_up(small, large, group, shape):
    """How many pieces of ``small``, over the dims, make up the blocks of ``large`` on these devices; 0 if they don't.

    The pieces along a dim are those that tile the one block that all the devices hold there in ``large``.
    """
    count = 1
    for d, length in enumerate(shape):
        pieces, wholes = {small[i][d] for i in group}, {large[i][d] for i in group}
        if pieces == wholes:
            continue
        if len(wholes) != 1 or not tile(pieces, *wholes, length):
            return 0
        count *= len(pieces)
    return count if len({small[i] for i in group}) == count * len({large[i] for i in group}) else 0


def exchange(before, after, group, shape):
    """Whether each device of the group gives each the same amount, and all have something else afterwards."""
    given = taken = 1
    for d, length in enumerate(shape):
        old, new = {before[i][d] for i in group}, {after[i][d] for i in group}
        if old == new:
            if len(old) > 1:
                return False
        elif len(new) == 1 and tile(old, *new, length):
            given *= len(old)
        elif len(old) == 1 and tile(new, *old, length):
            taken *= len(new)
        else:
            return False
    distinct = len({before[i] for i in group}), len({after[i] for i in group})
    return distinct == (given, taken) == (len(group), len(group))


class Oracle:
    """All steps between all placements of an array on a mesh of factors, and the shortest ways.

    Args:
      sizes: of the factors.
      shape: of the array.
      reduce: the kind of the Partial factors of the source; None where there are none.
      wanted: likewise of the destination.
    """

    def __init__(self, sizes, shape, reduce, wanted):
        self.sizes, self.shape = tuple(sizes), tuple(shape)
        self.names = [
            p for p in placements_of(len(sizes), len(shape)) if not p[1] or reduce is not None or wanted is not None
        ]
        self.at = {name: i for i, name in enumerate(self.names)}
        self.held = [held_by(self.sizes, self.shape, name) for name in self.names]
        self.groups = [
            groups_over(self.sizes, chosen)
            for n in range(1, len(sizes) + 1)
            for chosen in itertools.combinations(range(len(sizes)), n)
        ]
        self.reduce, self.wanted = reduce, wanted
        self.step = np.full((len(self.names),) * 2, NEVER)
        self.made = self.step.copy()  # between contributions to the destination
        self.gives = np.zeros(self.step.shape, bool)  # what becomes a contribution, or one of more devices
        for (i, one), (j, other) in itertools.product(enumerate(self.held), repeat=2):
            if i == j:
                self.step[i, j] = self.made[i, j] = 0
                continue
            if reduce is not None or (one.parts == other.parts == 1):
                self.step[i, j] = self._single(one, other)
            if one.parts == other.parts:
                self.made[i, j] = self._single(one, other)
            if wanted is not None and one.parts < other.parts:
                self.gives[i, j] = self._contributes(one, other)
        self.ways = functools.cache(self._ways)

    def cost(self, source, goal):
        """(bytes, collectives) of the cheapest way."""
        i, j = self.at[source], self.at[goal]
        before, after = self.ways(goal[1])
        if not goal[1] or self.reduce == self.wanted:
            found = before[i, j]
        else:  # reduced, then contributed to the other kind
            whole = np.array([held.parts == 1 for held in self.held])
            found = (before[i, whole] + after[whole, j]).min()
        assert found < NEVER, (source, goal)
        return divmod(int(found), UNIT)

    def _ways(self, partial):
        """The cheapest ways while what there is waits for the source's kind, and for the destination's.

        Contributions are made only along the destination's own factors.
        """
        new = [[set(there[1]) - set(here[1]) for there in self.names] for here in self.names]
        gives = self.gives & np.array([[each <= set(partial) for each in row] for row in new])
        before = np.where(gives, 0, self.step) if self.reduce == self.wanted else self.step
        return self._shortest(before), self._shortest(np.where(gives, 0, self.made))

    @staticmethod
    def _shortest(step):
        ways = step.copy()
        for k in range(len(ways)):
            np.minimum(ways, ways[:, k, None] + ways[None, k, :], out=ways)
        return ways

    def _bytes(self, boxes):
        return ITEM * math.prod(high - low for low, high in boxes[0])

    def _single(self, one, other):
        """The cheapest step between the two; NEVER where there is none."""
        held, best = self._bytes(one.boxes), NEVER
        if one.part == other.part and all(
            inside(small, large, n)
            for box, piece in zip(one.boxes, other.boxes, strict=True)
            for large, small, n in zip(box, piece, self.shape, strict=True)
        ):
            best = 0  # slice
        if sorted(zip(one.boxes, one.part, strict=True)) == sorted(zip(other.boxes, other.part, strict=True)):
            best = min(best, held * UNIT + 1)  # permute
        for groups in self.groups:
            n = len(groups[0])
            if one.part == other.part:
                if all(makes_up(one.boxes, other.boxes, g, self.shape) == n for g in groups):
                    best = min(best, held * n * (n - 1) // n * UNIT + 1)  # all_gather
                if all(exchange(one.boxes, other.boxes, g, self.shape) for g in groups):
                    pairs = zip(one.boxes[0], other.boxes[0], strict=True)
                    piece = ITEM * math.prod(min(b - a, d - c) for (a, b), (c, d) in pairs)
                    best = min(best, piece * n * (n - 1) // n * UNIT + 1)  # all_to_all
            elif one.parts == other.parts * n and self._reduces(one.part, other.part, groups):
                if one.boxes == other.boxes:
                    cost = held * (n - 1) if self.reduce == "prod" else 2 * held * (n - 1) // n
                    best = min(best, cost * UNIT + 1)  # psum
                elif all(makes_up(other.boxes, one.boxes, g, self.shape) == n for g in groups):
                    best = min(best, self._bytes(other.boxes) * (n - 1) * UNIT + 1)  # psum_scatter
        return best

    @staticmethod
    def _reduces(before, after, groups):
        """Whether each group holds other contributions, and afterwards the one made of these."""
        made = {}
        for g in groups:
            mine = frozenset(before[i] for i in g)
            if len(mine) != len(g) or len({after[i] for i in g}) != 1:
                return False
            if made.setdefault(mine, after[g[0]]) != after[g[0]]:
                return False
        return len(set(made.values())) == len(made)

    def _contributes(self, one, other):
        """Whether blocks, each in its place among nothing, are contributions to the blocks of ``other``."""
        if self.wanted == "mean" and one.boxes != other.boxes:
            return False
        for groups in self.groups:
            n = len(groups[0])
            if other.parts == one.parts * n and self._reduces(other.part, one.part, groups):
                return all(makes_up(one.boxes, other.boxes, g, self.shape) for g in groups)
        return False


@functools.lru_cache(256)
def oracle(sizes, shape, reduce, wanted):
    """One oracle a case; kinds that cost the same share it."""
    return Oracle(sizes, shape, reduce, wanted)


# --- the planner, asked the same ------------------------------------------------------------------


def primes(size):
    """Prime factors, so that 8 is (2, 2, 2)."""
    found = []
    for p in (2, 3, 5, 7):
        while size % p == 0:
            found.append(p)
            size //= p
    return tuple(found)


def cut_axes(cuts, placement):
    """A placement of whole axes, as one of the factors that each axis is cut into."""
    count = itertools.count()
    mine = [tuple(next(count) for _ in sizes) for sizes in cuts]
    dims, partial = placement
    return tuple(tuple(f for a in axes for f in mine[a]) for axes in dims), tuple(f for a in partial for f in mine[a])


def in_mesh_order(placement):
    return all(list(axes) == sorted(axes) for axes in placement[0])


def layout(mesh, placement, kind):
    """The layout that a placement of axes is."""
    where, (dims, partial) = AbstractMesh(mesh, tuple("xyz"[: len(mesh)])), placement
    if not in_mesh_order(placement):
        entries = [tuple("xyz"[a] for a in axes) or None for axes in dims]
        return sk.Layout(where, partition_spec(entries, ["xyz"[a] for a in partial], kind, ()))
    cut = {"xyz"[a]: sk.Shard(d) for d, axes in enumerate(dims) for a in axes}
    return sk.Layout(where, cut | {"xyz"[a]: sk.Partial(kind) for a in partial})


def planned(mesh, shape, source, goal, kinds):
    """(bytes, collectives) of the plan."""
    ends = [layout(mesh, placement, kind) for placement, kind in zip((source, goal), kinds, strict=True)]
    plan = sk.plan_reshard(shape, np.float32, *ends)
    return plan.bytes_per_device, len(plan.collectives)


def role(placement, axis):
    dims, partial = placement
    return "partial" if axis in partial else next((d for d in enumerate(dims) if axis in d[1]), None)


def cheapest_over(cuts, shape, source, goal, kinds):
    """(bytes, collectives) by the oracle, where each axis is cut into these factors."""
    sizes = tuple(s for axis in cuts for s in axis)
    return oracle(sizes, shape, *kinds).cost(cut_axes(cuts, source), cut_axes(cuts, goal))


def check(mesh, shape, source, goal, kinds):
    """The plan costs what the exhaustive search over the same factors finds, and nearly always over primes."""
    changed = [a for a in range(len(mesh)) if role(source, a) != role(goal, a)]
    sizes = {str(a): s for a, s in enumerate(mesh)}
    split = [cut for _, cut in split_for(sizes, [str(a) for a in changed], most=3 if source[1] else 4).axes]
    case = (shape, source, goal, kinds)
    got = planned(mesh, shape, source, goal, kinds)
    coarse, fine = (cheapest_over(cuts, *case) for cuts in ([(s,) for s in mesh], split))
    assert got[0] == min(coarse, fine)[0], case
    # Reductions over parts of axes are looked at only where they may save bytes.
    assert got == min(coarse, fine) or (source[1] and got == coarse), case
    finest = cheapest_over([primes(s) for s in mesh], *case)
    # Where padding is reduced or gathered, a part of an axis after another may carry less of it than both at once.
    divides = all(n % math.prod(mesh) == 0 for n in shape)
    if divides or kinds in [("sum", "sum"), ("mean", "mean")]:
        assert got[0] == finest[0], case
    assert got >= finest, case


def pairs(mesh, ndim, kinds):
    """All (source, goal) that a layout can say, and that these kinds matter to."""
    known = list(placements_of(len(mesh), ndim))
    for source, goal in itertools.product(known, repeat=2):
        if kinds[0] != kinds[1] and not (source[1] and goal[1]):
            continue  # one kind only: the same as without a change
        if kinds != ("sum", "sum") and not all(in_mesh_order(p) or not p[1] for p in (source, goal)):
            continue  # no form of placements says this
        yield source, goal


def sample(mesh, ndim, kinds, count):
    found = list(pairs(mesh, ndim, kinds))
    return found if count >= len(found) else random.Random(0).sample(found, count)


# --- plans ----------------------------------------------------------------------------------------

KINDS = [("sum", "sum"), ("sum", "max"), ("mean", "mean"), ("prod", "prod")]
SHAPES = [(16,), (5,), (8, 16), (5, 7), (1, 3)]  # divides, doesn't, is smaller than the mesh


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [(2,), (4,), (8,), (2, 2), (3,), (2, 3)], ids=str)
@pytest.mark.every(4)
def test_small_meshes(mesh, shape, kinds):
    for source, goal in sample(mesh, len(shape), kinds, 100):
        check(mesh, shape, source, goal, kinds)


@pytest.mark.parametrize("shape", [(16,), (5,), (8, 16), (5, 7)], ids=str)
def test_axes_of_different_sizes(shape):
    for source, goal in sample((2, 4), len(shape), ("sum", "sum"), 324 if shape == (8, 16) else 100):
        check((2, 4), shape, source, goal, ("sum", "sum"))


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [(8, 16), (5, 7)], ids=str)
@pytest.mark.parametrize("mesh", [(2, 4), (4, 2), (2, 2, 2)], ids=str)
@pytest.mark.every(4)
def test_samples(mesh, shape, kinds):
    for source, goal in sample(mesh, 2, kinds, 25):
        check(mesh, shape, source, goal, kinds)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(4, 8, 12), (3, 5, 7)], ids=str)
def test_rank_three_samples(mesh, shape):
    for kinds in KINDS[:2]:
        for source, goal in sample(mesh, 3, kinds, 25):
            check(mesh, shape, source, goal, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_all_pairs(mesh, shape, kinds):
    # Another kind makes no other ways, only other costs: of the 8464 pairs of the cube, some will do.
    for source, goal in sample(mesh, len(shape), kinds, 10_000 if kinds == ("sum", "sum") else 1000):
        check(mesh, shape, source, goal, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [(4, 8, 16), (3, 5, 7), (8, 1, 6)], ids=str)
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_rank_three(mesh, shape, kinds):
    for source, goal in sample(mesh, 3, kinds, 200):
        check(mesh, shape, source, goal, kinds)


# --- what the search rests on -----------------------------------------------------------------------


def problem_of(sizes, shape, reduce, wanted):
    return Problem(Factors(tuple((f"a{i}", (s,)) for i, s in enumerate(sizes))), shape, ITEM, reduce, wanted)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [(5,), (8, 16), (5, 7)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (2, 3), (2, 2, 2)], ids=str)
def test_bound_is_admissible(sizes, shape, kinds):
    problem, known = problem_of(sizes, shape, *kinds), oracle(sizes, shape, *kinds)
    names = list(known.names)
    for goal in random.Random(1).sample(names, min(len(names), 8)):
        bound = _Bound(problem, State(*goal))
        for state in names:
            assert bound(State(*state)) <= known.cost(state, goal)[0], (state, goal)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_bound_falls_by_a_step_at_most(sizes, shape):
    """States that are done needn't be looked at again only if no step lowers the bound by more than it costs."""
    problem, known = problem_of(sizes, shape, "sum", "sum"), oracle(sizes, shape, "sum", "sum")
    names = list(known.names)
    for goal in random.Random(2).sample(names, min(len(names), 8)):
        bound = _Bound(problem, State(*goal))
        left = np.array([bound(State(*name)) for name in names])
        fall = left[:, None] - left[None, :]
        assert (fall * UNIT <= known.step).all(), goal


@pytest.mark.parametrize("kind", ["sum", "prod"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_every_move_is_a_step(sizes, shape, kind):
    """No move that devices can't make, or that costs less than they receive."""
    problem, known = problem_of(sizes, shape, kind, None), oracle(sizes, shape, kind, kind)
    for name in known.names:
        state = State(*name)
        for move in moves(problem, state, State(((),) * len(shape), ())):
            assert known.step[known.at[name], known.at[tuple(move.after)]] <= move.bytes * UNIT + move.collectives


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_all_states(count, ndim):
    found = [tuple(s) for s in all_states(count, ndim, True)]
    assert len(set(found)) == len(found)
    assert set(found) == set(placements_of(count, ndim))
    assert {tuple(s) for s in all_states(count, ndim, False)} == {s for s in found if not s[1]}


def test_nothing_to_do():
    problem = problem_of((2, 2), (8,), "sum", "sum")
    for state in all_states(2, 1, True):
        assert cheapest(problem, state, state) == []


@pytest.mark.parametrize("shape", [(8,), (5,)], ids=str)
def test_another_kind_is_never_nothing(shape):
    """Contributions to a sum are none to a max, on the same axes of the same blocks either."""
    problem = problem_of((2, 2), shape, "sum", "max")
    for source, goal in itertools.product(all_states(2, 1, True), repeat=2):
        if not (source.partial and goal.partial):
            continue
        way = cheapest(problem, source, goal)
        states, kinds = [source, *(move.after for move in way)], [move.kind for move in way]
        first = kinds.index("contribute")
        assert states[-1] == goal and not states[first].partial
        assert {"reduce", "reduce_scatter"}.isdisjoint(kinds[first:])


@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (9,)], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_a_whole_dim_is_cut_for_nothing(shape, order):
    """Over all axes at once too, where pieces of pieces would be of other sizes."""
    way = cheapest(problem_of((2, 2, 2), shape, None, None), State(((),), ()), State((order,), ()))
    assert {move.kind for move in way} == {"slice"}
    assert way[-1].after == State((order,), ())


def test_unreachable_states_are_reported():
    problem = problem_of((2,), (8,), None, None)
    with pytest.raises(RuntimeError, match=r"no way from .* please report this"):
        cheapest(problem, State(((),), ()), State(((),), (0,)))
