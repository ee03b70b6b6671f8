"""Carrying out an ``Exchange`` plan inside a manual region: permutes, then local assembly."""

from __future__ import annotations

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from shardkit.spatial.windows import Exchange, Message

AxisName = str | tuple[str, ...] | None


def shard_index(axis_name: AxisName) -> Array | int:
    """This device's position along the mesh axis; 0 for a dim that isn't sharded."""
    return 0 if axis_name is None else lax.axis_index(axis_name)


def per_shard(values: tuple, axis_name: AxisName):
    """The entry of a static table that belongs to this shard; a plain int where all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return jnp.asarray(np.asarray(values, np.int32))[shard_index(axis_name)]


def _send(x: Array, message: Message, axis_name: AxisName, dim: int) -> Array:
    offset = per_shard(message.offsets, axis_name)
    if isinstance(offset, int):
        piece = lax.slice_in_dim(x, offset, offset + message.length, axis=dim)
    else:
        piece = lax.dynamic_slice_in_dim(x, offset, message.length, axis=dim)
    if message.travels:
        return lax.ppermute(piece, axis_name, list(message.pairs))  # zeros where nobody sends
    return piece if message.pairs else jnp.zeros_like(piece)


def receive(x: Array, exchange: Exchange, axis_name: AxisName, dim: int) -> tuple[Array, ...]:
    """The halos of a block: one array a message, thin along ``dim``."""
    return tuple(_send(x, message, axis_name, dim) for message in exchange.messages)


def clear_tail(x: Array, size: int, shards: int, axis_name: AxisName, dim: int) -> Array:
    """Zeros in place of the elements of padded tail blocks (at or beyond ``size``), which mean nothing."""
    block = x.shape[dim]
    if size == block * shards:
        return x
    kept = size - shard_index(axis_name) * block
    position = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(position < kept, x, jnp.zeros((), x.dtype))


def join(x: Array, halos: tuple[Array, ...], exchange: Exchange, axis_name: AxisName, dim: int) -> Array:
    """Block and halos side by side: the line of the plan, or the span its table describes."""
    if exchange.table is None:
        pieces = [*halos[: len(exchange.before)], x, *halos[len(exchange.before) :]]
        return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)
    held = lax.concatenate([x, *halos], dim) if halos else x
    rows = np.asarray(exchange.table, np.int32)
    row = jnp.asarray(rows)[shard_index(axis_name)]
    span = jnp.take(held, jnp.maximum(row, 0), axis=dim, mode="clip")
    if (rows < 0).any():
        real = lax.broadcast_in_dim(row >= 0, span.shape, (dim,))
        span = jnp.where(real, span, jnp.zeros((), x.dtype))
    return span


def cut_span(line: Array, exchange: Exchange, axis_name: AxisName, dim: int) -> Array:
    """This shard's span out of its line: zeros are put where the line ends early, then sliced."""
    if exchange.table is not None:
        return line
    lo = max(0, -min(exchange.starts))
    hi = max(0, max(exchange.starts) + exchange.length - line.shape[dim])
    if lo or hi:
        config = [(0, 0, 0)] * line.ndim
        config[dim] = (lo, hi, 0)
        line = lax.pad(line, jnp.zeros((), line.dtype), config)
    start = per_shard(tuple(s + lo for s in exchange.starts), axis_name)
    if isinstance(start, int):
        return lax.slice_in_dim(line, start, start + exchange.length, axis=dim)
    return lax.dynamic_slice_in_dim(line, start, exchange.length, axis=dim)
