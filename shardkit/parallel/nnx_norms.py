"""nnx norms of inputs sharded in space: statistics of the whole image, in one all-reduce of small sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from flax import nnx
from jax import lax
from jax import numpy as jnp

from shardkit.arrays import Padded, pad_to
from shardkit.parallel.nnx_operands import array_of, cleared, like, say_once, whole
from shardkit.parallel.plans import Applied
from shardkit.spatial.moments import moments
from shardkit.spatial.operands import clear_tails
from shardkit.spatial.pooling.global_pool import ring_global_pool


def _dims(axes: Any, ndim: int) -> tuple[int, ...]:
    """Array dims as Flax reads them: one or several, from the end where negative."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({d + ndim if d < 0 else d for d in given}))


def _statistics(layer: Any, x: Any, dims: tuple[int, ...], spatial: Any, centered: bool = True) -> tuple[Any, Any]:
    """Mean and variance of a norm layer's input over the whole sharded image, reduced dims kept with size 1.

    Other dims come back as long as they are held, whatever ``x`` counts there, so that the statistics fit what they
    normalize; in tails of those dims the variance is 1. Not ``centered``: the mean is zero.
    """
    array, logical = array_of(x), x.shape
    x = like(x, array, tuple(size if d in dims else array.shape[d] for d, size in enumerate(logical)))
    kept = {axes: d for axes, d in spatial.items() if d not in dims}
    spatial = {axes: d for axes, d in spatial.items() if d in dims}
    dtype = jnp.promote_types(array.dtype if layer.dtype is None else layer.dtype, jnp.float32)
    if not spatial:
        mean, var = _local_statistics(x, dims, dtype, layer.use_fast_variance, centered)
    elif centered:
        mean, var = moments(
            x,
            dims,
            spatial_axes=spatial,
            keepdims=True,
            dtype=dtype,
            fast_variance=layer.use_fast_variance,
            mesh=layer.shardkit_plan.mesh,
        )
    else:
        squares = like(x, _abs_squared(array.astype(dtype)))
        var = ring_global_pool(
            squares, "mean", dims, spatial_axes=spatial, keepdims=True, mesh=layer.shardkit_plan.mesh
        )
        mean = jnp.zeros((), dtype)
    var = array_of(var)
    if isinstance(x, Padded):
        counted = tuple(1 if d in dims else size for d, size in enumerate(logical))
        var = cleared(layer, Padded(var, counted), 1, kept).array
    return array_of(mean), var


def _local_statistics(x: Any, dims: tuple[int, ...], dtype: Any, fast: bool, centered: bool) -> tuple[Any, Any]:
    """The same where no reduced dim is cut: nothing travels. Tails of ``x`` hold zeros."""
    array = array_of(x).astype(dtype)
    if any(array.shape[d] < x.shape[d] for d in dims):
        raise ValueError(
            f"a norm over dims {dims} of shape {tuple(x.shape)} holds only {array.shape} here; name the mesh axes that "
            "cut these dims in the ConvParallel plan"
        )
    count = math.prod(x.shape[d] for d in dims)

    def average(values):
        return values.sum(dims, keepdims=True) / count

    if not centered:
        return jnp.zeros((), dtype), average(_abs_squared(array))
    mean = average(array)
    if fast:
        return mean, jnp.maximum(average(_abs_squared(array)) - _abs_squared(mean), 0)
    return mean, average(clear_tails(_abs_squared(array - mean), x.shape, dims))


def _abs_squared(x: Any) -> Any:
    return jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else x * x


def _operands(layer: Any, x: Any, *statistics: Any) -> tuple[Any, ...]:
    """Input, scale, bias and running statistics of a norm layer in its computation dtype."""
    scale, bias = (getattr(layer, name, None) for name in ("scale", "bias"))
    given = (None if p is None else p[...] for p in (scale, bias))
    array, *others = layer.promote_dtype((array_of(cleared(layer, x)), *given, *statistics), dtype=layer.dtype)
    return like(x, array), *others


