"""Flax models that ``models.py`` compiles: a GPT in nnx and in linen, a U-Net, one attention layer.

Where Flax code is annotated for XLA's partitioner the model calls ``note(x, *names)``, a name a dim, as with logical
axes; a model that is given to ``sk.parallelize`` has no notes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

Note = Callable[..., Any]

# How activations are annotated: between layers, the input of cut layers, their hidden features, heads, and logits.
BETWEEN = ("batch", "sequence", None)
INSIDE = ("batch", None, None)
HIDDEN = ("batch", None, "model")
HEADS = ("batch", None, "model", None)


def nothing(x: Any, *names: str | None) -> Any:
    """No annotation."""
    return x


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a GPT and its batch."""

    layers: int = 2
    width: int = 512
    heads: int = 8
    context: int = 512
    vocabulary: int = 8192
    batch: int = 8


def noted_attention(note: Note, attend: Callable) -> Callable:
    """An ``attention_fn`` whose heads are annotated."""

    @functools.wraps(attend)
    def run(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        query, key, value = (note(x, *HEADS) for x in (query, key, value))
        return note(attend(query, key, value, *args, **options), *HEADS)

    return attend if note is nothing else run


class Block(nnx.Module):
    """Attention and two layers, each after a norm."""

    def __init__(self, sizes: Sizes, dtype: Any, note: Note, rngs: nnx.Rngs):
        width, more = sizes.width, {"dtype": dtype, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(width, **more)
        self.attn = nnx.MultiHeadAttention(
            sizes.heads,
            width,
            decode=False,
            keep_rngs=False,
            attention_fn=noted_attention(note, nnx.dot_product_attention),
            **more,
        )
        self.norm2 = nnx.LayerNorm(width, **more)
        self.up = nnx.Linear(width, 4 * width, **more)
        self.down = nnx.Linear(4 * width, width, **more)
        self.note = note

    def __call__(self, x: Any, mask: Any) -> Any:
        note = self.note
        y = note(note(self.norm1(x), *BETWEEN), *INSIDE)
        x = x + note(self.attn(y, mask=mask), *BETWEEN)
        y = note(note(self.norm2(x), *BETWEEN), *INSIDE)
        y = note(nnx.gelu(self.up(y)), *HIDDEN)
        return note(x + note(self.down(y), *BETWEEN), *BETWEEN)


class Gpt(nnx.Module):
    """Decoder only, learned positions, the head a layer of its own."""

    def __init__(self, sizes: Sizes, dtype: Any, note: Note, rngs: nnx.Rngs):
        width, more = sizes.width, {"dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(sizes.vocabulary, width, **more)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (sizes.context, width), jnp.float32))
        self.blocks = nnx.List([Block(sizes, dtype, note, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(width, **more)
        self.head = nnx.Linear(width, sizes.vocabulary, use_bias=False, **more)
        self.note = note

    def __call__(self, ids: Any) -> Any:
        note = self.note
        x = note(self.embed(ids), *BETWEEN)
        x = note(x + self.positions[...].astype(x.dtype), *BETWEEN)
        mask = nnx.make_causal_mask(ids, dtype=bool)
        for block in self.blocks:
            x = block(x, mask)
        x = note(note(self.norm(x), *BETWEEN), *INSIDE)
        return note(self.head(x), *HIDDEN)


class LinenBlock(nn.Module):
    """As ``Block``."""

    sizes: Sizes
    dtype: Any
    note: Note

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        note, dtype, width = self.note, self.dtype, self.sizes.width
        attend = noted_attention(note, nn.dot_product_attention)
        attn = nn.MultiHeadDotProductAttention(self.sizes.heads, dtype=dtype, attention_fn=attend, name="attn")
        y = note(note(nn.LayerNorm(dtype=dtype, name="norm1")(x), *BETWEEN), *INSIDE)
        x = x + note(attn(y, mask=mask), *BETWEEN)
        y = note(note(nn.LayerNorm(dtype=dtype, name="norm2")(x), *BETWEEN), *INSIDE)
        y = note(nn.gelu(nn.Dense(4 * width, dtype=dtype, name="up")(y)), *HIDDEN)
        return note(x + note(nn.Dense(width, dtype=dtype, name="down")(y), *BETWEEN), *BETWEEN)


class LinenGpt(nn.Module):
    """As ``Gpt``."""

    sizes: Sizes
    dtype: Any
    note: Note

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        note, dtype, sizes = self.note, self.dtype, self.sizes
        x = note(nn.Embed(sizes.vocabulary, sizes.width, dtype=dtype, name="embed")(ids), *BETWEEN)
        shape = (sizes.context, sizes.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape, jnp.float32)
        x = note(x + positions.astype(x.dtype), *BETWEEN)
        mask = nn.make_causal_mask(ids, dtype=bool)
        for i in range(sizes.layers):
            x = LinenBlock(sizes, dtype, note, name=f"blocks_{i}")(x, mask)
        x = note(note(nn.LayerNorm(dtype=dtype, name="norm")(x), *BETWEEN), *INSIDE)
        return note(nn.Dense(sizes.vocabulary, use_bias=False, dtype=dtype, name="head")(x), *HIDDEN)


class UNet(nnx.Module):
    """Twice down by 2 and up again, with skips; group norm."""

    def __init__(self, width: int, dtype: Any, note: Note, rngs: nnx.Rngs):
        def conv(inputs: int, outputs: int, strides: int = 1) -> nnx.Conv:
            return nnx.Conv(inputs, outputs, (3, 3), strides=strides, dtype=dtype, rngs=rngs)

        def norm(features: int) -> nnx.GroupNorm:
            return nnx.GroupNorm(features, num_groups=8, dtype=dtype, rngs=rngs)

        def grow(inputs: int, outputs: int) -> nnx.ConvTranspose:
            return nnx.ConvTranspose(inputs, outputs, (2, 2), strides=(2, 2), dtype=dtype, rngs=rngs)

        one, two, four = width, 2 * width, 4 * width
        self.inp, self.norm1 = conv(3, one), norm(one)
        self.down1, self.norm2 = conv(one, two, 2), norm(two)
        self.down2, self.norm3 = conv(two, four, 2), norm(four)
        self.middle, self.norm4 = conv(four, four), norm(four)
        self.up1, self.join1 = grow(four, two), conv(four, two)
        self.up2, self.join2 = grow(two, one), conv(two, one)
        self.out = conv(one, 3)
        self.note = note

    def __call__(self, images: Any) -> Any:
        def note(x: Any) -> Any:
            return self.note(x, "batch", None, "width", None)

        x = note(nnx.gelu(self.norm1(self.inp(note(images)))))
        y = note(nnx.gelu(self.norm2(self.down1(x))))
        z = note(nnx.gelu(self.norm3(self.down2(y))))
        z = note(nnx.gelu(self.norm4(self.middle(z))))
        y = note(nnx.gelu(self.join1(jnp.concatenate([note(self.up1(z)), y], -1))))
        x = note(nnx.gelu(self.join2(jnp.concatenate([note(self.up2(y)), x], -1))))
        return note(self.out(x))
