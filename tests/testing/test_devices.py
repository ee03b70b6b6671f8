import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

import shardkit as sk
from shardkit import testing


@pytest.mark.not_smoke
def test_simulated_devices_are_there_and_can_be_asked_for_again():
    program = """
import jax, shardkit.testing as testing
testing.simulate_devices(4)
testing.simulate_devices(3)
assert jax.device_count() == 3 and jax.default_backend() == "cpu"
testing.simulate_devices(3)
try:
    testing.simulate_devices(5)
except RuntimeError as err:
    assert "simulate_devices(5) came too late: JAX has already started, with 3 cpu device(s)" in str(err), err
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("count", ["8", 8.0, True, None])
def test_a_number_of_devices_is_a_number(count):
    with pytest.raises(TypeError, match="simulate_devices takes a number of devices"):
        testing.simulate_devices(count)


def test_a_number_of_devices_is_positive():
    with pytest.raises(ValueError, match="needs at least one device; got 0"):
        testing.simulate_devices(0)


def test_as_many_as_there_are_is_fine():
    testing.simulate_devices(jax.device_count())


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        (("a",), [(1,), (2,), (4,), (8,)]),
        (("a", "b"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]),
        (("a", "b", "c"), [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)]),
    ],
)
def test_meshes_have_every_size(axes, shapes):
    auto = testing.meshes(axes, axis_types="auto")
    assert [mesh.devices.shape for mesh in auto] == shapes
    assert all(mesh.axis_names == axes and set(mesh.axis_types) == {AxisType.Auto} for mesh in auto)
    assert len(testing.meshes(axes)) == 2 * len(auto)


def test_every_split_if_asked_for():
    found = testing.meshes(("a", "b"), devices=[8, 4096], axis_types="explicit", every=True)
    assert [mesh.devices.shape for mesh in found] == [(1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"axes": "dp"}, TypeError, "such as \\('dp',\\)"),
        ({"axes": ()}, ValueError, "axis names that differ"),
        ({"axes": ("a", "a")}, ValueError, "axis names that differ"),
        ({"devices": [0, 2]}, ValueError, "positive numbers of devices"),
        ({"devices": []}, ValueError, "positive numbers of devices"),
        ({"axis_types": "automatic"}, ValueError, "'automatic' is unknown"),
    ],
)
def test_bad_meshes(arguments, error, message):
    with pytest.raises(error, match=message):
        testing.meshes(**arguments)


def test_ids_are_readable():
    assert testing.mesh_id(sk.make_mesh({"dp": 2, "sp": 4})) == "dp2-sp4"
    assert testing.mesh_id(sk.make_mesh({"dp": 2}, axis_types="explicit")) == "dp2-explicit"
    assert testing.mesh_id(sk.make_mesh({"a": 2, "b": 2}, axis_types={"a": "explicit"})) == "a2-b2-mixed"
    assert testing.mesh_id(3) is None


@pytest.mark.parametrize("mesh", testing.meshes(("dp", "sp"), devices=[4]), ids=testing.mesh_id)
def test_as_a_parametrization(mesh, request):
    assert request.node.name.endswith(f"[{testing.mesh_id(mesh)}]")
    x = sk.shard_tensor(jax.numpy.arange(4.0), {"dp": sk.Shard(0)}, mesh)
    with testing.entered(mesh):
        assert float((x + x).sum()) == 12
