"""Models as people write them with Flax, small, and one training step of each: nothing in here knows of devices.

``benchmarks/partition.py`` measures the same ones at other sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

# --- models ---------------------------------------------------------------------------------------


class MLP(nnx.Module):
    """Two layers with a norm between them; in ``dtype``, if it's given, and with dropout."""

    def __init__(self, rngs, inputs=16, hidden=32, outputs=8, dropout=0.0, dtype=None):
        self.up = nnx.Linear(inputs, hidden, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.down = nnx.Linear(hidden, outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(self.norm(jax.nn.gelu(self.up(x)))))


class CNN(nnx.Module):
    """Convolution, BatchNorm, pooling, a convolution with strides, a linear layer."""

    def __init__(self, rngs, width=8, side=16, classes=10):
        self.first = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Conv(width, width, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(width * (side // 4) ** 2, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(jax.nn.relu(self.norm(self.first(x))), (2, 2), strides=(2, 2))
        x = jax.nn.relu(self.second(x))
        return self.head(x.reshape(x.shape[0], -1))


class ResBlock(nnx.Module):
    """Two convolutions with BatchNorm beside the identity."""

    def __init__(self, width, rngs):
        self.first = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return jax.nn.relu(x + self.norm2(self.second(jax.nn.relu(self.norm1(self.first(x))))))


class ResNet(nnx.Module):
    """A stack of residual blocks, the mean over space, a linear layer."""

    def __init__(self, rngs, width=8, blocks=2, classes=10):
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.blocks = nnx.List([ResBlock(width, rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class UNet(nnx.Module):
    """One level down (strided and pooled) and up (transposed), with a skip; GroupNorm."""

    def __init__(self, rngs, width=8):
        self.enter = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.down = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.GroupNorm(2 * width, 4, rngs=rngs)
        self.up = nnx.ConvTranspose(2 * width, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.leave = nnx.Conv(2 * width, 3, (3, 3), rngs=rngs)

    def __call__(self, x):
        skip = jax.nn.gelu(self.enter(x))
        pooled = nnx.max_pool(skip, (2, 2), strides=(2, 2))
        deep = jax.nn.gelu(self.norm(self.down(skip))) + jnp.concatenate([pooled, pooled], -1)
        return self.leave(jnp.concatenate([skip, self.up(deep)], -1))


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm and beside the identity."""

    def __init__(self, width, heads, rngs, dtype=None):
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Encoder(nnx.Module):
    """Blocks without a mask between two linear layers."""

    def __init__(self, rngs, inputs=16, width=32, heads=4, layers=1, outputs=8, dtype=None):
        self.enter = nnx.Linear(inputs, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs, dtype) for _ in range(layers)])
        self.head = nnx.Linear(width, outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class GPT(nnx.Module):
    """A causal language model; with ``remat``, blocks are computed again on the way back."""

    def __init__(self, rngs, vocabulary=32, width=32, heads=4, layers=2, context=16, remat=False):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((context, width), jnp.float32))
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.vocabulary = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)
        self.remat = remat

    def __call__(self, tokens):
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.position[...]
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x, mask) if self.remat else block(x, mask)
        return self.vocabulary(self.norm(x))


class ViT(nnx.Module):
    """Patches, a class token, learned positions, blocks."""

    def __init__(self, rngs, width=32, heads=4, layers=1, patch=4, side=16, classes=10):
        self.patches = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, width), jnp.float32))
        self.position = nnx.Param(jnp.zeros((1, (side // patch) ** 2 + 1, width), jnp.float32))
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], 1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Recurrent(nnx.Module):
    """A cell scanned over time, a linear layer on its last state."""

    def __init__(self, rngs, cell=nnx.LSTMCell, inputs=16, hidden=32, outputs=8):
        self.cells = nnx.RNN(cell(inputs, hidden, rngs=rngs))
        self.head = nnx.Linear(hidden, outputs, rngs=rngs)

    def __call__(self, x):
        return self.head(self.cells(x)[:, -1])


class MoE(nnx.Module):
    """Each token weighs two experts; all experts see all tokens (dense dispatch)."""

    def __init__(self, rngs, width=16, experts=4, hidden=32, outputs=8):
        self.gate = nnx.Linear(width, experts, rngs=rngs)
        self.up = nnx.Param(jnp.zeros((experts, width, hidden), jnp.float32))
        self.down = nnx.Param(jnp.zeros((experts, hidden, width), jnp.float32))
        self.head = nnx.Linear(width, outputs, rngs=rngs)
        self.experts = experts

    def __call__(self, x):
        weights, which = jax.lax.top_k(jax.nn.softmax(self.gate(x)), 2)
        dispatch = (jax.nn.one_hot(which, self.experts) * weights[..., None]).sum(-2)
        given = jnp.einsum("te,td->etd", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("etd,edf->etf", given, self.up[...]))
        return self.head(x + jnp.einsum("etf,efd->etd", hidden, self.down[...]).sum(0))


class LinenCNN(nn.Module):
    """The older Flax: a convolution with BatchNorm, a linear layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(10)(nn.avg_pool(x, (4, 4), (4, 4)).reshape(x.shape[0], -1))


# --- losses ---------------------------------------------------------------------------------------


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def squares(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """The mean of squared differences."""
    return jnp.mean((found - wanted) ** 2)


# --- a step ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Training:
    """A step and what it starts from.

    Attributes:
      step: of (params, optimizer state, other state, x, y); gives the first three anew, and the loss.
      state: (params, optimizer state, other state).
    """

    step: Callable
    state: tuple[Any, Any, Any]


def adamw() -> optax.GradientTransformation:
    """With an eps that isn't tiny: some gradients are zero but for rounding (those of a key's bias: adding one number
    to all logits changes no softmax), and Adam would turn their noise into steps of the size of the learning rate."""
    return optax.adamw(1e-2, eps=1e-3)


def training(make: Callable[[nnx.Rngs], nnx.Module], loss: Callable, microbatches: bool = False) -> Training:
    """Forward, backward and AdamW for a model.

    Args:
      make: of ``nnx.Rngs``, the model. It's never made: its state is filled with numbers that NumPy draws, so that no
        parameter is zero.
      loss: of the model's result and ``y``.
      microbatches: ``x`` and ``y`` have a leading dim of microbatches; gradients are summed over it in a ``lax.scan``.
    """
    tx = adamw()
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    params, rest = filled(params), filled(rest)

    def of_batch(params: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        value = loss(model(x), y)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    def gradients(params: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.value_and_grad(of_batch, has_aux=True)(params, rest, x, y)

    def summed(params: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        def one(carried: Any, batch: Any) -> Any:
            rest, total, grads = carried
            (value, rest), more = gradients(params, rest, *batch)
            return (rest, total + value, jax.tree.map(jnp.add, grads, more)), None

        start = (rest, jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
        (rest, value, grads), _ = jax.lax.scan(one, start, (x, y))
        value, grads = jax.tree.map(lambda a: a / len(x), (value, grads))
        return (value, rest), grads

    def step(params: Any, optimizer: Any, rest: Any, x: jax.Array, y: jax.Array) -> Any:
        (value, rest), grads = (summed if microbatches else gradients)(params, rest, x, y)
        updates, optimizer = tx.update(grads, optimizer, params)
        return optax.apply_updates(params, updates), optimizer, rest, value

    return Training(step, (params, filled(jax.eval_shape(tx.init, params), zeros=True), rest))


def filled(tree: Any, zeros: bool = False) -> Any:
    """Numbers for described arrays: small ones for weights, about one for scales and variances, keys."""
    rng = np.random.default_rng(0)

    def fill(path: Any, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if zeros or not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(np.zeros(x.shape, x.dtype))
        name = jax.tree_util.keystr(path)
        fan_in = math.prod(x.shape[:-1]) if len(x.shape) > 1 else 100
        drawn = rng.normal(size=x.shape) / math.sqrt(fan_in)
        near_one = "scale" in name or "var" in name
        return jnp.asarray((1 + 0.1 * np.tanh(drawn) if near_one else drawn).astype(x.dtype))

    return jax.tree_util.tree_map_with_path(fill, tree)


# --- where parameters are -------------------------------------------------------------------------

# Megatron: what reads the residual stream is cut by columns, what writes to it by rows, tables by vocabulary. By parts
# of a parameter's path: the dim that "tp" cuts.
COLUMNS_AND_ROWS = {
    "['query']['kernel']": 1,
    "['key']['kernel']": 1,
    "['value']['kernel']": 1,
    "['query']['bias']": 0,
    "['key']['bias']": 0,
    "['value']['bias']": 0,
    "['out']['kernel']": 0,
    "['up']['kernel']": 1,
    "['up']['bias']": 0,
    "['down']['kernel']": 0,
    "['embed']['embedding']": 0,
    "['vocabulary']['kernel']": 1,
}


def cut_dim(path: Any, x: Any, rules: Mapping[str, int]) -> int | None:
    """The dim of a leaf that the rules cut, by its path; None for none (of optimizer state as of its parameter)."""
    name = jax.tree_util.keystr(path)
    return next((dim for part, dim in rules.items() if part in name and np.ndim(x) > dim), None)
