"""Who holds what, against JAX's own account of it and against slices of a whole array."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit as sk
from shardkit.data import parts


@st.composite
def cuts(draw):
    """Sizes of mesh axes, which of them cut which dim, and the rank."""
    sizes = {name: draw(st.sampled_from([1, 2, 3])) for name in "abc"[: draw(st.integers(1, 3))]}
    ndim = draw(st.integers(1, 3))
    axes: dict[int, tuple[str, ...]] = {}
    for name in draw(st.permutations(list(sizes))):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            axes[dim] = (*axes.get(dim, ()), name)
    return sizes, axes, ndim


@st.composite
def held(draw):
    """A cut, and processes whose devices are one index of some mesh axes, so that each holds a grid."""
    sizes, axes, ndim = draw(cuts())
    across = draw(st.sets(st.sampled_from(list(sizes))))
    numbers = {}
    owners = []
    for place in itertools.product(*(range(size) for size in sizes.values())):
        index = tuple(i for name, i in zip(sizes, place, strict=True) if name in across)
        owners.append(numbers.setdefault(index, len(numbers)))
    return parts.cut(sizes, axes, ndim), owners


def block_of(whole, block, sizes):
    return whole[tuple(slice(k * size, (k + 1) * size) for k, size in zip(block, sizes, strict=True))]


@given(cuts())
def test_blocks_are_where_jax_says(case):
    sizes, axes, ndim = case
    if math.prod(sizes.values()) > jax.device_count():
        return
    mesh = sk.make_mesh(sizes)
    spec = jax.sharding.PartitionSpec(*(axes.get(dim) for dim in range(ndim)))
    found = parts.cut(sizes, axes, ndim)
    shape = tuple(2 * count for count in found.counts)
    indices = jax.sharding.NamedSharding(mesh, spec).devices_indices_map(shape)
    for device, block in zip(mesh.devices.flat, found.blocks, strict=True):
        starts = tuple(index.indices(size)[0] for index, size in zip(indices[device], shape, strict=True))
        assert starts == tuple(2 * k for k in block)


@given(held(), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_each_block_is_found_in_the_part(case, sizes):
    """A process's part is what its intervals take out of the whole; ``inside`` finds each block in it."""
    cut, owners = case
    sizes = sizes[: len(cut.counts)]
    shape = tuple(size * count for size, count in zip(sizes, cut.counts, strict=True))
    whole = np.arange(math.prod(shape)).reshape(shape)
    grids = parts.grids(cut, owners)
    for block, process in zip(cut.blocks, owners, strict=True):
        part = whole
        for dim, numbers in enumerate(grids[process]):
            pieces = [range(*interval) for interval in parts.intervals(numbers, sizes[dim])]
            part = part.take([i for piece in pieces for i in piece], axis=dim)
        assert part.shape == tuple(size * len(n) for size, n in zip(sizes, grids[process], strict=True))
        np.testing.assert_array_equal(part[parts.inside(block, grids[process], sizes)], block_of(whole, block, sizes))


@given(held())
def test_shared_blocks(case):
    cut, owners = case
    shared = parts.shared(cut, owners)
    for block in set(cut.blocks):
        who = {p for b, p in zip(cut.blocks, owners, strict=True) if b == block}
        assert shared.get(block, ()) == (tuple(sorted(who)) if len(who) > 1 else ())


@given(held())
def test_units_of_rows(case):
    """One unit for arrays cut more and less, as far as processes hold the same of both."""
    cut, owners = case
    finer = parts.Cut((2 * cut.counts[0],), tuple((2 * b[0] + k,) for k in (0, 1) for b in cut.blocks))
    total, held_units = parts.row_units([finer, parts.Cut(cut.counts, cut.blocks * 2)], list(owners) * 2)
    assert total == 2 * cut.counts[0]
    for process, grid in parts.grids(cut, owners).items():
        assert held_units[process] == tuple(2 * n + k for n in grid[0] for k in (0, 1))


def test_what_makes_no_array():
    diagonal = parts.cut({"a": 2, "b": 2}, {0: ("a",), 1: ("b",)}, 2)
    with pytest.raises(ValueError, match=r"process 0 hold blocks \[\(0, 0\), \(1, 1\)\] .* don't make one array"):
        parts.grids(diagonal, [0, 1, 1, 0])


def test_rows_that_differ_between_leaves():
    rows, whole = parts.cut({"a": 2}, {0: ("a",)}, 1), parts.cut({"a": 2}, {}, 1)
    assert parts.row_units([rows, whole], [0, 0]) == (2, {0: (0, 1)})
    with pytest.raises(ValueError, match="process 0 would hold other rows of one leaf than of another"):
        parts.row_units([rows, whole], [0, 1])


def test_a_scalar():
    cut = parts.cut({"a": 2}, {}, 0)
    assert parts.grids(cut, [0, 1]) == {0: (), 1: ()}
    assert parts.inside((), (), ()) == ()


def test_a_process_that_is_no_neighbour_of_itself():
    """Devices in turn: each process has every second block."""
    cut = parts.cut({"a": 4}, {0: ("a",)}, 1)
    grids = parts.grids(cut, [0, 1, 0, 1])
    assert grids == {0: ((0, 2),), 1: ((1, 3),)}
    assert parts.intervals(grids[1][0], 3) == [(3, 6), (9, 12)]
    assert parts.inside((3,), grids[1], (3,)) == (slice(3, 6),)
