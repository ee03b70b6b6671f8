"""The convolution one device runs on its block, its halos, and its derivatives.

Everything here is local code for a manual region: blocks in, blocks out. Three forms say how block and
halos meet: "concat" and "blocks" (concat.py, blocks.py) and "overlap" (overlap.py). The convolution is
bilinear, and ``custom_jvp`` splits its tangent into the two linear maps, so that each can have
the form whose transpose is the backward pass we want, while ``jvp``, ``vmap`` and higher
derivatives stay JAX's own:

* the input tangent is written as the transpose of a convolution of output gradients, so its
  transpose (the input gradient) *gathers*: it fetches halos of the output gradient and convolves
  once, instead of convolving a wider block and sending partial sums back;
* the kernel tangent keeps the block and its thin halos, never their concatenation, and needs no
  communication of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp

from shardkit.spatial.convolution import concat, overlap
from shardkit.spatial.convolution.apply import Indices, is_tiny
from shardkit.spatial.convolution.blocks import from_chunks, to_chunks, why_chunks_differ
from shardkit.spatial.convolution.concat import Halos, clear
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.exchange import clear_tail
from shardkit.spatial.windows import shard_window
from shardkit.varying import alike


def _exchange(conv: LocalConv, at: Indices, x: Array) -> Halos:
    form = overlap if conv.method == "overlap" else concat
    return form.exchange_halos(conv, at, x)


def _outputs(conv: LocalConv, at: Indices, x: Array, halos: Halos, kernel: Array) -> Array:
    form = overlap if conv.method == "overlap" else concat
    return form.outputs(conv, at, x, halos, kernel)


def _outputs_for_kernel(conv: LocalConv, at: Indices, x: Array, halos: Halos, kernel: Array) -> Array:
    """The outputs again, in the form whose transpose the kernel's gradient should be."""
    if conv.method == "overlap":
        return overlap.outputs_by_parts(conv, at, x, halos, kernel)
    return concat.outputs(conv, at, x, halos, kernel)


def _plain(conv: LocalConv, at: Indices, x: Array, kernel: Array) -> Array:
    return _outputs(conv, at, x, _exchange(conv, at, x), kernel)


def _kept(conv: LocalConv, out: Array) -> Array:
    """For "overlap": outputs that become an array of their own.

    Else the compiler keeps both what an activation function made of them and, for its derivative, what the
    edges were put into: two arrays of a layer's size in place of one.
    """
    return lax.optimization_barrier(out) if conv.method == "overlap" else out


@functools.lru_cache(maxsize=1024)
def input_gradient_conv(conv: LocalConv) -> LocalConv | None:
    """The convolution that gathers output gradients into the input gradient; None to scatter instead.

    Edges that repeat elements fold gradients back and batch groups mix dims: there, and where
    gathering would move more, the transpose of the forward pass (scatter and add) is used.
    """
    if conv.batch_groups > 1 or any(m != "zeros" for m in conv.modes) or conv.sum_over:
        return None
    if conv.preferred_element_type is not None:
        return None
    windows = tuple(shard_window(w.window.input_gradient(), w.exchange.shards) for w in conv.windows)
    swapped = dataclasses.replace(
        conv,
        lhs_spec=conv.out_spec,
        out_spec=conv.lhs_spec,
        windows=windows,
        rhs_spec=(conv.rhs_spec[1], conv.rhs_spec[0], *conv.rhs_spec[2:]),
    )
    if swapped.received > conv.received or swapped.permutes > conv.permutes:
        return None
    if conv.method == "blocks" and why_chunks_differ(swapped) is not None:
        return None
    if conv.method == "overlap" and overlap.why_not_overlap(swapped) is not None:
        return dataclasses.replace(swapped, method="concat")
    return swapped


def _transposed_kernel(conv: LocalConv, kernel: Array) -> Array:
    """Kernel flipped in space, its in and out features swapped within each group.

    Same dims order as before: dim ``rhs_spec[0]`` now holds what the gradient convolution takes in.
    """
    out_dim, in_dim, *spatial = conv.rhs_spec
    kernel = lax.rev(kernel, tuple(spatial))
    groups = conv.feature_groups
    if groups == 1:
        return kernel
    # The out dim holds the groups one after the other; they move in front of the in dim.
    split = kernel.reshape(*kernel.shape[:out_dim], groups, -1, *kernel.shape[out_dim + 1 :])
    shape = list(kernel.shape)
    shape[out_dim] //= groups
    shape[in_dim] *= groups
    return jnp.moveaxis(split, out_dim, in_dim).reshape(shape)


