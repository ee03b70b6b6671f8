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
@pytest.mark.every(2)
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
@pytest.mark.not_smoke
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
    assert [b.shape for b in sk.to_local(moments["odd"])] == [(6,)] * 4  # a padded row


@pytest.mark.parametrize("fuse", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.not_smoke
@pytest.mark.every(2)
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


@pytest.mark.parametrize("shape", [{"dp": 4, "tp": 2}, {"tp": 2, "dp": 4}, {"dp": 8, "tp": 1}], ids=str)
def test_a_bias_that_another_axis_cuts(shape, mesh_for):
    """It has no dim left: each device keeps a part of its part, and nothing crosses the other axis."""
    mesh = mesh_for(shape)
    b = {"b": sk.shard_tensor(np.ones(64), {"tp": S(0)}, mesh)}
    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"))
    state = tx.init(b)
    assert {x.shape for x in sk.to_local(state.inner[0].mu["b"])} == {(8,)}
    x = np.random.default_rng(0).normal(size=(8, 64))

    def step(b, state, x):
        _, grads = sk.value_and_grad(lambda b, x: jnp.mean((x * b["b"]) ** 2), batch_axes="dp", mesh=mesh)(b, x)
        updates, state = tx.update(grads, state, b)
        return optax.apply_updates(b, updates), state

    after, _ = jax.jit(step)(b, state, x)
    assert after["b"].sharding.is_equivalent_to(b["b"].sharding, 1)
    np.testing.assert_allclose(np.asarray(after["b"]), 1 - 1e-2, rtol=1e-6)
    report = sk.assert_collectives(step, b, state, x, reduce_scatter=1, all_gather=1, all_reduce=(0, 2), max_bytes=1024)
    assert all(e.axes == ("dp",) for e in report if e.bytes > 64)


def test_where_dims_are_ordered_otherwise(mesh_for):
    """A parameter whose dim is cut by axes in another than mesh order comes back to just that."""
    mesh = mesh_for({"dp": 2, "fsdp": 2, "tp": 2})
    home = jax.sharding.NamedSharding(mesh, jax.P(("tp", "fsdp"), None))
    w = {"w": jax.device_put(jnp.arange(24.0).reshape(8, 3), home)}
    tx = sk.shard_optimizer(optax.sgd(1.0), sk.ShardingStage1("dp"))
    grads = {"w": sk.reshard(np.arange(24.0).reshape(8, 3), [P, R, R], mesh)}
    updates, _ = tx.update(grads, tx.init(w), w)
    assert updates["w"].sharding.is_equivalent_to(home, 2)
    np.testing.assert_array_equal(np.asarray(updates["w"]), -np.arange(24.0).reshape(8, 3))


ORDERS = [jax.P(("dp", "tp")), jax.P(("fsdp", "tp")), jax.P(("dp", "fsdp", "tp")), jax.P(("fsdp", "tp"), "dp")]


@pytest.mark.parametrize("spec", ORDERS, ids=str)
@pytest.mark.parametrize("fuse", ["reduce_scatter", "all_reduce"])
def test_a_batch_axis_outside_another_on_one_dim(fuse, spec, mesh_for):
    """Gradients lie cut by the inner axis alone: scattered as they lie, and put in the parameter's order then."""
    mesh = mesh_for({"dp": 2, "fsdp": 2, "tp": 2})
    w = np.random.default_rng(0).normal(size=(8, 8))
    placed = jax.device_put(w, jax.sharding.NamedSharding(mesh, spec))

    def half(w, x):
        return jnp.mean((x @ w) ** 2)

    tx = sk.shard_optimizer(optax.sgd(1.0), sk.ShardingStage1("dp"), fuse=fuse)
    state = tx.init(placed)

    @jax.jit
    def step(w, state, x):
        _, grads = sk.value_and_grad(half, batch_axes=("dp", "fsdp"), mesh=mesh)(w, x)
        return tx.update(grads, state, w)

    updates, _ = step(placed, state, X)
    np.testing.assert_allclose(np.asarray(updates), -np.asarray(jax.grad(half)(w, X)), rtol=1e-9)
    assert updates.sharding.is_equivalent_to(placed.sharding, 2)


@pytest.mark.parametrize("bucket_bytes", [0, 256, None])
@pytest.mark.not_smoke
def test_buckets(bucket_bytes, mesh_for):
    """The same values; collectives there and back as many as buckets, whatever the number of parameters."""
    mesh = mesh_for({"dp": 4})
    params = {f"w{i}": sk.shard_tensor(np.full((8, 4), i + 1.0), [R], mesh) for i in range(3)}
    grads = {name: sk.reshard(np.asarray(x) / 3, [P], mesh) for name, x in params.items()}
    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage1("dp"), bucket_bytes=bucket_bytes)
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    theirs = optax.adam(1e-2)
    wanted, _ = theirs.update({n: np.asarray(x) / 3 for n, x in params.items()}, theirs.init(params))
    close(updates, wanted)
    count = 1 if bucket_bytes is None else 3
    sk.assert_collectives(tx.update, grads, state, params, reduce_scatter=count, all_gather=count, all_reduce=0)


