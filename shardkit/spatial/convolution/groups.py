"""The convolution XLA is handed, with groups in a form that its partitioner doesn't gather."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

from jax import Array, lax
from jax import numpy as jnp

from shardkit.spatial.convolution.spec import LocalConv


def grouped_conv(conv: LocalConv, lhs: Array, rhs: Array, padding: list[Any], lhs_dilation: list[Any]) -> Array:
    """``lax.conv_general_dilated`` of a block that has its halos, with padding and dilation of its own."""
    numbers = lax.ConvDimensionNumbers(conv.lhs_spec, conv.rhs_spec, conv.out_spec)
    run = functools.partial(
        lax.conv_general_dilated,
        window_strides=[w.window.stride for w in conv.windows],
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=[w.window.rhs_dilation for w in conv.windows],
        dimension_numbers=numbers,
        batch_group_count=conv.batch_groups,
        precision=conv.precision,
        preferred_element_type=conv.preferred_element_type,
    )
    groups = conv.feature_groups
    if not (conv.split_groups and groups > 1):
        return run(lhs, rhs, feature_group_count=groups)
    taps_out, taps_in = conv.rhs_spec[:2]
    each_in, each_out = rhs.shape[taps_in], rhs.shape[taps_out] // groups
    taps = math.prod(rhs.shape[d] for d in conv.rhs_spec[2:])
    if groups <= each_in * each_out * taps:  # whichever takes fewer operations
        parts = zip(jnp.split(lhs, groups, axis=conv.lhs_spec[1]), jnp.split(rhs, groups, axis=taps_out), strict=True)
        return lax.concatenate([run(a, b) for a, b in parts], conv.out_spec[1])
    # Many narrow groups: as depthwise convolutions, one for each pair of features within a group.
    inputs = [_dilate_and_pad(conv, x, padding, lhs_dilation) for x in _every(lhs, conv.lhs_spec[1], each_in)]
    outputs = []
    for kernel in _every(rhs, taps_out, each_out):
        parts = [_depthwise(conv, x, lax.index_in_dim(kernel, i, taps_in)) for i, x in enumerate(inputs)]
        outputs.append(functools.reduce(jnp.add, parts))
    shape = list(outputs[0].shape)
    shape[conv.out_spec[1]] *= each_out
    dtype = conv.preferred_element_type or jnp.result_type(lhs, rhs)
    return jnp.stack(outputs, axis=conv.out_spec[1] + 1).reshape(shape).astype(dtype)


def _dilate_and_pad(conv: LocalConv, x: Array, padding: list[Any], lhs_dilation: list[Any]) -> Array:
    """The input as a convolution's windows see it, in at least float32."""
    config = [(0, 0, 0)] * x.ndim
    for dim, (lo, hi), dilation in zip(conv.lhs_spec[2:], padding, lhs_dilation, strict=True):
        config[dim] = (lo, hi, dilation - 1)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _depthwise(conv: LocalConv, x: Array, kernel: Array) -> Array:
    """A depthwise convolution as shifted products: elementwise, so XLA has nothing to gather."""
    spatial, feature = conv.rhs_spec[2:], conv.lhs_spec[1]
    products = []
    for tap in itertools.product(*(range(kernel.shape[d]) for d in spatial)):
        starts, limits, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
        index: list[Any] = [0] * kernel.ndim
        index[conv.rhs_spec[0]] = slice(None)
        for dim, kernel_dim, at, sharded in zip(conv.lhs_spec[2:], spatial, tap, conv.windows, strict=True):
            window = sharded.window
            starts[dim], strides[dim], index[kernel_dim] = at * window.rhs_dilation, window.stride, at
            reach = (kernel.shape[kernel_dim] - 1) * window.rhs_dilation + 1
            count = (x.shape[dim] - reach) // window.stride + 1
            limits[dim] = starts[dim] + (count - 1) * window.stride + 1
        weight = jnp.expand_dims(kernel[tuple(index)], [d for d in range(x.ndim) if d != feature])
        products.append(lax.slice(x, starts, limits, strides) * weight.astype(x.dtype))
    total = functools.reduce(jnp.add, products)
    # From the input's order of dims to the output's.
    order = [0] * x.ndim
    for source, target in zip(conv.lhs_spec, conv.out_spec, strict=True):
        order[target] = source
    return lax.transpose(total, order)


def _every(x: Array, dim: int, step: int) -> list[Array]:
    """``x[i::step]`` along ``dim``, for each ``i``."""
    if step == 1:
        return [x]
    split = x.reshape(*x.shape[:dim], -1, step, *x.shape[dim + 1 :])
    return [lax.index_in_dim(split, i, dim + 1, keepdims=False) for i in range(step)]
