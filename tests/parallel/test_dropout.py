"""Dropout of models under plans: the masks of one device, however the batch and the layers are spread."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk
from tests.parallel.models import LinenBlock, NnxBlock

X = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)
KEY = jax.random.key(5)


def taken_apart(framework: str, model: Any) -> tuple[Any, Any]:
    """(parameters, a loss of them and a batch that drops half) of a block."""
    if framework == "nnx":
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return params, lambda p, x: jnp.mean(jnp.sin(nnx.merge(graph, p, rest, copy=True)(x)))
    params = model.init(jax.random.key(0), X, None, False)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.sin(model.apply(p, x, None, True, rngs={"dropout": KEY})))

    return params, loss


def block(framework: str) -> Any:
    return NnxBlock(16, 4, nnx.Rngs(0), 0.5) if framework == "nnx" else LinenBlock(16, 4, 0.5)


@functools.cache
def on_one_device(framework: str) -> Any:
    params, loss = taken_apart(framework, block(framework))
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, X))


@pytest.mark.parametrize(
    ("framework", "axes", "microbatches"),
    [
        ("nnx", {"dp": 2, "tp": 4}, 1),
        pytest.param("linen", {"dp": 2, "tp": 2}, 2, marks=pytest.mark.slow),
        pytest.param("nnx", {"dp": 4}, 1, marks=pytest.mark.slow),
        pytest.param("linen", {"dp": 4, "tp": 2}, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.not_smoke
def test_masks_are_those_of_one_device(framework, axes, microbatches):
    mesh = sk.make_mesh(axes)
    config: dict[str, Any] = {"dp": {"axis": "dp", "stage": 1}}
    if "tp" in axes:
        config["mp"] = {"plan": sk.plans.transformer("tp", sequence=True, verbose=False)}
    make = functools.partial(block, framework)
    given = make if framework == "nnx" else make()
    model, _ = sk.parallelize(given, config=config, mesh=mesh, optimizer=optax.sgd(0.1))
    params, loss = taken_apart(framework, model)
    x = jax.device_put(X, sk.to_named_sharding({"dp": sk.Shard(0)}, mesh))
    run = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, keys="shared", microbatches=microbatches)
    value, grads = jax.jit(lambda p, x: run(p, x))(params, x)
    grads = jax.tree.map(lambda g: g.reduce(), grads, is_leaf=lambda g: isinstance(g, sk.PartialArray))
    want = on_one_device(framework)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, jax.device_get((value, grads)), want)
