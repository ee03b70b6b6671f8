"""``shard_tensor`` and ``unshard``."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

pytestmark = pytest.mark.smoke

X = np.random.default_rng(0).normal(size=(8, 6, 16))
MESHES = [{"sp": 1}, {"sp": 2}, {"sp": 4}, {"sp": 8}, {"dp": 2, "sp": 4}, {"dp": 2, "tp": 2, "sp": 2}]


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def placed_as(x, mesh, spec):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


# --- placing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_eager(mesh_for, axis_types, shape):
    mesh = mesh_for(shape, axis_types)
    placements = {name: sk.Shard(dim) for name, dim in zip(shape, (0, -1, 2), strict=False)}
    y = sk.shard_tensor(X, placements, mesh)
    np.testing.assert_array_equal(y, X)
    assert y.sharding == NamedSharding(mesh, sk.to_partition_spec(placements, mesh, 3))


@pytest.mark.parametrize(
    "placements",
    [
        [sk.Replicate(), sk.Shard(2)],
        {"sp": sk.Shard(-1)},
        P(None, None, "sp"),
    ],
    ids=["sequence", "mapping", "spec"],
)
def test_every_form(mesh_for, axis_types, placements):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    for given in (placements, sk.Layout(mesh, placements)):
        assert placed_as(sk.shard_tensor(X, given, mesh), mesh, P(None, None, "sp"))


def test_the_mesh_may_come_with_the_placements(mesh_for):
    mesh = mesh_for({"sp": 4})
    for given in (NamedSharding(mesh, P("sp")), sk.Layout(mesh, P("sp"))):
        assert placed_as(sk.shard_tensor(X, given), mesh, P("sp"))


def test_or_from_the_array_or_the_context(mesh_for, axis_types):
    mesh = mesh_for({"sp": 4}, axis_types)
    y = sk.shard_tensor(sk.shard_tensor(X, P("sp"), mesh), P(None, None, "sp"))
    assert placed_as(y, mesh, P(None, None, "sp"))
    with jax.set_mesh(mesh):
        for x in (X, jnp.asarray(X), X.tolist()):
            y = sk.shard_tensor(x, P("sp"))
            assert placed_as(y, mesh, P("sp"))
            np.testing.assert_array_equal(y, X)
            y = jax.jit(lambda x: x + sk.shard_tensor(np.ones_like(X), P("sp")))(y)  # a constant under jit
            np.testing.assert_array_equal(y, X + 1)
        short = sk.shard_tensor(jnp.asarray(X[:5]), P("sp"), uneven="pad")
        assert placed_as(short.array, mesh, P("sp"))


def test_from_one_device_and_from_another_mesh(mesh_for, axis_types):
    mesh = mesh_for({"sp": 4}, axis_types)
    elsewhere = sk.shard_tensor(X, P("a"), sk.make_mesh({"a": 2, "b": 2}, devices=jax.devices()[4:]))
    for x in (jax.device_put(X, jax.devices()[5]), elsewhere):
        for uneven in ("error", "pad"):
            y = sk.shard_tensor(x, P("sp"), mesh, uneven=uneven)
            np.testing.assert_array_equal(y, X)
            assert placed_as(y.array if uneven == "pad" else y, mesh, P("sp"))
        short = sk.shard_tensor(x[:5], P("sp"), mesh, uneven="pad")
        np.testing.assert_array_equal(short, X[:5])


def test_under_jit(mesh_for, axis_types, ambient):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = sk.shard_tensor(X, P(None, None, "sp"), mesh)
    f = jax.jit(lambda x: sk.shard_tensor(x * 2, P("sp", None, "dp"), mesh))
    with ambient(mesh):
        y = f(x)
    np.testing.assert_array_equal(y, 2 * X)
    assert placed_as(y, mesh, P("sp", None, "dp"))


def test_placing_what_is_in_place_moves_nothing(mesh_for, axis_types):
    mesh = mesh_for({"sp": 4}, axis_types)
    x = sk.shard_tensor(X, P("sp"), mesh)
    assert len(sk.collectives(jax.jit(lambda x: sk.shard_tensor(x + 1, P("sp"), mesh)), x)) == 0


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 8, 9])
def test_pad(mesh_for, axis_types, size):
    mesh = mesh_for({"sp": 4}, axis_types)
    x = np.arange(1.0, 1 + 2 * size).reshape(2, size)
    y = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
    assert isinstance(y, sk.Padded)
    assert y.shape == (2, size)
    assert y.array.shape == (2, -(-size // 4) * 4)
    assert y.sharding == NamedSharding(mesh, P(None, "sp"))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(np.asarray(y.array)[:, size:], 0)


def test_pad_several_dims(mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 2, "sp": 2})
    x = np.arange(35.0).reshape(5, 7)
    y = sk.shard_tensor(x, P(("tp", "dp"), "sp"), mesh, uneven="pad")
    assert y.array.shape == (8, 8)
    assert y.sharding == NamedSharding(mesh, P(("tp", "dp"), "sp"))
    np.testing.assert_array_equal(y, x)


def test_pad_under_jit(mesh_for, axis_types, ambient):
    mesh = mesh_for({"sp": 4}, axis_types)
    with ambient(mesh):
        y = jax.jit(lambda x: sk.shard_tensor(x, P("sp"), mesh, uneven="pad"))(X[:5])
    assert y.shape == (5, 6, 16)
    assert placed_as(y.array, mesh, P("sp"))
    np.testing.assert_array_equal(y, X[:5])


def test_a_padded_array_can_move(mesh_for, axis_types, ambient):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = np.arange(35.0).reshape(5, 7)
    with ambient(mesh):
        rows = sk.shard_tensor(x, P("sp"), mesh, uneven="pad")
        columns = sk.shard_tensor(rows, P(None, "dp"), uneven="pad")
    assert (columns.shape, columns.array.shape) == ((5, 7), (5, 8))
    assert placed_as(columns.array, mesh, P(None, "dp"))
    np.testing.assert_array_equal(columns, x)


def test_gradients_pass(mesh_for, axis_types, ambient):
    mesh = mesh_for({"sp": 4}, axis_types)

    def loss(x):
        return (sk.shard_tensor(x, P("sp"), mesh, uneven="pad").value ** 2).sum()

    with ambient(mesh):
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(X[:5]), 2 * X[:5], rtol=1e-15)


# --- unshard --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 8])
def test_unshard(mesh_for, axis_types, ambient, size):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = sk.shard_tensor(X[:size], {"sp": sk.Shard(0), "dp": sk.Shard(1)}, mesh, uneven="pad")
    with ambient(mesh):
        for y in (sk.unshard(x), jax.jit(sk.unshard)(x)):
            np.testing.assert_array_equal(y, X[:size])
            assert y.sharding.is_fully_replicated
            assert y.sharding.device_set == x.sharding.device_set


def test_unshard_under_jit_gathers_once_per_axis(mesh_for):
    mesh = mesh_for({"sp": 4})
    x = sk.shard_tensor(X, P("sp"), mesh)
    for call in (jax.jit(sk.unshard), jax.jit(lambda x: sk.unshard(2 * x))):
        assert sk.collectives(call, x).by_kind() == {"all_gather": 1}


def test_unshard_of_one_device_is_itself():
    x = jnp.ones(3)
    assert sk.unshard(x) is x
    np.testing.assert_array_equal(jax.jit(sk.unshard)(x), x)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (P("sp"), "dim 0 of shape (6, 9) has 6 elements, which mesh axis 'sp' of size 4 does not divide"),
        (P(None, "dp"), "dim 1 of shape (6, 9) has 9 elements, which mesh axis 'dp' of size 2 does not divide"),
        (P(("sp", "dp")), "dim 0 of shape (6, 9) has 6 elements, which mesh axis 'sp' x 'dp' of size 8 does not"),
        ({"sp": sk.Shard(-2)}, 'use sk.shard_tensor(x, placements, uneven="pad")'),
        ({"sp": sk.Shard(2)}, "Shard(2) on mesh axis 'sp': the array has 2 dims, so dim must lie in [-2, 1]"),
        ({"xx": sk.Shard(0)}, "name mesh axes ['xx'], but the mesh has ('dp', 'sp')"),
        ([sk.Shard(0)], "got 1 placements [Shard(dim=0)] for a mesh with 2 axes ('dp', 'sp')"),
        (P(None, None, "dp"), "speaks of 3 dims, but the array has 2"),
        ({"dp": sk.Partial()}, "the placements are Partial over ('dp',); use Shard or Replicate there"),
        (P(unreduced={"dp"}), "shard_tensor places whole values"),
    ],
)
def test_bad_placements(mesh_for, placements, message):
    mesh = mesh_for({"dp": 2, "sp": 4})
    with refuses(message):
        sk.shard_tensor(np.ones((6, 9)), placements, mesh)
    with refuses(message):
        jax.jit(lambda x: sk.shard_tensor(x, placements, mesh))(np.ones((6, 9)))


def test_unknown_uneven(mesh_for):
    with refuses('uneven=\'drop\' is unknown; use "error" or "pad"'):
        sk.shard_tensor(X, P("sp"), mesh_for({"sp": 4}), uneven="drop")


def test_no_mesh():
    with refuses("shard_tensor found no mesh: not in mesh=, not on its array arguments"):
        sk.shard_tensor(X, P("sp"))


def test_a_sharding_of_another_mesh(mesh_for):
    with refuses("the sharding lives on mesh {'sp': 4}, not on the given mesh {'sp': 2}"):
        sk.shard_tensor(X, NamedSharding(mesh_for({"sp": 4}), P("sp")), mesh_for({"sp": 2}))


def test_inside_a_manual_region(mesh_for, axis_types):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)

    x = sk.shard_tensor(X, P("sp"), mesh)

    def run(body):
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("sp"), out_specs=P("sp")))(x)

    with refuses("shard_tensor places whole arrays, but mesh axes ['sp'] are manual here"):
        run(lambda x: sk.shard_tensor(x, {"sp": sk.Shard(1)}))
    with refuses("unshard moves whole arrays, but here (inside jax.shard_map) a value is one device's block"):
        run(sk.unshard)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_of_any_number(mesh_for, impl):
    """Their padding is zeros, which count as little as any other."""
    mesh = mesh_for({"x": 8})
    keys = jax.random.split(jax.random.key(0, impl=impl), 10)
    placed = sk.shard_tensor(keys, {"x": sk.Shard(0)}, mesh, uneven="pad")
    assert (placed.shape, placed.array.shape, placed.sharding.spec) == ((10,), (16,), jax.P("x"))
    np.testing.assert_array_equal(jax.random.key_data(sk.unshard(placed)), jax.random.key_data(keys))
    under_jit = jax.jit(lambda k: sk.shard_tensor(k, {"x": sk.Shard(0)}, mesh, uneven="pad"))(keys)
    np.testing.assert_array_equal(jax.random.key_data(sk.unshard(under_jit)), jax.random.key_data(keys))
