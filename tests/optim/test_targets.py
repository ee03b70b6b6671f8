"""Where gradients go: tables of placements."""

import itertools
import re

import jax
import pytest
from jax.sharding import AbstractMesh

import shardkit as sk
from shardkit.optim.targets import target_placements

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()
CUBE = AbstractMesh((2, 2, 2), ("x", "y", "z"))


@pytest.mark.parametrize(
    ("placements", "shape", "axis", "target"),
    [
        ([P, P, P], (8, 8), "x", [S(0), S(1), R]),  # the two of the design
        ([P, S(0), P], (8, 8), "x", [S(1), S(0), R]),
        ([P, P, P], (8, 8), "z", [S(1), R, S(0)]),  # the sharding axis first
        ([P, P, P], (8, 8, 8), "y", [S(1), S(0), S(2)]),
        ([P, R, P], (8, 8), "x", [S(0), S(1), R]),  # every axis that doesn't cut it
        ([P, R, R], (3, 8), "x", [S(1), R, R]),  # the next dim that divides
        ([P, R, R], (3, 5), "x", [R, R, R]),
        ([P, R, R], (), "x", [R, R, R]),
        ([S(1), P, R], (8, 8), "x", [S(1), S(0), R]),  # it cuts it already
        ([P, R, R], (0, 4), "x", [S(1), R, R]),
    ],
)
def test_reduce_scatter(placements, shape, axis, target):
    assert target_placements(placements, shape, axis, "reduce_scatter", CUBE) == tuple(target)


def test_all_reduce():
    """Partial becomes Replicate, all else stays: whatever the axis."""
    for placements in itertools.product([P, R, S(0), sk.Partial("mean")], repeat=3):
        target = target_placements(placements, (8,), "y", "all_reduce", CUBE)
        assert target == tuple(R if isinstance(p, sk.Partial) else p for p in placements)


def test_nothing_is_partial_and_shards_stay():
    for placements in itertools.product([P, R, S(0), S(1)], repeat=3):
        for axis in "xyz":
            target = target_placements(placements, (8, 8), axis, "reduce_scatter", CUBE)
            assert not any(isinstance(p, sk.Partial) for p in target)
            assert all(new == old for new, old in zip(target, placements, strict=True) if isinstance(old, S))


@pytest.mark.parametrize(
    ("axis", "fuse", "message"),
    [
        ("x", "scatter", "fuse='scatter' is unknown; use \"reduce_scatter\""),
        ("dp", "all_reduce", "axis='dp' is not on the mesh, which has ('x', 'y', 'z')"),
    ],
)
def test_refused(axis, fuse, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        target_placements([P, P, P], (8,), axis, fuse, CUBE)
    gradient = sk.reshard(jax.numpy.ones(8), [P, R, R], sk.make_mesh({"x": 1, "y": 1, "z": 1}))
    with pytest.raises(ValueError, match=re.escape(message)):
        sk.reduce_gradients(gradient, fuse, axis=axis)
