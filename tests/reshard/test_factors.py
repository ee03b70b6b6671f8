"""Axes as products of factors: positions, groups, names; which factors a reshard needs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.reshard.factors import Factors, common, split_for, whole

F = Factors((("x", (2,)), ("y", (2, 3)), ("z", ())))  # a mesh of 2 x 6 x 1


@st.composite
def some_factors(draw):
    sizes = st.lists(st.integers(2, 3), max_size=2).map(tuple)
    axes = draw(st.lists(sizes, min_size=1, max_size=3))
    return Factors(tuple((f"a{i}", axis) for i, axis in enumerate(axes)))


@st.composite
def factors_and_chosen(draw):
    factors = draw(some_factors())
    order = draw(st.permutations(range(len(factors.sizes))))
    return factors, tuple(order[: draw(st.integers(0, len(order)))])


mesh_shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4).map(tuple)


def test_numbers():
    assert F.sizes == (2, 2, 3)
    assert F.of_axis == {"x": (0,), "y": (1, 2), "z": ()}
    assert F.home == (("x", 1), ("y", 3), ("y", 1))
    assert F.positions.shape == (2, 2, 3)
    assert F.positions[1, 0, 2] == 6 + 2


@pytest.mark.parametrize(
    ("chosen", "groups"),
    [
        ((0,), [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]),
        ((2,), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        ((1, 2), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        ((2, 1), [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]),
        ((0, 1), [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        ((), [[i] for i in range(12)]),
    ],
    ids=str,
)
def test_groups(chosen, groups):
    assert F.groups(chosen) == groups


@given(factors_and_chosen())
def test_groups_partition_the_devices(case):
    factors, chosen = case
    groups = factors.groups(chosen)
    assert sorted(itertools.chain(*groups)) == list(range(math.prod(factors.sizes)))
    assert {len(g) for g in groups} == {math.prod(factors.sizes[f] for f in chosen)}


@given(factors_and_chosen())
@pytest.mark.not_smoke
def test_a_group_counts_through_its_factors(case):
    """The n-th device of every group is the one whose coordinates along the factors spell n."""
    factors, chosen = case
    at = np.indices(factors.sizes).reshape(len(factors.sizes), math.prod(factors.sizes))
    sizes = [factors.sizes[f] for f in chosen]
    others = [f for f in range(len(factors.sizes)) if f not in chosen]
    for group in factors.groups(chosen):
        for n, device in enumerate(group):
            assert tuple(at[list(chosen), device]) == tuple(np.unravel_index(n, sizes) if sizes else ())
            assert (at[others, device] == at[others, group[0]]).all()


@given(some_factors())
def test_home_counts_positions_on_the_axis(factors):
    """An axis's position divided by the stride, modulo the size, is the factor's coordinate."""
    shape = [math.prod(sizes) for _, sizes in factors.axes]
    on_axis = dict(zip((name for name, _ in factors.axes), np.indices(shape), strict=True))
    for f, (name, stride) in enumerate(factors.home):
        expected = on_axis[name].ravel() // stride % factors.sizes[f]
        np.testing.assert_array_equal(np.indices(factors.sizes)[f].ravel(), expected)


@pytest.mark.parametrize(
    ("chosen", "axes", "label"),
    [
        ((), (), ()),
        ((0,), ("x",), ("x",)),
        ((1, 2), ("y",), ("y",)),
        ((1, 2, 0), ("y", "x"), ("y", "x")),
        ((0, 1, 2), ("x", "y"), ("x", "y")),
        ((1,), None, ("y/3:2",)),
        ((2,), None, ("y/1:3",)),
        ((2, 1), None, ("y/1:3", "y/3:2")),
        ((1, 0, 2), None, ("y/3:2", "x", "y/1:3")),
        ((0, 2), None, ("x", "y/1:3")),
    ],
    ids=str,
)
def test_names(chosen, axes, label):
    assert F.whole_axes(chosen) == axes
    assert F.label(chosen) == label


@given(factors_and_chosen())
def test_whole_axes_are_labelled_by_name(case):
    factors, chosen = case
    axes = factors.whole_axes(chosen)
    assert (axes == factors.label(chosen)) == (axes is not None)


def test_whole():
    assert whole({"x": 2, "one": 1, "y": 6}).axes == (("x", (2,)), ("one", ()), ("y", (6,)))


@pytest.mark.parametrize(
    ("sizes", "changed", "axes"),
    [
        ({"x": 2, "y": 4}, "xy", [(2,), (2, 2)]),
        ({"x": 4, "y": 2}, "xy", [(2, 2), (2,)]),
        ({"x": 2, "y": 8}, "xy", [(2,), (2, 2, 2)]),
        ({"x": 2, "y": 16}, "xy", [(2,), (2, 8)]),  # too many primes: as they differ
        ({"x": 8, "y": 4}, "xy", [(4, 2), (4,)]),
        ({"x": 8, "y": 4}, "", [(8,), (4,)]),
        ({"x": 4, "y": 6}, "xy", [(2, 2), (2, 3)]),
        ({"x": 2, "y": 4}, "", [(2,), (2, 2)]),
        ({"x": 2, "y": 3}, "xy", [(2,), (3,)]),
        ({"x": 4, "y": 4}, "xy", [(2, 2), (2, 2)]),
        ({"x": 8, "y": 8}, "xy", [(8,), (8,)]),
        ({"x": 1, "y": 4}, "xy", [(), (2, 2)]),
        ({"x": 2, "y": 4, "z": 2}, "xyz", [(2,), (2, 2), (2,)]),
    ],
    ids=str,
)
def test_split_for(sizes, changed, axes):
    assert [cut for _, cut in split_for(sizes, list(changed)).axes] == axes


@given(mesh_shapes, st.data())
def test_split_keeps_the_mesh(shape, data):
    sizes = {f"a{i}": s for i, s in enumerate(shape)}
    changed = data.draw(st.lists(st.sampled_from(list(sizes)), unique=True))
    found = split_for(sizes, changed)
    assert {name: math.prod(cut) for name, cut in found.axes} == sizes
    assert all(size > 1 for size in found.sizes)
    assert len(found.sizes) <= max(4, len(whole(sizes).sizes))
    assert split_for(sizes, changed, most=0) == whole(sizes)


@pytest.mark.parametrize(
    ("one", "other", "factors"),
    [
        ((8,), (2, 4), (2, 4)),
        ((2, 4), (4, 2), (2, 2, 2)),
        ((2, 4), (2, 4), (2, 4)),
        ((6,), (3, 2), (3, 2)),
        ((2, 3), (3, 2), None),
        ((4, 6), (6, 4), None),
        ((1, 4), (4, 1), (4,)),
        ((1,), (1, 1), ()),
    ],
    ids=str,
)
def test_common(one, other, factors):
    assert common(one, other) == common(other, one) == factors


def merges_to(factors, shape):
    """Whether consecutive factors multiply to each size of the shape, in order."""
    left = list(factors)
    for size in shape:
        while size > 1:
            if not left or size % left[0]:
                return False
            size //= left.pop(0)
    return not left


@given(mesh_shapes, mesh_shapes)
def test_common_builds_both_meshes(one, other):
    if math.prod(one) != math.prod(other):
        return
    found = common(one, other)
    if found is not None:
        assert merges_to(found, one) and merges_to(found, other)
        assert all(size > 1 for size in found)
        return
    # None means none: any factors are cut at all strides of both meshes.
    strides = sorted({math.prod(s[i:]) for s in (one, other) for i in range(len(s) + 1)})
    assert any(high % low for low, high in itertools.pairwise(strides))


@given(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=4), st.data())
def test_common_of_groupings(factors, data):
    """Two meshes made of the same factors always have some."""

    def grouped():
        shape, left = [], list(factors)
        while left:
            n = data.draw(st.integers(1, len(left)))
            shape.append(math.prod(left[:n]))
            left = left[n:]
        return tuple(shape)

    one, other = grouped(), grouped()
    found = common(one, other)
    assert found is not None
    assert merges_to(found, one) and merges_to(found, other)
