"""The convolution one device runs on its block, its halos, and its derivatives.

Everything here is local code for a manual region: blocks in, blocks out. The convolution is
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
import math

import jax
from jax import Array, lax
from jax import numpy as jnp

from shardkit._compat import varying_axes
from shardkit.spatial.conv_groups import grouped_conv
from shardkit.spatial.conv_spec import LocalConv, kept_whole
from shardkit.spatial.exchange import Index, clear_tail, cut_span, join, per_shard, receive
from shardkit.spatial.windows import ShardedWindow, shard_window

Indices = tuple[Index, ...]  # this device's position along the mesh axis of each spatial dim


def _extend(x: Array, halos: tuple[Array, ...], dim: int, window: ShardedWindow, index: Index) -> Array:
    line = join(x, halos, window.exchange, index, dim)
    return line if kept_whole(window) else cut_span(line, window.exchange, index, dim)


def _clear(conv: LocalConv, at: Indices, x: Array) -> Array:
    for (dim, window, _), index in zip(conv.spatial(), at, strict=True):
        x = clear_tail(x, window.exchange.size, window.exchange.shards, index, dim)
    return x


def _exchange(conv: LocalConv, at: Indices, x: Array) -> tuple[tuple[Array, ...], ...]:
    """Halos of every spatial dim; a later dim's carry the corners of the earlier ones."""
    x = _clear(conv, at, x)
    halos = []
    for (dim, window, axis), index in zip(conv.spatial(), at, strict=True):
        halos.append(receive(x, window.exchange, axis, index, dim))
        x = _extend(x, halos[-1], dim, window, index)
    return tuple(halos)


def _assemble(conv: LocalConv, at: Indices, x: Array, halos: tuple[tuple[Array, ...], ...]) -> Array:
    x = _clear(conv, at, x)
    for (dim, window, _), halo, index in zip(conv.spatial(), halos, at, strict=True):
        x = _extend(x, halo, dim, window, index)
    return x


def _convolve(conv: LocalConv, at: Indices, line: Array, kernel: Array) -> Array:
    """The convolution of an assembled block: ``out_block`` outputs in every spatial dim."""
    padding, dilation, slices = [], [], []
    for position, (dim, window, _) in enumerate(conv.spatial()):
        base = window.window.lhs_dilation
        length = line.shape[dim]
        if kept_whole(window):
            lo = -(window.exchange.starts[0] * base + window.phases[0])
        elif window.static_phase:
            lo = -window.phases[0]
        elif window.slices_output:
            lo = 0
            slices.append((position, window))
        else:
            # Every shard's windows begin at another phase of a dilated input: dilate, then slice.
            line = _pad_dilated(line, dim, 0, base - 1, base)
            phase = per_shard(window.phases, at[position])
            line = lax.dynamic_slice_in_dim(line, phase, window.dilated_length, axis=dim)
            lo, base, length = 0, 1, window.dilated_length
        hi = window.dilated_length - lo - ((length - 1) * base + 1)
        tiny = window.outputs_computed <= base or _is_tiny(conv, line, kernel)
        if base > 1 and (window.window.stride > 1 or window.window.rhs_dilation > 1 or tiny):
            # Rare, and XLA's simplifier takes some of these for grouped convolutions (those without padding
            # whose kernel, or output in the kernel's gradient, is as long as the dilation), swaps the operands
            # and aborts the process: hand it a dilated input.
            line, lo, hi, base = _pad_dilated(line, dim, lo, hi, base), 0, 0, 1
        padding.append((lo, hi))
        dilation.append(base)
    out = grouped_conv(conv, line, kernel, padding, dilation)
    for position, window in slices:
        dim = conv.out_spec[2 + position]
        phase = per_shard(window.phases, at[position])
        out = lax.dynamic_slice_in_dim(out, phase, window.out_block, axis=dim)
    return lax.psum(out, conv.sum_over) if conv.sum_over else out


def _is_tiny(conv: LocalConv, x: Array, kernel: Array) -> bool:
    """Fewer elements than taps in space: where XLA considers swapping the operands."""
    taps = math.prod(kernel.shape[d] for d in conv.rhs_spec[2:])
    return taps > math.prod(x.shape[d] for d in conv.lhs_spec[2:])


def _pad_dilated(x: Array, dim: int, lo: int, hi: int, dilation: int) -> Array:
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (lo, hi, dilation - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _plain(conv: LocalConv, at: Indices, x: Array, kernel: Array) -> Array:
    return _convolve(conv, at, _assemble(conv, at, x, _exchange(conv, at, x)), kernel)


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
    cheaper = swapped.received <= conv.received and swapped.permutes <= conv.permutes
    return swapped if cheaper else None


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
    if gather is None or _is_tiny(conv, dx, kernel):
        return _plain(conv, at, dx, kernel)
    flipped = _transposed_kernel(conv, kernel)
    backward = functools.partial(_plain, gather, at)
    (tangent,) = jax.linear_transpose(lambda dy: backward(dy, flipped), out)(_clear(conv, at, dx))
    return tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _local_conv(conv: LocalConv, at: Indices, x: Array, kernel: Array) -> Array:
    return _plain(conv, at, x, kernel)


def _local_conv_jvp(conv: LocalConv, primals, tangents):
    (at, x, kernel), (_, dx, dkernel) = primals, tangents
    halos = _exchange(conv, at, x)
    out = _convolve(conv, at, _assemble(conv, at, x, halos), kernel)
    parts = []
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        parts.append(_input_tangent(conv, at, dx, kernel, out))
    if not isinstance(dkernel, jax.custom_derivatives.SymbolicZero):

        def along_kernel(at, x, halos, dkernel):
            return _convolve(conv, at, _assemble(conv, at, x, halos), dkernel)

        # checkpoint: the concatenation is made again in the backward pass, the halos are kept.
        parts.append(jax.checkpoint(along_kernel)(at, x, halos, dkernel))
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
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not jnp.issubdtype(kernel.dtype, jnp.inexact):
        return _plain(conv, at, x, kernel)
    x, kernel = _vary_alike(x, kernel, at)
    return _local_conv(conv, at, x, kernel)


def _vary_alike(x: Array, kernel: Array, at: Indices) -> tuple[Array, Array]:
    """Both operands varying over every mesh axis that either varies over.

    The transpose of this (a sum over the axes an operand did not vary over) then lies outside of
    the custom derivative, whose maps all act between equally varying blocks.
    """
    union = frozenset[str]().union(*(varying_axes(a) for a in (x, kernel, *at) if isinstance(a, jax.Array)))

    def vary(a: Array) -> Array:
        missing = tuple(sorted(union - varying_axes(a)))
        if not missing:
            return a
        if a.dtype.itemsize < 4 and jnp.issubdtype(a.dtype, jnp.floating):
            # The transpose sums over the missing axes: in float32, which is more exact, and XLA's CPU
            # backend aborts on some 16-bit sums in regions that leave other axes to the compiler.
            return lax.pcast(a.astype(jnp.float32), missing, to="varying").astype(a.dtype)
        return lax.pcast(a, missing, to="varying")

    return vary(x), vary(kernel)
