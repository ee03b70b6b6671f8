"""All gradients of a step reduced together, against reducing each on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from shardkit.optim.targets import target_placements

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()
SHAPES = {"kernel": (8, 4), "bias": (4,), "deep": (4, 2, 8), "odd": (3, 5), "scalar": ()}


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def gradients(mesh, placements, dtype=np.float64, seed=0):
    """A tree of contributions, and their sums (or means) on one device."""
    rng = np.random.default_rng(seed)
    tree, wanted = {}, {}
    for name, shape in SHAPES.items():
        own = [p if not isinstance(p, S) or (len(shape) > p.dim and shape[p.dim] % 2 == 0) else R for p in placements]
        layout = sk.Layout(mesh, own).resolved(len(shape))
        lead = tuple(mesh.shape[a] for a in layout.partial_axes)
        stack = rng.integers(-8, 8, lead + shape).astype(dtype)
        sharding = jax.sharding.NamedSharding(mesh, layout.stack_spec(len(shape)))
        tree[name] = sk.PartialArray(jax.device_put(stack, sharding), layout)
        fold = np.mean if layout.reduce == "mean" else np.sum
        wanted[name] = fold(stack.astype(np.float64), axis=tuple(range(len(lead))))
    return tree, wanted


CASES = [
    ({"x": 1}, [P], "x"),
    ({"x": 2}, [P], "x"),
    ({"x": 8}, [P], "x"),
    ({"x": 2, "y": 4}, [P, R], "x"),
    ({"x": 2, "y": 4}, [P, P], "y"),
    ({"x": 2, "y": 2}, [P, S(0)], "x"),
    ({"x": 2, "y": 2}, [sk.Partial("mean"), S(1)], "x"),
    ({"x": 2, "y": 2, "z": 2}, [P, P, P], "x"),
    ({"x": 2, "y": 2, "z": 2}, [P, S(0), P], "z"),
]


@pytest.mark.parametrize("fuse", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("shape", "placements", "axis"), CASES, ids=str)
@pytest.mark.every(3)
def test_against_one_device(shape, placements, axis, fuse, axis_types, mesh_for, ambient):
    mesh = mesh_for(shape, axis_types)
    tree, wanted = gradients(mesh, placements)
    with ambient(mesh):
        for run in (
            lambda g: sk.reduce_gradients(g, fuse, axis=axis),
            jax.jit(lambda g: sk.reduce_gradients(g, fuse, axis=axis)),
        ):
            got = jax.block_until_ready(run(tree))
            assert jax.tree.structure(got) == jax.tree.structure(wanted)
            for name, value in got.items():
                np.testing.assert_array_equal(np.asarray(value), wanted[name])
                target = target_placements(tree[name].placements, SHAPES[name], axis, fuse, mesh)
                assert value.sharding.is_equivalent_to(sk.Layout(mesh, target).sharding, value.ndim), name


@pytest.mark.parametrize("count", [2, 12])
def test_collectives_do_not_grow_with_the_leaves(count, mesh_for):
    """One for what's scattered and one for what isn't, over all Partial axes together."""
    mesh = mesh_for({"x": 2, "y": 4})
    leaves = [sk.reshard(jnp.ones((8, 8)), [P, P], mesh) for _ in range(count)]
    odd = [sk.reshard(jnp.ones((3, 5)), [P, P], mesh) for _ in range(count)]
    report = sk.assert_collectives(
        lambda g: sk.reduce_gradients(g, axis="x"), leaves + odd, reduce_scatter=1, all_reduce=1, all_gather=0
    )
    assert {e.axes for e in report} == {("x", "y")}
    sk.assert_collectives(
        lambda g: sk.reduce_gradients(g, "all_reduce", axis="x"), leaves + odd, reduce_scatter=0, all_reduce=1
    )
    sk.assert_collectives(
        lambda g: sk.reduce_gradients(g, axis="x", bucket_bytes=1024), leaves, reduce_scatter=count // 2, all_reduce=0
    )


def test_bytes(mesh_for):
    """A reduce-scatter receives (n - 1) / n of the gradient, no more."""
    mesh = mesh_for({"x": 8})
    tree = {name: sk.reshard(jnp.ones(s, jnp.float32), [P], mesh) for name, s in {"a": (16, 3), "b": (8,)}.items()}
    report = sk.collectives(lambda g: sk.reduce_gradients(g, axis="x"), tree)
    assert report.bytes() == (16 * 3 + 8) * 4 * 7 // 8


def test_leaves_that_are_not_partial(mesh_for):
    mesh = mesh_for({"x": 4})
    value = np.arange(32.0).reshape(8, 4)
    tree = [
        sk.shard_tensor(value, [R], mesh),
        sk.reshard(value, [P], mesh),
        sk.shard_tensor(value, [S(1)], mesh),
        value,
    ]
    for fuse, wanted in (("reduce_scatter", [S(0), S(0), S(1), S(0)]), ("all_reduce", [R, R, S(1), R])):
        got = sk.reduce_gradients(tree, fuse, axis="x")
        assert [sk.placements(x) for x in got] == [(p,) for p in wanted]
        for x in got:
            np.testing.assert_array_equal(np.asarray(x), value)


def test_native_unreduced(mesh_for):
    mesh = mesh_for({"x": 4}, "explicit")
    with jax.set_mesh(mesh):
        native = sk.to_unreduced(sk.reshard(np.ones((8, 4)), [P], mesh))
        got = sk.reduce_gradients([native], axis="x")[0]
    assert sk.placements(got) == (S(0),)
    np.testing.assert_array_equal(np.asarray(got), np.ones((8, 4)))


def test_sums_in_another_dtype(mesh_for):
    """256 + 1 + ... + 1 is lost in bfloat16, not in float32."""
    mesh = mesh_for({"x": 8})
    stack = jnp.where(jnp.arange(8)[:, None] == 0, 256.0, 1.0).astype(jnp.bfloat16) * jnp.ones((8, 8), jnp.bfloat16)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    g = sk.PartialArray(jax.device_put(stack, sharding), sk.Layout(mesh, [P]))
    got = sk.reduce_gradients(g, axis="x", reduce_dtype=jnp.float32)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.float32(jnp.bfloat16(263.0)))


def test_refused(mesh_for):
    mesh = mesh_for({"x": 4})
    largest = sk.reshard(np.ones(8), [sk.Partial("max")], mesh)
    with refuses("reduce_gradients sums contributions, but got PartialArray"):
        sk.reduce_gradients(largest, axis="x")
    other = sk.reshard(np.ones(8), [P], mesh_for({"x": 8}))
    with refuses("leaves live on different meshes, {'x': 4} and {'x': 8}"):
        sk.reduce_gradients([sk.reshard(np.ones(8), [P], mesh), other], axis="x")
    with refuses("found no mesh on the leaves"):
        sk.reduce_gradients([np.ones(8)], axis="x")
