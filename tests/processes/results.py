"""One of everything that sends bytes between devices. Run by one process, and by several: the same numbers."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardkit as sk


def here(x):
    """A value, in the memory of this process."""
    whole = sk.unshard(x)
    return np.asarray(whole.addressable_shards[0].data)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def cut(x, placements, mesh):
    return sk.shard_tensor(x, placements, mesh)


def convolutions(devices):
    """Halos that cross processes, forward and backward; strides, uneven sizes, a transposed convolution, circular."""
    mesh = sk.make_mesh({"sp": len(devices)}, devices=devices)
    x, w = random(2, 8, 24, 3), random(3, 3, 3, 4)
    numbers = ("NHWC", "HWIO", "NHWC")
    cases = {
        "same": {"window_strides": (1, 1), "padding": "SAME"},
        "circular": {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "padding_mode": "circular"},
        "strided": {"window_strides": (1, 2), "padding": ((0, 1), (2, 1))},
        "transposed": {"window_strides": (1, 1), "padding": ((1, 1), (1, 2)), "lhs_dilation": (1, 2)},
    }
    for name, options in cases.items():

        def loss(x, w, options=options):
            y = sk.ring_conv(x, w, dimension_numbers=numbers, spatial_axes={"sp": "W"}, mesh=mesh, **options)
            y = y.value if isinstance(y, sk.Padded) else y
            return jnp.sum(jnp.sin(y)), y

        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, y), (dx, dw) = grad(cut(x, {"sp": sk.Shard(2)}, mesh), cut(w, {}, mesh))
        yield f"conv {name}", y
        yield f"conv {name} dx", dx
        yield f"conv {name} dw", dw


def reshards(devices):
    """From every placement to every other on a mesh of two axes."""
    mesh = sk.make_mesh({"a": 2, "b": len(devices) // 2}, devices=devices)
    x = random(8, 8, 4)
    ends = [sk.Replicate(), sk.Shard(0), sk.Shard(1), sk.Partial()]
    for src in itertools.product(ends, repeat=2):
        # A Partial's parts: each device has its own, and all of them sum up to x.
        parts = [(1 + i) * x for i in range(len(devices))]
        if sk.Partial() in src:
            blocks = iter(parts)
            y = sk.from_local([sk_block(next(blocks), src, mesh, i) for i in range(len(devices))], src, mesh)
        else:
            y = cut(x, src, mesh)
        for dst in itertools.product(ends[:3], repeat=2):
            yield f"reshard {src} -> {dst}", sk.reshard(y, dst)


def sk_block(x, placements, mesh, number):
    """The block of device ``number`` of an array."""
    place = np.unravel_index(number, tuple(mesh.shape.values()))
    for index, size, placement in zip(place, mesh.shape.values(), placements, strict=True):
        if isinstance(placement, sk.Shard):
            x = np.split(x, size, axis=placement.dim)[index]
    return x


def optimizers(devices):
    """Three steps of each stage, with Partial gradients of a loss over a cut batch."""
    mesh = sk.make_mesh({"dp": len(devices)}, devices=devices)
    values = {"w": random(8, 16), "odd": random(7, 3), "bias": random(16)}
    data = cut(random(16, 8), {"dp": sk.Shard(0)}, mesh)

    def loss(params, x):
        y = jnp.tanh(x @ params["w"] + params["bias"])
        return jnp.mean(y**2) + jnp.mean(params["odd"] ** 2) * jnp.mean(x)

    value_and_grad = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, microbatches=2)
    for stage in (sk.ShardingStage1, sk.ShardingStage2, sk.ShardingStage3):
        params = jax.tree.map(lambda x: cut(x, {}, mesh), values)
        if stage is sk.ShardingStage3:
            params = sk.shard_params(params, "dp", mesh)
        inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
        tx = sk.shard_optimizer(inner, stage("dp"), mesh=mesh)
        state = tx.init(params)

        @jax.jit
        def step(params, state, data, tx=tx):
            value, grads = value_and_grad(params, data)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        for _ in range(3):
            params, state, value = step(params, state, data)
        yield f"{stage.__name__} loss", value
        for name, x in sk.unshard_params(params, "dp", mesh).items():
            yield f"{stage.__name__} {name}", x


def partitioned(devices):
    """A step in which each weight is cut another way, with its gradients."""
    mesh = sk.make_mesh({"mp": len(devices)}, devices=devices)
    x, w0, w1, label = random(4, 16), random(16, 16), random(16, 8), random(4, 8)

    def step(x, w0, w1, label):
        def loss(w0, w1):
            return jnp.mean((jax.nn.relu(jax.nn.relu(x @ w0) @ w1) - label) ** 2)

        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(w0, w1)
        return value, w0 - 0.1 * grads[0], w1 - 0.1 * grads[1]

    places = ({}, {"mp": sk.Shard(1)}, {"mp": sk.Shard(0)}, {})
    arguments = [cut(v, place, mesh) for v, place in zip((x, w0, w1, label), places, strict=True)]
    for name, y in zip(("loss", "w0", "w1"), sk.partition(step, places, mesh=mesh)(*arguments), strict=True):
        yield f"partition {name}", y


class Model(nnx.Module):
    """A convolution over a cut width and two layers that cut features."""

    def __init__(self, rngs):
        double = {"rngs": rngs, "param_dtype": jnp.float64}
        self.conv = nnx.Conv(3, 8, (3, 3), **double)
        self.up = nnx.Linear(8, 16, **double)
        self.down = nnx.Linear(16, 4, **double)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(nnx.relu(self.conv(x)))))


def parallelized(devices):
    """The model's output and gradients under a plan."""
    mesh = sk.make_mesh({"sp": 2, "tp": len(devices) // 2}, devices=devices)
    model = Model(nnx.Rngs(0))
    plan = {
        "conv": sk.ConvParallel("sp", dim="W"),
        "up": sk.ColWiseParallel("tp"),
        "down": sk.RowWiseParallel("tp"),
    }
    sk.parallelize(model, plan, mesh)
    x = cut(random(2, 8, 16, 3), {"sp": sk.Shard(2)}, mesh)

    @nnx.jit
    def run(model, x):
        def loss(model):
            y = model(x)
            return jnp.mean(y**2), y

        return nnx.value_and_grad(loss, has_aux=True)(model)

    (_, y), grads = run(model, x)
    yield "model", y
    for path, g in nnx.to_flat_state(grads):
        yield f"model {path}", g.get_value()


CASES = (convolutions, reshards, optimizers, partitioned, parallelized)


def results(devices):
    """All of it, by name."""
    return {name: here(x) for case in CASES for name, x in case(devices)}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    sk.initialize()
    found = results(jax.devices())
    if jax.process_index() == 0:
        np.savez(Path(sys.argv[1]), **found)
