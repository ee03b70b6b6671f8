"""Block and halos as one array: the form "concat", and "blocks" once its chunks lie in the batch dim."""

from __future__ import annotations

from jax import Array

from shardkit.spatial.convolution.apply import Indices, convolve
from shardkit.spatial.convolution.blocks import receive_chunks
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.exchange import clear_tail, extend, receive

Halos = tuple[tuple[Array, ...], ...]  # of each spatial dim, one array a message


def clear(conv: LocalConv, at: Indices, x: Array) -> Array:
    """Zeros in padded tails. Chunks have none: they're cleared before the block is cut into them."""
    for position, ((dim, window, _), index) in enumerate(zip(conv.spatial(), at, strict=True)):
        if conv.chunks is None or conv.chunks.position != position:
            x = clear_tail(x, window.exchange.size, window.exchange.shards, index, dim)
    return x


def _order(conv: LocalConv) -> list[int]:
    """Spatial dims as they are exchanged: the one that lies in chunks comes last.

    Chunks with their halos hold some elements twice, and what another dim sends would hold them twice, too.
    """
    return sorted(range(len(conv.windows)), key=lambda p: conv.chunks is not None and conv.chunks.position == p)


def exchange_halos(conv: LocalConv, at: Indices, x: Array) -> Halos:
    """Halos of every spatial dim; those of one exchanged later carry the corners of the earlier ones."""
    x = clear(conv, at, x)
    spatial, halos = conv.spatial(), {}
    for position in _order(conv):
        dim, window, axis = spatial[position]
        if conv.chunks is not None and conv.chunks.position == position:
            halos[position] = receive_chunks(conv, x)
        else:
            halos[position] = receive(x, window.exchange, axis, at[position], dim)
        x = extend(x, halos[position], window, at[position], dim)
    return tuple(halos[position] for position in range(len(spatial)))


def _assemble(conv: LocalConv, at: Indices, x: Array, halos: Halos) -> Array:
    x = clear(conv, at, x)
    spatial = conv.spatial()
    for position in _order(conv):
        dim, window, _ = spatial[position]
        x = extend(x, halos[position], window, at[position], dim)
    return x


def outputs(conv: LocalConv, at: Indices, x: Array, halos: Halos, kernel: Array) -> Array:
    """One convolution over the block and its halos."""
    return convolve(conv, at, _assemble(conv, at, x, halos), kernel)
