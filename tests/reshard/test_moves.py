"""Tables of integers for each kind of step: the state before and after, bytes, peak. No arrays."""

import numpy as np
import pytest

from shardkit.reshard.cost import wire_bytes
from shardkit.reshard.factors import Factors
from shardkit.reshard.moves import Move, moves, permute
from shardkit.reshard.states import Problem, State


def problem_of(sizes, shape, reduce=None, wanted=None):
    """A problem of 4-byte elements on one axis a factor."""
    return Problem(Factors(tuple(("xyzw"[i], (s,)) for i, s in enumerate(sizes))), shape, 4, reduce, wanted)


def state(*dims, partial=()):
    return State(dims, partial)


def found(problem, before, kind, goal=None):
    """{state: (bytes, collectives, peak)} of the steps of one kind."""
    goal = goal or State(((),) * len(before.dims), ())
    mine = [m for m in moves(problem, before, goal) if m.kind == kind]
    assert len({m.after for m in mine}) == len(mine)
    return {m.after: (m.bytes, m.collectives, m.peak) for m in mine}


# --- cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "result", "group", "received"),
    [
        ("all_gather", 1024, 4, 768),
        ("reduce_scatter", 256, 4, 768),
        ("all_reduce", 1024, 4, 1536),
        ("all_to_all", 1024, 4, 768),
        ("ragged_all_to_all", 1024, 8, 896),
        ("collective_permute", 1024, 8, 1024),
        ("collective_broadcast", 1024, 8, 1024),
        ("all_reduce", 10, 4, 15),
        ("all_reduce", 10, 3, 13),  # 13.3
        ("all_gather", 10, 4, 7),  # 7.5
        ("all_reduce", 1024, 1, 0),
    ],
)
def test_wire_bytes(kind, result, group, received):
    assert wire_bytes(kind, result, group) == received


# --- states -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "block", "size"),
    [
        (((), ()), (5, 7), 140),
        (((0,), ()), (3, 7), 84),
        (((0,), (1,)), (3, 2), 24),
        (((), (0, 1)), (5, 1), 20),
    ],
    ids=str,
)
def test_blocks(dims, block, size):
    problem = problem_of((2, 4), (5, 7))
    assert problem.block_shape(State(dims, ())) == block
    assert problem.local_bytes(State(dims, ())) == size


@pytest.mark.parametrize(
    ("length", "outer", "inner", "nests"),
    [
        (8, (0,), (1,), True),
        (5, (), (0,), True),  # the whole dim can be cut by anything,
        (5, (), (0, 1), True),
        (5, (0,), (1,), False),  # but blocks of 3 aren't made of blocks of 2;
        (7, (0,), (1,), True),  # blocks of 4 are
        (3, (0,), (1,), True),
        (1, (0,), (1,), False),
        (0, (0,), (1,), True),
    ],
)
def test_nests(length, outer, inner, nests):
    assert problem_of((2, 2), (length,)).nests(0, outer, inner) == nests


def test_intervals_have_no_padding():
    problem = problem_of((2, 4), (5,))
    low, high = problem.interval(0, (0, 1))
    assert low.tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert high.tolist() == [1, 2, 3, 4, 5, 5, 5, 5]
    low, high = problem.interval(0, (1,))
    assert low.tolist() == [0, 2, 4, 5] * 2
    assert high.tolist() == [2, 4, 5, 5] * 2