def test_native_unreduced_gradients(mesh_for):
    """JAX's own, and leaves that are reduced already, in one tree."""
    mesh = mesh_for({"dp": 4}, "explicit")
    with jax.set_mesh(mesh):
        params = {n: sk.shard_tensor(np.ones((8, 4)), [R], mesh) for n in ("partial", "native", "plain")}
        part = sk.reshard(sk.shard_tensor(np.arange(32.0).reshape(8, 4), [R], mesh), [P])
        grads = {"partial": part, "native": sk.to_unreduced(part), "plain": sk.unshard(part)}
        tx = sk.shard_optimizer(optax.sgd(1.0), sk.ShardingStage2("dp"))
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        for x in updates.values():
            np.testing.assert_array_equal(np.asarray(x), -np.arange(32.0).reshape(8, 4))
        sk.assert_collectives(tx.update, grads, tx.init(params), params, reduce_scatter=1, all_gather=1, all_reduce=0)


@pytest.mark.not_smoke
def test_with_the_optimizer_of_flax(mesh_for):
    """nnx.Optimizer hands states over with and without their variables."""
    mesh = mesh_for({"dp": 4})

    def make():
        return nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 7, rngs=nnx.Rngs(1)))

    def mean(params, x):
        return jnp.mean(nnx.merge(graph, params)(x) ** 2)

    ours, theirs = make(), make()
    graph = nnx.graphdef(ours)
    nnx.update(ours, jax.tree.map(lambda x: sk.shard_tensor(x, [R], mesh), nnx.state(ours)))
    optimizer = nnx.Optimizer(ours, sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp")), wrt=nnx.Param)
    reference = nnx.Optimizer(theirs, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = sk.value_and_grad(mean, batch_axes="dp", mesh=mesh)(nnx.state(model), x)
        optimizer.update(model, grads)

    for _ in range(3):
        step(ours, optimizer, X)
        jax.block_until_ready(nnx.state(ours))
        reference.update(theirs, jax.grad(mean)(nnx.state(theirs), X))
    for a, b in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-7)
        assert a.sharding.is_fully_replicated
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
    assert len(moments) == 8 and not any(x.sharding.is_fully_replicated for x in moments)


@pytest.mark.not_smoke
def test_parameters_stay_where_they_are_for_a_hundred_steps(mesh_for):
    mesh = mesh_for({"dp": 4, "tp": 2})
    at = {"w": {"tp": S(1)}, "b": {"tp": S(0)}}
    params = {n: sk.shard_tensor(x, at.get(n, {}), mesh) for n, x in params_of().items()}
    before = jax.tree.map(lambda x: x.sharding, params)
    params, _, _ = train(sk.shard_optimizer(optax.adamw(1e-3), sk.ShardingStage1("dp")), params, mesh, steps=100)
    assert all(x.sharding.is_equivalent_to(before[n], x.ndim) for n, x in params.items())
    close(params, reference(optax.adamw(1e-3), params_of(), steps=100))


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


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1), optax.clip_by_global_norm(1.0)])
def test_a_bare_optimizer_does_not_take_partial_gradients(tx, mesh_for):
    """It errs, at the latest where its updates meet the parameters, and says that it met a PartialArray."""
    mesh = mesh_for({"dp": 4})
    params = {"w": sk.shard_tensor(np.ones((8, 4)), [R], mesh)}
    grads = {"w": sk.reshard(np.ones((8, 4)), [P], mesh)}
    with pytest.raises((TypeError, ValueError), match="PartialArray"):
        optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])


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
    with refuses("shard_optimizer takes an optax transformation", TypeError):
        sk.shard_optimizer(optax.adam, sk.ShardingStage1("dp"))
    with refuses("bucket_bytes=-1: a number of bytes"):
        grads = {"w": sk.reshard(np.ones((8, 8)), [P], mesh)}
        tx = sk.shard_optimizer(optax.sgd(0.1), sk.ShardingStage1("dp"), bucket_bytes=-1)
        tx.update(grads, tx.init(params), params)
    other = mesh_for({"x": 2})
    with refuses("lives on mesh {'x': 2}, others on {'dp': 4}"):
        odd = {"w": params["w"], "z": sk.shard_tensor(np.ones(4), [R], other)}
        sk.shard_optimizer(optax.sgd(0.1), sk.ShardingStage1("dp")).init(odd)
    tx = sk.shard_optimizer(optax.adam(0.1), sk.ShardingStage1("dp"))
    state = tx.init(params)
    with refuses("the gradients don't match the parameters that its state was made for, at \"['v']\""):
        tx.update({"v": params["w"]}, state, params)
    with refuses("reduce first: sk.reshard(x, ...)", TypeError):
        jnp.sqrt(sk.reshard(np.ones((8, 8)), [P], mesh))


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_the_ambient_mesh_is_used_where_none_is_given(types):
    """Of parameters that are on no mesh yet, and of gradients to be reduced."""
    mesh = sk.make_mesh({"dp": 8}, axis_types=types)
    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"))
    params = {"w": jnp.arange(48.0).reshape(8, 6)}
    with jax.set_mesh(mesh):
        state = tx.init(params)
        assert sk.placements(state.inner[0].mu["w"]) == (S(0),)
        updates, _ = jax.jit(tx.update)(params, state, params)
        assert sk.placements(sk.reduce_gradients(params, axis="dp")["w"]) == (S(0),)
    expected, _ = optax.adam(1e-2).update(params, optax.adam(1e-2).init(params), params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-12)
