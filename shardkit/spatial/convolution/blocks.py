"""The form "blocks": a device's block cut into chunks along one dim, laid side by side in the batch dim.

To the exchange the chunks of all devices are shards of one ring: between chunks of one device halos are
slices, between devices they travel. A matrix unit that multiplies several images at once has more to do
with eight chunks than with one image.
"""

from __future__ import annotations

import dataclasses

from jax import Array, lax
from jax import numpy as jnp

from shardkit.spatial.convolution.spec import Chunks, LocalConv
from shardkit.spatial.exchange import AxisName, permute
from shardkit.spatial.windows import Message, shard_window


def cut_into_chunks(conv: LocalConv, chunks: Chunks) -> LocalConv:
    """``conv`` as it runs on chunks; check ``why_not_chunks`` first."""
    at, window = chunks.position, conv.windows[chunks.position]
    chunked = shard_window(window.window, window.exchange.shards * chunks.count, conv.modes[at])
    windows = (*conv.windows[:at], chunked, *conv.windows[at + 1 :])
    return dataclasses.replace(conv, windows=windows, method="blocks", chunks=chunks)


def why_not_chunks(conv: LocalConv, position: int, count: int) -> str | None:
    """What keeps a convolution from running on ``count`` chunks of one dim; None if nothing does."""
    whole = conv.windows[position]
    if conv.batch_groups > 1:
        return "batch_group_count > 1 gives the batch dim another meaning"
    if whole.exchange.table is not None:
        return f"padding_mode={conv.modes[position]!r} lays its edges out element by element"
    part = shard_window(whole.window, whole.exchange.shards * count, conv.modes[position])
    if part.exchange.block * count != whole.exchange.block or part.out_block * count != whole.out_block:
        return (
            f"blocks of {whole.exchange.block} inputs and {whole.out_block} outputs in spatial dim {position} don't "
            f"divide into {count} chunks"
        )
    return why_chunks_differ(cut_into_chunks(conv, Chunks(position, count)))


def why_chunks_differ(conv: LocalConv) -> str | None:
    """What keeps the chunks of ``conv`` from all running one convolution on themselves and their neighbours' edges."""
    assert conv.chunks is not None
    position, window = conv.chunks.position, conv.windows[conv.chunks.position]
    count, exchange = conv.chunks.count, window.exchange
    if exchange.table is not None or not window.kept_whole:
        return f"windows begin at another place in each chunk of spatial dim {position}"
    if len(exchange.before) > 1 or len(exchange.after) > 1:
        return f"{count} chunks of {exchange.block} elements in spatial dim {position} are narrower than their halos"
    return None


def to_chunks(x: Array, batch: int, dim: int, chunks: Chunks) -> Array:
    """A block with ``dim`` cut into chunks that lie in the ``batch`` dim; nothing is computed."""
    shape = list(x.shape)
    split = [*shape[:dim], chunks.count, shape[dim] // chunks.count, *shape[dim + 1 :]]
    merged = list(shape)
    merged[batch] *= chunks.count
    merged[dim] //= chunks.count
    # Positions in ``split``: the batch dim, and where the chunks' dim goes (beside it).
    at = batch if batch < dim else batch + 1
    order = [d for d in range(len(split)) if d != dim]
    order.insert(order.index(at) + (0 if chunks.major else 1), dim)
    return lax.transpose(x.reshape(split), order).reshape(merged)


def from_chunks(x: Array, batch: int, dim: int, chunks: Chunks) -> Array:
    """The inverse of ``to_chunks``."""
    shape = list(x.shape)
    images = shape[batch] // chunks.count
    pair = [chunks.count, images] if chunks.major else [images, chunks.count]
    split = [*shape[:batch], *pair, *shape[batch + 1 :]]
    chunk_at = batch if chunks.major else batch + 1
    order = [d for d in range(len(split)) if d != chunk_at]
    order.insert(order.index(dim if dim < batch else dim + 1), chunk_at)
    merged = list(shape)
    merged[batch], merged[dim] = images, shape[dim] * chunks.count
    return lax.transpose(x.reshape(split), order).reshape(merged)


def receive_chunks(conv: LocalConv, x: Array) -> tuple[Array, ...]:
    """The halos of every chunk: its neighbour's edge, which only at the block's ends is another device's."""
    assert conv.chunks is not None
    dim, window, axis = conv.spatial()[conv.chunks.position]
    exchange = window.exchange
    halos = []
    for message, towards in [(m, +1) for m in exchange.before] + [(m, -1) for m in exchange.after]:
        # First the edges of all chunks (thin), then chunk by chunk: a slice of both dims at once would make the
        # TPU's compiler give the whole activation another layout.
        begin = message.offsets[0]
        edges = lax.slice_in_dim(x, begin, begin + message.length, axis=dim)
        halos.append(pass_on(edges, conv.lhs_spec[0], conv.chunks, message, axis, exchange.shards, towards))
    return tuple(halos)


def pass_on(
    edges: Array, batch: int, chunks: Chunks, message: Message, axis: AxisName, ring: int, towards: int
) -> Array:
    """Every chunk's edge, one place further along the ring of all chunks: up (+1) or down (-1)."""
    count = chunks.count
    shape = list(edges.shape)
    images = shape[batch] // count
    pair = [count, images] if chunks.major else [images, count]
    split = edges.reshape([*shape[:batch], *pair, *shape[batch + 1 :]])
    dim = batch if chunks.major else batch + 1
    last = count - 1 if towards > 0 else 0
    leaving = lax.slice_in_dim(split, last, last + 1, axis=dim)
    # Of the ring of chunks, the steps that lead from one device to another (or around a device that is alone).
    steps = [(a, b) for a, b in message.pairs if a // count != b // count or (ring == count and (b - a) != towards)]
    pairs = tuple((a // count, b // count) for a, b in steps)
    if any(a != b for a, b in pairs):
        arriving = permute(leaving, axis, pairs)
    else:
        arriving = leaving if pairs else jnp.zeros_like(leaving)
    if towards > 0:
        parts = [arriving, lax.slice_in_dim(split, 0, count - 1, axis=dim)]
    else:
        parts = [lax.slice_in_dim(split, 1, count, axis=dim), arriving]
    return lax.concatenate(parts, dim).reshape(shape)
