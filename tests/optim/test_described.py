"""Optimizers of parameters that are only described: the state is described as it would be."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardkit as sk
from shardkit.optim import FlatShard
from shardkit.parallel.config import optimizer_for, read_config

STAGES = [sk.ShardingStage1, sk.ShardingStage2, sk.ShardingStage3]
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "master weights": lambda: sk.master_weights(optax.adam(1e-2)),
    "loss scale": lambda: sk.dynamic_loss_scale(optax.adam(1e-2)),
    "noise": lambda: optax.add_noise(0.1, 0.1, key=0),
}
PLACES = {"w": {"tp": sk.Shard(1)}, "b": {}, "odd": {}, "s": {}}
SHAPES = {"w": (8, 6), "b": (6,), "odd": (7, 3), "s": ()}


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    mesh = sk.make_mesh({"dp": 4, "tp": 2}, axis_types=request.param)
    with jax.set_mesh(mesh):
        yield mesh


def described(mesh, dtype=jnp.float32):
    return {
        name: sk.shard_tensor(jax.ShapeDtypeStruct(shape, dtype), PLACES[name], mesh) for name, shape in SHAPES.items()
    }


def made(tree):
    return jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), tree)


def same(told, real):
    """The same structure, and of each leaf the same type and place."""
    assert jax.tree.structure(told) == jax.tree.structure(real)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(told), jax.tree.leaves(real), strict=True):
        assert isinstance(a, jax.ShapeDtypeStruct), path
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):
            assert a.sharding.is_fully_replicated
        else:
            assert a.weak_type == b.weak_type, path
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (path, a.sharding, b.sharding)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_described_as_it_would_be(mesh, name, stage):
    params = described(mesh, jnp.bfloat16)
    if stage is sk.ShardingStage3:
        params = sk.shard_params(params, "dp", mesh)
    tx = sk.shard_optimizer(OPTIMIZERS[name](), stage("dp"), mesh=mesh)
    same(tx.init(params), tx.init(made(params)))


@pytest.mark.parametrize("wrap", [sk.master_weights, sk.dynamic_loss_scale])
def test_around_a_sharded_optimizer(mesh, wrap):
    """These have arrays of their own beside what's described."""
    tx = wrap(sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"), mesh=mesh))
    params = described(mesh, jnp.bfloat16)
    told, real = tx.init(params), tx.init(made(params))
    assert jax.tree.structure(told) == jax.tree.structure(real)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(told)] == [(x.shape, x.dtype) for x in jax.tree.leaves(real)]
    same(told.inner, real.inner)


@pytest.mark.parametrize("stage", range(4))
def test_of_a_configuration(stage):
    mesh = sk.make_mesh({"dp": 4, "tp": 2})
    tx = optimizer_for(read_config({"dp": {"axis": "dp", "stage": stage}}, mesh), optax.adam(1e-2), mesh)
    params = described(mesh)
    same(tx.init(params), tx.init(made(params)))


def test_parameters_of_stage_3():
    mesh = sk.make_mesh({"dp": 4, "tp": 2})
    told = sk.shard_params(described(mesh), "dp", mesh)
    real = sk.shard_params(made(described(mesh)), "dp", mesh)
    same(told, real)
    assert isinstance(told["odd"], FlatShard)
    same(sk.unshard_params(told, "dp", mesh), sk.unshard_params(real, "dp", mesh))
    stacked = {"w": jax.ShapeDtypeStruct((3, 8, 6), jnp.float32)}
    assert sk.placements(sk.shard_params(stacked, "dp", mesh, first_dim=1)["w"]) == (sk.Shard(1), sk.Replicate())


def test_an_nnx_optimizer():
    mesh = sk.make_mesh({"dp": 8})
    model = nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
    sk.parallelize(model, {"": sk.DataParallel("dp")}, mesh)
    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"), mesh=mesh)
    state = nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param))
    cut = [x.sharding.spec for x in jax.tree.leaves(state) if x.shape == (8, 16)]
    assert cut == [jax.P("dp", None)] * 2


