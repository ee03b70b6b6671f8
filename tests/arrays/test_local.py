"""``from_local`` and ``to_local``: putting blocks together and taking them apart moves nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

X = np.random.default_rng(0).normal(size=(4, 8))


@pytest.fixture
def mesh(mesh_for, axis_types):
    return mesh_for({"dp": 2, "sp": 4}, axis_types)


def blocks_of(x, mesh, placements):
    return sk.to_local(sk.shard_tensor(x, placements, mesh))


@pytest.mark.parametrize(
    "placements",
    [
        {"dp": sk.Shard(0), "sp": sk.Shard(1)},
        {"dp": sk.Shard(1), "sp": sk.Shard(1)},
        {"sp": sk.Shard(-1)},
        {},
        [sk.Shard(1), sk.Shard(0)],
        P(None, ("sp", "dp")),
    ],
)
def test_there_and_back(mesh, placements):
    blocks = blocks_of(X, mesh, placements)
    x = sk.from_local(blocks, placements, mesh)
    np.testing.assert_array_equal(x, X)
    assert x.sharding.is_equivalent_to(sk.shard_tensor(X, placements, mesh).sharding, 2)
    # Blocks that are on their devices stay where they are.
    assert [b.unsafe_buffer_pointer() for b in sk.to_local(x)] == [b.unsafe_buffer_pointer() for b in blocks]


def test_under_an_ambient_mesh(mesh):
    """Single-device arrays are taken apart and put together there too."""
    blocks = [jax.device_put(np.full((1, 3), i), d) for i, d in enumerate(mesh.devices.flat)]
    with jax.set_mesh(mesh):
        x = sk.from_local(blocks, {"dp": sk.Partial(), "sp": sk.Shard(0)})
        np.testing.assert_array_equal(sk.to_local(x), blocks)
        assert x.shape == (4, 3)
        short = [jax.device_put(np.ones(2 - i % 4 // 3), d) for i, d in enumerate(mesh.devices.flat)]
        assert sk.from_local(short, {"sp": sk.Shard(0)}, global_shape=(7,)).shape == (7,)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_from_a_function(mesh_for, axis_types, n):
    x = sk.from_local(lambda at: np.full((2, 3), at["dp"]), {"dp": sk.Shard(0)}, mesh_for({"dp": n}, axis_types))
    np.testing.assert_array_equal(x, np.repeat(np.arange(n), 2)[:, None] * np.ones(3))


def test_the_mesh_is_found(mesh):
    placements = {"dp": sk.Shard(0), "sp": sk.Shard(1)}
    blocks = list(np.ones((8, 2, 2)))
    for given in (sk.Layout(mesh, placements), NamedSharding(mesh, P("dp", "sp"))):
        assert sk.from_local(blocks, given).sharding.mesh == mesh
    with jax.set_mesh(mesh):
        assert sk.from_local(blocks, placements).sharding.mesh == mesh


def test_devices_in_any_order():
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[::-1], (2, 4)), ("dp", "sp"))
    x = sk.from_local(list(np.arange(8).reshape(8, 1)), P(("dp", "sp")), mesh)
    np.testing.assert_array_equal(x, np.arange(8))


# --- Partial --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
def test_contributions(mesh, kind):
    contributions = np.random.default_rng(1).normal(size=(8, 4, 2))
    x = sk.from_local(list(contributions), {"dp": sk.Partial(kind), "sp": sk.Shard(1)}, mesh)
    assert isinstance(x, sk.PartialArray)
    assert (x.shape, x.placements) == ((4, 8), (sk.Partial(kind), sk.Shard(1)))
    assert x.sharding == NamedSharding(mesh, P("dp", None, "sp"))
    for d in range(2):
        np.testing.assert_array_equal(np.asarray(x.stack)[d], np.concatenate(contributions[4 * d : 4 * d + 4], 1))
    np.testing.assert_array_equal(sk.to_local(x), contributions)


def test_contributions_over_all_axes(mesh):
    x = sk.from_local(list(np.arange(8.0)), [sk.Partial(), sk.Partial()], mesh)
    assert (x.shape, x.stack.shape) == ((), (2, 4))
    assert float(np.sum(x.stack)) == 28
    np.testing.assert_array_equal(sk.to_local(x), np.arange(8.0))


def test_flags(mesh):
    x = sk.from_local([np.array([i == 3]) for i in range(8)], {"dp": sk.Partial("any"), "sp": sk.Shard(0)}, mesh)
    np.testing.assert_array_equal(np.any(x.stack, 0), [False, False, False, True])


# --- sizes that don't divide ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_uneven(mesh_for, axis_types, size, padded):
    """Short and empty tails, or whole blocks: 5 over 4 is 2, 2, 1, 0."""
    mesh = mesh_for({"sp": 4}, axis_types)
    x = np.arange(3.0 * size).reshape(3, size)
    block = -(-size // 4)
    shards = [x[:, i * block : (i + 1) * block] for i in range(4)]
    if padded:
        shards = [np.pad(s, ((0, 0), (0, block - s.shape[1]))) for s in shards]
    out = sk.from_local([jnp.asarray(s) if i % 2 else s for i, s in enumerate(shards)], {"sp": sk.Shard(1)}, mesh,
                        global_shape=x.shape)  # fmt: skip
    assert isinstance(out, sk.Padded) and out.logical_shape == (3, size)
    np.testing.assert_array_equal(out, x)
    assert out.sharding == NamedSharding(mesh, P(None, "sp"))
    np.testing.assert_array_equal(np.asarray(out.array)[:, size:], 0)


def test_uneven_contributions(mesh):
    pieces = {0: 2, 1: 2, 2: 1, 3: 0}
    x = sk.from_local(
        lambda at: np.full((pieces[at["sp"]],), at["dp"] + 1.0),
        {"dp": sk.Partial(), "sp": sk.Shard(0)},
        mesh,
        global_shape=(5,),
    )
    assert (x.shape, x.logical_shape, x.stack.shape) == ((5,), (5,), (2, 8))
    np.testing.assert_array_equal(np.asarray(x.stack).sum(0), [3, 3, 3, 3, 3, 0, 0, 0])


def test_two_axes_on_one_uneven_dim(mesh):
    """9 over 2 x 4 is 2, 2, 2, 2, 1, 0, 0, 0: more than one shard is short or empty."""
    x = np.arange(9)
    out = sk.from_local([x[2 * i : 2 * i + 2] for i in range(8)], P(("dp", "sp")), mesh, global_shape=(9,))
    np.testing.assert_array_equal(out, x)
    turned = [x[2 * (4 * 0 + 0) :][:0] for _ in range(8)]
    for i in range(8):
        place = (i % 4) * 2 + i // 4  # sp major
        turned[i] = x[2 * place : 2 * place + 2]
    np.testing.assert_array_equal(sk.from_local(turned, P(("sp", "dp")), mesh, global_shape=(9,)), x)


def test_a_global_shape_that_divides_gives_a_plain_array(mesh):
    x = sk.from_local(list(np.ones((8, 2, 2))), {"dp": sk.Shard(0), "sp": sk.Shard(1)}, mesh, global_shape=(4, 8))
    assert isinstance(x, jax.Array) and x.shape == (4, 8)


# --- bad input ------------------------------------------------------------------------------------


def test_bad_shards(mesh):
    both = {"dp": sk.Shard(0), "sp": sk.Shard(1)}
    ones = list(np.ones((8, 2, 2)))
    with pytest.raises(ValueError, match=r"got 3 shards for the 8 devices of mesh \{'dp': 2, 'sp': 4\}; give one"):
        sk.from_local(ones[:3], both, mesh)
    message = (
        "the shard of device 6 {'dp': 1, 'sp': 2} has shape (2, 3), but that of device 0 {'dp': 0, 'sp': 0} has (2, 2)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        sk.from_local([*ones[:6], np.ones((2, 3)), ones[7]], both, mesh)
    message = (
        "the shard of device 7 {'dp': 1, 'sp': 3} is float32[2, 2], but that of device 0 {'dp': 0, 'sp': 0} is float64"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        sk.from_local([*ones[:7], np.ones((2, 2), "float32")], both, mesh)
    with pytest.raises(ValueError, match=r"the shard of device 1 .* is None, but this process owns it"):
        sk.from_local([ones[0], None, *ones[2:]], both, mesh)
    with pytest.raises(TypeError, match="takes a sequence of arrays in mesh order, or a function"):
        sk.from_local({"dp": 1}, both, mesh)
    with pytest.raises(ValueError, match=r"Shard\(2\) on mesh axis 'dp': the array has 2 dims"):
        sk.from_local(ones, {"dp": sk.Shard(2)}, mesh)


def test_bad_global_shapes(mesh):
    placements = {"sp": sk.Shard(0)}
    with pytest.raises(ValueError, match=r"global_shape=\(4, 4\) has 2 dims, but the shards have 1"):
        sk.from_local(list(np.ones((8, 2))), placements, mesh, global_shape=(4, 4))
    message = "of device 2 {'dp': 0, 'sp': 2} has shape (1,); of global_shape=(7,) it holds (2,)"
    with pytest.raises(ValueError, match=re.escape(message)):
        sk.from_local([np.ones(2 - (i % 4 == 2)) for i in range(8)], placements, mesh, global_shape=(7,))
    with pytest.raises(ValueError, match=re.escape("it holds (1,), or padded (2,)")):
        sk.from_local([np.ones(2 + (i % 4 == 3)) for i in range(8)], placements, mesh, global_shape=(7,))


def test_other_bad_input(mesh):
    scalars = list(np.ones(8))
    with pytest.raises(ValueError, match="from_local found no mesh"):
        sk.from_local(scalars, {})
    with pytest.raises(ValueError, match=r"needs the devices themselves, but mesh .* is abstract"):
        sk.from_local(scalars, {}, mesh.abstract_mesh)
    with pytest.raises(ValueError, match="wait for different reductions"):
        sk.from_local(scalars, [sk.Partial(), sk.Partial("max")], mesh)
    with pytest.raises(TypeError, match=r"from_local: Partial\('mean'\) of dtype int64 isn't defined"):
        sk.from_local(list(np.ones(8, int)), {"dp": sk.Partial("mean")}, mesh)
    with pytest.raises(ValueError, match=r"from_local needs concrete arrays; inside jit use sk.local_map"):
        jax.jit(lambda x: sk.from_local([x] * 8, {}, mesh))(1.0)
    with pytest.raises(ValueError, match="to_local needs a concrete array"):
        jax.jit(lambda x: sk.to_local(x))(sk.from_local(scalars, {"dp": sk.Partial()}, mesh))
