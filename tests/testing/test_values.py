"""``assert_same_values``: what counts as the same, and what is said where it isn't."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from shardkit import testing
from shardkit.testing.blame import Cut, where_wrong
from shardkit.testing.closeness import relative, wrong
from shardkit.testing.held import Block, Held


def message(got, wanted, **options):
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_values(got, wanted, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "x",
    [
        np.float64([1, np.nan, -np.inf]),
        np.float32(3),
        np.array([[1 + 1j, np.nan]]),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array([1, 2**62], np.int64),
        jnp.array([1, np.nan], jnp.bfloat16),
        jnp.array([1, 2], jnp.float8_e4m3fn),
        jnp.array([1, 2], jnp.int4),
        3.5,
        True,
        "relu",
    ],
    ids=str,
)
def test_anything_is_the_same_as_itself(x):
    testing.assert_same_values({"a": [x]}, {"a": [x]})


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [
        ("float64", 1 + 1e-11, 1 + 1e-9),
        ("float32", 1 + 5e-6, 1 + 5e-5),
        ("complex64", 1 + 1e-6j, 1 + 1e-4j),
        ("bfloat16", 1.016, 1.1),
        ("float16", 1.002, 1.01),
        ("float8_e4m3fn", 1.25, 4),
        ("int32", 1, 2),
        ("bool", 1, 0),
    ],
)
def test_tolerance_is_that_of_the_dtype(dtype, near, far):
    one = np.ones(3, jnp.dtype(dtype))
    testing.assert_same_values(np.full(3, near).astype(one.dtype), one)
    assert "3 of 3 elements differ" in message(np.full(3, far).astype(one.dtype), one)


@pytest.mark.parametrize(
    ("got", "wanted"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, np.inf), (np.inf, -np.inf), (np.nan, np.inf)],
)
def test_only_equal_non_numbers_are_equal(got, wanted):
    assert "1 of 2 elements differ" in message(np.array([got, 5.0]), np.array([wanted, 5.0]), rtol=1.0, atol=1e9)


def test_what_cancels_is_measured_by_the_largest_element_unless_told():
    got, wanted = np.array([1e-9, 1000.0]), np.array([0.0, 1000.0])
    testing.assert_same_values(got, wanted)
    assert "1 of 2" in message(got, wanted, atol=0)
    testing.assert_same_values(np.array([1.1]), np.array([1.0]), rtol=0.2)


def test_large_integers_are_compared_exactly():
    assert "1 of 1" in message(np.array([2**62 + 1]), np.array([2**62]))


def test_keys_are_compared_exactly():
    keys = jax.random.split(jax.random.key(0), 4)
    testing.assert_same_values(keys, keys.copy())
    assert "the array: 2 of 4 elements differ" in message(keys, keys[jnp.array([1, 0, 2, 3])])
    assert "got dtype key<fry>, wanted key<rbg>" in message(keys[0], jax.random.key(0, impl="rbg"))


@pytest.mark.parametrize(
    ("got", "wanted", "said"),
    [
        ({"a": 1.0}, {"b": 1.0}, "only in what was got: ['a']\n  only in what was wanted: ['b']"),
        ([1.0], (1.0,), "got    PyTreeDef([*])\n  wanted PyTreeDef((*,))"),
        ({"a": np.ones(3)}, {"a": np.ones((3, 1))}, "['a']: got shape (3,), wanted (3, 1)"),
        (np.float32(1), np.float64(1), "the array: got dtype float32, wanted float64"),
        (["relu"], ["gelu"], "[0]: got 'relu', wanted 'gelu'"),
    ],
)
def test_structure_shape_and_dtype(got, wanted, said):
    assert said in message(got, wanted)


def test_says_which_leaf_how_far_and_where():
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    wanted = np.ones((4, 64))
    off = wanted.copy()
    off[:, 31:33] += 0.5
    off[2, 32] = 4
    got = {"w": sk.shard_tensor(off, {"dp": sk.Shard(0), "sp": sk.Shard(1)}, mesh), "b": np.zeros(2)}
    assert message(got, {"w": wanted, "b": np.zeros(2)}, what="the outputs") == (
        "the outputs differ in 1 of 2 leaves:\n"
        "  ['w']: 8 of 256 elements differ by more than 1e-10 + 1e-10 * |wanted|\n"
        "    largest absolute error 3 at (2, 32) on device dp=1, sp=2: got 4.0, wanted 1.0\n"
        "    largest relative error 3 at (2, 32) on device dp=1, sp=2: got 4.0, wanted 1.0\n"
        "    all wrong elements are in dim 1 (cut by sp into 4 blocks of 16) at 31:33, at the border of blocks "
        "sp=1 | sp=2\n"
        "    on 4 of 8 devices: dp=0, sp=1; dp=0, sp=2; dp=1, sp=1; dp=1, sp=2"
    )


def test_copies_that_differ_are_found():
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    apart = jax.shard_map(
        lambda x: x + (jax.lax.axis_index("sp") == 3),
        mesh=mesh,
        in_specs=jax.P("dp"),
        out_specs=jax.P("dp"),
        check_vma=False,
    )(np.zeros(2))
    text = message(apart, np.zeros(2))
    assert np.array_equal(np.asarray(apart), np.zeros(2))  # which only looks at the first copies
    assert "on 2 of 8 devices: dp=0, sp=3; dp=1, sp=3" in text
    assert "copies of the same block differ between devices" in text


def test_padding_does_not_count_and_partial_values_are_reduced():
    mesh = sk.make_mesh({"sp": 4})
    x = sk.shard_tensor(np.arange(9.0), {"sp": sk.Shard(0)}, mesh, uneven="pad")
    dirty = sk.Padded(x.array.at[9:].set(np.nan), x.logical_shape)
    testing.assert_same_values([dirty], [np.arange(9.0)])
    assert "dim 0 (cut by sp into 4 blocks of 3) at 8, part of block sp=2" in message(dirty, np.r_[0.0:8, 9])
    parts = sk.from_local([np.full(2, i) for i in range(4)], {"sp": sk.Partial("max")}, mesh)
    testing.assert_same_values(parts, np.full(2, 3))


@pytest.mark.parametrize(
    ("wrong_at", "cut", "said"),
    [
        ([15, 16, 47, 48], Cut((("sp", 4),), 16), "15:17, 47:49, at the border of blocks sp=0 | sp=1; sp=2 | sp=3"),
        ([0, 63], Cut((("sp", 4),), 16), "at the border of blocks start of the array | sp=0; sp=3 | end of the array"),
        (range(16, 32), Cut((("sp", 4),), 16), "at 16:32, all of block sp=1"),
        (range(16, 48), Cut((("sp", 4),), 16), "at 16:48, all of blocks sp=1; sp=2"),
        ([5, 24], Cut((("sp", 4),), 16), "at 5, 24, part of blocks sp=0; sp=1"),
        ([31, 32], Cut((("dp", 2), ("sp", 2)), 16), "(cut by dp x sp into 4 blocks of 16) at 31:33, at the border of "
                                                    "blocks dp=0,sp=1 | dp=1,sp=0"),
        ([45], Cut((("sp", 3),), 30), "at 45, part of block sp=1"),
        (range(0, 64, 2), Cut((("sp", 32),), 2), "... (32 runs), part of blocks sp=0;"),
    ],
)  # fmt: skip
def test_where_the_wrong_elements_are(wrong_at, cut, said):
    mask = np.zeros((2, 64), bool)
    mask[:, list(wrong_at)] = True
    assert said in where_wrong(mask, {1: cut})


def test_wrong_all_over():
    assert where_wrong(np.ones((2, 3), bool), {}) == "wrong elements are all over the array"
    assert where_wrong(np.eye(3, dtype=bool)[:, :2], {}) == "all wrong elements are in dim 0 at 0:2"


def test_long_lists_are_cut_short():
    assert re.search(r"0, 2, 4, 6, 8, 10, \.\.\. \(50 runs\)", where_wrong(np.arange(100) % 2 == 0, {}))


@pytest.mark.parametrize(
    ("option", "error", "said"),
    [({"rtol": -1}, ValueError, "rtol must be at least 0"), ({"atol": "1"}, TypeError, "atol must be a number")],
)
def test_bad_tolerances(option, error, said):
    with pytest.raises(error, match=said):
        testing.assert_same_values(1.0, 1.0, **option)


def test_relative_tolerances():
    assert [relative(d) for d in ("float64", "float32", "bfloat16", "int8", "key<fry>")] == [1e-10, 1e-5, 2**-5, 0, 0]
    assert not wrong(np.array([2]), np.array([1]), 0, 1).any()


def test_what_other_processes_hold_is_not_made_up():
    half = Held((4,), "float64", (Block("dp=0", (slice(0, 2),), np.zeros(2)),), complete=False)
    with pytest.raises(ValueError, match=r"only a part of the array of shape \(4,\), .* sk.unshard it first"):
        half.assembled()
