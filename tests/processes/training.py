"""A small training job over processes, which writes down its losses to the last bit and may be killed at any moment."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk

ROWS, FEATURES, BATCH = 96, 6, 8


def records():
    """Inputs and targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1, keepdims=True)).astype(np.float32)}


def parameters():
    """Some that the axis divides and some that it doesn't, which are kept as rows."""
    rng = np.random.default_rng(1)
    shapes = {"w": (FEATURES, 16), "b": (16,), "v": (16, 5), "c": (5,), "u": (5, 1)}
    return {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}


def loss_of(params, batch):
    """Of a network with dropout, whose noise is part of what must come back."""
    h = jnp.tanh(batch["x"] @ params["w"] + params["b"]) * batch["noise"]
    y = jnp.tanh(h @ params["v"] + params["c"]) @ params["u"]
    return jnp.mean((y - batch["y"]) ** 2)


def say(words):
    """A line, at once: this may be the last moment."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def train(arguments):
    """Go on from the newest checkpoint up to a step."""
    sk.initialize()
    say(f"process id {os.getpid()}")
    dp, tp = arguments.mesh
    mesh = sk.make_mesh({"dp": dp, "tp": tp})
    places = {"w": {"tp": sk.Shard(1)}, "b": {"tp": sk.Shard(0)}, "v": {"tp": sk.Shard(0)}}
    params = {name: sk.shard_tensor(x, places.get(name, {}), mesh) for name, x in parameters().items()}
    tx = sk.shard_optimizer(optax.adamw(1e-2), sk.ShardingStage2("dp"), mesh=mesh)
    value_and_grad = sk.value_and_grad(loss_of, batch_axes="dp", mesh=mesh)

    @jax.jit
    def step(params, state, batch, key):
        key, now = jax.random.split(key)
        # The same noise on any mesh.
        noise = jax.random.bernoulli(now, 0.9, (BATCH, 16)).astype(jnp.float32)
        loss, grads = value_and_grad(params, batch | {"noise": noise})
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, key, loss

    data = sk.shard_dataloader(
        records(), {"dp": sk.Shard(0)}, mesh, batch_size=BATCH, shuffle=True, seed=3, epochs=None
    )
    log = arguments.path / "losses.txt"
    with data, sk.Checkpointer(arguments.path / "steps", keep=2) as checkpoints:
        tree = {"params": params, "state": tx.init(params), "key": jax.random.key(7), "data": data}
        tree, done = checkpoints.resume(tree)
        say(f"from step {done} on")
        for number in range(done + 1, arguments.until + 1):
            batch = next(data)
            tree["params"], tree["state"], tree["key"], loss = step(tree["params"], tree["state"], batch, tree["key"])
            loss = float(loss)
            if jax.process_index() == 0:
                with log.open("a") as file:
                    file.write(f"{number} {loss.hex()}\n")
            say(f"step {number}")
            checkpoints.save(tree, number)
            say(f"saving {number}")
            if checkpoints.preempted:
                say(f"asked to end after {number}")
                break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--mesh", type=lambda text: tuple(map(int, text.split("x"))), default=(2, 2))
    parser.add_argument("--until", type=int, required=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
