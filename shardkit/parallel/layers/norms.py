"""Norms of inputs sharded in space: statistics of the whole image, in one all-reduce of small sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from shardkit.arrays import Padded, pad_to
from shardkit.parallel.layers.operands import array_of, cleared, like, placed_along
from shardkit.parallel.layers.spread import averaged, on_parts
from shardkit.parallel.plans import Applied
from shardkit.spatial.moments import abs_squared, moments
from shardkit.spatial.operands import clear_tails
from shardkit.spatial.pooling.global_pool import ring_global_pool


@dataclasses.dataclass(frozen=True)
class NormSettings:
    """What every norm layer has.

    Attributes:
      epsilon: added to the variance.
      dtype: of the result and, if wider than the input's, of the statistics; None: what the operands promote to.
      fast_variance: ``E[|x|^2] - |E[x]|^2``, else of the differences to the mean.
      wide_statistics: of at least float32, else of ``dtype`` or that of the input.
    """

    epsilon: float
    dtype: Any = None
    fast_variance: bool = True
    wide_statistics: bool = True

    @classmethod
    def of(cls, layer: Any) -> NormSettings:
        """Of an nnx or linen layer: they name alike what they share."""
        wide = getattr(layer, "force_float32_reductions", True)
        return cls(layer.epsilon, layer.dtype, layer.use_fast_variance, wide)


def why_not_norm(layer: Any, mask: Any) -> str | None:
    """Why the statistics of a layer called like this can't be taken here, if so."""
    if mask is not None:
        return "it was called with a mask"
    if layer.axis_name is not None and layer.axis_index_groups is not None:
        return f"it reduces over axis_index_groups={layer.axis_index_groups!r} itself"
    return None


def why_not_alone(layer: Any, mask: Any) -> str | None:
    """The same of a norm of each example, which has nothing to reduce over other devices."""
    if layer.axis_name is not None:
        return f"it reduces over axis_name={layer.axis_name!r} itself"
    return why_not_norm(layer, mask)


def why_not_features(axes: Any, ndim: int) -> str | None:
    """Batch and instance norms are sharded where the features are the last dim, the usual case."""
    if dims_of(axes, ndim) == (ndim - 1,):
        return None
    several = isinstance(axes, Iterable)
    return f"its features are in {'dims' if several else 'dim'} {axes}, not the last"


def dims_of(axes: Any, ndim: int) -> tuple[int, ...]:
    """Array dims as Flax reads them: one or several, from the end where negative."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({d + ndim if d < 0 else d for d in given}))


def is_local(x: Any, reduced: tuple[int, ...], applied: Applied) -> bool:
    """Nothing that is cut is reduced, and nothing is padded: Flax's own code is right."""
    return not isinstance(x, Padded) and not set(reduced) & set(applied.plan.spatial_axes(x.ndim).values())


def batch_norm(
    settings: NormSettings,
    x: Any,
    scale: Any,
    bias: Any,
    applied: Applied,
    running: Sequence[Any] | None = None,
    axes: Any = None,
) -> tuple[Any, Any, Any]:
    """A batch norm over all dims but the last.

    Args:
      settings: of the layer.
      x: (..., features), an array or ``sk.Padded``.
      scale, bias: (features,) or None.
      applied: which mesh axes cut which dims.
      running: (mean, var), each (features,), to normalize with, in place of those of the batch.
      axes: manual mesh axes that cut the batch, to average statistics over; None: ``x`` has all of it.

    Returns:
      The result, and the mean and variance that it was normalized with.
    """
    x = cleared(applied, x)
    if running is not None:
        mean, var = running
    else:
        mean, var = _statistics(settings, x, tuple(range(x.ndim - 1)), applied)
        mean, var = mean.reshape(-1), var.reshape(-1)
        if axes is not None:
            dtypes = mean.dtype, var.dtype
            whole = averaged(mean, var, axes, settings.fast_variance)
            mean, var = (on_parts(s, x, dtype) for s, dtype in zip(whole, dtypes, strict=True))
            y = _normalize(settings, x, mean, var, scale, bias)
            return y, *(s.astype(dtype) for s, dtype in zip(whole, dtypes, strict=True))
    return _normalize(settings, x, mean, var, scale, bias), mean, var


def group_norm(
    settings: NormSettings,
    x: Any,
    scale: Any,
    bias: Any,
    applied: Applied,
    groups: int,
    reduction_axes: Any = None,
) -> Any:
    """A norm of each image over ``groups`` groups of neighbouring features.

    Args:
      settings, x, scale, bias, applied: as for ``batch_norm``.
      groups: their number, which divides the features.
      reduction_axes: dims reduced, the last among them; else all but the first.
    """
    x = cleared(applied, x)
    array, last = array_of(x), x.ndim - 1
    size = array.shape[-1] // groups
    grouped = like(x, array.reshape(*array.shape[:-1], groups, size), (*x.shape[:-1], groups, size))
    reduced = range(1, x.ndim) if reduction_axes is None else dims_of(reduction_axes, x.ndim)
    dims = tuple(d + (d == last) for d in reduced)
    mean, var = _statistics(settings, grouped, dims, applied, x.ndim)

    def widen(stat: Any) -> Any:  # [N, 1.., groups, 1] -> [N, 1.., features]
        return jnp.repeat(stat.reshape(*stat.shape[:-1]), size, axis=-1)

    return _normalize(settings, x, widen(mean), widen(var), scale, bias)


