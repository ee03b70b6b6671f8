"""nnx layers that run on inputs sharded in space: the same parameters and meaning, another ``__call__``.

``parallelize`` changes a layer's class to its twin here; nothing else about it changes, so state,
checkpoints and the model's own code stay as they are.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax import numpy as jnp

from shardkit.arrays import Padded, pad_to
from shardkit.parallel.plans import Applied
from shardkit.spatial.conv import ring_conv
from shardkit.spatial.conv_transpose import ring_conv_transpose, transpose_padding
from shardkit.spatial.moments import moments
from shardkit.spatial.operands import clear_tails

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


def _array(x: Any) -> Any:
    return x.array if isinstance(x, Padded) else x


def _whole(x: Any) -> Any:
    """For Flax's own code."""
    return x.value if isinstance(x, Padded) else x


def _like(x: Any, array: Any, shape: tuple[int, ...] | None = None) -> Any:
    return Padded(array, x.logical_shape if shape is None else shape) if isinstance(x, Padded) else array


def _with_one_batch_dim(x: Any, spatial: int) -> tuple[Any, tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Flax allows any number of batch dims: flatten them, and say how to undo it (dims held, dims that count)."""
    array, count = _array(x), x.ndim - spatial - 1
    if count == 1:
        return x, None
    flat = array.reshape(-1, *array.shape[count:])
    return _like(x, flat, (flat.shape[0], *x.shape[count:])), (array.shape[:count], x.shape[:count])


def _restore_batch(y: Any, batch: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Any:
    if batch is None:
        return y
    array, (held, logical) = _array(y), batch
    return _like(y, array.reshape(*held, *array.shape[1:]), (*logical, *y.shape[1:]))


def _numbers(spatial: int) -> tuple[str, str, str]:
    space = "DHW"[-spatial:]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def _say_once(layer: Any, reason: str) -> None:
    """A layer that can't run sharded says so, with its name and the reason (Python shows it once)."""
    applied: Applied = layer.shardkit_plan
    warnings.warn(
        f"layer {applied.path!r} ({type(layer).__mro__[1].__name__}) runs unsharded: {reason}",
        UserWarning,
        stacklevel=3,
    )


def _conv_operands(layer: Any, x: Any) -> tuple[Any, Any, Any]:
    """Input, (masked) kernel and bias of a convolution in its computation dtype."""
    kernel = layer.kernel[...]
    if layer.mask is not None:
        if layer.mask.shape != layer.kernel_shape:
            raise ValueError(f"mask of shape {layer.mask.shape} for a kernel of shape {layer.kernel_shape}")
        kernel = kernel * layer.mask
    bias = layer.bias[...] if layer.bias is not None else None
    array, kernel, bias = layer.promote_dtype((_array(x), kernel, bias), dtype=layer.dtype)
    return _like(x, array), kernel, bias


class RingConv(nnx.Conv):
    """``nnx.Conv`` as a ring convolution."""

    shardkit_plan: Applied

    def __call__(self, inputs, out_sharding=None):
        reason = _why_not_conv(self, inputs, out_sharding)
        if reason is not None:
            _say_once(self, reason)
            return nnx.Conv.__call__(self, _whole(inputs), out_sharding=out_sharding)
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
            y = _like(y, _array(y) + bias)
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
            y = _like(y, _array(y) + bias)
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


def _moments(layer: Any, x: Any, dims: tuple[int, ...], spatial: dict[Any, int]) -> tuple[Any, Any]:
    """Mean and variance of a norm layer's input, over the whole sharded image."""
    stats = moments(
        x,
        dims,
        spatial_axes=spatial,
        keepdims=True,
        dtype=layer.dtype,
        fast_variance=layer.use_fast_variance,
        mesh=layer.shardkit_plan.mesh,
    )
    held = _array(x).shape  # statistics of a padded batch: as long as what they normalize
    mean, var = (
        pad_to(_array(m), tuple(1 if n == 1 else h for n, h in zip(m.shape, held, strict=True))) for m in stats
    )
    return mean, var


def _operands(layer: Any, x: Any, *statistics: Any) -> tuple[Any, ...]:
    """Input, scale, bias and running statistics of a norm layer in its computation dtype."""
    scale = layer.scale[...] if layer.scale is not None else None
    bias = layer.bias[...] if layer.bias is not None else None
    array, *others = layer.promote_dtype((_array(_cleared(x)), scale, bias, *statistics), dtype=layer.dtype)
    return _like(x, array), *others


def _cleared(x: Any) -> Any:
    """Zeros in padded tails: a NaN there would reach the derivatives of scale and statistics as NaN * 0."""
    return _like(x, clear_tails(x.array, x.shape, range(x.ndim))) if isinstance(x, Padded) else x


def _normalize(layer: Any, x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
    """``(x - mean) / sqrt(var + epsilon) * scale + bias``, in the order Flax computes it."""
    array = _array(x)
    y = array - mean
    multiplier = lax.rsqrt(var + layer.epsilon)
    if scale is not None:
        multiplier = multiplier * scale
    y = y * multiplier
    if bias is not None:
        y = y + bias
    dtype = layer.dtype or jnp.result_type(array, *(a for a in (scale, bias) if a is not None))
    return _like(x, y.astype(dtype))


def _running(old: Any, new: Any, momentum: float) -> Any:
    return lax.stop_gradient(momentum * old + (1 - momentum) * new).astype(old.dtype)


def _why_not_norm(layer: Any, mask: Any) -> str | None:
    if mask is not None:
        return "it was called with a mask"
    if layer.axis_name is not None:
        return f"it reduces over axis_name={layer.axis_name!r} itself"
    return None


class SpatialBatchNorm(nnx.BatchNorm):
    """``nnx.BatchNorm`` whose statistics are those of the whole, sharded batch."""

    shardkit_plan: Applied

    def __call__(self, x, use_running_average=None, *, mask=None):
        frozen = use_running_average if use_running_average is not None else self.use_running_average
        reason = _why_not_norm(self, mask)
        if self.axis not in (-1, x.ndim - 1):
            reason = f"its features are in dim {self.axis}, not the last"
        if reason is not None and not frozen:
            _say_once(self, reason)
        if reason is not None or frozen is None or (frozen and not isinstance(x, Padded)):
            # With running averages there is nothing to reduce: Flax's own elementwise code is right.
            return nnx.BatchNorm.__call__(self, _whole(x), use_running_average, mask=mask)
        x, scale, bias, mean, var = _operands(self, x, self.mean[...], self.var[...])
        if not frozen:
            spatial = self.shardkit_plan.plan.spatial_axes(x.ndim)
            mean, var = _moments(self, x, tuple(range(x.ndim - 1)), spatial)
            mean, var = mean.reshape(-1), var.reshape(-1)
            self.mean[...] = _running(self.mean[...], mean, self.momentum)
            self.var[...] = _running(self.var[...], var, self.momentum)
        return _normalize(self, x, mean, var, scale, bias)


class SpatialGroupNorm(nnx.GroupNorm):
    """``nnx.GroupNorm`` whose statistics are those of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x, *, mask=None):
        reason = _why_not_norm(self, mask)
        if self.reduction_axes is not None:
            reason = f"it has its own reduction_axes={self.reduction_axes}"
        if reason is not None:
            _say_once(self, reason)
            return nnx.GroupNorm.__call__(self, _whole(x), mask=mask)
        x, scale, bias = _operands(self, x)
        groups = (self.num_groups, self.group_size)
        array = _array(x)
        grouped = _like(x, array.reshape(*array.shape[:-1], *groups), (*x.shape[:-1], *groups))
        dims = (*range(1, x.ndim - 1), x.ndim)
        mean, var = _moments(self, grouped, dims, self.shardkit_plan.plan.spatial_axes(x.ndim))

        def widen(stat):  # [N, 1.., groups, 1] -> [N, 1.., features]
            return jnp.repeat(stat.reshape(*stat.shape[:-1]), self.group_size, axis=-1)

        return _normalize(self, x, widen(mean), widen(var), scale, bias)


class SpatialInstanceNorm(nnx.InstanceNorm):
    """``nnx.InstanceNorm`` whose statistics are those of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x, *, mask=None):
        reason = _why_not_norm(self, mask)
        if self.feature_axes not in (-1, x.ndim - 1):
            reason = f"its features are in dims {self.feature_axes}, not the last"
        if reason is not None:
            _say_once(self, reason)
            return nnx.InstanceNorm.__call__(self, _whole(x), mask=mask)
        x, scale, bias = _operands(self, x)
        dims = tuple(range(1, x.ndim - 1))
        mean, var = _moments(self, x, dims, self.shardkit_plan.plan.spatial_axes(x.ndim))
        return _normalize(self, x, mean, var, scale, bias)


# Flax layer -> its spatially sharded twin.
SPATIAL_LAYERS: dict[type, type] = {
    nnx.Conv: RingConv,
    nnx.ConvTranspose: RingConvTranspose,
    nnx.BatchNorm: SpatialBatchNorm,
    nnx.GroupNorm: SpatialGroupNorm,
    nnx.InstanceNorm: SpatialInstanceNorm,
}
