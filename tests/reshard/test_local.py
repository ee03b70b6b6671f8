"""The order of floats as integers, and which device sends to which in a permute."""

import itertools

import hypothesis
import hypothesis.extra.numpy as npst
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.reshard.factors import split_for, whole
from shardkit.reshard.local import permutation
from shardkit.reshard.ordered import from_ordered, to_ordered
from shardkit.reshard.search import all_states
from shardkit.reshard.states import Problem, State

FLOATS = ["float16", "bfloat16", "float32", "float64"]
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40]  # the last ones subnormal in float32


def of_bits(dtype):
    """Arrays of any bits at all: every NaN, every subnormal."""
    bits = {2: "uint16", 4: "uint32", 8: "uint64"}[jnp.dtype(dtype).itemsize]
    return npst.arrays(bits, 16).map(lambda a: a.view(jnp.dtype(dtype)))


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


def is_nan(x):
    with np.errstate(invalid="ignore"):  # signalling ones
        return np.isnan(x)


def check_round_trip(x, kind):
    back = np.asarray(from_ordered(to_ordered(jnp.asarray(x), kind), x.dtype))
    assert back.dtype == x.dtype
    nan = is_nan(x)
    np.testing.assert_array_equal(is_nan(back), nan)
    np.testing.assert_array_equal(bits(back)[~nan], bits(x)[~nan])


def check_order(x, kind):
    """Integers compare as the floats do, minus zero below zero, and NaNs win."""
    ordered = np.asarray(to_ordered(jnp.asarray(x), kind)).tolist()
    for (a, i), (b, j) in itertools.product(zip(x.astype("float64").tolist(), ordered, strict=True), repeat=2):
        if np.isnan(a) or np.isnan(b):
            if np.isnan(a) and np.isnan(b):
                assert i == j
            elif np.isnan(a):
                assert i > j if kind == "max" else i < j
            continue
        if a < b or (a == b == 0 and np.signbit(a) and not np.signbit(b)):
            assert i < j
        elif a == b and np.signbit(a) == np.signbit(b):
            assert i == j


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS)
@hypothesis.settings(max_examples=25)
@given(data=st.data())
@pytest.mark.every(2)
def test_any_bits(dtype, kind, data):
    x = data.draw(of_bits(dtype))
    check_round_trip(x, kind)
    check_order(x, kind)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(dtype, kind):
    x = np.array([*SPECIAL, jnp.finfo(dtype).max, jnp.finfo(dtype).min]).astype(jnp.dtype(dtype))
    check_round_trip(x, kind)
    check_order(x, kind)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_every_value_of_a_small_type(dtype, kind):
    width = jnp.dtype(dtype).itemsize
    x = np.arange(2 ** (8 * width), dtype=f"uint{8 * width}").view(jnp.dtype(dtype))
    check_round_trip(x, kind)
    with np.errstate(invalid="ignore"):
        values = x.astype("float64")
    ordered = np.asarray(to_ordered(jnp.asarray(x), kind)).astype("int64")
    real = ~np.isnan(values)
    ascending = values[real][np.argsort(ordered[real])]
    assert (np.diff(ascending) >= 0).all()
    best = ordered[~real]
    assert (best.min() > ordered[real].max()) if kind == "max" else (best.max() < ordered[real].min())


def test_bools_and_integers():
    flags = jnp.array([True, False])
    assert to_ordered(flags, "any").tolist() == [1, 0]
    assert from_ordered(to_ordered(flags, "all"), flags.dtype).tolist() == [True, False]
    for dtype in ("int8", "uint8", "int64", "uint64"):
        x = jnp.array([jnp.iinfo(dtype).min, jnp.iinfo(dtype).max, 1], dtype)
        assert to_ordered(x, "max") is x
        assert from_ordered(x, x.dtype) is x


# --- permutation --------------------------------------------------------------------------------------


def check_permutation(problem, before, after):
    pairs = permutation(problem, before, after)
    count = problem.coordinates.shape[1]
    sources, targets = zip(*pairs, strict=True)
    assert sorted(sources) == sorted(targets) == list(range(count))
    held, needed = problem.contents(before), problem.contents(after)
    for source, target in pairs:
        assert held[source] == needed[target]  # everyone receives what it needs
    for device in range(count):
        assert (held[device] != needed[device]) or (device, device) in pairs  # and nothing that it has


FACTORS = [
    whole({"x": 4}),
    whole({"x": 2, "y": 4}),
    whole({"x": 2, "y": 2, "z": 2}),
    split_for({"x": 2, "y": 4}, ["x", "y"]),
    whole({"x": 1, "y": 8}),
]


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("factors", FACTORS, ids=lambda f: str(f.axes))
def test_permutations(factors, partial, ndim):
    problem = Problem(factors, (16, 8)[:ndim], 4, "sum" if partial else None, "sum" if partial else None)
    alike = {}
    for state in all_states(len(factors.sizes), ndim, partial):
        alike.setdefault(problem.signature(state), []).append(state)
    checked = 0
    for group in alike.values():
        for before, after in itertools.islice(itertools.product(group, repeat=2), 400):
            check_permutation(problem, before, after)
            checked += 1
    assert checked > 1


def test_two_axes_that_trade_places():
    problem = Problem(whole({"x": 2, "y": 2}), (4,), 4)
    assert permutation(problem, State(((0, 1),), ()), State(((1, 0),), ())) == [(0, 0), (1, 2), (2, 1), (3, 3)]