def _normalize(layer: Any, x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
    """``(x - mean) / sqrt(var + epsilon) * scale + bias``, in the order Flax computes it."""
    array = array_of(x)
    y = array - mean
    multiplier = lax.rsqrt(var + layer.epsilon)
    if scale is not None:
        multiplier = multiplier * scale
    y = y * multiplier
    if bias is not None:
        y = y + bias
    dtype = layer.dtype or jnp.result_type(array, *(a for a in (scale, bias) if a is not None))
    return like(x, y.astype(dtype))


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
            say_once(self, reason)
        if reason is not None or frozen is None or (frozen and not isinstance(x, Padded)):
            # With running averages there is nothing to reduce: Flax's own elementwise code is right.
            return nnx.BatchNorm.__call__(self, whole(x), use_running_average, mask=mask)
        x, scale, bias, mean, var = _operands(self, x, self.mean[...], self.var[...])
        if not frozen:
            spatial = self.shardkit_plan.plan.spatial_axes(x.ndim)
            mean, var = _statistics(self, x, tuple(range(x.ndim - 1)), spatial)
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
            say_once(self, reason)
            return nnx.GroupNorm.__call__(self, whole(x), mask=mask)
        x, scale, bias = _operands(self, x)
        groups = (self.num_groups, self.group_size)
        array = array_of(x)
        grouped = like(x, array.reshape(*array.shape[:-1], *groups), (*x.shape[:-1], *groups))
        dims = (*range(1, x.ndim - 1), x.ndim)
        mean, var = _statistics(self, grouped, dims, self.shardkit_plan.plan.spatial_axes(x.ndim))

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
            say_once(self, reason)
            return nnx.InstanceNorm.__call__(self, whole(x), mask=mask)
        x, scale, bias = _operands(self, x)
        dims = tuple(range(1, x.ndim - 1))
        mean, var = _statistics(self, x, dims, self.shardkit_plan.plan.spatial_axes(x.ndim))
        return _normalize(self, x, mean, var, scale, bias)


def _features(parameter: Any, x: Any, dims: tuple[int, ...]) -> Any:
    """A parameter (one number for each element of ``dims``) laid along those dims, as long as they are held."""
    if parameter is None:
        return None
    held = tuple(size if d in dims else 1 for d, size in enumerate(array_of(x).shape))
    counted = tuple(size if d in dims else 1 for d, size in enumerate(x.shape))
    if any(h < c for h, c in zip(held, counted, strict=True)):
        raise ValueError(
            f"feature dims {dims} of shape {tuple(x.shape)} are cut, and inside a manual region scale and bias can't "
            "be: call this layer outside it"
        )
    return pad_to(parameter.reshape(counted), held)


def _layer_norm(layer: Any, x: Any, mask: Any, centered: bool) -> Any:
    reduced = _dims(layer.reduction_axes, x.ndim)
    spatial = layer.shardkit_plan.plan.spatial_axes(x.ndim)
    if not isinstance(x, Padded) and not set(reduced) & set(spatial.values()):
        return None  # elementwise in space: Flax's own code is right, with a mask or an axis_name too
    reason = _why_not_norm(layer, mask)
    if reason is not None:
        say_once(layer, reason)
        return None
    features = _dims(layer.feature_axes, x.ndim)
    x, scale, bias = _operands(layer, x)
    mean, var = _statistics(layer, x, reduced, spatial, centered)
    return _normalize(layer, x, mean, var, _features(scale, x, features), _features(bias, x, features))


class SpatialLayerNorm(nnx.LayerNorm):
    """``nnx.LayerNorm``; where it reduces spatial dims, with the statistics of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x, *, mask=None):
        y = _layer_norm(self, x, mask, centered=True)
        return nnx.LayerNorm.__call__(self, whole(x), mask=mask) if y is None else y


class SpatialRMSNorm(nnx.RMSNorm):
    """``nnx.RMSNorm``; where it reduces spatial dims, with the mean square of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x, mask=None):
        y = _layer_norm(self, x, mask, centered=False)
        return nnx.RMSNorm.__call__(self, whole(x), mask=mask) if y is None else y
