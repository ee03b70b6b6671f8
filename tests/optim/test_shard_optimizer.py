"""Optimizers whose state is spread over devices give the parameters of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardkit as sk

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()
STAGES = [sk.ShardingStage1, sk.ShardingStage2, sk.ShardingStage3]
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.sgd(1e-1, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False, "odd": True, "s": False}),
    "two": lambda: optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-1)}, {"w": "a", "b": "b", "odd": "a", "s": "b"}
    ),
}


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def params_of():
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 6), "b": (6,), "odd": (7, 3), "s": ()}
    return {name: np.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


X = np.random.default_rng(1).normal(size=(16, 8))


def loss(p, x):
    return jnp.mean(jnp.sum(jnp.tanh(x @ p["w"] + p["b"]), -1) + jnp.sum(p["odd"] ** 3) * p["s"])


def reference(tx, params, steps=5):
    """The parameters after some steps on one device."""
    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params, X), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


def train(tx, params, mesh, steps=5):
    """The same with a batch that is spread over ``dp``."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        _, grads = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = jax.block_until_ready(step(params, state, X))
    return params, state, step


def close(got, wanted):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_one_device(name, mesh_for):
    """After five steps; parameters stay where they were, large state is cut, the scalars of it are whole."""
    mesh = mesh_for({"dp": 4})
    stage = STAGES[list(OPTIMIZERS).index(name) % 2]
    placed = jax.tree.map(lambda x: sk.shard_tensor(x, [R], mesh), params_of())
    tx = sk.shard_optimizer(OPTIMIZERS[name](), stage("dp"))
    params, state, _ = train(tx, placed, mesh)
    close(params, reference(OPTIMIZERS[name](), params_of()))
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
    for x in jax.tree.leaves(state):
        assert x.size < 4 or not x.sharding.is_fully_replicated, x.shape


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
def test_stages_and_what_each_device_keeps(stage, mesh_for):
    mesh = mesh_for({"dp": 4})
    cut = stage is sk.ShardingStage3
    placed = {name: sk.shard_tensor(x, [S(0) if cut and name == "w" else R], mesh) for name, x in params_of().items()}
    tx = sk.shard_optimizer(optax.adam(1e-2), stage("dp"))
    params, state, _ = train(tx, placed, mesh)
    close(params, reference(optax.adam(1e-2), params_of()))
    assert {n: x.sharding.is_fully_replicated for n, x in params.items()} == {
        n: x.sharding.is_fully_replicated for n, x in placed.items()
    }
    moments = state.inner[0].mu
    assert sk.placements(moments["w"]) == (S(0),)
    assert [b.shape for b in sk.to_local(moments["w"])] == [(2, 6)] * 4
    assert moments["odd"].shape == (7, 3) and [b.shape for b in sk.to_local(moments["odd"].flat)] == [(6,)] * 4


@pytest.mark.parametrize("fuse", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("columns", [False, True])
def test_a_linear_layer_and_adamw(fuse, columns, mesh_for):
    """Linear(10, 10), a batch of ten on two devices, five steps, stage 1; a column-sharded weight besides."""
    mesh = mesh_for({"dp": 2, "tp": 2} if columns else {"dp": 2})
    graph, model = nnx.split(nnx.Linear(10, 10, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(10, 10)).astype(np.float32)

    def mean(p, x):
        return jnp.mean(nnx.merge(graph, p)(x) ** 2)

    def at(value):
        return {"tp": S(value.ndim - 1)} if columns else {}

    tx = optax.adamw(1e-2)
    ours = sk.shard_optimizer(tx, sk.ShardingStage1("dp"), fuse=fuse)
    placed = jax.tree.map(lambda v: sk.shard_tensor(v, at(v), mesh), model)
    one, state, theirs = model, ours.init(placed), tx.init(model)
    before = jax.tree.map(lambda v: v.sharding, placed)
    for _ in range(5):
        _, grads = sk.value_and_grad(mean, batch_axes="dp", mesh=mesh)(placed, x)
        updates, state = ours.update(grads, state, placed)
        placed = jax.block_until_ready(optax.apply_updates(placed, updates))
        updates, theirs = tx.update(jax.grad(mean)(one, x), theirs, one)
        one = optax.apply_updates(one, updates)
    for got, wanted in zip(jax.tree.leaves(placed), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(placed), jax.tree.leaves(before), strict=True):
        assert got.sharding.is_equivalent_to(wanted, got.ndim)


def test_collectives_of_a_step(mesh_for):
    """Where sizes divide: one reduction, and one gather a parameter."""
    mesh = mesh_for({"dp": 4})
    params = {f"w{i}": sk.shard_tensor(np.ones((8, 8)), [R], mesh) for i in range(3)}

    def total(p, x):
        return jnp.mean(x @ p["w0"] @ p["w1"] @ p["w2"])

    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"))

    def step(params, state, x):
        _, grads = sk.value_and_grad(total, batch_axes="dp", mesh=mesh, microbatches=2)(params, x)
        return tx.update(grads, state, params)

    sk.assert_collectives(
        step, params, tx.init(params), X, reduce_scatter=1, all_reduce=(0, 1), all_gather=(1, 3), in_loop=0
    )


def test_updates_gathered_in_another_dtype(mesh_for):
    mesh = mesh_for({"dp": 4})
    params = {"w": sk.shard_tensor(np.ones((8, 8), np.float32), [R], mesh)}
    tx = sk.shard_optimizer(optax.sgd(0.1), sk.ShardingStage1("dp"), gather_dtype=jnp.bfloat16)
    grads = {"w": sk.reshard(np.full((8, 8), 1 / 3, np.float32), [P], mesh)}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["w"].dtype == np.float32
    wanted = np.float32(jnp.bfloat16(np.float32(-0.1) * np.float32(1 / 3)))
    np.testing.assert_allclose(np.asarray(updates["w"]), wanted, rtol=1e-2)
    assert len(np.unique(np.asarray(updates["w"]))) == 1


def test_refused(mesh_for):
    mesh = mesh_for({"dp": 4})
    params = {"w": sk.shard_tensor(np.ones((8, 8)), [R], mesh)}
    with refuses("use sk.ShardingStage1(axis)", TypeError):
        sk.shard_optimizer(optax.sgd(0.1), "stage1")
    with refuses("fuse='both' is unknown"):
        sk.shard_optimizer(optax.sgd(0.1), sk.ShardingStage1("dp"), fuse="both")
    with refuses('fuse="all_reduce" keeps whole gradients'):
        sk.shard_optimizer(optax.sgd(0.1), sk.ShardingStage2("dp"), fuse="all_reduce")
    with refuses("axis='tp' is not on the mesh"):
        sk.shard_optimizer(optax.sgd(0.1), sk.ShardingStage1("tp")).init(params)
    with refuses("found no mesh on the parameters"):
        sk.shard_optimizer(optax.sgd(0.1), sk.ShardingStage1("dp")).init({"w": np.ones(4)})
    tx = sk.shard_optimizer(optax.adam(0.1), sk.ShardingStage1("dp"))
    state = tx.init(params)
    with refuses("the gradients don't match the parameters that its state was made for, at \"['v']\""):
        tx.update({"v": params["w"]}, state, params)
    with refuses("reduce first: sk.reshard(x, ...)", TypeError):
        jnp.sqrt(sk.reshard(np.ones((8, 8)), [P], mesh))
