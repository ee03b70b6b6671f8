"""Trees saved on one mesh and restored on another: values, placements, axis types, names."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkit as sk

BOTH = ("auto", "explicit")


def on(shape, axis_types="auto"):
    count = int(np.prod(list(shape.values())))
    return sk.make_mesh(shape, axis_types=axis_types, devices=jax.devices()[:count])


def check(found, wanted, like):
    """Bit for bit, and where the target has it, axis types and all."""
    assert found.dtype == wanted.dtype
    assert found.sharding == like.sharding
    assert found.sharding.mesh.axis_types == like.sharding.mesh.axis_types
    np.testing.assert_array_equal(np.asarray(found), wanted)


VALUES = {
    "matrix": np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32),
    "double": np.random.default_rng(1).normal(size=(8,)),
    "half": np.arange(32).astype("bfloat16").reshape(4, 8),
    "count": np.int32(7).reshape(()),
    "flags": np.arange(8) % 3 == 0,
    "complex": (np.arange(8) + 1j).astype(np.complex64),
    "empty": np.zeros((0, 8), np.float32),
}
SPECS = {
    "matrix": PartitionSpec("a", "b"),
    "double": PartitionSpec("a"),
    "half": PartitionSpec(None, ("a", "b")),
    "count": PartitionSpec(),
    "flags": PartitionSpec(("b", "a")),
    "complex": PartitionSpec("b"),
    "empty": PartitionSpec(None, "a"),
}


def placed(mesh, values, specs=SPECS):
    return {
        name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[name]), lambda index, x=x: x[index])
        for name, x in values.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    sk.save(path, placed(on({"a": 2, "b": 4}), VALUES), 3)
    return path


@pytest.mark.parametrize("axis_types", BOTH)
@pytest.mark.parametrize("shape", [{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 1, "b": 1}, {"a": 2, "b": 2}], ids=str)
def test_onto_other_meshes(saved, shape, axis_types):
    target = placed(on(shape, axis_types), jax.tree.map(np.zeros_like, VALUES))
    found = sk.restore(saved, target)
    for name, wanted in VALUES.items():
        check(found[name], wanted, target[name])


def test_onto_other_names_and_placements(saved):
    mesh = on({"x": 8})
    specs = dict.fromkeys(VALUES, PartitionSpec()) | {"matrix": PartitionSpec(None, "x"), "double": PartitionSpec("x")}
    target = placed(mesh, jax.tree.map(np.zeros_like, VALUES), specs)
    found = sk.restore(saved, target)
    for name, wanted in VALUES.items():
        check(found[name], wanted, target[name])


def test_onto_descriptions(saved):
    mesh = on({"x": 4})
    target = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
        for name, x in VALUES.items()
    }
    for name, x in sk.restore(saved, target).items():
        check(x, VALUES[name], target[name])


def test_onto_one_device_and_onto_numpy(saved):
    target = {name: jnp.zeros(x.shape, x.dtype) for name, x in VALUES.items()}
    target["double"] = jax.device_put(target["double"], jax.devices()[3])
    target["matrix"] = np.zeros_like(VALUES["matrix"])
    found = sk.restore(saved, target)
    assert isinstance(found["matrix"], np.ndarray)
    assert found["double"].sharding == SingleDeviceSharding(jax.devices()[3])
    assert not found["half"].committed
    for name, wanted in VALUES.items():
        assert found[name].dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), wanted)


def test_a_description_without_devices_is_refused(saved):
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    target = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for n, x in VALUES.items()}
    with pytest.raises(ValueError, match="complex: the target's mesh is abstract"):
        sk.restore(saved, target)


def test_numpy_and_single_arrays_onto_a_mesh(tmp_path):
    sk.save(tmp_path, {"n": VALUES["matrix"], "j": jnp.asarray(VALUES["double"])}, 0)
    mesh = on({"a": 2, "b": 4}, "explicit")
    target = placed(
        mesh, {"n": VALUES["matrix"] * 0, "j": VALUES["double"] * 0}, {"n": PartitionSpec("b"), "j": PartitionSpec("a")}
    )
    found = sk.restore(tmp_path, target)
    check(found["n"], VALUES["matrix"], target["n"])
    check(found["j"], VALUES["double"], target["j"])


@pytest.mark.parametrize("axis_types", BOTH)
def test_padded_arrays_onto_other_numbers_of_devices(tmp_path, axis_types):
    x = np.arange(13.0 * 5).reshape(13, 5)
    sk.save(tmp_path, {"x": sk.shard_tensor(x, {"a": sk.Shard(0)}, on({"a": 8}), uneven="pad")}, 1)
    for count in (2, 4):
        mesh = on({"b": count}, axis_types)
        target = {"x": sk.shard_tensor(x * 0, {"b": sk.Shard(1)}, mesh, uneven="pad")}
        found = sk.restore(tmp_path, target)["x"]
        assert isinstance(found, sk.Padded)
        assert found.array.sharding == target["x"].array.sharding
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(np.asarray(found.value), x)
    plain = sk.restore(tmp_path, {"x": np.zeros_like(x)})["x"]
    np.testing.assert_array_equal(plain, x)


def test_a_plain_array_onto_a_padded_one(tmp_path):
    x = np.arange(13.0)
    sk.save(tmp_path, x, 1)
    target = sk.shard_tensor(x * 0, {"a": sk.Shard(0)}, on({"a": 4}), uneven="pad")
    np.testing.assert_array_equal(np.asarray(sk.restore(tmp_path, target).value), x)


STAGES = {"1": sk.ShardingStage1, "2": sk.ShardingStage2, "3": sk.ShardingStage3}
SHAPES = {"odd": (7, 3), "w": (8, 24), "small": (3,)}


def trained(stage, axis, mesh, steps):
    """Parameters and state of Adam after some steps, and the transformation; ``stage`` None: on one device."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    if stage is None:
        params = jax.tree.map(jnp.asarray, params)
    else:
        params = jax.tree.map(lambda x: sk.shard_tensor(x, {}, mesh), params)
        tx = sk.shard_optimizer(tx, STAGES[stage](axis), mesh=mesh)
        if stage == "3":
            params = sk.shard_params(params, axis, mesh)
    state = tx.init(params)

    def step(params, state):
        # Of the parameters themselves, so that steps differ; a plain gradient, already reduced.
        grads = params
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step)
    for _ in range(steps):
        params, state = step(params, state)
    return {"params": params, "state": state}, step


