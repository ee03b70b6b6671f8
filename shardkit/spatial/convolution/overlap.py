"""The form "overlap": the block is convolved as it is while halos travel, then its edges are put right.

No array holds the block and its halos together. The outputs that read a halo are computed once more, whole,
from thin strips, and selected in place of those that took zeros for it.
"""

from __future__ import annotations

import dataclasses

from jax import Array, lax
from jax import numpy as jnp

from shardkit.spatial.convolution.apply import Indices, convolve_piece, window_start
from shardkit.spatial.convolution.concat import Halos, clear
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.exchange import transfer
from shardkit.spatial.windows import ShardedWindow


@dataclasses.dataclass(frozen=True)
class Edge:
    """The outputs at one side of a block that read its halo there.

    Attributes:
      first, stop: outputs, counted in the block.
      begin, end: elements they read, counted from the block's first: those beyond the block are the halo.
    """

    first: int
    stop: int
    begin: int
    end: int


def edges(window: ShardedWindow) -> tuple[Edge | None, Edge | None]:
    """The edges before and after: (None, None) where nothing travels."""
    exchange, base, stride = window.exchange, window.window.lhs_dilation, window.window.stride
    start, reach, out = window_start(window), window.window.reach, window.out_block
    lower = upper = None
    if exchange.before:
        stop = min(out, max(0, -(start // stride)))  # windows that begin before the block
        end = (start + (stop - 1) * stride + reach - 1) // base + 1
        lower = Edge(0, stop, -exchange.reach_lo, max(1, min(end, exchange.block)))
    if exchange.after:
        # The first window whose end is beyond the block's last element.
        last = (exchange.block - 1) * base
        first = max(0, (last - reach + 1 - start) // stride + 1)
        begin = -(-(start + first * stride) // base)
        upper = Edge(min(first, out), out, min(max(begin, 0), exchange.block - 1), exchange.block + exchange.reach_hi)
    return lower, upper


def why_not_overlap(conv: LocalConv) -> str | None:
    """What keeps a convolution from this form; None if nothing does."""
    for position, (_, window, _) in enumerate(conv.spatial()):
        exchange = window.exchange
        if exchange.table is not None:
            return f"padding_mode={conv.modes[position]!r} lays its edges out element by element"
        if not window.kept_whole:
            return f"windows begin at another place in each block of spatial dim {position}"
        if not exchange.messages:
            continue
        if len(exchange.before) > 1 or len(exchange.after) > 1:
            return f"halos in spatial dim {position} are wider than a block of {exchange.block} elements"
        lower, upper = edges(window)
        inner = (upper.first if upper else window.out_block) - (lower.stop if lower else 0)
        if inner < 1 or (lower and lower.end > exchange.block) or (upper and upper.begin < 0):
            return f"no output of a block of {exchange.block} elements in spatial dim {position} reads the block alone"
    return None


def _piece(conv: LocalConv, x: Array, halos: list[tuple[Array, ...]], dim: int, begin: int, end: int) -> Array:
    """Elements [begin, end) of the block in ``dim``, with the halos of all earlier spatial dims around them."""
    piece = lax.slice_in_dim(x, begin, end, axis=dim)
    for (earlier, window, _), around in zip(conv.spatial(), halos, strict=False):
        count = len(window.exchange.before)
        thin = [lax.slice_in_dim(h, begin, end, axis=dim) for h in around]
        if thin:
            piece = lax.concatenate([*thin[:count], piece, *thin[count:]], earlier)
    return piece


def exchange_halos(conv: LocalConv, at: Indices, x: Array) -> Halos:
    """As for "concat", but no more than the strips that travel is ever laid out."""
    x = clear(conv, at, x)
    halos: list[tuple[Array, ...]] = []
    for dim, window, axis in conv.spatial():
        found = []
        for message in window.exchange.messages:
            begin = message.offsets[0]
            strip = _piece(conv, x, halos, dim, begin, begin + message.length)
            found.append(transfer(strip, message, axis))
        halos.append(tuple(found))
    return tuple(halos)


def _around(conv: LocalConv, position: int, begin: int, outputs: tuple[int, int]):
    """Where a strip of one dim begins, and which outputs it gives: earlier dims with halos, later ones without."""
    begins = [-w.exchange.reach_lo if p < position else 0 for p, (_, w, _) in enumerate(conv.spatial())]
    begins[position] = begin
    wanted = [(0, w.out_block) for _, w, _ in conv.spatial()]
    wanted[position] = outputs
    return begins, wanted


def outputs(conv: LocalConv, at: Indices, x: Array, halos: Halos, kernel: Array) -> Array:
    """The block's outputs; those at its edges from strips, each in one convolution."""
    x = clear(conv, at, x)
    everything = [(0, w.out_block) for _, w, _ in conv.spatial()]
    out = convolve_piece(conv, x, kernel, [0] * len(everything), everything)
    for position, (dim, window, _) in enumerate(conv.spatial()):
        out_dim = conv.out_spec[2 + position]
        around = list(halos[position])
        for side, edge in enumerate(edges(window)):
            if edge is None:
                continue
            halo = around.pop(0)
            inner = (0, edge.end) if side == 0 else (edge.begin, window.exchange.block)
            strip = _piece(conv, x, list(halos[:position]), dim, *inner)
            strip = lax.concatenate([halo, strip] if side == 0 else [strip, halo], dim)
            where = _around(conv, position, edge.begin, (edge.first, edge.stop))
            out = _put(out, convolve_piece(conv, strip, kernel, *where), edge, out_dim)
    return out


def _put(out: Array, part: Array, edge: Edge, dim: int) -> Array:
    """``part`` in place of the edge's outputs: a select, which fuses with what comes before and after."""
    length = out.shape[dim]
    if edge.stop - edge.first > 1:
        config = [(0, 0, 0)] * out.ndim
        config[dim] = (edge.first, length - edge.stop, 0)
        part = lax.pad(part, jnp.zeros((), part.dtype), config)
    position = lax.broadcasted_iota(jnp.int32, out.shape, dim)
    return jnp.where((position >= edge.first) & (position < edge.stop), part, out)


def outputs_by_parts(conv: LocalConv, at: Indices, x: Array, halos: Halos, kernel: Array) -> Array:
    """The same outputs as a sum: what the block adds, and what each halo does.

    For the kernel's gradient, a sum anyway: it reads the block and its halos where they lie.
    """
    x = clear(conv, at, x)
    everything = [(0, w.out_block) for _, w, _ in conv.spatial()]
    out = convolve_piece(conv, x, kernel, [0] * len(everything), everything)
    for position, (_, window, _) in enumerate(conv.spatial()):
        out_dim = conv.out_spec[2 + position]
        around = list(halos[position])
        for side, edge in enumerate(edges(window)):
            if edge is None:
                continue
            begin = edge.begin if side == 0 else window.exchange.block
            where = _around(conv, position, begin, (edge.first, edge.stop))
            part = convolve_piece(conv, around.pop(0), kernel, *where)
            config = [(0, 0, 0)] * out.ndim
            config[out_dim] = (edge.first, window.out_block - edge.stop, 0)
            out = out + lax.pad(part, jnp.zeros((), part.dtype), config)
    return out
