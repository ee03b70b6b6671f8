import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.inspect import CollectiveReport, assert_collectives


@pytest.fixture(scope="module")
def program():
    """Two permutes over sp, one over dp, and in a loop an all-reduce over both: compiled once."""
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)

    def body(x):
        x = lax.ppermute(x, "sp", [(0, 1), (1, 2)]) + lax.ppermute(x * 2, "sp", [(1, 0)])
        x = lax.ppermute(x, "dp", [(0, 1)])
        return lax.fori_loop(0, 3, lambda i, c: c + lax.psum(c, ("dp", "sp")), x)

    f = jax.shard_map(body, mesh=mesh, in_specs=P("dp", "sp"), out_specs=P("dp", "sp"), check_vma=False)
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp", "sp")))
    return jax.jit(f).lower(x).compile()


@pytest.mark.parametrize(
    "expected",
    [
        {"all_gather": 0, "all_reduce": 1, "collective_permute": 3, "in_loop": 1},
        {"reduce_scatter": 0, "all_to_all": 0, "collective_broadcast": 0, "ragged_all_to_all": 0},
        {"collective_permute": (1, 3)},
        {"collective_permute": [3, None], "all_reduce": (None, 1)},
        {"collective_permute": {"sp": 2, "dp": 1}},
        {"collective_permute": {("sp",): 2, ("dp", "sp"): 0, "dp": (None, 1)}},
        {"all_reduce": {"sp": 1, "dp": 1, ("sp",): 0, ("sp", "dp"): 1}},
        {"in_loop": {"sp": 1, ("dp",): 0}},
        {"axis": "sp", "collective_permute": 2, "all_reduce": 1},
        {"axis": ("dp",), "collective_permute": 1, "all_reduce": 0, "in_loop": 0},
        {"max_bytes": 8 * 4 * 4},
        {"max_bytes": 8 * 4 * 4, "axis": "sp"},
    ],
)
def test_holds(program, expected):
    assert isinstance(assert_collectives(program, **expected), CollectiveReport)


@pytest.mark.parametrize(
    ("expected", "lines"),
    [
        ({"all_gather": 1}, ["  all_gather: expected 1, found 0"]),
        (
            {"all_reduce": 0, "collective_permute": (4, None)},
            ["  all_reduce: expected 0, found 1", "  collective_permute: expected at least 4, found 3"],
        ),
        ({"collective_permute": (None, 2)}, ["  collective_permute: expected at most 2, found 3"]),
        ({"collective_permute": (4, 6)}, ["  collective_permute: expected 4 to 6, found 3"]),
        (
            {"collective_permute": {"sp": 1, "dp": 1}},
            ["  collective_permute over axis sp: expected 1, found 2"],
        ),
        ({"in_loop": 0}, ["  collectives in loops: expected 0, found 1"]),
        ({"axis": ("dp", "sp"), "all_reduce": 0}, ["  all_reduce over axes dp, sp: expected 0, found 1"]),
    ],
)
def test_fails(program, expected, lines):
    with pytest.raises(AssertionError) as failure:
        assert_collectives(program, **expected)
    head, *rest = str(failure.value).split("\n")
    assert head == "the program's collectives are not as expected:"
    assert rest[: len(lines)] == lines
    assert rest[len(lines)] == "4 collectives on mesh (dp=2, sp=4)"
    assert re.search(r"all_reduce +dp,sp +1 +f32\[8,4\] .* yes x3 +test_assertions.py:\d+", str(failure.value))


def test_fails_for_a_large_result(program):
    with pytest.raises(AssertionError, match=r"max_bytes: expected results of at most 100 bytes .*\n.*") as failure:
        assert_collectives(program, max_bytes=100)
    assert str(failure.value).count("found 128 bytes: ") == 4
    with pytest.raises(AssertionError) as failure:
        assert_collectives(program, max_bytes=100, axis=("dp",))
    assert str(failure.value).count("found 128 bytes: ") == 1


def test_unmapped_collectives_are_not_passed_over():
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(lambda x: lax.psum(x, "sp"), mesh=mesh, in_specs=P("dp", "sp"), out_specs=P("dp"))
    x = np.ones((8, 8))
    with pytest.raises(AssertionError, match=r"all_reduce over axis x: cannot tell the axes of all_reduce over \?"):
        assert_collectives(f, x, mesh=other, all_reduce={"x": 0})
    assert_collectives(f, x, mesh=other, all_reduce=1, all_gather={"x": 0})


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        (
            {"all_gathers": 0},
            TypeError,
            "no keyword 'all_gathers'.*Did you mean 'all_gather'.*functools.partial",
        ),
        ({"training": True}, TypeError, r"no keyword 'training'; allowed are all_gather.*fun, training="),
        ({"all_gather": "none"}, TypeError, "all_gather must be None .* got 'none'"),
        ({"all_gather": True}, TypeError, "all_gather must be None .* got True"),
        ({"all_gather": 1.0}, TypeError, "all_gather must be None"),
        ({"all_gather": (1, 2, 3)}, TypeError, "a pair"),
        ({"all_gather": (1, True)}, TypeError, "a pair"),
        ({"all_gather": {"sp": "x"}}, TypeError, r"all_gather\['sp'\] must be"),
        ({"all_gather": -1}, ValueError, "all_gather: a number of collectives is at least 0; got -1"),
        ({"all_gather": (-1, None)}, ValueError, "at least 0"),
        ({"in_loop": (2, 1)}, ValueError, r"in_loop=\(2, 1\).*swap"),
        ({"all_gather": {"sp": 0}, "axis": "dp"}, ValueError, "leave out one of the two"),
        (
            {"all_gather": 0, "axis": "tp"},
            ValueError,
            "axis 'tp' is not in the mesh; its axes are dp=2, sp=4",
        ),
        ({"all_gather": {"tp": 0}}, ValueError, "axis 'tp' is not in the mesh"),
        ({"max_bytes": 1e6}, TypeError, "max_bytes must be an int"),
        ({"max_bytes": -1}, ValueError, "max_bytes must be at least 0"),
        ({}, ValueError, "nothing to check"),
        ({"axis": "sp"}, ValueError, "nothing to check"),
    ],
)
def test_bad_expectations(program, keywords, error, message):
    with pytest.raises(error, match=message):
        assert_collectives(program, **keywords)


def test_keyword_arguments_through_partial():
    def f(x, *, factor):
        return x * factor

    assert_collectives(functools.partial(f, factor=2.0), np.ones(4), all_reduce=0)