def plain_of(tree, axis, mesh):
    whole = sk.unshard_params(tree["params"], axis, mesh) if axis else tree["params"]
    return {name: np.asarray(x) for name, x in whole.items()}


@pytest.fixture(scope="module")
def stage_checkpoints(tmp_path_factory):
    """Two steps done: by each stage over eight devices, and on one."""
    paths = {}
    for stage in (None, *STAGES):
        tree, _ = trained(stage, "dp", on({"dp": 8}), 2)
        paths[stage] = tmp_path_factory.mktemp(f"stage{stage}")
        sk.save(paths[stage], tree, 2)
    return paths


@pytest.fixture(scope="module")
def third_step():
    return plain_of(trained(None, None, None, 3)[0], None, None)


@pytest.mark.parametrize("count", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", STAGES)
@pytest.mark.parametrize("source", [None, *STAGES])
@pytest.mark.not_smoke
def test_any_stage_goes_on_from_any_other(stage_checkpoints, third_step, source, to, count):
    mesh = on({"fsdp": count})
    target, step = trained(to, "fsdp", mesh, 0)
    found = sk.restore(stage_checkpoints[source], target)
    kept = jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, found, target))
    assert all(kept)
    params, _ = step(found["params"], found["state"])
    done = plain_of({"params": params}, "fsdp", mesh)
    for name, wanted in third_step.items():
        np.testing.assert_allclose(done[name], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("source", STAGES)
def test_one_device_goes_on_from_any_stage(stage_checkpoints, third_step, source):
    target, step = trained(None, None, None, 0)
    found = sk.restore(stage_checkpoints[source], target)
    params, _ = step(found["params"], found["state"])
    for name, wanted in third_step.items():
        np.testing.assert_allclose(np.asarray(params[name]), wanted, rtol=1e-10, atol=1e-12)


def test_a_stage_goes_on_on_explicit_axes(stage_checkpoints):
    mesh = on({"dp": 4}, "explicit")
    with jax.set_mesh(mesh):
        target, _ = trained("2", "dp", mesh, 0)
        found = sk.restore(stage_checkpoints["3"], target)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        assert a.sharding == b.sharding
        assert a.sharding.mesh.axis_types == mesh.axis_types


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 8, rngs=rngs)