def instance_norm(settings: NormSettings, x: Any, scale: Any, bias: Any, applied: Applied) -> Any:
    """A norm of every feature of every image by itself; the arguments as for ``batch_norm``."""
    x = cleared(applied, x)
    mean, var = _statistics(settings, x, tuple(range(1, x.ndim - 1)), applied)
    return _normalize(settings, x, mean, var, scale, bias)


def layer_norm(
    settings: NormSettings,
    x: Any,
    scale: Any,
    bias: Any,
    applied: Applied,
    reduction_axes: Any,
    feature_axes: Any,
    centered: bool = True,
) -> Any:
    """A norm over any dims; not ``centered``, an RMS norm.

    Args:
      settings, x, applied: as for ``batch_norm``.
      scale, bias: one number for each element of the feature dims, or None.
      reduction_axes, feature_axes: one dim or several.
      centered: subtract the mean.
    """
    x = cleared(applied, x)
    features = dims_of(feature_axes, x.ndim)
    mean, var = _statistics(settings, x, dims_of(reduction_axes, x.ndim), applied, centered=centered)
    return _normalize(settings, x, mean, var, _features(scale, x, features), _features(bias, x, features))


def _statistics(
    settings: NormSettings,
    x: Any,
    dims: tuple[int, ...],
    applied: Applied,
    ndim: int | None = None,
    centered: bool = True,
) -> tuple[Any, Any]:
    """Mean and variance over the whole sharded image, reduced dims kept with size 1.

    Other dims come back as long as they are held, whatever ``x`` counts there, so that the statistics fit what they
    normalize; in tails of those dims the variance is 1. Not ``centered``: the mean is zero. ``ndim``: that of the
    layer's input, if ``x`` isn't as it was.
    """
    array, logical = array_of(x), x.shape
    x = like(x, array, tuple(size if d in dims else array.shape[d] for d, size in enumerate(logical)))
    cut = applied.plan.spatial_axes(x.ndim if ndim is None else ndim)
    kept = {axes: d for axes, d in cut.items() if d not in dims}
    spatial = {axes: d for axes, d in cut.items() if d in dims}
    given = array.dtype if settings.dtype is None else settings.dtype
    dtype = jnp.promote_types(given, jnp.float32)
    if not spatial:
        mean, var = _local_statistics(x, dims, dtype, settings.fast_variance, centered)
    elif centered:
        mean, var = moments(
            x,
            dims,
            spatial_axes=spatial,
            keepdims=True,
            dtype=dtype,
            fast_variance=settings.fast_variance,
            mesh=applied.mesh,
        )
    else:
        squares = like(x, abs_squared(array.astype(dtype)))
        var = ring_global_pool(squares, "mean", dims, spatial_axes=spatial, keepdims=True, mesh=applied.mesh)
        mean = jnp.zeros((), dtype)
    mean, var = array_of(mean), array_of(var)
    if isinstance(x, Padded):
        counted = tuple(1 if d in dims else size for d, size in enumerate(logical))
        var = cleared(applied, Padded(var, counted), 1, kept).array
    if not settings.wide_statistics and jnp.issubdtype(given, jnp.floating):
        mean, var = mean.astype(given), var.astype(given)  # summed in float32 nevertheless
    return mean, var


def _local_statistics(x: Any, dims: tuple[int, ...], dtype: Any, fast: bool, centered: bool) -> tuple[Any, Any]:
    """The same where no reduced dim is cut: nothing travels. Tails of ``x`` hold zeros."""
    array = array_of(x).astype(dtype)
    if any(array.shape[d] < x.shape[d] for d in dims):
        raise ValueError(
            f"a norm over dims {dims} of shape {tuple(x.shape)} holds only {array.shape} here; name the mesh axes that "
            "cut these dims in the ConvParallel plan"
        )
    count = math.prod(x.shape[d] for d in dims)

    def average(values: Any) -> Any:
        return values.sum(dims, keepdims=True) / count

    if not centered:
        return jnp.zeros((), dtype), average(abs_squared(array))
    mean = average(array)
    if fast:
        return mean, jnp.maximum(average(abs_squared(array)) - abs_squared(mean), 0)
    return mean, average(clear_tails(abs_squared(array - mean), x.shape, dims))


def _normalize(settings: NormSettings, x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
    """``(x - mean) / sqrt(var + epsilon) * scale + bias``, in the order Flax computes it."""
    array = array_of(x)
    y = array - mean
    multiplier = lax.rsqrt(var + settings.epsilon)
    if scale is not None:
        multiplier = multiplier * scale
    y = y * multiplier
    if bias is not None:
        y = y + bias
    dtype = settings.dtype or jnp.result_type(array, *(a for a in (scale, bias) if a is not None))
    return like(x, y.astype(dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.promote_types(dtype, jnp.float32)))


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
    # Cut as what it scales, so that its gradient, cut too, is gathered before the padding is taken off.
    return placed_along(array_of(x), pad_to(parameter.reshape(counted), held))