@pytest.mark.parametrize(
    ("before", "index", "contents"),
    [
        (state((), ()), [0] * 8, [0] * 8),
        (state((0,), ()), [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
        (state((1, 0), ()), [0, 2, 4, 6, 1, 3, 5, 7], [0, 2, 4, 6, 1, 3, 5, 7]),
        (state((0,), (1,)), [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]),
        (state((1,), (), partial=(0,)), [0, 1, 2, 3] * 2, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=str,
)
def test_contents(before, index, contents):
    problem = problem_of((2, 4), (8, 16), "sum")
    np.testing.assert_array_equal(problem.index(before.dims[0]), index)
    np.testing.assert_array_equal(problem.contents(before), contents)


def test_free_and_signature():
    problem = problem_of((2, 2, 4), (8, 16), "sum")
    assert problem.free(state((1,), (), partial=(2,))) == (0,)
    assert problem.signature(state((1,), (), partial=(2,))) == problem.signature(state((0,), (), partial=(2,)))
    assert problem.signature(state((1,), ())) != problem.signature(state((), (1,)))


# --- slices -----------------------------------------------------------------------------------------


def test_slice():
    # 8 x 16 floats on 2 x 2: 512 bytes, of which 256 are kept.
    assert found(problem_of((2, 2), (8, 16)), state((), ()), "slice") == {
        state((0,), ()): (0, 0, 768),
        state((), (0,)): (0, 0, 768),
        state((1,), ()): (0, 0, 768),
        state((), (1,)): (0, 0, 768),
    }


def test_slice_appends():
    assert found(problem_of((2, 2), (8, 16)), state((1,), ()), "slice") == {
        state((1, 0), ()): (0, 0, 256 + 128),
        state((1,), (0,)): (0, 0, 256 + 128),
    }


def test_slice_of_contributions():
    problem = problem_of((2, 2), (8,), "sum")
    assert found(problem, state((), partial=(0,)), "slice") == {state((1,), partial=(0,)): (0, 0, 48)}


@pytest.mark.parametrize(
    ("length", "before", "after"),
    [
        (5, (0,), []),  # blocks of 3, of which no two of 2 are made
        (5, (), [(0,), (1,), (0, 1), (1, 0)]),  # so the whole dim is cut at once
        (7, (0,), [(0, 1)]),
        (7, (), [(0,), (1,)]),
        (1, (), []),  # there is nothing to cut
    ],
    ids=str,
)
def test_slices_of_uneven_sizes(length, before, after):
    assert sorted(s.dims[0] for s in found(problem_of((2, 2), (length,)), state(before), "slice")) == sorted(after)


def test_a_dim_of_one_is_cut_where_the_goal_is():
    goal = state((1,), ())
    assert goal in found(problem_of((2, 2), (1, 4)), state((), ()), "slice", goal)


# --- gathers and exchanges --------------------------------------------------------------------------


def test_all_gather():
    # Blocks of 8/2 x 16/4 floats: 64 bytes.
    assert found(problem_of((2, 4), (8, 16)), state((0,), (1,)), "all_gather") == {
        state((), (1,)): (64, 1, 64 + 128),
        state((0,), ()): (3 * 64, 1, 64 + 256),
        state((), ()): (7 * 64, 1, 64 + 512),
    }


def test_all_gather_takes_the_minor_factors_only():
    assert found(problem_of((2, 4), (8,)), state((1, 0)), "all_gather") == {
        state((1,)): (4, 1, 4 + 8),
        state(()): (7 * 4, 1, 4 + 32),
    }


def test_all_gather_of_uneven_sizes():
    # Blocks of 1 of 5: eight are gathered with the padding, five remain; two aren't a block of 3 or of 2 of 5.
    assert found(problem_of((2, 4), (5,)), state((0, 1)), "all_gather") == {state(()): (7 * 4, 1, 4 + 20)}
    # Blocks of 2 of 15 make up those of 4, and of 8.
    assert found(problem_of((2, 2, 2), (15,)), state((0, 1, 2)), "all_gather") == {
        state((0, 1)): (8, 1, 8 + 16),
        state((0,)): (3 * 8, 1, 8 + 32),
        state(()): (7 * 8, 1, 8 + 60),
    }


def test_all_to_all():
    assert found(problem_of((4,), (8, 16)), state((0,), ()), "all_to_all") == {state((), (0,)): (96, 1, 256)}


def test_all_to_all_of_several_factors():
    # 8 x 16 on 2 x 4, all of dim 0 cut: 64 bytes a device, and 1/2, 3/4 or 7/8 of them are received.
    assert found(problem_of((2, 4), (8, 16)), state((0, 1), ()), "all_to_all") == {
        state((0,), (1,)): (48, 1, 128),
        state((), (0, 1)): (56, 1, 128),
        state((), (1, 0)): (56, 1, 128),
    }


def test_all_to_all_to_two_dims():
    after = found(problem_of((2, 2), (8, 8, 8)), state((0, 1), (), ()), "all_to_all")
    assert after[state((), (0,), (1,))] == (512 * 3 // 4, 1, 1024)
    assert len(after) == 2 + 2 * 3  # factor 1 to either dim; both to one dim in two orders, or to one each


def test_all_to_all_of_two_dims():
    after = found(problem_of((2, 2), (8, 8, 8)), state((0,), (1,), ()), "all_to_all")
    assert after[state((), (), (1, 0))] == (512 * 3 // 4, 1, 1024)
    assert state((1,), (0,), ()) not in after  # that's a permute


def test_all_to_all_pads():
    # 5 x 7 on 4: from 2 x 7 (56 bytes), pieces of 2 x 2, to 5 x 2.
    assert found(problem_of((4,), (5, 7)), state((0,), ()), "all_to_all") == {state((), (0,)): (3 * 16, 1, 128)}


# --- reductions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "any", "all"])
def test_reduce(kind):
    problem = problem_of((2, 4), (8, 16), kind)
    assert found(problem, state((), (), partial=(0, 1)), "reduce") == {
        state((), (), partial=(1,)): (512, 1, 1024),
        state((), (), partial=(0,)): (768, 1, 1024),
        state((), ()): (896, 1, 1024),
    }


def test_products_are_gathered():
    problem = problem_of((2, 4), (8, 16), "prod")
    assert {s: c[0] for s, c in found(problem, state((), (), partial=(0, 1)), "reduce").items()} == {
        state((), (), partial=(1,)): 512,
        state((), (), partial=(0,)): 3 * 512,
        state((), ()): 7 * 512,
    }


def test_reduce_rounds_down():
    assert found(problem_of((3,), (5,), "sum"), state((), partial=(0,)), "reduce") == {state(()): (26, 1, 40)}


@pytest.mark.parametrize("kind", ["sum", "max", "prod"])
def test_reduce_scatter(kind):
    problem = problem_of((4,), (8, 16), kind)
    assert found(problem, state((), (), partial=(0,)), "reduce_scatter") == {
        state((0,), ()): (384, 1, 1024),
        state((), (0,)): (384, 1, 1024),
    }


def test_reduce_scatter_of_some():
    problem = problem_of((2, 4), (8, 16), "sum")
    after = found(problem, state((), (), partial=(0, 1)), "reduce_scatter")
    assert after[state((0,), (), partial=(1,))] == (256, 1, 1024)
    assert after[state((), (1,), partial=(0,))] == (384, 1, 1024)
    assert after[state((0,), (1,))] == (448, 1, 1024)
    assert len(after) == 2 + 2 + 6


def test_reduce_scatter_appends():
    problem = problem_of((2, 2), (8,), "sum")
    assert found(problem, state((1,), partial=(0,)), "reduce_scatter") == {state((1, 0)): (8, 1, 32)}
    problem = problem_of((2, 2), (5,), "sum")  # doesn't nest
    assert found(problem, state((1,), partial=(0,)), "reduce_scatter") == {}


def test_nothing_is_reduced_that_waits_for_another():
    problem = problem_of((2,), (8,), None, "sum")
    assert {m.kind for m in moves(problem, state((), partial=(0,)), state((), partial=(0,)))} == set()


# --- permutes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "received"),
    [
        (state((0,), (1,)), state((1,), (0,)), 128),
        (state((0,), ()), state((1,), ()), 256),
        (state((0, 1), ()), state((1, 0), ()), 128),
        (state((0,), (), partial=(1,)), state((1,), (), partial=(0,)), 256),
    ],
    ids=str,
)
def test_permute(before, after, received):
    problem = problem_of((2, 2), (8, 16), "sum")
    assert permute(problem, before, after) == Move("permute", after, received, 1, 2 * received)


def test_permute_in_place():
    problem = problem_of((2, 2), (8, 16))
    assert permute(problem, state((0,), ()), state((0,), ())) == Move("permute", state((0,), ()), 0, 0, 512)


# --- contributions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod", "any", "all"])
@pytest.mark.parametrize("before", [state((), ()), state((0,), ()), state((), (0,))], ids=str)
def test_contribute(kind, before):
    problem, goal = problem_of((2,), (8, 16), None, kind), state((), (), partial=(0,))
    peak = problem.local_bytes(before) + 512
    assert found(problem, before, "contribute", goal) == {goal: (0, 0, peak)}


def test_a_mean_has_no_identity():
    problem, goal = problem_of((2,), (8, 16), None, "mean"), state((), (), partial=(0,))
    assert found(problem, state((), ()), "contribute", goal) == {goal: (0, 0, 1024)}
    assert found(problem, state((0,), ()), "contribute", goal) == {}


@pytest.mark.parametrize(
    ("before", "goal", "kinds", "after"),
    [
        (state((1, 0)), state((1,), partial=(0,)), (None, "sum"), [state((1,), partial=(0,))]),
        (state((0, 1)), state((1,), partial=(0,)), (None, "sum"), []),  # x is the major one
        (state((1,)), state((1,), partial=(0,)), (None, "sum"), [state((1,), partial=(0,))]),
        (state(()), state((1,), partial=(0,)), (None, "sum"), [state((), partial=(0,))]),  # to be sliced afterwards
        (state((1,), partial=(0,)), state((), partial=(0, 1)), ("sum", "sum"), [state((), partial=(0, 1))]),
        (state((1,), partial=(0,)), state((), partial=(0, 1)), ("sum", "max"), []),  # to be reduced before
        (state((), partial=(0,)), state((), partial=(1,)), ("sum", "sum"), [state((), partial=(0, 1))]),
        (state((), partial=(0,)), state((), partial=(0,)), ("sum", "sum"), []),
        (
            state((0,)),
            state((), partial=(0, 1)),
            (None, "max"),
            [state((), partial=(0,)), state((0,), partial=(1,)), state((), partial=(0, 1))],
        ),
        (state(()), state(()), ("sum", None), []),
    ],
)
def test_what_can_contribute(before, goal, kinds, after):
    problem = problem_of((2, 2), (8,), *kinds)
    assert set(found(problem, before, "contribute", goal)) == set(after)


def test_contributions_of_another_kind():
    """What waits for the destination's kind can get more contributions, but isn't reduced."""
    problem, half = problem_of((2, 2), (8,), "sum", "max"), state((), partial=(0,))
    goal = state((), partial=(0, 1))
    made = list(moves(problem, half, goal, made=True))
    assert goal in {m.after for m in made if m.kind == "contribute"}
    assert {"reduce", "reduce_scatter"}.isdisjoint(m.kind for m in made)


def test_contributions_of_uneven_sizes():
    problem, goal = problem_of((2, 2), (5,), None, "sum"), state((1,), partial=(0,))
    assert found(problem, state((1, 0)), "contribute", goal) == {}  # blocks of 2 aren't pieces of blocks of 3
    assert found(problem, state((1,)), "contribute", goal) == {goal: (0, 0, 24)}
    goal = state((), partial=(0, 1))
    assert found(problem, state((1, 0)), "contribute", goal) == {goal: (0, 0, 8 + 20)}


def test_contributions_one_after_another():
    """From a whole value too, whose contributions are all of the goal's kind: others may move between them."""
    problem, goal = problem_of((2, 2, 2), (16,), None, "sum"), state((), partial=(0, 2))
    first = state((0, 1), partial=(2,))
    assert first in found(problem, state((0, 1, 2)), "contribute", goal)
    assert found(problem, state((0,), partial=(2,)), "contribute", goal) == {goal: (0, 0, 32 + 64)}
