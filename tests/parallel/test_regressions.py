"""Kinds of trouble that plans ran into once: each with what it was."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from tests.parallel.models import LinenMLP, NnxMLP, NnxViT

C, R, S = sk.ColWiseParallel("tp"), sk.RowWiseParallel("tp"), sk.SequenceParallel("tp")
PLAN = {"up": C, "down": R}


def mesh(**axes):
    return sk.make_mesh(axes or {"dp": 2, "tp": 4})


def x_of(*shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(dtype))


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.not_smoke)])
@pytest.mark.not_smoke
def test_short_floats_beside_another_axis(sequence):
    """XLA on CPU stopped the process when it summed bfloat16 in a region that leaves an axis to it."""

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 8, dtype=jnp.bfloat16, rngs=rngs)
            self.up = nnx.Linear(8, 16, dtype=jnp.bfloat16, rngs=rngs)
            self.down = nnx.Linear(16, 8, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, ids):
            return self.down(jnp.tanh(self.up(self.embed(ids))))

    plain = MLP(nnx.Rngs(0))
    plan = {"embed": R, "up": C, "down": R}
    if sequence:
        plan = {path: [item, S] for path, item in plan.items()}
    model = sk.parallelize(MLP(nnx.Rngs(0)), plan, mesh())
    ids = np.random.default_rng(0).integers(0, 8, (4, 8))
    graph, params = nnx.split(model)
    got = jax.jit(jax.value_and_grad(lambda p, ids: nnx.merge(graph, p)(ids).sum().astype(jnp.float32)))(params, ids)
    graph, params = nnx.split(plain)
    want = jax.value_and_grad(lambda p, ids: nnx.merge(graph, p)(ids).sum().astype(jnp.float32))(params, ids)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.2), jax.device_get(got), want)


@pytest.mark.not_smoke
def test_nothing_traced_is_kept():
    """What layers share of one input was kept for as long as the process ran."""
    seen = []

    def watch(mesh, x):
        seen.append(weakref.ref(x))
        return x

    model = sk.parallelize(NnxMLP(nnx.Rngs(0)), {"up": [sk.PrepareLayerInput(watch), C], "down": R}, mesh())
    graph, params = nnx.split(model)
    for _ in range(2):
        jax.jit(lambda p, x: nnx.merge(graph, p)(x)).lower(params, x_of(4, 8))
    gc.collect()
    assert len(seen) == 2 and all(ref() is None for ref in seen)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_parameters_that_were_cast(framework):
    """A layer without a dtype of its own computes in that of its parameters, not of those it was made with."""
    x = x_of(4, 8).astype(jnp.bfloat16)
    if framework == "nnx":
        graph, params = nnx.split(sk.parallelize(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), {"": C}, mesh()))
        run = lambda p, x: nnx.merge(graph, p)(x)  # noqa: E731
    else:
        model = sk.parallelize(nn.Dense(16), {"": C}, mesh())
        params, run = model.init(jax.random.key(0), x), model.apply
    assert run(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), x).dtype == jnp.bfloat16
    assert run(params, x).dtype == jnp.float32


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_stacked_layers(framework):
    """Layers that scan runs through are stacked along dim 0, which isn't the layer's."""
    x = x_of(4, 8)
    if framework == "nnx":

        class Stack(nnx.Module):
            def __init__(self, rngs):
                @nnx.split_rngs(splits=3)
                @nnx.vmap
                def make(rngs):
                    return NnxMLP(rngs)

                self.layers = make(rngs)

            def __call__(self, x):
                return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

        want = Stack(nnx.Rngs(0))(x)
        model = sk.parallelize(Stack(nnx.Rngs(0)), {f"layers/{path}": item for path, item in PLAN.items()}, mesh())
        up, down = model.layers.up.kernel[...], model.layers.down.kernel[...]
        graph, params = nnx.split(model)
        run = lambda p, x: nnx.merge(graph, p)(x)  # noqa: E731
    else:

        class Stacked(nn.Module):
            @nn.compact
            def __call__(self, x):
                step = nn.scan(
                    lambda layer, x, _: (layer(x), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=3,
                )
                return step(LinenMLP(name="layers"), x, None)[0]

        model = sk.parallelize(Stacked(), {f"layers/{path}": item for path, item in PLAN.items()}, mesh())
        params = model.init(jax.random.key(0), x)
        want = Stacked().apply(jax.device_get(params), x)
        up, down = (params["params"]["layers"][name]["kernel"] for name in ("up", "down"))
        run = model.apply
    assert up.sharding.spec == P(None, None, "tp") and tuple(down.sharding.spec)[:2] == (None, "tp")
    np.testing.assert_allclose(jax.jit(run)(params, x), want, rtol=1e-4, atol=1e-5)
    report = sk.collectives(run, params, x)
    assert report.by_kind() == {"all_reduce": 1}, str(report)


def test_ready_plans_are_joined():
    """Of two guessed plans, and of entries beside one's own, none is lost."""
    quiet = {"verbose": False}
    config = {
        "dp": {"axis": "dp"},
        "mp": {"plan": sk.plans.transformer("tp", **quiet)},
        "sp": {"plan": sk.plans.unet("dp", "W", **quiet)},
    }
    from shardkit.parallel.config import read_config

    model = nnx.eval_shape(lambda: NnxViT(nnx.Rngs(0)))
    chosen = read_config(config, mesh()).plans.guess(model)  # type: ignore[attr-defined]
    assert chosen[""] == [sk.DataParallel("dp")]
    assert chosen["blocks/0/up"] == [C] and chosen["patches"] == [sk.ConvParallel("dp", "W")]
    mine = sk.plans.transformer("tp", **quiet)
    mine[""] = sk.PrepareLayerOutput(lambda mesh, y: y)
    chosen = read_config({**config, "mp": {"plan": mine}}, mesh()).plans.guess(model)  # type: ignore[attr-defined]
    assert chosen[""] == [mine[""], sk.DataParallel("dp")]


