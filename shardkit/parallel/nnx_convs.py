"""nnx convolutions that run on inputs sharded in space."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import lax
from jax import numpy as jnp

from shardkit.parallel.nnx_operands import array_of, like, say_once, whole
from shardkit.parallel.plans import Applied
from shardkit.spatial.convolution.ring import ring_conv
from shardkit.spatial.convolution.transpose import ring_conv_transpose, transpose_padding

_FLAX_MODES = {"CIRCULAR": "circular", "REFLECT": "reflect"}


def _per_dim(value: Any, count: int) -> tuple[int, ...]:
    return (1,) * count if value is None else (value,) * count if isinstance(value, int) else tuple(value)


def _pairs(padding: Any, count: int) -> Any:
    """Flax's spellings of padding as pairs; names stay names."""
    if isinstance(padding, str):
        return padding
    if isinstance(padding, int):
        return [(padding, padding)] * count
    return [(p, p) if isinstance(p, int) else tuple(p) for p in padding]


def _with_one_batch_dim(x: Any, spatial: int) -> tuple[Any, tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Flax allows any number of batch dims: flatten them, and say how to undo it (dims held, dims that count)."""
    array, count = array_of(x), x.ndim - spatial - 1
    if count == 1:
        return x, None
    flat = array.reshape(-1, *array.shape[count:])
    return like(x, flat, (flat.shape[0], *x.shape[count:])), (array.shape[:count], x.shape[:count])


def _restore_batch(y: Any, batch: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Any:
    if batch is None:
        return y
    array, (held, logical) = array_of(y), batch
    return like(y, array.reshape(*held, *array.shape[1:]), (*logical, *y.shape[1:]))


def _numbers(spatial: int) -> tuple[str, str, str]:
    space = "DHW"[-spatial:]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def _conv_operands(layer: Any, x: Any) -> tuple[Any, Any, Any]:
    """Input, (masked) kernel and bias of a convolution in its computation dtype."""
    kernel = layer.kernel[...]
    if layer.mask is not None:
        if layer.mask.shape != layer.kernel_shape:
            raise ValueError(f"mask of shape {layer.mask.shape} for a kernel of shape {layer.kernel_shape}")
        kernel = kernel * layer.mask
    bias = layer.bias[...] if layer.bias is not None else None
    array, kernel, bias = layer.promote_dtype((array_of(x), kernel, bias), dtype=layer.dtype)
    return like(x, array), kernel, bias


class RingConv(nnx.Conv):
    """``nnx.Conv`` as a ring convolution."""

    shardkit_plan: Applied

    def __call__(self, inputs, out_sharding=None):
        reason = _why_not_conv(self, inputs, out_sharding)
        if reason is not None:
            say_once(self, reason)
            return nnx.Conv.__call__(self, whole(inputs), out_sharding=out_sharding)
        count = len(self.kernel_size)
        x, batch = _with_one_batch_dim(inputs, count)
        x, kernel, bias = _conv_operands(self, x)
        input_dilation = _per_dim(self.input_dilation, count)
        kernel_dilation = _per_dim(self.kernel_dilation, count)
        padding, mode = _pairs(self.padding, count), "zeros"
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, kernel_dilation, strict=True)]
        if isinstance(padding, str) and padding in _FLAX_MODES:
            # Flax pads the undilated input, so padding counts input_dilation positions each.
            mode = _FLAX_MODES[padding]
            padding = [((k - 1) // 2 * d, k // 2 * d) for k, d in zip(reach, input_dilation, strict=True)]
        elif padding == "CAUSAL":
            if count != 1:
                raise ValueError("Causal padding is only implemented for 1D convolutions.")
            padding = [((reach[0] - 1) * input_dilation[0], 0)]
        y = ring_conv(
            x,
            kernel,
            _per_dim(self.strides, count),
            padding,
            lhs_dilation=input_dilation,
            rhs_dilation=kernel_dilation,
            dimension_numbers=_numbers(count),
            feature_group_count=self.feature_group_count,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            spatial_axes=self.shardkit_plan.plan.spatial_axes(x.ndim),
            padding_mode=mode,
            mesh=self.shardkit_plan.mesh,
        )
        if bias is not None:
            y = like(y, array_of(y) + bias)
        return _restore_batch(y, batch)


def _why_not_conv(layer: RingConv, inputs: Any, out_sharding: Any) -> str | None:
    count = len(layer.kernel_size)
    if layer.conv_general_dilated is not lax.conv_general_dilated:
        return "it has its own conv_general_dilated function, which knows nothing of halos"
    if out_sharding is not None:
        return f"it was called with out_sharding={out_sharding}"
    if layer.padding == "REFLECT":
        reach = [
            (k - 1) * d + 1 for k, d in zip(layer.kernel_size, _per_dim(layer.kernel_dilation, count), strict=True)
        ]
        sizes = inputs.shape[inputs.ndim - 1 - count : -1]
        if any(k // 2 >= s for k, s in zip(reach, sizes, strict=True)):
            return f"REFLECT padding for a kernel covering {reach} repeats more than the {sizes} elements there are"
    return None


class RingConvTranspose(nnx.ConvTranspose):
    """``nnx.ConvTranspose`` as a ring convolution."""

    shardkit_plan: Applied

    def __call__(self, inputs):
        count = len(self.kernel_size)
        x, batch = _with_one_batch_dim(inputs, count)
        x, kernel, bias = _conv_operands(self, x)
        strides, dilation = _per_dim(self.strides, count), _per_dim(self.kernel_dilation, count)
        common: dict[str, Any] = {
            "rhs_dilation": dilation,
            "dimension_numbers": _numbers(count),
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
            "spatial_axes": self.shardkit_plan.plan.spatial_axes(x.ndim),
            "mesh": self.shardkit_plan.mesh,
        }
        padding = _pairs(self.padding, count)
        if padding == "CIRCULAR":
            if self.transpose_kernel:
                kernel = jnp.swapaxes(jax.lax.rev(kernel, tuple(range(count))), -1, -2)
            reach = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, dilation, strict=True)]
            sizes = x.shape[1:-1]
            pads = [
                circular_transpose_padding(s, k, t, self.transpose_kernel)
                for s, k, t in zip(sizes, reach, strides, strict=True)
            ]
            y = ring_conv(x, kernel, (1,) * count, pads, lhs_dilation=strides, padding_mode="circular", **common)
        else:
            y = ring_conv_transpose(x, kernel, strides, padding, transpose_kernel=self.transpose_kernel, **common)
        if bias is not None:
            y = like(y, array_of(y) + bias)
        return _restore_batch(y, batch)


def circular_transpose_padding(size: int, kernel: int, stride: int, transpose_kernel: bool) -> tuple[int, int]:
    """Padding that makes a transposed convolution on a circle: ``size * stride`` outputs.

    Flax computes the "VALID" result and adds up what wraps around; the same outputs are windows over
    the dilated circle, whose period is ``size * stride`` positions.

    Args:
      size: input elements around the circle.
      kernel: positions the dilated kernel covers.
      stride: input dilation.
      transpose_kernel: which side of an even remainder gets the extra element.
    """
    period = size * stride
    low, high = transpose_padding(kernel, stride, "VALID")
    valid = (size - 1) * stride + 1 + low + high - kernel + 1
    rest = -(valid - period) % (2 * period)
    shift = rest // 2 if transpose_kernel else (rest + 1) // 2
    low = (low + shift) % period
    if low > period // 2:
        low -= period  # the nearer way round
    return low, period - ((size - 1) * stride + 1) + kernel - 1 - low