def test_a_plain_model_into_a_parallelized_one_and_back(tmp_path):
    plain = Net(nnx.Rngs(0))
    sk.save(tmp_path / "plain", {"model": plain}, 1)
    mesh = on({"dp": 2, "tp": 4})
    model = Net(nnx.Rngs(1))
    sk.parallelize(model, {"out": sk.ColWiseParallel("tp"), "conv": sk.ConvParallel("tp", dim="W")}, mesh)
    placed_at = sk.placements(model.out.kernel.get_value())
    assert sk.restore(tmp_path / "plain", {"model": model})["model"] is model
    assert sk.placements(model.out.kernel.get_value()) == placed_at == (sk.Replicate(), sk.Shard(1))
    np.testing.assert_array_equal(np.asarray(model.out.kernel.get_value()), plain.out.kernel.get_value())
    sk.save(tmp_path / "parallel", {"model": model}, 1)
    again = Net(nnx.Rngs(2))
    sk.restore(tmp_path / "parallel", {"model": again})
    for a, b in zip(jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(plain)), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_a_part_of_a_checkpoint(tmp_path):
    sk.save(tmp_path, {"model": Net(nnx.Rngs(0)), "epoch": 3}, 1)
    model = Net(nnx.Rngs(1))
    with pytest.raises(sk.CheckpointError, match="epoch: not in the target; the checkpoint has int"):
        sk.restore(tmp_path, {"model": model})
    sk.restore(tmp_path, {"model": model}, partial=True)
    np.testing.assert_array_equal(model.conv.kernel.get_value(), Net(nnx.Rngs(0)).conv.kernel.get_value())


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_jax_random(tmp_path, impl):
    mesh = on({"a": 4}, "explicit")
    one = jax.random.key(5, impl=impl)
    many = jax.random.split(jax.random.key(6, impl=impl), 8)
    sk.save(tmp_path, {"one": one, "many": many}, 1)
    target = {"one": jax.random.key(0, impl=impl), "many": jax.random.split(jax.random.key(0, impl=impl), 8)}
    sharded = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec("a")))(target["many"])
    for many_there in (target["many"], sharded):
        target["many"] = many_there
        found = sk.restore(tmp_path, target)
        assert found["many"].sharding == target["many"].sharding
        assert jax.random.normal(found["one"], ()) == jax.random.normal(one, ())
        np.testing.assert_array_equal(jax.random.key_data(found["many"]), jax.random.key_data(many))


def test_plain_values_and_states(tmp_path):
    class Data:
        position = 0

        def get_state(self):
            return {"position": self.position}

        def set_state(self, state):
            self.position = state["position"]

    class Grain(Data):
        def get_state(self):
            return str(self.position).encode()

        def set_state(self, state):
            self.position = int(state)

    data, grain = Data(), Grain()
    data.position, grain.position = 17, 23
    values = {"i": 3, "big": 2**80, "f": 0.1, "inf": float("inf"), "c": 1 + 2j, "s": "é\n", "b": b"\x00\xff", "t": True}
    sk.save(tmp_path, values | {"data": data, "grain": grain, "n": np.float32(2.5)}, 1)
    data.position = grain.position = 0
    target = {name: type(x)() for name, x in values.items()} | {"data": data, "grain": grain, "n": np.float32(0)}
    found = sk.restore(tmp_path, target)
    assert {name: found[name] for name in values} == values
    assert type(found["n"]) is np.float32
    assert found["n"] == np.float32(2.5)
    assert found["data"] is data
    assert (data.position, grain.position) == (17, 23)


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 6),
    source=st.sampled_from([1, 2, 4, 8]),
    to=st.sampled_from([1, 2, 4, 8]),
    dims=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
@settings(max_examples=12)
def test_any_size_from_any_number_of_devices_onto_any_other(tmp_path_factory, rows, columns, source, to, dims):
    path = tmp_path_factory.mktemp("any")
    x = np.random.default_rng(rows).normal(size=(rows, columns))
    sk.save(path, sk.shard_tensor(x, {"a": sk.Shard(dims[0])}, on({"a": source}), uneven="pad"), 0)
    target = sk.shard_tensor(x * 0, {"b": sk.Shard(dims[1])}, on({"b": to}), uneven="pad")
    found = sk.restore(path, target)
    np.testing.assert_array_equal(np.asarray(found), x)
    assert type(found) is type(target)


def test_orbax_alone_reads_the_arrays(saved):
    """Nobody needs shardkit to get at what it saved."""
    import orbax.checkpoint as ocp

    names = [name for name in VALUES if name != "empty"]
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.restore(saved / "3", ocp.args.PyTreeRestore(restore_args=how))
    for name in names:
        np.testing.assert_array_equal(found[name], VALUES[name])


def test_states_of_optimizers_with_fields_of_any_name(tmp_path):
    """A line search keeps ``value`` and ``grad``, whose leaves lie below it."""
    state = optax.lbfgs().init({"w": jnp.arange(3.0)})
    sk.save(tmp_path, state, 1)
    found = sk.restore(tmp_path, jax.tree.map(jnp.zeros_like, state))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axis_types", BOTH)
