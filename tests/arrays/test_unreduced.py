"""JAX's unreduced arrays and ``PartialArray``: the same contributions, nothing communicated, right gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._compat import unreduced_kinds

MESHES = [
    ({"dp": 1}, ["dp"], None),
    ({"dp": 2}, ["dp"], None),
    ({"dp": 4}, ["dp"], None),
    ({"dp": 1, "sp": 8}, ["dp"], "sp"),
    ({"dp": 2, "sp": 4}, ["dp"], "sp"),
    ({"dp": 2, "sp": 2, "tp": 2}, ["dp", "tp"], "sp"),
    ({"dp": 2, "sp": 2, "tp": 2}, ["tp"], "sp"),
]


def make(mesh, partial, sharded, kind="sum"):
    placements = {n: sk.Partial(kind) for n in partial} | ({sharded: sk.Shard(0)} if sharded else {})
    layout = sk.Layout(mesh, placements)
    sizes = [mesh.shape[n] for n in partial]
    stack = np.random.default_rng(0).normal(size=(*sizes, 8, 3))
    return sk.PartialArray(jax.device_put(stack, NamedSharding(mesh, layout.stack_spec(2))), layout), stack


@pytest.mark.parametrize(("shape", "partial", "sharded"), MESHES)
@pytest.mark.every(2)
def test_there_and_back(mesh_for, shape, partial, sharded):
    """Eagerly without an ambient mesh, and under jit with one."""
    mesh = mesh_for(shape, "explicit")
    x, stack = make(mesh, partial, sharded)
    u = sk.to_unreduced(x)
    assert u.shape == x.shape
    assert u.sharding.spec.unreduced == set(partial)
    assert sk.placements(u) == x.placements
    np.testing.assert_array_equal(sk.to_local(u), sk.to_local(x))
    back = sk.from_unreduced(u)
    assert back.placements == x.placements
    np.testing.assert_array_equal(back.stack, stack)
    assert back.sharding.is_equivalent_to(x.sharding, stack.ndim)
    with jax.set_mesh(mesh):
        # JAX itself agrees on what the value is.
        value = jax.jit(lambda x: jax.sharding.reshard(sk.to_unreduced(x), P(sharded)))(x)
        np.testing.assert_allclose(value, stack.sum(tuple(range(len(partial)))), rtol=1e-13)
        both = jax.jit(lambda x: sk.from_unreduced(sk.to_unreduced(x)))
        np.testing.assert_array_equal(both(x).stack, stack)
        for fun, arg in ((both, x), (jax.jit(sk.to_unreduced), x), (jax.jit(sk.from_unreduced), u)):
            assert len(sk.collectives(fun, arg)) == 0


@pytest.mark.parametrize(("shape", "partial", "sharded"), MESHES)
@pytest.mark.every(2)
def test_gradients(mesh_for, shape, partial, sharded):
    """Of the value with respect to each contribution, and of what looks at the contributions apart."""
    mesh = mesh_for(shape, "explicit")
    x, stack = make(mesh, partial, sharded)
    w = np.random.default_rng(1).normal(size=(8, 3))
    apart = np.random.default_rng(2).normal(size=stack.shape)

    def value(x):
        return (jax.sharding.reshard(sk.to_unreduced(x), P(sharded)) * jax.sharding.reshard(w, P(sharded))).sum()

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(value))(x)
        np.testing.assert_allclose(got.stack, np.broadcast_to(w, stack.shape), rtol=1e-13)
        assert got.sharding.is_equivalent_to(x.sharding, stack.ndim)
        apart_of = lambda x: sk.from_unreduced(sk.to_unreduced(x)).stack  # noqa: E731
        tangent = jax.jit(lambda x: jax.jvp(apart_of, (x,), (x,))[1])(x)
        np.testing.assert_array_equal(tangent, stack)
        weights = jax.device_put(apart, x.sharding)
        got = jax.jit(jax.grad(lambda x, w: (apart_of(x) * w).sum()))(x, weights)
        np.testing.assert_allclose(got.stack, apart, rtol=1e-13)
        np.testing.assert_allclose(jax.grad(value)(x).stack, np.broadcast_to(w, stack.shape), rtol=1e-13)  # eagerly


@pytest.mark.skipif("max" not in unreduced_kinds(), reason="this JAX names sums only")
@pytest.mark.parametrize("kind", ["max", "min"])
def test_max_and_min_where_jax_has_them(mesh_for, kind):
    mesh = mesh_for({"dp": 2, "sp": 4}, "explicit")
    x, stack = make(mesh, ["dp"], "sp", kind)
    u = sk.to_unreduced(x)
    assert sk.placements(u) == (sk.Partial(kind), sk.Shard(0))
    np.testing.assert_array_equal(sk.to_local(u), sk.to_local(x))
    np.testing.assert_array_equal(sk.from_unreduced(u).stack, stack)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(sk.from_unreduced)(u).stack, stack)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"JAX can only make unreduced sums, not a {kind}"):
        jax.jit(sk.to_unreduced)(x)


def test_refusals(mesh_for):
    explicit, auto = mesh_for({"dp": 2}, "explicit"), mesh_for({"dp": 2})
    with pytest.raises(ValueError, match=re.escape('sk.make_mesh(..., axis_types="explicit"), or reduce first')):
        sk.to_unreduced(make(auto, ["dp"], None)[0])
    with pytest.raises(ValueError, match="can only say one Partial of"):
        sk.to_unreduced(make(explicit, ["dp"], None, "prod")[0])
    with pytest.raises(TypeError, match=r"to_unreduced takes an sk.PartialArray, got int"):
        sk.to_unreduced(1)
    with pytest.raises(TypeError, match=r"from_unreduced takes a jax.Array, got PartialArray"):
        sk.from_unreduced(make(explicit, ["dp"], None)[0])
    with pytest.raises(ValueError, match="no mesh axis of this array is unreduced"):
        sk.from_unreduced(sk.shard_tensor(np.ones(4), {"dp": sk.Shard(0)}, explicit))
    with pytest.raises(ValueError, match="no mesh axis of this array is unreduced"):
        sk.from_unreduced(jnp.ones(4))
    padded = sk.from_local(
        [np.ones(2)] * 4,
        {"dp": sk.Partial(), "sp": sk.Shard(0)},
        mesh_for({"dp": 2, "sp": 2}, "explicit"),
        global_shape=(3,),
    )
    with pytest.raises(ValueError, match=r"is padded to .* sk.reshard it to placements that divide its shape first"):
        sk.to_unreduced(padded)
    x = make(explicit, ["dp"], None)[0]
    with pytest.raises(ValueError, match="are manual here"):
        jax.shard_map(lambda x: sk.to_unreduced(x), mesh=explicit, in_specs=P("dp"), out_specs=P())(x)
