"""``shard_batch`` in one process: values, shardings, forms of placements, padding, and bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.data import shard_batch

MESHES = {
    "1d": ({"dp": 8}, {"dp": sk.Shard(0)}, ("dp", None)),
    "1d of 2": ({"dp": 2}, [sk.Shard(0)], ("dp", None)),
    "2d": ({"dp": 4, "tp": 2}, {"dp": sk.Shard(0), "tp": sk.Shard(-1)}, ("dp", "tp")),
    "2d rows": ({"dp": 4, "fsdp": 2}, [sk.Shard(0), sk.Shard(0)], (("dp", "fsdp"), None)),
    "2d turned": ({"dp": 4, "fsdp": 2}, PartitionSpec(("fsdp", "dp")), (("fsdp", "dp"), None)),
    "3d": ({"a": 2, "b": 2, "c": 2}, {"b": sk.Shard(0), "c": sk.Shard(1)}, ("b", "c")),
    "one": ({"dp": 1}, {}, (None, None)),
}


def table(rows=8, columns=4):
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


@pytest.mark.parametrize("case", MESHES)
def test_values_and_sharding(case, axis_types, mesh_for, ambient):
    shape, placements, spec = MESHES[case]
    mesh = mesh_for(shape, axis_types)
    with ambient(mesh):
        found = shard_batch({"x": table(), "y": table().astype(np.float16)}, placements, mesh)
    for name, dtype in {"x": np.float32, "y": np.float16}.items():
        assert found[name].sharding == NamedSharding(mesh, PartitionSpec(*spec)) and found[name].dtype == dtype
        for shard in found[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), table()[shard.index].astype(dtype))


@dataclasses.dataclass
class Batch:
    image: object
    step: object


jax.tree_util.register_dataclass(Batch, data_fields=["image", "step"], meta_fields=[])


def test_forms_of_placements(mesh_for):
    mesh = mesh_for({"x": 4, "y": 2})
    rows, step = table(), np.float32(3)
    cases = [
        ({"image": rows, "step": step}, {"image": {"x": sk.Shard(0)}, "step": {}}),
        ({"image": rows, "step": step}, {"image": PartitionSpec("x"), "step": [sk.Replicate(), sk.Replicate()]}),
        ({"image": {"deep": [rows, rows]}, "step": step}, {"image": {"x": sk.Shard(0)}, "step": {}}),
        ({"image": rows, "step": step}, {"image": sk.Layout(mesh, {"x": sk.Shard(0)}), "step": PartitionSpec()}),
        ((rows, step), (NamedSharding(mesh, PartitionSpec("x")), {})),
        ([rows, rows], {"x": sk.Shard(0)}),
        (Batch(rows, step), Batch({"x": sk.Shard(0)}, {})),
        # The batch's names are the mesh's: what is below says which is meant.
        ({"x": rows, "y": rows}, {"x": {"x": sk.Shard(0)}, "y": {"x": sk.Shard(0)}}),
    ]
    for batch, placements in cases:
        found = shard_batch(batch, placements, mesh)
        assert jax.tree.structure(found) == jax.tree.structure(batch)
        for array, value in zip(jax.tree.leaves(found), jax.tree.leaves(batch), strict=True):
            np.testing.assert_array_equal(array, value)
            assert sk.placements(array) == ((sk.Shard(0) if np.ndim(value) else sk.Replicate()), sk.Replicate())


def test_where_the_mesh_comes_from(mesh_for):
    mesh = mesh_for({"dp": 4})
    sharding = NamedSharding(mesh, PartitionSpec("dp"))
    for placements in (sharding, {"x": sharding}, sk.Layout(mesh, [sk.Shard(0)])):
        assert shard_batch({"x": table()}, placements)["x"].sharding.mesh == mesh
    with jax.set_mesh(mesh):
        assert shard_batch(table(), {"dp": sk.Shard(0)}).sharding.mesh == mesh


def test_jax_arrays_numbers_and_a_step(mesh_for):
    """Arrays that are on devices already; what is made goes into a step without any communication before it."""
    mesh = mesh_for({"dp": 4})
    batch = {"x": jnp.asarray(table()), "bf16": jnp.ones((8,), jnp.bfloat16), "flag": np.ones(8, bool)}
    found = shard_batch(batch, {"dp": sk.Shard(0)}, mesh)
    assert found["bf16"].dtype == jnp.bfloat16 and found["flag"].dtype == bool
    np.testing.assert_array_equal(found["x"], table())
    assert len(sk.collectives(lambda b: b["x"] * b["flag"][:, None], found)) == 0
    assert float(jax.jit(lambda b: b["x"].sum())(found)) == table().sum()
    again = shard_batch(found, {"dp": sk.Shard(0)}, mesh_for({"dp": 2}))
    np.testing.assert_array_equal(again["x"], table())
    assert float(shard_batch(3, {}, mesh)) == 3


def test_a_buffer_may_be_filled_anew(mesh_for):
    mesh = mesh_for({"dp": 4})
    # Aligned as XLA likes it, it would be used as it is.
    memory = np.zeros(64 + 8 * 64, np.uint8)
    start = -memory.ctypes.data % 64
    buffer = memory[start : start + 512].view(np.float32).reshape(8, 16)
    found = shard_batch(buffer, {"dp": sk.Shard(0)}, mesh)
    buffer[:] = 1
    assert float(found.sum()) == 0


def test_64_bits(mesh_for):
    mesh = mesh_for({"dp": 4})
    assert shard_batch(np.arange(8), {}, mesh).dtype == np.int64
    with jax.enable_x64(False):
        assert shard_batch(np.arange(8), {}, mesh).dtype == np.int32


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_padding(rows, axis_types, mesh_for, ambient):
    mesh = mesh_for({"dp": 4, "tp": 2}, axis_types)
    placements = {"step": {}, "x": {"dp": sk.Shard(0), "tp": sk.Shard(1)}, "y": {}}
    with ambient(mesh):
        batch = {"step": 7, "x": table(rows), "y": np.arange(rows)}
        found, mask = shard_batch(batch, placements, mesh, uneven="pad")
    padded = -(-rows // 4) * 4
    assert found["x"].shape == (padded, 4) and found["y"].shape == (padded,) and int(found["step"]) == 7
    assert mask.sharding == NamedSharding(mesh, PartitionSpec("dp"))
    np.testing.assert_array_equal(mask, np.arange(padded) < rows)
    np.testing.assert_array_equal(np.asarray(found["x"])[:rows], table(rows))
    assert not np.asarray(found["x"])[rows:].any() and not np.asarray(found["y"])[rows:].any()


def test_padding_of_leaves_cut_more_and_less(mesh_for):
    mesh = mesh_for({"a": 2, "b": 3})
    placements = {"x": {"a": sk.Shard(0)}, "y": {"b": sk.Shard(0)}}
    found, mask = shard_batch({"x": np.arange(4), "y": np.arange(4)}, placements, mesh, uneven="pad")
    np.testing.assert_array_equal(found["x"], [0, 1, 2, 3, 0, 0])
    np.testing.assert_array_equal(found["y"], found["x"])
    assert mask.sharding.spec == PartitionSpec("a")


X, ROWS = table(), {"dp": sk.Shard(0)}


@pytest.mark.parametrize(
    ("batch", "placements", "options", "kind", "message"),
    [
        (X, ROWS, {"uneven": "drop"}, ValueError, 'uneven=\'drop\' is unknown; use "error" or "pad"'),
        (X[:6], ROWS, {}, ValueError, r'dim 0 of batch has 6 .* into 4 blocks.*uneven="pad"'),
        (
            X[:, :3],
            {"tp": sk.Shard(1)},
            {"uneven": "pad"},
            ValueError,
            "dim 1 of batch has 3 .*pad or crop it",
        ),
        ({"x": X, "n": 3}, ROWS, {}, ValueError, r"batch\['n'\] has 0 dims. Shard\(0\) .*Give placements per leaf"),
        (X, {"dp": sk.Shard(2)}, {}, ValueError, r"batch has 2 dims. Shard\(2\) .*Give placements per leaf"),
        (X, PartitionSpec("dp", None, None), {}, ValueError, "speaks of 3 dims, but the array has 2"),
        ({"x": X}, {"dp": sk.Partial()}, {}, ValueError, r"batch\['x'\] are Partial over \('dp',\); use Shard or"),
        ({"x": X}, {"pd": sk.Shard(0)}, {}, ValueError, r"no(r|t) .*tree like the batch: .*\['pd'\].* no parts of it"),
        ({"x": X, "y": X}, {"x": ROWS}, {}, ValueError, r"""of which \["\['y'\]"\] have none"""),
        ({"x": X}, {"x": [ROWS, ROWS]}, {}, ValueError, r"at batch\['x'\] are neither .*this is one leaf"),
        (X, [sk.Shard(0)], {}, ValueError, "got 1 placements"),
        (X, PartitionSpec("pd"), {}, ValueError, r"name mesh axes \['pd'\]"),
        ({"x": np.array(["a"] * 8)}, ROWS, {}, TypeError, r"batch\['x'\] has dtype <U1, which devices can't hold"),
        ({"x": np.array([None] * 8)}, ROWS, {}, TypeError, r"batch\['x'\] has dtype object"),
        (jax.random.split(jax.random.key(0), 8), ROWS, {}, TypeError, "give its jax.random.key_data"),
        ({"x": X, "y": X[:4]}, ROWS, {"uneven": "pad"}, ValueError, r"equally many; got first dims .*8.*4"),
        (3, {}, {"uneven": "pad"}, ValueError, "no leaf of the batch has one"),
        ({}, {}, {}, ValueError, "has no arrays in it"),
    ],
)
def test_bad_input(batch, placements, options, kind, message, mesh_for):
    with pytest.raises(kind, match=message):
        shard_batch(batch, placements, mesh_for({"dp": 4, "tp": 2}), **options)


def test_no_mesh():
    with pytest.raises(ValueError, match="shard_batch found no mesh"):
        shard_batch(X, ROWS)
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        shard_batch(X, ROWS, "dp")
    with pytest.raises(ValueError, match="is abstract"):
        shard_batch(X, ROWS, jax.sharding.AbstractMesh((4,), ("dp",)))


def test_under_jit(mesh_for):
    mesh = mesh_for({"dp": 4})
    with pytest.raises(TypeError, match=r"batch\['x'\] is traced; call it outside jit"):
        jax.jit(lambda x: shard_batch({"x": x}, ROWS, mesh))(X)