def test_within_a_mesh_of_other_devices(tmp_path, axis_types):
    """Targets needn't be on the mesh that is set where a checkpoint is saved and restored."""
    source, mesh = on({"a": 8}, "explicit"), on({"b": 4}, axis_types)
    keys = jax.random.split(jax.random.key(1), 8)

    def tree(mesh, axis, factor):
        tx = sk.shard_optimizer(optax.adam(1e-3), sk.ShardingStage2(axis), mesh=mesh)
        with jax.set_mesh(mesh):
            x = sk.shard_tensor(VALUES["matrix"][:7, :5] * factor, {}, mesh)
            state = tx.init({"x": x})
        there = jax.device_put(keys, NamedSharding(mesh, PartitionSpec(axis)))
        padded = sk.shard_tensor(VALUES["matrix"][:7] * factor, {axis: sk.Shard(0)}, mesh, uneven="pad")
        return {"x": x, "state": state, "keys": there, "padded": padded, "alone": jnp.float32(2 * factor)}

    target = tree(mesh, "b", 0)
    saved = tree(source, "a", 1)
    with jax.set_mesh(on({"o": 2}, axis_types)):
        sk.save(tmp_path, saved, 1)
        found = sk.restore(tmp_path, target)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        assert a.sharding == b.sharding
    np.testing.assert_array_equal(np.asarray(found["x"]), VALUES["matrix"][:7, :5])
    np.testing.assert_array_equal(np.asarray(found["padded"]), VALUES["matrix"][:7])
    np.testing.assert_array_equal(jax.random.key_data(found["keys"]), jax.random.key_data(keys))
    assert found["alone"] == 2


def test_onto_a_model_that_was_only_described(tmp_path):
    source = Net(nnx.Rngs(0))
    no_keys = jax.random.split(jax.random.key(0), 4)[:0]
    sk.save(tmp_path, {"model": source, "no keys": no_keys}, 1)
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    found = sk.restore(tmp_path, {"model": model, "no keys": jax.eval_shape(lambda: no_keys)})
    assert found["model"] is model
    np.testing.assert_array_equal(model.conv.kernel.get_value(), source.conv.kernel.get_value())
    assert isinstance(found["no keys"], jax.Array)
    assert found["no keys"].dtype == no_keys.dtype


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


def test_types_of_plain_values_are_kept(tmp_path):
    tree = {"color": Color.RED, "n": np.float64(3), "c": np.complex128(1j), "swapped": np.arange(3, dtype=">f4")}
    sk.save(tmp_path, tree, 1)
    target = {"color": Color.BLUE, "n": np.float64(0), "c": np.complex128(0), "swapped": np.zeros(3, ">f4")}
    found = sk.restore(tmp_path, target)
    assert found["color"] is Color.RED
    for name in ("n", "c", "swapped"):
        assert type(found[name]) is type(tree[name])
        assert found[name].dtype == tree[name].dtype
        np.testing.assert_array_equal(found[name], tree[name])


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn", "float4_e2m1fn"])
def test_small_numbers(tmp_path, dtype):
    x = np.array([0, 1, 0, 1]).astype(dtype)
    sk.save(tmp_path, {"x": x}, 1)
    found = sk.restore(tmp_path, {"x": x})["x"]
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x)


class Position:
    """Something that has a state, and may not take one."""

    def __init__(self, at, taken=True):
        self.at, self.taken = at, taken

    def get_state(self):
        return self.at

    def set_state(self, state):
        if not self.taken and state != self.at:
            raise ValueError("not taken")
        self.at = state


def test_nothing_is_changed_where_a_state_is_not_taken(tmp_path):
    sk.save(tmp_path, {"a": Position((1, 2)), "b": Position(3), "model": Net(nnx.Rngs(1))}, 1)
    a, model = Position(0), Net(nnx.Rngs(0))
    before = np.asarray(model.conv.kernel.get_value())
    with pytest.raises(ValueError, match="not taken"):
        sk.restore(tmp_path, {"a": a, "b": Position(0, taken=False), "model": model})
    assert a.at == 0
    np.testing.assert_array_equal(model.conv.kernel.get_value(), before)
    sk.restore(tmp_path, {"a": a, "b": Position(0), "model": model})
    assert a.at == (1, 2)


def test_names_of_any_characters(tmp_path):
    names = ["a.b", "/", "%", "%2E", "", " ", "é\n", "\\", "x" * 300, "value"]
    tree = {name: {"in": jnp.float32(i)} for i, name in enumerate(names)}
    sk.save(tmp_path / "a b%20é#", tree, np.int64(1))
    found = sk.restore(tmp_path / "a b%20é#", jax.tree.map(jnp.zeros_like, tree), step=np.int64(1))
    assert [float(found[name]["in"]) for name in names] == list(range(len(names)))