def _input_tangent(conv: LocalConv, at: Indices, dx: Array, kernel: Array, out: Array) -> Array:
    gather = input_gradient_conv(conv)

    def along_input(at: Any, dx: Array, kernel: Array) -> Any:
        if gather is None or is_tiny(conv, dx, kernel):
            return _plain(conv, at, dx, kernel)
        flipped = _transposed_kernel(conv, kernel)
        backward = functools.partial(_plain, gather, at)
        # ``out`` only says what the outputs look like; its values aren't used, nor kept.
        (tangent,) = jax.linear_transpose(lambda dy: backward(dy, flipped), out)(clear(conv, at, dx))
        return tangent

    if conv.method == "overlap":
        # checkpoint: else every select keeps its mask and its zeros, arrays of the layer's size, where the
        # backward pass isn't compiled together with the forward one (or lies in another turn of a scan).
        along_input = jax.checkpoint(along_input, prevent_cse=False)
    return along_input(at, dx, kernel)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _local_conv(conv: LocalConv, at: Indices, x: Array, kernel: Array) -> Array:
    return _kept(conv, _plain(conv, at, x, kernel))


def _local_conv_jvp(conv: LocalConv, primals: Any, tangents: Any) -> Any:
    (at, x, kernel), (_, dx, dkernel) = primals, tangents
    halos = _exchange(conv, at, x)
    out = _kept(conv, _outputs(conv, at, x, halos, kernel))
    parts = []
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        parts.append(_input_tangent(conv, at, dx, kernel, out))
    if not isinstance(dkernel, jax.custom_derivatives.SymbolicZero):

        def along_kernel(at: Any, x: Array, halos: Any, dkernel: Array) -> Any:
            return _outputs_for_kernel(conv, at, x, halos, dkernel)

        # checkpoint: "concat" makes the concatenation again in the backward pass, the halos are kept. "overlap" has
        # none to make, and what "blocks" lays out the compiler fuses into the convolutions that read it.
        remade = conv.method == "concat"
        parts.append(jax.checkpoint(along_kernel, prevent_cse=remade)(at, x, halos, dkernel))
    if not parts:
        return out, jnp.zeros_like(out)
    return out, functools.reduce(jnp.add, parts)


_local_conv.defjvp(_local_conv_jvp, symbolic_zeros=True)


def local_conv(conv: LocalConv, at: Indices, x: Array, kernel: Array) -> Array:
    """The block of outputs that belongs to this device.

    Args:
      conv: the static description.
      at: this device's position along the mesh axis of each spatial dim (0 where it isn't sharded).
      x: this device's block of the input.
      kernel: the whole kernel.

    Returns:
      ``out_block`` outputs in each spatial dim; those beyond the logical size mean nothing.
    """
    if conv.chunks is None:
        return laid_out_conv(conv, at, x, kernel)
    position = conv.chunks.position
    window, index = conv.windows[position], at[position]
    dim, out_dim = conv.lhs_spec[2 + position], conv.out_spec[2 + position]
    shards = window.exchange.shards // conv.chunks.count
    x = clear_tail(x, window.exchange.size, shards, index, dim)
    out = laid_out_conv(conv, at, to_chunks(x, conv.lhs_spec[0], dim, conv.chunks), kernel)
    out = from_chunks(out, conv.out_spec[0], out_dim, conv.chunks)
    # Of gradients too, which come the other way.
    return clear_tail(out, window.window.output_size, shards, index, out_dim)


def laid_out_conv(conv: LocalConv, at: Indices, x: Array, kernel: Array) -> Array:
    """``local_conv`` of what lies as ``conv`` runs: of chunks, where it runs on chunks, zeros in their tails."""
    if jnp.issubdtype(x.dtype, jnp.inexact) and jnp.issubdtype(kernel.dtype, jnp.inexact):
        # A sum over the axes that an operand did not vary over lies outside of the custom derivative, whose maps all
        # act between equally varying blocks.
        return _local_conv(conv, at, *alike([x, kernel], *at))
    return _plain(conv, at, x, kernel)  # nothing to differentiate
