"""The convolution of what a device has laid out: where it begins and ends is said by padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import Array, lax
from jax import numpy as jnp

from shardkit import scopes
from shardkit.spatial.convolution.groups import grouped_conv
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.exchange import Index, per_shard
from shardkit.spatial.windows import ShardedWindow

Indices = tuple[Index, ...]  # this device's position along the mesh axis of each spatial dim


def convolve(conv: LocalConv, at: Indices, line: Array, kernel: Array) -> Array:
    """The convolution of an assembled block: ``out_block`` outputs in every spatial dim."""
    padding, dilation, slices = [], [], []
    for position, (dim, window, _) in enumerate(conv.spatial()):
        base = window.window.lhs_dilation
        length = line.shape[dim]
        if window.kept_whole:
            lo = -(window.exchange.starts[0] * base + window.phases[0])
        elif window.static_phase:
            lo = -window.phases[0]
        elif conv.shift_kernel and window.window.rhs_dilation == 1:
            kernel = _shifted(conv, kernel, position, window, at[position])
            covered = (window.out_block - 1) * window.window.stride + window.window.reach + base
            padding.append((1, covered - 1 - ((length - 1) * base + 1)))
            dilation.append(base)
            continue
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
        padding.append((lo, hi))
        dilation.append(base)
    out = _convolve_padded(conv, line, kernel, padding, dilation)
    for position, window in slices:
        dim = conv.out_spec[2 + position]
        phase = per_shard(window.phases, at[position])
        out = lax.dynamic_slice_in_dim(out, phase, window.out_block, axis=dim)
    return out


def _shifted(conv: LocalConv, kernel: Array, position: int, window: ShardedWindow, index: Index) -> Array:
    """A wider kernel, whose taps begin where this shard's windows do: no phase touches an activation.

    It begins one position before the line: XLA's TPU compiler moves space into the batch dim (as "blocks"
    does) of dilated inputs too, but only of those that are padded in front.
    """
    dim, room = conv.rhs_spec[2 + position], window.window.lhs_dilation - 1
    config = [(0, 0, 0)] * kernel.ndim
    config[dim] = (room + 1, room, 0)
    padded = lax.pad(kernel, jnp.zeros((), kernel.dtype), config)
    start = per_shard(tuple(room - phase for phase in window.phases), index)
    return lax.dynamic_slice_in_dim(padded, start, kernel.shape[dim] + room + 1, axis=dim)


def convolve_piece(
    conv: LocalConv, piece: Array, kernel: Array, begins: Sequence[int], outputs: Sequence[tuple[int, int]]
) -> Array:
    """Some of a device's outputs from a piece of its line, zeros standing for the rest of it.

    Args:
      conv: of windows that are kept whole.
      piece: contiguous elements of the line.
      kernel: the whole kernel.
      begins: for each spatial dim, where the piece begins, counted from the block's first element.
      outputs: for each spatial dim, the outputs to compute, [first, stop) of the block's.
    """
    padding, dilation = [], []
    for (dim, window, _), begin, (first, stop) in zip(conv.spatial(), begins, outputs, strict=True):
        base, stride = window.window.lhs_dilation, window.window.stride
        lo = begin * base - (window_start(window) + first * stride)
        covered = (stop - first - 1) * stride + window.window.reach
        padding.append((lo, covered - lo - ((piece.shape[dim] - 1) * base + 1)))
        dilation.append(base)
    return _convolve_padded(conv, piece, kernel, padding, dilation)


def window_start(window: ShardedWindow) -> int:
    """Dilated position of a device's first window, counted from its block's first element."""
    exchange = window.exchange
    return (exchange.starts[0] - exchange.reach_lo) * window.window.lhs_dilation + window.phases[0]


def is_tiny(conv: LocalConv, x: Array, kernel: Array) -> bool:
    """Fewer elements than taps in space: where XLA considers swapping the operands."""
    taps = math.prod(kernel.shape[d] for d in conv.rhs_spec[2:])
    return taps > math.prod(x.shape[d] for d in conv.lhs_spec[2:])


def _convolve_padded(conv: LocalConv, x: Array, kernel: Array, padding: list[Any], dilation: list[Any]) -> Array:
    padding, dilation = list(padding), list(dilation)
    for position, (dim, window, _) in enumerate(conv.spatial()):
        (lo, hi), base = padding[position], dilation[position]
        tiny = window.outputs_computed <= base or is_tiny(conv, x, kernel)
        if base > 1 and (window.window.stride > 1 or window.window.rhs_dilation > 1 or tiny):
            # Rare, and XLA's simplifier takes some of these for grouped convolutions (those without padding
            # whose kernel, or output in the kernel's gradient, is as long as the dilation), swaps the operands
            # and aborts the process: hand it a dilated input.
            x = _pad_dilated(x, dim, lo, hi, base)
            padding[position], dilation[position] = (0, 0), 1
    out = grouped_conv(conv, x, kernel, padding, dilation)
    if not conv.sum_over:
        return out
    with scopes.scope(scopes.REDUCTION):
        return lax.psum(out, conv.sum_over)


def _pad_dilated(x: Array, dim: int, lo: int, hi: int, dilation: int) -> Array:
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (lo, hi, dilation - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), config)
