"""Carrying out an ``Exchange`` plan inside a manual region: permutes, then local assembly."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from shardkit import scopes
from shardkit.spatial.windows import Exchange, Message, ShardedWindow

AxisName = str | tuple[str, ...] | None

# This device's position along the mesh axis; 0 for a dim that isn't sharded. It is handed in, since
# lax.axis_index can't always be compiled in a region that leaves other mesh axes to the compiler.
Index = Array | int

# What stands where no element is (beyond the ends of a dim that "zeros" extends, in padded tails): a scalar,
# None for zero. A reduction puts its identity there.
Fill = Any


def _filler(x: Array, fill: Fill) -> Array:
    return jnp.zeros((), x.dtype) if fill is None else jnp.asarray(fill, x.dtype)


def per_shard(values: tuple[Any, ...], index: Index) -> Any:
    """The entry of a static table that belongs to this shard; a plain int where all are equal."""
    if len(set(values)) == 1:
        return values[0]
    table = np.asarray(values)
    return jnp.asarray(table if table.dtype == bool else table.astype(np.int32))[index]


def permute(x: Array, axis_name: AxisName, pairs: tuple[tuple[int, int], ...]) -> Array:
    """``lax.ppermute`` with positions counted along ``axis_name``, its first axis major.

    JAX counts them in the mesh's order of the axes, whatever order they're named in (jax 0.10 in
    silence; 0.12 refuses another order).
    """
    if isinstance(axis_name, tuple):
        sizes = jax.sharding.get_abstract_mesh().shape
        given, in_mesh = axis_name, tuple(n for n in sizes if n in axis_name)
        if given != in_mesh:

            def translate(position: int) -> int:
                place = dict(zip(given, np.unravel_index(position, [sizes[n] for n in given]), strict=True))
                return int(np.ravel_multi_index([place[n] for n in in_mesh], [sizes[n] for n in in_mesh]))

            axis_name, pairs = in_mesh, tuple((translate(a), translate(b)) for a, b in pairs)
    with scopes.scope(scopes.HALO):
        return lax.ppermute(x, axis_name, list(pairs))


def _send(x: Array, message: Message, axis_name: AxisName, index: Index, dim: int) -> Array:
    offset = per_shard(message.offsets, index)
    if isinstance(offset, int):
        piece = lax.slice_in_dim(x, offset, offset + message.length, axis=dim)
    else:
        piece = lax.dynamic_slice_in_dim(x, offset, message.length, axis=dim)
    return transfer(piece, message, axis_name)


def transfer(piece: Array, message: Message, axis_name: AxisName) -> Array:
    """A piece of every sender, at its receiver; zeros where nobody sends."""
    if message.travels:
        return permute(piece, axis_name, message.pairs)
    return piece if message.pairs else jnp.zeros_like(piece)


def receive(
    x: Array, exchange: Exchange, axis_name: AxisName, index: Index, dim: int, fill: Fill = None
) -> tuple[Array, ...]:
    """The halos of a block: one array a message, thin along ``dim``; ``fill`` where nothing is sent."""
    halos = []
    for message in exchange.messages:
        halo = _send(x, message, axis_name, index, dim)
        if fill is not None and len(message.pairs) < exchange.shards:
            receivers = {destination for _, destination in message.pairs}
            got = per_shard(tuple(i in receivers for i in range(exchange.shards)), index)
            halo = jnp.where(got, halo, _filler(x, fill))
        halos.append(halo)
    return tuple(halos)


def clear_tail(x: Array, size: int, shards: int, index: Index, dim: int, fill: Fill = None) -> Array:
    """``fill`` in place of the elements of padded tail blocks (at or beyond ``size``), which mean nothing."""
    block = x.shape[dim]
    if size == block * shards:
        return x
    kept = size - index * block
    position = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(position < kept, x, _filler(x, fill))


def join(x: Array, halos: tuple[Array, ...], exchange: Exchange, index: Index, dim: int, fill: Fill = None) -> Array:
    """Block and halos side by side: the line of the plan, or the span its table describes."""
    if exchange.table is None:
        pieces = [*halos[: len(exchange.before)], x, *halos[len(exchange.before) :]]
        return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)
    held = lax.concatenate([x, *halos], dim) if halos else x
    rows = np.asarray(exchange.table, np.int32)
    row = jnp.asarray(rows)[index]
    span = jnp.take(held, jnp.maximum(row, 0), axis=dim, mode="clip")
    if (rows < 0).any():
        real = lax.broadcast_in_dim(row >= 0, span.shape, (dim,))
        span = jnp.where(real, span, _filler(x, fill))
    return span


def cut_span(line: Array, exchange: Exchange, index: Index, dim: int, fill: Fill = None) -> Array:
    """This shard's span out of its line: ``fill`` is put where the line ends early, then sliced."""
    if exchange.table is not None:
        return line
    lo = max(0, -min(exchange.starts))
    hi = max(0, max(exchange.starts) + exchange.length - line.shape[dim])
    if lo or hi:
        config = [(0, 0, 0)] * line.ndim
        config[dim] = (lo, hi, 0)
        line = lax.pad(line, _filler(line, fill), config)
    start = per_shard(tuple(s + lo for s in exchange.starts), index)
    if isinstance(start, int):
        return lax.slice_in_dim(line, start, start + exchange.length, axis=dim)
    return lax.dynamic_slice_in_dim(line, start, exchange.length, axis=dim)


def extend(
    x: Array, halos: tuple[Array, ...], window: ShardedWindow, index: Index, dim: int, fill: Fill = None
) -> Array:
    """A block with its halos, as the window reads it: the line, or the span cut out of it."""
    line = join(x, halos, window.exchange, index, dim, fill)
    return line if window.kept_whole else cut_span(line, window.exchange, index, dim, fill)
