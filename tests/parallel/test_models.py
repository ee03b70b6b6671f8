"""Whole models under plans: five steps as on one device, parameters in their places before and after.

A few rows of the table run always, the rest as slow tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk
from tests.parallel import models

STEPS = 5
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[int, ...]]] = {
    "MLP": (lambda: models.NnxMLP(nnx.Rngs(0)), models.LinenMLP, (8, 8)),
    "GPT": (lambda: models.NnxGPT(nnx.Rngs(0)), models.LinenGPT, (4, 8)),
    "ViT": (lambda: models.NnxViT(nnx.Rngs(0)), models.LinenViT, (4, 8, 8, 1)),
    "UNet": (lambda: models.NnxUNet(nnx.Rngs(0)), models.LinenUNet, (4, 8, 16, 1)),
    "UNet3D": (lambda: models.NnxUNet(nnx.Rngs(0), dims=3), lambda: models.LinenUNet(dims=3), (4, 8, 4, 8, 1)),
}
# mesh, stage of data parallelism (None: none), plan of the model
HEADS = functools.partial(sk.plans.transformer, "tp", verbose=False)
WAYS: dict[str, tuple[dict[str, int], int | None, Callable[[], Any] | None]] = {
    "dp": ({"dp": 4}, 1, None),
    "tp": ({"tp": 4}, None, HEADS),
    "tp+sequence": ({"tp": 4}, None, lambda: HEADS(sequence=True)),
    "dp x tp": ({"dp": 2, "tp": 4}, 2, HEADS),
    "dp x tp+sequence": ({"dp": 2, "tp": 4}, 0, lambda: HEADS(sequence=True)),
    "sp": ({"sp": 4}, None, lambda: sk.plans.unet("sp", "W", verbose=False)),
    "dp x sp": ({"dp": 2, "sp": 2}, 2, lambda: sk.plans.unet("sp", "W", verbose=False)),
    "D x W": ({"sd": 2, "sw": 2}, None, lambda: sk.plans.unet(("sd", "sw"), "DW", verbose=False)),
    "fsdp": ({"dp": 4}, 3, None),
    "fsdp x tp": ({"dp": 2, "tp": 2}, 3, HEADS),
}
FLAT = ("dp", "tp", "dp x tp", "fsdp", "fsdp x tp")
SEQUENCES = ("dp", "tp", "tp+sequence", "dp x tp", "dp x tp+sequence", "fsdp", "fsdp x tp")
ROWS = [
    *[("MLP", way) for way in FLAT],
    *[(model, way) for model in ("GPT", "ViT") for way in SEQUENCES],
    *[("UNet", way) for way in ("dp", "sp", "dp x sp", "fsdp")],
    *[("UNet3D", way) for way in ("D x W", "dp x sp")],
]
ALWAYS = {
    ("linen", "MLP", "fsdp x tp"),
    ("nnx", "UNet3D", "D x W"),
}


def batch(name: str) -> Any:
    rng = np.random.default_rng(3)
    shape = MODELS[name][2]
    return rng.integers(0, 32, shape) if name == "GPT" else rng.normal(size=shape).astype(np.float32)


def loss_of(name: str, run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A mean over examples of what a model makes of a batch (ids, their successors being the labels; or images)."""

    def loss(params: Any, x: Any) -> Any:
        y = run(params, x)
        if name == "GPT":
            return optax.softmax_cross_entropy_with_integer_labels(y[:, :-1], x[:, 1:]).mean()
        if name == "ViT":
            return optax.softmax_cross_entropy_with_integer_labels(y, jnp.arange(y.shape[0]) * 0 + 3).mean()
        return jnp.mean((y - jnp.sin(x)) ** 2)

    return loss


def taken_apart(framework: str, name: str, model: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """(parameters, a function of them and a batch) of a model, plain or under a plan."""
    if framework == "nnx":
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return params, lambda p, x: nnx.merge(graph, p, rest)(x)
    params = model.init(jax.random.key(0), batch(name))["params"]
    return params, lambda p, x: model.apply({"params": p}, x)


def train(grad: Callable[[Any, Any], Any], tx: Any, params: Any, x: Any) -> tuple[list[float], Any]:
    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = grad(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x)
        losses.append(float(loss))
    return losses, params


OPTIMIZER = optax.adamw(1e-2, eps=1e-3)  # attention key biases have no gradient: a tiny eps makes noise of it


@functools.cache
def on_one_device(framework: str, name: str) -> tuple[list[float], Any, Any]:
    make = MODELS[name][0 if framework == "nnx" else 1]
    params, run = taken_apart(framework, name, make())
    losses, after = train(jax.value_and_grad(loss_of(name, run)), OPTIMIZER, params, batch(name))
    return losses, jax.device_get(params), jax.device_get(after)


def placements_of(params: Any) -> list[Any]:
    return [sk.placements(x) for x in jax.tree.leaves(params)]


@pytest.mark.parametrize(
    ("framework", "name", "way"),
    [
        pytest.param(framework, *row, marks=pytest.mark.not_smoke if (framework, *row) in ALWAYS else pytest.mark.slow)
        for framework in ("nnx", "linen")
        for row in ROWS
    ],
)
def test_five_steps_as_on_one_device(framework, name, way):
    want, want_before, want_after = on_one_device(framework, name)
    axes, stage, plan = WAYS[way]
    mesh = sk.make_mesh(axes)
    config: dict[str, Any] = {} if stage is None else {"dp": {"axis": "dp", "stage": stage}}
    if plan is not None:
        config["mp"] = {"plan": plan()}
    make = MODELS[name][0 if framework == "nnx" else 1]
    given = make if framework == "nnx" else make()
    model, tx = sk.parallelize(given, config=config, mesh=mesh, optimizer=OPTIMIZER)
    params, run = taken_apart(framework, name, model)
    # One compiled program makes them all, so a last bit may differ from one operation after another.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), jax.device_get(params), want_before)
    loss = loss_of(name, run)
    spread = {"dp": sk.Shard(0)} if "dp" in axes else {}
    x = jax.device_put(batch(name), sk.to_named_sharding(spread, mesh))
    grad = jax.value_and_grad(loss) if stage is None else sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)
    got, after = train(grad, tx, params, x)
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert placements_of(after) == placements_of(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), jax.device_get(after), want_after)
