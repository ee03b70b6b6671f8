"""A decoder-only transformer as plain functions of a tree, so that benchmarks can describe it by shapes alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; ``compute`` is the dtype that products are taken in."""

    layers: int
    features: int
    heads: int
    vocabulary: int
    context: int
    compute: str = "float32"

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return sum(x.size for x in jax.tree.leaves(shapes(self)))


LARGE = Config(layers=4, features=1280, heads=10, vocabulary=24576, context=512, compute="bfloat16")  # 111 million
SMALL = Config(layers=4, features=256, heads=4, vocabulary=2048, context=128)


def shapes(config: Config, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The parameters, described: eleven arrays a layer."""
    d = config.features

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = {
        **{name: leaf(d, d) for name in ("query", "key", "value", "out")},
        "up": leaf(d, 4 * d),
        "up_bias": leaf(4 * d),
        "down": leaf(4 * d, d),
        "down_bias": leaf(d),
        "norm1": leaf(d),
        "norm2": leaf(d),
        "out_bias": leaf(d),
    }
    tree = {"embedding": leaf(config.vocabulary, d), "positions": leaf(config.context, d), "norm": leaf(d)}
    return tree | {f"layer{i:02}": dict(layer) for i in range(config.layers)}


def create(config: Config, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters with values."""
    leaves, tree = jax.tree.flatten(shapes(config, dtype))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree, [0.05 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )


def loss(config: Config, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of each next token; tokens [batch, context + 1]."""
    dtype = jnp.dtype(config.compute)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return (x * (1 + scale)).astype(dtype)

    @jax.checkpoint  # layers are run again in the backward pass, as is usual at this size
    def layer(p: dict[str, Any], x: jax.Array) -> jax.Array:
        p = {name: w if name.startswith("norm") else w.astype(dtype) for name, w in p.items()}
        y = norm(x, p["norm1"])
        split = (*x.shape[:2], config.heads, -1)
        mixed = jax.nn.dot_product_attention(
            *((y @ p[name]).reshape(split) for name in ("query", "key", "value")), is_causal=True
        )
        x = x + mixed.reshape(x.shape) @ p["out"] + p["out_bias"]
        y = jax.nn.gelu(norm(x, p["norm2"]) @ p["up"] + p["up_bias"])
        return x + y @ p["down"] + p["down_bias"]

    x = (params["embedding"][tokens[:, :-1]] + params["positions"]).astype(dtype)
    for i in range(config.layers):
        x = layer(params[f"layer{i:02}"], x)
    logits = norm(x, params["norm"]) @ params["embedding"].astype(dtype).T
    logits = logits.astype(jnp.float32)
    right = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - right)
