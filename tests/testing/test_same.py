"""``assert_same_as_one_device`` and what it runs on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk
from shardkit import testing

NUMBERS = ("NHWC", "HWIO", "NHWC")
RNG = np.random.default_rng(0)


def ring(x, kernel):
    return sk.ring_conv(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS, spatial_axes={"sp": "W"})


def plain(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)


def without_halo(mesh):
    specs = (jax.P("dp", None, "sp"), jax.P())
    return jax.shard_map(plain, mesh=mesh, in_specs=specs, out_specs=specs[0])


def operands(mesh, width=32, uneven="error"):
    x = RNG.normal(size=(4, 3, width, 2))
    placements = {"dp": sk.Shard(0), "sp": sk.Shard(2)}
    return sk.shard_tensor(x, placements, mesh, uneven=uneven), RNG.normal(size=(3, 3, 2, 2))


@pytest.mark.parametrize("mesh", testing.meshes(("dp", "sp"), devices=[1, 8], axis_types="auto"), ids=testing.mesh_id)
def test_a_right_function_passes(mesh):
    where = {"dp": sk.Shard(0), "sp": sk.Shard(2)}
    y = testing.assert_same_as_one_device(jax.jit(ring), *operands(mesh), reference=plain, placements=where)
    assert y.shape == (4, 3, 32, 2)


def test_without_a_reference_the_function_itself_is_run_on_a_mesh_of_one_device():
    seen = []

    def spied(x, kernel):
        seen.append(dict(x.sharding.mesh.shape))
        return ring(x, kernel)

    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    testing.assert_same_as_one_device(spied, *operands(mesh))
    assert seen == [{"dp": 1, "sp": 1}, {"dp": 2, "sp": 4}]


def test_a_missing_halo_is_blamed():
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_as_one_device(without_halo(mesh), *operands(mesh), reference=plain)
    text = str(caught.value)
    assert text.startswith("the results on many devices and on one differ in 1 of 1 leaves")
    assert (
        "dim 2 (cut by sp into 4 blocks of 8) at 7:9, 15:17, 23:25, at the border of blocks sp=0 | sp=1; sp=1 | sp=2; "
        "sp=2 | sp=3"
    ) in text


def test_a_wrong_placement_is_found():
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    with pytest.raises(AssertionError, match=r"the array: found .* wanted {sp: Shard\(2\)}"):
        testing.assert_same_as_one_device(ring, *operands(mesh), reference=plain, placements={"sp": sk.Shard(2)})


def test_padded_and_partial_arguments_enter_as_their_values():
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    testing.assert_same_as_one_device(ring, *operands(mesh, 29, "pad"), reference=plain)
    parts = sk.from_local([np.full(3, i) for i in range(8)], {"dp": sk.Partial(), "sp": sk.Partial()}, mesh)
    testing.assert_same_as_one_device(lambda p: 2 * p, parts, reference=lambda x: 2 * x)
    assert testing.on_one_device(lambda x: x)(parts).tolist() == [28, 28, 28]


def test_unreduced_arguments_too():
    mesh = sk.make_mesh({"dp": 8}, axis_types="explicit")
    parts = sk.to_unreduced(sk.from_local([np.full(3, float(i)) for i in range(8)], {"dp": sk.Partial()}, mesh))
    assert testing.on_one_device(lambda x: x)(parts).tolist() == [28, 28, 28]


def test_partitioned_functions_and_pytrees():
    mesh = sk.make_mesh({"dp": 2, "tp": 4})

    def layer(params, x):
        h = jnp.tanh(x @ params["w"])
        return {"h": h, "n": jnp.sum(h > 0), "key": jax.random.key(3)}

    placed = sk.partition(layer, ({"w": {"tp": sk.Shard(1)}}, {"dp": sk.Shard(0)}), mesh=mesh)
    testing.assert_same_as_one_device(placed, {"w": RNG.normal(size=(8, 16))}, RNG.normal(size=(4, 8)))


def test_explicit_axes_are_set_for_eager_functions():
    mesh = sk.make_mesh({"dp": 8}, axis_types="explicit")
    x = sk.shard_tensor(np.arange(16.0), {"dp": sk.Shard(0)}, mesh)
    testing.assert_same_as_one_device(lambda x: (x * 2).sum(), x)
    with jax.set_mesh(mesh):
        testing.assert_same_as_one_device(lambda x: (x * 2).sum(), x, reference=lambda x: (x * 2).sum())


def test_arguments_may_be_donated_by_both():
    mesh = sk.make_mesh({"dp": 8})
    x = sk.shard_tensor(np.arange(16.0), {"dp": sk.Shard(0)}, mesh)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    testing.assert_same_as_one_device(double, x)
    assert x.is_deleted()
    y = jnp.arange(3.0)
    testing.on_one_device(double)(y)
    assert not y.is_deleted()


def test_random_keys_and_other_arguments():
    mesh = sk.make_mesh({"dp": 8})
    keys = sk.shard_tensor(jax.random.split(jax.random.key(0), 8), {"dp": sk.Shard(0)}, mesh)
    draw = jax.vmap(functools.partial(jax.random.normal, shape=(2,)))
    testing.assert_same_as_one_device(lambda keys, scale, name: draw(keys) * scale, keys, 2, "unused")


def test_a_function_that_cannot_run_on_one_device_says_what_to_do():
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    with pytest.raises(ValueError, match="device") as caught:
        testing.assert_same_as_one_device(without_halo(mesh), *operands(mesh))
    assert "on a mesh {'dp': 1, 'sp': 1} of one device" in caught.value.__notes__[-1]
    assert "reference=..." in caught.value.__notes__[-1]


def test_a_structure_that_depends_on_the_devices_is_found():
    mesh = sk.make_mesh({"dp": 8})
    x = sk.shard_tensor(np.arange(16.0), {"dp": sk.Shard(0)}, mesh)
    with pytest.raises(AssertionError, match=r"another structure:\n.*only in what was got: \[1\]"):
        testing.assert_same_as_one_device(lambda x: [x] * min(2, x.sharding.mesh.size), x)
