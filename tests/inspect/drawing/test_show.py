"""What ``show`` takes and refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.inspect.drawing import show

S, P = sk.Shard, PartitionSpec
ABSTRACT = jax.sharding.AbstractMesh((2, 4), ("dp", "sp"))


@pytest.mark.parametrize(
    "given",
    [
        {"dp": S(0), "sp": S(1)},
        [S(0), S(1)],
        P("dp", "sp"),
        sk.Layout(ABSTRACT, P("dp", "sp")),
        NamedSharding(ABSTRACT, P("dp", "sp")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_all_forms_of_placements(given):
    assert str(show(given, ABSTRACT, shape=(8, 8))) == str(show([S(-2), S(-1)], ABSTRACT, shape=(8, 8)))


def test_arrays_and_their_descriptions(mesh_for, axis_types):
    sharding = NamedSharding(mesh_for({"dp": 2, "sp": 4}, axis_types), P("dp"))
    x = jax.device_put(jnp.zeros((8, 2), jnp.float32), sharding)
    described = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)
    assert str(show(x)) == str(show(described))
    assert str(show(x)).startswith("float32[8, 2] on mesh dp=2 sp=4 (cpu): 64 B, 32 B a device\n")


def test_nothing_is_printed(capsys, mesh_for):
    show({"a": S(0)}, mesh_for({"a": 8}))
    assert capsys.readouterr().out == ""


def test_other_dtypes(mesh_for):
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh_for({"a": 8}), P("a")))
    assert show(keys).to_dict()["dtype"].startswith("key<")


def test_tracers_are_refused(mesh_for):
    mesh = mesh_for({"a": 8})
    with pytest.raises(TypeError, match=r"needs a layout.*inside jit pass the sharding"):
        jax.eval_shape(show, jnp.zeros(8))
    padded = sk.shard_tensor(jnp.zeros(5), {"a": S(0)}, mesh, uneven="pad")
    with pytest.raises(TypeError, match="needs a layout"):
        jax.eval_shape(show, padded)
    partial = sk.from_local([jnp.zeros(3)] * 8, {"a": sk.Partial()}, mesh)
    with pytest.raises(TypeError, match="needs a layout"):
        jax.eval_shape(show, partial)


def test_the_sharding_inside_jit(mesh_for):
    sharding = NamedSharding(mesh_for({"a": 8}), P("a"))
    seen = []
    jax.eval_shape(lambda x: seen.append(show(sharding, shape=x.shape)) or x, jnp.zeros(8))
    assert seen[0].to_dict()["devices"][1]["dims"][0]["start"] == 1


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(3), "got ndarray.*lives on the host.*shard_tensor"),
        (3.0, "got float"),
        ("dp", "got str"),
        (S(0), "which mesh axis"),
        ({"w": np.zeros(3)}, "is no placement.*draw one leaf"),
        ([np.zeros(3)], "is no placement.*draw one leaf"),
    ],
    ids=str,
)
def test_what_has_no_layout(x, message):
    with pytest.raises(TypeError, match=message):
        show(x, ABSTRACT)


def test_no_sharding():
    with pytest.raises(ValueError, match="this ShapeDtypeStruct of shape \\(3,\\) has none"):
        show(jax.ShapeDtypeStruct((3,), jnp.float32))


def test_no_mesh():
    with pytest.raises(ValueError, match="found no mesh"):
        show({"dp": S(0)}, shape=(8,))


def test_no_such_mesh():
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        show({"dp": S(0)}, {"dp": 8})  # type: ignore[arg-type]


def test_unknown_axis():
    with pytest.raises(ValueError, match="name mesh axes \\['tp'\\]"):
        show({"tp": S(0)}, ABSTRACT, shape=(8,))


def test_another_mesh(mesh_for):
    layout = sk.Layout(ABSTRACT, {"dp": S(0)})
    with pytest.raises(ValueError, match="leave mesh out"):
        show(layout, mesh_for({"dp": 8}))
    first, last = (jax.sharding.Mesh(np.array(jax.devices()[i : i + 4]), ("a",)) for i in (0, 4))
    with pytest.raises(ValueError, match="on other devices"):
        show(NamedSharding(first, P("a")), last)


def test_a_mesh_for_what_is_on_one_device(mesh_for):
    with pytest.raises(ValueError, match="SingleDeviceSharding, which is on no mesh"):
        show(jnp.zeros(8), mesh_for({"a": 8}))


def test_dims_out_of_range():
    with pytest.raises(ValueError, match="Shard\\(3\\) on mesh axis 'dp': the array has 2 dims"):
        show({"dp": S(3)}, ABSTRACT, shape=(8, 8))
    with pytest.raises(ValueError, match="speaks of 3 dims"):
        show(P(None, None, "dp"), ABSTRACT, shape=(8, 8))


def test_dims_from_the_last_need_a_shape():
    with pytest.raises(ValueError, match="give shape="):
        show({"dp": S(-1)}, ABSTRACT)


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match=r'dim 0 of shape \(5,\).*does not divide.*uneven="pad"'):
        show({"dp": S(0)}, ABSTRACT, shape=(5,))


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [(8, TypeError, "size of each dim"), ((2.5,), TypeError, "size of each dim"), ((-8,), ValueError, "at least 0")],
)
def test_shapes_that_are_none(shape, error, message):
    with pytest.raises(error, match=message):
        show({"dp": S(0)}, ABSTRACT, shape=shape)


def test_a_shape_for_what_has_one():
    x = jnp.zeros((3, 4))
    assert str(show(x, shape=(3, 4))) == str(show(x))
    with pytest.raises(ValueError, match="the array has shape \\(3, 4\\); leave it out"):
        show(x, shape=(12,))


def test_shardings_without_a_mesh_need_a_shape():
    with pytest.raises(ValueError, match="SingleDeviceSharding says who holds what only of a known shape"):
        show(jnp.zeros(3).sharding)


def test_reductions_of_two_kinds():
    with pytest.raises(ValueError, match="wait for different reductions"):
        show({"dp": sk.Partial(), "sp": sk.Partial("max")}, ABSTRACT, shape=(8,))
