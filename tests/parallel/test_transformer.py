"""Tensor parallelism of a transformer: the textbook's collectives, no others, and what's kept for backward."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk
from tests.parallel.models import LinenGPT, NnxGPT

LAYERS, BATCH, LENGTH, WIDTH = 2, 4, 8, 16
IDS = np.random.default_rng(0).integers(0, 32, (BATCH, LENGTH))
C, R, S = sk.ColWiseParallel("tp"), sk.RowWiseParallel("tp"), sk.SequenceParallel("tp")


def plan_of(sequence: bool, blocks: str) -> dict[str, Any]:
    def also(plan: Any) -> Any:
        return [plan, S] if sequence else plan

    plan: dict[str, Any] = {
        "embed": also(R),
        f"{blocks}/attn": also(C),
        f"{blocks}/up": also(C),
        f"{blocks}/down": also(R),
    }
    if sequence:
        plan |= {f"{blocks}/norm1": S, f"{blocks}/norm2": S, f"{blocks}/dropout": S, "norm": S}
    return plan


def loss_of(framework: str, plan: Any, mesh: Any, strict: bool = True) -> tuple[Any, Any]:
    """(a loss of parameters and ids whose logits never come together, parameters)."""

    def loss(logits: Any, ids: Any) -> Any:
        return sk.loss_parallel(logits, ids, axis="tp", mesh=mesh).mean()

    if framework == "nnx":
        model = sk.parallelize(NnxGPT(nnx.Rngs(0)), plan, mesh, strict=strict)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return lambda p, x: loss(nnx.merge(graph, p, rest)(x), x), params
    model = sk.parallelize(LinenGPT(), plan, mesh, strict=strict)
    params = model.init(jax.random.key(0), IDS)["params"]
    return lambda p, x: loss(model.apply({"params": p}, x), x), params


CASES = [
    pytest.param("nnx", {"tp": 4}, False, marks=pytest.mark.not_smoke),
    ("linen", {"dp": 2, "tp": 4}, True),
    pytest.param("linen", {"dp": 2, "tp": 4}, False, marks=pytest.mark.slow),
    pytest.param("linen", {"tp": 2}, True, marks=pytest.mark.slow),
    pytest.param("nnx", {"dp": 2, "tp": 2}, True, marks=pytest.mark.slow),
    pytest.param("nnx", {"dp": 2, "tp": 2}, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("framework", "axes", "sequence"), CASES)
@pytest.mark.not_smoke
def test_a_block_sends_what_the_textbook_says(framework, axes, sequence):
    """A row layer: one all-reduce forward; a column layer (of one input): one backward. Four a block, two around them.

    With sequence parallelism each is a reduce-scatter and an all-gather, of equal bytes in all.
    """
    mesh = sk.make_mesh(axes)
    plan = plan_of(sequence, "blocks/*" if framework == "nnx" else "blocks_*")
    if "dp" in axes:
        plan[""] = sk.DataParallel("dp")
    loss, params = loss_of(framework, plan, mesh)
    spread = {"dp": sk.Shard(0)} if "dp" in axes else {}
    ids = jax.device_put(IDS, sk.to_named_sharding(spread, mesh))
    report = sk.collectives(jax.value_and_grad(loss), params, ids)
    size = BATCH // axes.get("dp", 1) * LENGTH * WIDTH * 4
    large = [c for c in report if c.axes == ("tp",) and c.bytes >= size // 2]
    kinds = {kind: sum(len(c.shapes) for c in large if c.kind == kind) for kind in {c.kind for c in large}}
    blocks = 4 * LAYERS + 2
    if not sequence:
        assert kinds.pop("all_reduce") >= blocks, str(report)
        large = [c for c in large if c.kind == "all_reduce"]
    else:
        assert (kinds.pop("reduce_scatter"), kinds.pop("all_gather")) == (blocks, blocks), str(report)
        kinds.pop("all_reduce", None)  # gradients of norms, together
    assert not kinds, str(report)
    n = axes["tp"]
    sent = sum(c.bytes for c in large if c.kind != "all_reduce" or not sequence)
    assert sent == pytest.approx(blocks * 2 * size * (n - 1) / n, rel=0.1), str(report)
    if "dp" in axes:
        assert all(c.kind == "all_reduce" for c in report if c.axes == ("dp",)), str(report)


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_an_mlp_on_either_kind_of_axes(types):
    mesh = sk.make_mesh({"dp": 2, "tp": 4}, axis_types=types)

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    plain = MLP(nnx.Rngs(0))
    model = sk.parallelize(MLP(nnx.Rngs(0)), {"up": [C, S], "down": [R, S], "": sk.DataParallel("dp")}, mesh)
    x = np.random.default_rng(1).normal(size=(4, 8, 8))
    placed = jax.device_put(x, sk.to_named_sharding({"dp": sk.Shard(0), "tp": sk.Shard(1)}, mesh))
    graph, params = nnx.split(model)

    def loss(run):
        return lambda p, x: jnp.sum(jnp.sin(run(p, x)))

    def step(p, x):
        return jax.value_and_grad(loss(lambda p, x: nnx.merge(graph, p)(x)), argnums=(0, 1))(p, x)

    plain_graph, plain_params = nnx.split(plain)
    want = jax.value_and_grad(loss(lambda p, x: nnx.merge(plain_graph, p)(x)), argnums=(0, 1))(plain_params, x)
    with jax.set_mesh(mesh):
        got = jax.jit(step)(params, placed)
        report = sk.collectives(step, params, placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), jax.device_get(got), jax.device_get(want))
    assert sk.placements(got[1][0]["up"]["kernel"][...]) == (sk.Replicate(), sk.Shard(1))
    assert sk.placements(got[1][0]["down"]["kernel"][...]) == (sk.Replicate(), sk.Shard(0))
    assert sk.placements(got[1][1]) == (sk.Shard(0), sk.Shard(1))
    assert report.count("reduce_scatter", axis="tp") == 2, str(report)
    assert report.count("all_gather", axis="dp") == report.count("all_to_all") == 0, str(report)


@pytest.mark.not_smoke
def test_layers_that_read_one_input_send_its_gradient_once():
    """Query, key and value, or gate and up: their parts of the gradient are added up first, casts included."""
    mesh = sk.make_mesh({"tp": 4})

    class Gated(nnx.Module):
        def __init__(self, rngs):
            make = lambda i, o: nnx.Linear(i, o, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)  # noqa: E731
            self.gate, self.up, self.down = make(8, 16), make(8, 16), make(16, 8)

        def __call__(self, x):
            return self.down(nnx.silu(self.gate(x)) * self.up(x))

    model = sk.parallelize(Gated(nnx.Rngs(0)), {"gate": C, "up": C, "down": R}, mesh)
    graph, params = nnx.split(model)
    report = sk.collectives(
        jax.grad(lambda p, x: nnx.merge(graph, p)(x).sum(), argnums=(0, 1)), params, jnp.ones((2, 4, 8), jnp.float32)
    )
    assert report.count() == report.count("all_reduce") <= 2, str(report)
    report = sk.collectives(
        jax.grad(lambda p, x: nnx.merge(graph, p)(jnp.tanh(x)).sum(), argnums=1), params, jnp.ones((2, 4, 8))
    )
    assert report.count("all_reduce") == 1, str(report)


@pytest.mark.not_smoke
def test_norms_and_dropout_keep_a_part_of_the_sequence():
    """What a block keeps for backward outside its tensor-parallel layers is 1/n of the activations."""
    mesh = sk.make_mesh({"tp": 4})
    sizes = {}
    for sequence in (False, True):
        plan = plan_of(sequence, "blocks/*")
        loss, params = loss_of("nnx", plan, mesh)
        ids = jax.ShapeDtypeStruct((64, 8), np.int32, sharding=sk.to_named_sharding({}, mesh))
        sizes[sequence] = sk.memory(jax.grad(loss), params, ids).temporaries
    assert sizes[True] < sizes[False], sizes


def test_gather_output_and_whole_inputs():
    mesh = sk.make_mesh({"tp": 4})
    column = sk.ColWiseParallel("tp", gather_output=True)
    layer = sk.parallelize(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), {"": column}, mesh)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8)))
    y = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(y, nnx.Linear(8, 16, rngs=nnx.Rngs(0))(x), rtol=1e-6)
    assert y.sharding.is_fully_replicated
    row = sk.RowWiseParallel("tp", is_input_parallel=False)
    layer = sk.parallelize(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), {"": row}, mesh)
    report = sk.collectives(nnx.jit(lambda layer, x: layer(x)), layer, x)
    assert report.by_kind() == {"all_reduce": 1}, str(report)


@pytest.mark.parametrize("plan", [C, R])
@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.parametrize("kind", ["general", "einsum", "embed"])
@pytest.mark.every(2)
def test_every_layer_that_multiplies(framework, kind, plan):
    """Values, gradients, and where parameters are; of layers other than Linear."""
    from flax import linen as nn

    mesh = sk.make_mesh({"tp": 2})
    rng = np.random.default_rng(2)
    if kind == "general":
        make = lambda: nnx.LinearGeneral((4, 2), (2, 4), axis=(-2, -1), rngs=nnx.Rngs(3))  # noqa: E731
        plain: Any = nn.DenseGeneral((2, 4), axis=(-2, -1))
        x: Any = rng.normal(size=(3, 4, 2))
        dim = 2 if plan == C else 0
    elif kind == "einsum":
        make = lambda: nnx.Einsum("...d,dnh->...nh", (8, 4, 2), (4, 2), rngs=nnx.Rngs(3))  # noqa: E731
        plain = nn.Einsum((8, 4, 2), "...d,dnh->...nh")
        x = rng.normal(size=(3, 8))
        dim = 1 if plan == C else 0
    else:
        make = lambda: nnx.Embed(6, 4, rngs=nnx.Rngs(3))  # noqa: E731
        plain = nn.Embed(6, 4)
        x = rng.integers(0, 6, (3, 5))
        dim = 1 if plan == C else 0
    if framework == "nnx":
        graph, before = nnx.split(make())
        planned, params = nnx.split(sk.parallelize(make(), {"": plan}, mesh))
        want_of, run = (lambda p: nnx.merge(graph, p)(x)), (lambda p: nnx.merge(planned, p)(x))
    else:
        model = sk.parallelize(plain, {"": plan}, mesh)
        before, params = plain.init(jax.random.key(0), x), model.init(jax.random.key(0), x)
        want_of, run = (lambda p: plain.apply(p, x)), (lambda p: model.apply(p, x))
    want = jax.value_and_grad(lambda p: jnp.sum(jnp.sin(want_of(p))))(before)
    got = jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(run(p)))))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(got), want)
    weight = max(jax.tree.leaves(params), key=lambda p: p.ndim * 1000 + p.size)
    assert sk.placements(weight) == (sk.Shard(dim),)
    assert [sk.placements(g) for g in jax.tree.leaves(got[1])] == [sk.placements(p) for p in jax.tree.leaves(params)]
    report = sk.collectives(run, params)
    assert set(report.by_kind()) <= {"all_reduce"} and report.count() == (plan == R), str(report)
