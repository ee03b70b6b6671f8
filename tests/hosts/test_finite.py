"""`check_finite` in one process of eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from shardkit.hosts import check_finite


def placed(value, spec, mesh):
    return jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))


def test_finite(mesh_for, axis_types, ambient):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    tree = {
        "x": placed(np.ones((4, 8)), ("dp", "sp"), mesh),
        "half": placed(jnp.ones((4, 8), jnp.bfloat16), (None, "sp"), mesh),
        "complex": placed(np.ones(8, np.complex64), ("sp",), mesh),
        "eighth": jnp.ones(8, jnp.float8_e4m3fn),
        "whole": jnp.arange(3),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0, 3)),
        "host": [np.ones(3), np.float32(1), 1.0, 1j, 3, "nan", None, np.array(["nan"])],
    }
    check_finite(tree)
    with ambient(mesh):
        check_finite(tree)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_one_nan(mesh_for, axis_types, ambient, dtype):
    """The device is named that holds it, and the rest of the tree is not."""
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    value = np.ones((4, 8), dtype)
    value[3, 5] = np.nan
    value[3, 4] = -np.inf
    with ambient(mesh), pytest.raises(FloatingPointError) as caught:
        check_finite({"g": [placed(value, ("dp", "sp"), mesh), np.ones(3)]}, "gradients", step=12)
    device = mesh.devices[1, 2].id
    assert str(caught.value) == (
        "gradients at step 12: not all are finite:\n"
        f"  process 0, ['g'][0] (device {device}): 1 NaN and 1 infinite of 4 elements"
    )


@pytest.mark.parametrize("value", [np.array([1, np.nan]), np.float32("nan"), float("nan"), complex(0, np.inf)])
def test_on_the_host(value):
    with pytest.raises(FloatingPointError, match=r"process 0, \['loss'\] \(host\): 1 "):
        check_finite({"loss": value}, "the loss")


def test_replicated(mesh_for):
    """Held by eight devices: eight lines at most, and none is left out in silence."""
    value = placed(np.full(3, np.nan), (None,), mesh_for({"dp": 8}))
    with pytest.raises(FloatingPointError) as caught:
        check_finite([value, np.nan])
    lines = str(caught.value).splitlines()
    assert lines[0] == "values: not all are finite:"
    assert lines[1] == "  process 0, [1] (host): 1 NaN of 1 elements"
    assert len(lines) == 10 and lines[-1] == "  process 0, and 1 more parts"


def test_padding_does_not_count(mesh_for, axis_types, ambient):
    mesh = mesh_for({"sp": 4}, axis_types)
    padded = sk.shard_tensor(jnp.arange(5.0), {"sp": sk.Shard(0)}, mesh, uneven="pad")
    array = placed(np.where(np.arange(8) < 5, np.arange(8.0), np.nan), ("sp",), mesh)
    assert padded.array.shape == array.shape
    with ambient(mesh):
        check_finite(sk.Padded(array, (5,)))
        with pytest.raises(FloatingPointError, match="1 NaN of 2 elements"):
            check_finite(sk.Padded(array, (6,)))


def test_contributions_as_they_are(mesh_for, axis_types):
    """Infinities that would cancel are there all the same."""
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    partial = sk.from_local(lambda index: np.full(3, 1.0 if index["dp"] else np.nan), {"dp": sk.Partial()}, mesh)
    with pytest.raises(FloatingPointError, match="3 NaN of 3 elements"):
        check_finite({"g": partial})
    check_finite(sk.from_local(lambda index: np.ones(3), {"dp": sk.Partial()}, mesh))


def test_within_jit():
    with pytest.raises(TypeError, match=r"check_finite\('values'\) was called within jit.*sk.all_finite"):
        jax.jit(check_finite)(jnp.ones(3))
