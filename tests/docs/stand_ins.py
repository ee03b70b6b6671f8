"""What blocks of pages take for granted, and the few blocks that can't be run: all in one place.

A page may show a part of a program: ``records`` and ``train_step`` are the reader's own. Here is what stands in for
them, by page and heading, run before each block under that heading.
"""

from __future__ import annotations

import importlib.util

from pages import Block

# Blocks of Python that aren't run: (page, heading, first line) and why. None at present.
NOT_RUN: dict[tuple[str, str, str], str] = {}

_UNET = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx


class UNet(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Conv(3, 4, (3, 3), strides=(2, 2), rngs=rngs)
        self.up = nnx.ConvTranspose(4, 3, (2, 2), strides=(2, 2), rngs=rngs)

    def __call__(self, x):
        return self.up(nnx.relu(self.down(x)))


images = np.ones((2, 8, 20, 3), np.float32)  # 20 columns over 4 devices
"""

_TRANSFORMER = """
import jax, jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x
"""

# A training that's asked to end at its third step, as a cluster does it.
_TRAINING = """
import os, signal
import jax, jax.numpy as jnp, numpy as np, optax, shardkit as sk

records = {"x": np.ones((128, 4), np.float32), "y": np.ones((128,), np.float32)}


def make_params():
    return {"w": jnp.ones((4, 8)), "v": jnp.ones((8,))}


def loss_of_part(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


asked = []


def train_step(state, batch):
    def one(params, optimizer, batch):
        value, grads = sk.value_and_grad(loss_of_part, batch_axes="dp", mesh=mesh)(params, batch)
        updates, optimizer = tx.update(grads, optimizer, params)
        return optax.apply_updates(params, updates), optimizer, value

    if not asked:
        asked.append(jax.jit(one))
    asked.append(None)
    if len(asked) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    params, optimizer, value = asked[0](state["params"], state["optimizer"], batch)
    return state | {"params": params, "optimizer": optimizer}, value
"""

# Without the TPU's compiler its mesh is one of simulated devices: the lines run, if for another machine.
_TARGET = """
import shardkit as sk

sk.target_mesh = lambda target, axes, **options: sk.make_mesh(axes, **options)
"""

# Each form is timed once: which one is best isn't asked here.
_TUNING = """
import functools
import jax, shardkit as sk

sk.spatial.tune_conv = functools.partial(sk.spatial.tune_conv, rounds=1)
step = lambda *_: None
"""

_STAND_INS = {
    ("README.md", "shardkit"): [_UNET],
    ("README.md", "A whole Flax model"): [_TRANSFORMER],
    ("README.md", "Many hosts"): [_TRAINING],
    ("README.md", "See it before you buy it"): [_TARGET],
    ("benchmarks/README.md", "Tuning"): [_TARGET, _TUNING],
    ("docs/recipes/slurm.md", "SLURM clusters"): [_TRAINING],
    ("docs/recipes/tpu-pods.md", "Plan"): [_TARGET],
}


def stand_ins(block: Block) -> list[str]:
    """The code to run before it."""
    found = _STAND_INS.get((block.page, block.heading), [])
    if importlib.util.find_spec("libtpu") is not None:
        found = [code for code in found if code is not _TARGET]
    return found
