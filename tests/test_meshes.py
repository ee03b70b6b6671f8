"""Making meshes, and finding the one a call should use."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.launch import environment
from shardkit.meshes import ambient_mesh, concrete_mesh, manual_axes, mesh_of, platform_of, resolve_mesh

pytestmark = pytest.mark.smoke


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({"x": 1}, (1,)),
        ({"x": 8}, (8,)),
        ({"x": -1}, (8,)),
        ({"x": 2, "y": -1}, (2, 4)),
        ({"x": -1, "y": 1, "z": 2}, (4, 1, 2)),
        ({"x": 8, "y": -1}, (8, 1)),
        ({"x": 2, "y": 2}, (2, 2)),  # fewer devices than there are
        ({"x": np.int64(4)}, (4,)),
    ],
)
def test_sizes(axes, sizes):
    mesh = sk.make_mesh(axes)
    assert mesh.axis_names == tuple(axes)
    assert mesh.axis_sizes == mesh.devices.shape == sizes
    assert len(set(mesh.devices.flat)) == mesh.devices.size


@pytest.mark.parametrize(
    ("given", "types"),
    [
        ("auto", (AxisType.Auto, AxisType.Auto)),
        ("explicit", (AxisType.Explicit, AxisType.Explicit)),
        (AxisType.Explicit, (AxisType.Explicit, AxisType.Explicit)),
        ({"y": "explicit"}, (AxisType.Auto, AxisType.Explicit)),
        ({"x": AxisType.Explicit, "y": "auto"}, (AxisType.Explicit, AxisType.Auto)),
    ],
)
def test_axis_types(given, types):
    assert sk.make_mesh({"x": 2, "y": 2}, axis_types=given).axis_types == types


def test_auto_is_the_default():
    assert sk.make_mesh({"x": 2}).axis_types == (AxisType.Auto,)


def test_the_devices_given_are_the_devices_used():
    chosen = jax.devices()[4:]
    assert set(sk.make_mesh({"x": 2, "y": -1}, devices=chosen).devices.flat) == set(chosen)


@pytest.mark.parametrize(
    ("axes", "kind", "message"),
    [
        ({}, ValueError, 'make_mesh needs at least one axis, e.g. make_mesh({"dp": -1})'),
        ([("x", 2)], TypeError, 'make_mesh takes a mapping of axis name to size, e.g. {"dp": 2}'),
        ({"x": 0}, ValueError, "mesh axis sizes must be positive integers, or -1 for the rest; got {'x': 0}"),
        ({"x": -2, "y": 2}, ValueError, "got {'x': -2}"),
        ({"x": 2.0}, ValueError, "got {'x': 2.0}"),
        ({"x": True}, ValueError, "got {'x': True}"),
        ({"x": -1, "y": -1}, ValueError, "only one mesh axis can be -1, got ['x', 'y']"),
        ({"x": 3, "y": -1}, ValueError, "8 devices can't be split into {'x': 3, 'y': -1}: the fixed axes take 3"),
        ({"x": 16}, ValueError, "mesh {'x': 16} needs 16 devices, but there are 8"),
        ({"x": 4, "y": 4}, ValueError, 'jax.config.update("jax_num_cpu_devices", 16)'),
    ],
)
def test_bad_meshes(axes, kind, message):
    with refuses(message, kind):
        sk.make_mesh(axes)


@pytest.mark.parametrize("axes", [{"x": 16}, {"x": 4, "y": 4}, {"x": 16, "y": -1}])
def test_a_process_that_was_launched_and_never_connected_is_told(monkeypatch, axes):
    for name, value in environment.variables(environment.Told("127.0.0.1:4000", 2, 1, 8)).items():
        monkeypatch.setenv(name, value)
    with refuses("this process is one of 2 that python -m shardkit.launch started") as raised:
        sk.make_mesh(axes)
    assert "call sk.initialize() first in the script" in str(raised.value)
    assert "jax_num_cpu_devices" not in str(raised.value)
    with refuses("only one mesh axis can be -1") as raised:
        sk.make_mesh({"x": -1, "y": -1})
    assert "launch" not in str(raised.value)
    monkeypatch.setenv(environment.PROCESSES, "1")
    with refuses("devices") as raised:
        sk.make_mesh(axes)
    assert "launch" not in str(raised.value)


def test_a_mesh_of_numbers_is_refused():
    numbers = jax.sharding.Mesh(np.arange(8).reshape(2, 4), ("dp", "sp"))
    text = "mesh must hold devices, as sk.make_mesh({'dp': 2, 'sp': 4}) makes it; this jax.sharding.Mesh was made of"
    with refuses(text, TypeError):
        sk.shard_tensor(np.ones(8), {"dp": sk.Shard(0)}, numbers)
    with refuses(text, TypeError):
        sk.partition(lambda x: x, {"dp": sk.Shard(0)}, mesh=numbers)(np.ones(8))


def test_too_many_devices_given():
    with refuses("mesh {'x': 2} needs 2 devices, but 4 were given in devices="):
        sk.make_mesh({"x": 2}, devices=jax.devices()[:4])


def test_bad_axis_types():
    with refuses("axis type 'manuel' is unknown; use one of ['auto', 'explicit', 'manual']"):
        sk.make_mesh({"x": 2}, axis_types="manuel")
    with refuses("axis_types names ['z'], but the axes are ('x',)"):
        sk.make_mesh({"x": 2}, axis_types={"z": "auto"})


# --- sub-meshes -----------------------------------------------------------------------------------


def test_sub_mesh_takes_the_devices_at_a_position():
    mesh = sk.make_mesh({"a": 2, "b": 2, "c": 2}, axis_types={"b": "explicit"})
    middle = sk.sub_mesh(mesh, b=1)
    assert (middle.axis_names, middle.axis_types) == (("a", "c"), (AxisType.Auto, AxisType.Auto))
    assert middle.devices.tolist() == mesh.devices[:, 1, :].tolist()
    line = sk.sub_mesh(mesh, c=0, a=1)
    assert (line.axis_names, line.axis_types) == (("b",), (AxisType.Explicit,))
    assert line.devices.tolist() == mesh.devices[1, :, 0].tolist()


def test_bad_sub_meshes():
    mesh = sk.make_mesh({"a": 2, "b": 4})
    with refuses("the mesh has no axis 'x'; it has ('a', 'b')"):
        sk.sub_mesh(mesh, x=0)
    for position in (2, -1):
        with refuses(f"axis 'a' has size 2, so there's no position {position}"):
            sk.sub_mesh(mesh, a=position)
    with refuses("a sub-mesh keeps at least one axis"):
        sk.sub_mesh(mesh, a=0, b=0)


# --- which mesh -----------------------------------------------------------------------------------


def place(mesh):
    return jax.device_put(np.zeros(8), NamedSharding(mesh, P(mesh.axis_names[0])))


def test_argument_then_array_then_ambient():
    a, b, c = (sk.make_mesh({name: 2}) for name in "abc")
    with jax.set_mesh(c):
        assert resolve_mesh(a, place(b), what="f") == a
        assert resolve_mesh(None, np.zeros(3), place(b), what="f") == b
        assert resolve_mesh(None, np.zeros(3), what="f") == c.abstract_mesh
    assert ambient_mesh() is None


def test_devices_behind_the_ambient_mesh():
    mesh, other = sk.make_mesh({"a": 2}), sk.make_mesh({"b": 2})
    assert concrete_mesh(mesh) is mesh
    assert concrete_mesh(mesh.abstract_mesh) == mesh.abstract_mesh
    seen = []
    with jax.set_mesh(mesh):
        assert concrete_mesh(mesh.abstract_mesh) == mesh
        assert concrete_mesh(other.abstract_mesh) == other.abstract_mesh
        jax.jit(lambda x: seen.append(concrete_mesh(mesh.abstract_mesh)) or x)(1.0)
    assert seen == [mesh.abstract_mesh]


def test_no_mesh_names_the_three_places():
    with refuses("f found no mesh: not in mesh=, not on its array arguments") as error:
        resolve_mesh(None, np.zeros(3), what="f")
    assert "none is ambient (jax.set_mesh(mesh))" in str(error.value)


def test_mesh_of(axis_types):
    mesh = sk.make_mesh({"x": 4}, axis_types=axis_types)
    assert mesh_of(place(mesh)) == mesh
    assert mesh_of(sk.shard_tensor(np.zeros(5), [sk.Shard(0)], mesh, uneven="pad")) == mesh
    assert mesh_of(np.zeros(3)) is None
    assert mesh_of(jax.numpy.zeros(3)) is None


def test_inside_a_manual_region_its_mesh_wins():
    mesh = sk.make_mesh({"x": 2, "y": 4})
    seen = []

    def body(v):
        seen.append((resolve_mesh(mesh, what="f").manual_axes, resolve_mesh(None, v, what="f").manual_axes))
        seen.append(manual_axes())
        return v

    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}))(np.zeros(8))
    assert seen == [(("x",), ("x",)), {"x"}]
    assert manual_axes() == frozenset()


def test_another_mesh_inside_a_manual_region():
    mesh, other = sk.make_mesh({"x": 2}), sk.make_mesh({"x": 4})

    def body(v):
        resolve_mesh(other, what="f")
        return v

    with refuses("f: mesh={'x': 4} was given inside a shard_map over mesh {'x': 2}; leave mesh out there"):
        jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(np.zeros(8))


def test_the_platform_of_meshes():
    mesh = sk.make_mesh({"sp": 4})
    assert platform_of(mesh) == platform_of(mesh.abstract_mesh) == jax.default_backend()


def test_axes_that_take_no_whole_dims_of_a_torus(monkeypatch):
    """Where JAX finds no whole dims for each axis, some are split: over the devices that it would have taken."""

    def refuse(*_, **__):
        raise NotImplementedError("Failed to find assignment")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    mesh = sk.make_mesh({"a": 2, "b": 2})
    assert dict(mesh.shape) == {"a": 2, "b": 2}
    assert set(mesh.devices.flat) == set(jax.devices()[:4])