def test_a_step_can_be_compiled(mesh):
    """With the state that was described, to the program that the real one gets."""

    def loss(p, x):
        return jnp.mean(jnp.sum(jnp.tanh(x @ p["w"] + p["b"]), -1) + jnp.sum(p["odd"] ** 3) * p["s"])

    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"), mesh=mesh)
    run = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)

    @jax.jit
    def step(p, s, x):
        value, grads = run(p, x)
        updates, s = tx.update(grads, s, p)
        return optax.apply_updates(p, updates), s, value

    params = {name: sk.shard_tensor(jax.ShapeDtypeStruct(shape, "float32"), {}, mesh) for name, shape in SHAPES.items()}
    x = sk.shard_tensor(jax.ShapeDtypeStruct((16, 8), jnp.float32), {"dp": sk.Shard(0)}, mesh)
    told = sk.collectives(step, params, tx.init(params), x)
    real = made(params)
    assert told.bytes() == sk.collectives(step, real, tx.init(real), made(x)).bytes()
    assert told.count(kind="reduce_scatter") + told.count(kind="all_reduce") > 0


def test_update_under_jit_finds_its_mesh_without_an_ambient_one():
    """Explicit axes, a mesh that's only described: nobody can set it."""
    mesh = sk.make_mesh({"dp": 8}, axis_types="explicit")
    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"), mesh=mesh)
    params = {"w": sk.shard_tensor(jax.ShapeDtypeStruct((8, 6), jnp.float32), {}, mesh)}
    updates, _ = jax.jit(tx.update).lower(params, tx.init(params), params).out_info
    assert updates["w"].shape == (8, 6)


def test_placing_a_shape():
    mesh = sk.make_mesh({"dp": 4, "tp": 2})
    x = sk.shard_tensor(jax.ShapeDtypeStruct((8, 6), jnp.bfloat16), {"tp": sk.Shard(1)}, mesh)
    assert (x.shape, x.dtype, sk.placements(x)) == ((8, 6), jnp.bfloat16, (sk.Replicate(), sk.Shard(1)))
    moved = sk.reshard(x, {"dp": sk.Shard(0)})
    assert sk.placements(moved) == (sk.Shard(0), sk.Replicate())
    padded = sk.shard_tensor(jax.ShapeDtypeStruct((7, 6), jnp.float32), {"dp": sk.Shard(0)}, mesh, uneven="pad")
    assert (padded.shape, padded.array.shape, padded.sharding.spec) == ((7, 6), (8, 6), jax.P("dp", None))
    with pytest.raises(ValueError, match='uneven="pad"'):
        sk.shard_tensor(jax.ShapeDtypeStruct((7, 6), jnp.float32), {"dp": sk.Shard(0)}, mesh)


@pytest.mark.parametrize(
    ("what", "call"),
    {
        "shard_tensor": lambda mesh: sk.shard_tensor(np.ones(8), {"dp": sk.Shard(0)}, mesh),
        "reshard": lambda mesh: sk.reshard(jnp.ones(8), {"dp": sk.Shard(0)}, mesh),
        "reshard ": lambda mesh: sk.shard_params({"w": jnp.ones(8)}, "dp", mesh),
        "shard_batch": lambda mesh: sk.shard_batch(np.ones(8), {"dp": sk.Shard(0)}, mesh),
        "parallelize_params": lambda mesh: sk.parallelize_params({"w": jnp.ones(8)}, {"w": {"dp": sk.Shard(0)}}, mesh),
    }.items(),
)
def test_no_values_go_to_devices_that_are_only_described(what, call, monkeypatch):
    monkeypatch.setattr("shardkit.meshes.holds_arrays", lambda mesh: False)
    told = re.escape(f"{what.strip()}: the devices of mesh {{'dp': 8}} are only described (sk.target_mesh)")
    with pytest.raises(ValueError, match=told):
        call(sk.make_mesh({"dp": 8}))


def test_a_shape_is_a_whole_value():
    mesh = sk.make_mesh({"dp": 8})
    x = sk.shard_tensor(jax.ShapeDtypeStruct((8, 6), jnp.float32), {"dp": sk.Shard(0)}, mesh)
    for call in (lambda: sk.reshard(x, {"dp": sk.Partial()}), lambda: sk.reshard(x, {}, src={"dp": sk.Partial()})):
        with pytest.raises(ValueError, match="stands for a whole value, so that it has no Partial placement"):
            call()
    with pytest.raises(ValueError, match="name mesh axes"):
        sk.reshard(x, {}, src={"nope": sk.Shard(0)})