def test_a_linen_model_that_is_used_in_ways_its_plan_cannot_follow():
    model, x = sk.parallelize(LinenMLP(), PLAN, mesh()), x_of(4, 8)
    params = model.init(jax.random.key(0), x)
    assert "Dense" in model.tabulate(jax.random.key(0), x)

    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(x)

    for use in (
        lambda: model.bind(params),
        lambda: nn.init(lambda m, x: m(x), model)(jax.random.key(0), x),
        lambda: Outer(model).init(jax.random.key(0), x),
    ):
        with pytest.raises(ValueError, match="carries a plan, which its own init and apply carry out"):
            use()
    assert copy.copy(model).apply(params, x).shape == (4, 8)


@pytest.mark.not_smoke
def test_patterns_of_layers_that_only_training_calls():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            x = nn.Dense(8, name="up")(inputs=x)
            return nn.Dropout(0.5, deterministic=not train, name="drop")(inputs=x) if train else x

    model = sk.parallelize(Net(), {"up": sk.ColWiseParallel("tp", gather_output=True), "drop": S}, mesh())
    x = x_of(4, 8, 8)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(rngs, x)
    assert model.apply(params, x, False).shape == model.apply(params, x, True, rngs=rngs).shape == (4, 8, 8)


def test_a_batch_in_any_form():
    """By name, as a dictionary, from NumPy; beside masks of one row and random keys; with results of other shapes."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.lin = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, batch, mask=None, key=None):
            y = self.lin(batch["x"]) + (0 if mask is None else mask)
            return {"y": y, "mean": y.mean(0), "key": key}

    model = sk.parallelize(Net(nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh(dp=8))
    batch, mask = {"x": np.ones((16, 8), np.float32)}, np.zeros((1, 8), np.float32)
    run = nnx.jit(lambda m, b, mask, key: m(batch=b, mask=mask, key=key))
    found = run(model, batch, mask, jax.random.PRNGKey(0))
    assert found["y"].sharding.spec[0] == "dp" and found["mean"].shape == (8,)
    assert model(batch)["y"].sharding.spec[0] == "dp"
    with pytest.raises(ValueError, match="its 8 devices don't divide 4"):
        model({"x": np.ones((4, 8), np.float32)})


@pytest.mark.not_smoke
def test_a_head_after_pooling():
    """A layer whose input has no sequence takes it whole, beside those that have one."""
    model = sk.parallelize(NnxMLP(nnx.Rngs(0)), {"up": [C, S], "down": [R, S]}, mesh(tp=2))
    for x in (x_of(4, 8), x_of(4, 6, 8)):
        np.testing.assert_allclose(model(x), NnxMLP(nnx.Rngs(0))(x), rtol=1e-5, atol=1e-6)


def test_models_under_plans_are_copied_and_pickled():
    model, x = sk.parallelize(NnxMLP(nnx.Rngs(0)), PLAN, mesh()), x_of(4, 8)
    for twin in (copy.deepcopy(model), nnx.clone(model)):
        np.testing.assert_allclose(twin(x), model(x), rtol=1e-6)
    wrapped = sk.parallelize(NnxMLP(nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh().abstract_mesh)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(wrapped.up)).kernel[...], wrapped.up.kernel[...])
    assert type(copy.copy(wrapped)) is type(wrapped)


def test_one_axis_cannot_cut_heads_and_the_sequence():
    layer = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="can cut the heads or the sequence of one layer"):
        sk.parallelize(layer, {"": [sk.RingAttention("tp"), C]}, mesh())


@pytest.mark.parametrize("axes", [{"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}])
@pytest.mark.not_smoke
def test_embeddings_and_layers_on_explicit_axes(axes):
    """An axis of one device is still in the types; and a lookup's derivative must be told where it lives."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 8, rngs=rngs)
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, ids):
            return self.down(jnp.tanh(self.up(self.embed(ids))))

    on = sk.make_mesh(axes, axis_types="explicit")
    plan = {"embed": sk.ColWiseParallel("tp", gather_output=True), **PLAN}
    ids = np.random.default_rng(0).integers(0, 8, (4, 6))
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    want = jax.value_and_grad(lambda p: jnp.sin(nnx.merge(graph, p)(ids)).sum())(params)
    planned, params = nnx.split(sk.parallelize(Net(nnx.Rngs(0)), plan, on))
    placed = jax.device_put(ids, sk.to_named_sharding({"dp": sk.Shard(0)}, on))
    with jax.set_mesh(on):
        got = jax.jit(jax.value_and_grad(lambda p, ids: jnp.sin(nnx.merge(planned, p)(ids)).sum()))(params, placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jax.device_get(got), want)


