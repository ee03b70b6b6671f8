"""`check_same` in a process alone, and the words for what differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from shardkit.hosts import ProcessMismatchError, agree, check_same, exchange
from shardkit.hosts.agreeing import differences
from shardkit.hosts.leaves import describe, leaves
from shardkit.hosts.same import different


def test_alone(mesh_for, axis_types, ambient):
    """A process agrees with itself, whatever it holds."""
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = sk.shard_tensor(jnp.arange(16.0).reshape(4, 4), {"dp": sk.Shard(0)}, mesh)
    tree = {
        "x": x,
        "padded": sk.shard_tensor(jnp.arange(5.0), {"sp": sk.Shard(0)}, mesh, uneven="pad"),
        "partial": sk.from_local(lambda index: np.ones(3), {"dp": sk.Partial()}, mesh),
        "key": jax.random.key(0),
        "scalar": jnp.float32(3),
        "host": np.arange(3),
        "words": ["adam", None, 3, 1.5, object()],
    }
    check_same(tree, "the state")
    check_same(tree, "the state", values=True)
    with ambient(mesh):
        check_same(tree["x"], values=True)
        check_same({"keys": tree["key"]}, values=True)


def test_torn_copies(mesh_for, axis_types):
    """Copies of one part that differ between devices of one process."""
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    parts = [jax.device_put(np.full(2, float(n == 5)), device) for n, device in enumerate(mesh.devices.flat)]
    torn = jax.make_array_from_single_device_arrays((4,), sharding, parts)
    with pytest.raises(ProcessMismatchError) as caught:
        check_same({"w": torn}, "weights", values=True)
    assert "weights: the elements differ" in str(caught.value)
    assert "['w'][2:4]: device 4: " in str(caught.value) and "(process 0)" in str(caught.value)
    check_same({"w": torn}, "weights")


def test_within_jit():
    with pytest.raises(TypeError, match=r"check_same\('tree'\) was called within jit"):
        jax.jit(check_same)(jnp.ones(3))


def test_described(mesh_for, axis_types):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    kind = axis_types.capitalize()
    x = sk.shard_tensor(jnp.zeros((4, 8), jnp.bfloat16), {"sp": sk.Shard(1)}, mesh)
    assert describe(x).startswith("bfloat16[4, 8], P")
    assert describe(x).endswith(f"on {kind} {{'dp': 2, 'sp': 4}}")
    assert describe(jnp.zeros(3, jnp.int32)) == "int32[3], on one device"
    assert describe(jnp.asarray(3.0)).startswith("float64[] (weak)")
    assert describe(np.zeros(3, np.int8)) == "NumPy int8[3]"
    assert describe(np.float32(1)) == "NumPy float32[]"
    assert describe(None) == "NoneType" and describe(3) == "int"
    padded = sk.shard_tensor(jnp.zeros(5, jnp.float32), {"sp": sk.Shard(0)}, mesh, uneven="pad")
    assert describe(padded).startswith("Padded for [5]: float32[8], P")
    partial = sk.from_local(lambda index: np.ones(3), {"dp": sk.Partial("max")}, mesh)
    assert describe(partial).startswith("PartialArray (max over dp) for [3]: float64[2, 3], P")


def test_leaves():
    assert leaves(3) == [("the value itself", 3)]
    assert leaves({"a": [None, 1]}) == [("['a'][0]", None), ("['a'][1]", 1)]


def test_different():
    """Those that differ from most come first; a leaf that some lack is named, too; many leaves are few lines."""
    most = {"w": "float32[4]", "b": "float32[2]"}
    lines = different([([0, 2, 3], most), ([1], {"w": "float32[8]", "b": "float32[2]", "z": "int"})])
    assert lines == [
        "  w: process 1: float32[8]; processes 0, 2, 3: float32[4]",
        "  z: process 1: int; processes 0, 2, 3: no such leaf",
    ]
    lines = different([([0], {f"w{n}": "a" for n in range(50)}), ([1], {f"w{n}": "b" for n in range(50)})])
    assert len(lines) == 21 and lines[-1] == "  and 30 more leaves"
    assert different([([0], most), ([1], dict(reversed(most.items())))]) == ["  the order of the leaves"]


def test_agree_alone():
    agree("images", {"shape": [8, 32]})
    assert exchange("anything", {"a": (1, 2)}) == [{"a": [1, 2]}]


def test_differences():
    said = [{"a": 1}, {"a": 2, "b": None}, {"a": 1}]
    assert differences(said) == [
        "  a: process 1: 2; processes 0, 2: 1",
        "  b: process 1: null; processes 0, 2: nothing",
    ]
    assert differences([{"a": [1]}, {"a": [1]}]) == []
