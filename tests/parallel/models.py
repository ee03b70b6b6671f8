"""Small whole models, each in nnx and in linen, of the plain kind that users bring."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax import numpy as jnp

# nnx


class NnxMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(8, jnp.float32))  # of the model itself

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.gelu(self.up(x))) * self.scale


class NnxBlock(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs, dropout: float = 0.0):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Any, mask: Any = None) -> Any:
        x = x + self.dropout(self.attn(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class NnxGPT(nnx.Module):
    """Token embedding tied to the head, learned positions held by the model itself."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 2, width: int = 16, heads: int = 4, dropout: float = 0.0):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (8, width), jnp.float32))
        self.blocks = nnx.List([NnxBlock(width, heads, rngs, dropout) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids) + self.positions[...]
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


class NnxViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 16, heads: int = 4):
        self.patches = nnx.Conv(1, width, (2, 2), strides=2, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, width), jnp.float32))
        self.blocks = nnx.List([NnxBlock(width, heads, rngs)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


class NnxUNet(nnx.Module):
    """Down by 2, a block, up by 2, a skip; of any number of spatial dims."""

    def __init__(self, rngs: nnx.Rngs, dims: int = 2):
        self.inp = nnx.Conv(1, 4, (3,) * dims, rngs=rngs)
        self.down = nnx.Conv(4, 8, (3,) * dims, strides=2, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.mid = nnx.Conv(8, 8, (3,) * dims, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2,) * dims, strides=2, rngs=rngs)
        self.out = nnx.Conv(8, 1, (3,) * dims, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        skip = nnx.gelu(self.inp(x))
        y = nnx.gelu(self.mid(nnx.gelu(self.norm(self.down(skip)))))
        return self.out(jnp.concatenate([self.up(y), skip], axis=-1))


# linen


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(x)))
        return x * self.param("scale", nn.initializers.ones, (8,), jnp.float32)


class LinenBlock(nn.Module):
    width: int
    heads: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Any, mask: Any = None, train: bool = True) -> Any:
        drop = nn.Dropout(self.dropout, deterministic=not train, name="dropout")
        attn = nn.MultiHeadDotProductAttention(self.heads, name="attn")
        x = x + drop(attn(nn.LayerNorm(name="norm1")(x), mask=mask))
        y = nn.gelu(nn.Dense(4 * self.width, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + drop(nn.Dense(self.width, name="down")(y))


class LinenGPT(nn.Module):
    layers: int = 2
    width: int = 16
    heads: int = 4
    dropout: float = 0.0

    def setup(self):
        self.embed = nn.Embed(32, self.width)
        self.positions = self.param("positions", nn.initializers.normal(0.02), (8, self.width), jnp.float32)
        self.blocks = [LinenBlock(self.width, self.heads, self.dropout) for _ in range(self.layers)]
        self.norm = nn.LayerNorm()

    def __call__(self, ids: Any, train: bool = True) -> Any:
        x = self.embed(ids) + self.positions
        mask = nn.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask, train)
        return self.embed.attend(self.norm(x))


class LinenViT(nn.Module):
    width: int = 16
    heads: int = 4

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.Conv(self.width, (2, 2), strides=2, name="patches")(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.param("positions", nn.initializers.normal(0.02), (16, self.width), jnp.float32)
        x = LinenBlock(self.width, self.heads, name="blocks_0")(x)
        return nn.Dense(10, name="head")(nn.LayerNorm(name="norm")(x).mean(axis=1))


class LinenUNet(nn.Module):
    dims: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size = (3,) * self.dims
        skip = nn.gelu(nn.Conv(4, size, name="inp")(x))
        y = nn.GroupNorm(num_groups=2, name="norm")(nn.Conv(8, size, strides=2, name="down")(skip))
        y = nn.gelu(nn.Conv(8, size, name="mid")(nn.gelu(y)))
        up = nn.ConvTranspose(4, (2,) * self.dims, strides=(2,) * self.dims, name="up")(y)
        return nn.Conv(1, size, name="out")(jnp.concatenate([up, skip], axis=-1))