def test_layers_inside_a_manual_region_of_their_axis():
    """There they work on this device's blocks: results are put together, and inputs that aren't cut are refused."""
    on = mesh(tp=4)
    plan = {"up": sk.ColWiseParallel("tp", gather_output=True), "down": sk.RowWiseParallel("tp")}
    model = sk.parallelize(NnxMLP(nnx.Rngs(0)), plan, on)
    up, params = nnx.split(model.up)
    specs = jax.tree.map(lambda p: p.sharding.spec, params)
    x = x_of(4, 8)

    def inside(p, x):
        y = nnx.merge(up, p)(x)
        assert y.shape == (4, 16)
        return jax.lax.pmean(y, "tp")

    y = jax.jit(jax.shard_map(inside, mesh=on, in_specs=(specs, P()), out_specs=P()))(params, x)
    np.testing.assert_allclose(y, NnxMLP(nnx.Rngs(0)).up(x), rtol=1e-5, atol=1e-6)
    down, params = nnx.split(model.down)
    specs = jax.tree.map(lambda p: p.sharding.spec, params)
    with pytest.raises(ValueError, match="takes this device's 4 input features, got 16"):
        jax.eval_shape(
            jax.shard_map(lambda p, x: nnx.merge(down, p)(x), mesh=on, in_specs=(specs, P()), out_specs=P()),
            params,
            x_of(4, 16),
        )
