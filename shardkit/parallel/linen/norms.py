"""linen norms of inputs sharded in space: what an interceptor of ``__call__`` does instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn
from jax import numpy as jnp

from shardkit.arrays import Padded
from shardkit.parallel.layers import norms
from shardkit.parallel.layers.norms import (
    NormSettings,
    dims_of,
    is_local,
    why_not_alone,
    why_not_features,
    why_not_norm,
)
from shardkit.parallel.layers.operands import say_once, whole
from shardkit.parallel.layers.setting import setting
from shardkit.parallel.layers.spread import read_call, spread_over
from shardkit.parallel.linen.wrapping import plain_class
from shardkit.parallel.plans import Applied


def batch_norm(
    module: Any,
    applied: Applied,
    run: Callable[..., Any],
    x: Any,
    use_running_average: bool | None = None,
    *,
    mask: Any = None,
) -> Any:
    """``nn.BatchNorm`` whose statistics are those of the whole, sharded batch."""
    frozen = nn.merge_param("use_running_average", module.use_running_average, use_running_average)
    reason = why_not_features(module.axis, x.ndim) or why_not_norm(module, mask)
    if reason is not None and not frozen:
        say_once(applied, "BatchNorm", reason)
    if reason is not None or (frozen and not isinstance(x, Padded)):
        # With running averages there is nothing to reduce: Flax's own elementwise code is right.
        return spread_batch_norm(module, run, whole(x), use_running_average, mask=mask)
    features = [x.shape[-1]]
    dtype = jnp.float32 if module.force_float32_reductions else module.param_dtype
    mean = module.variable("batch_stats", "mean", jnp.zeros, features, dtype)
    var = module.variable("batch_stats", "var", jnp.ones, features, dtype)
    scale, bias = _parameters(module, features)
    running, axes = None, spread_over(module, x, frozen)
    if frozen:
        running = mean.value, var.value
        if not module.force_float32_reductions:
            running = tuple(jnp.asarray(value, module.param_dtype) for value in running)
    y, batch_mean, batch_var = norms.batch_norm(NormSettings.of(module), x, scale, bias, applied, running, axes)
    if not frozen and not module.is_initializing():
        mean.value = module.momentum * mean.value + (1 - module.momentum) * batch_mean
        var.value = module.momentum * var.value + (1 - module.momentum) * batch_var
    return y


def spread_batch_norm(module: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``nn.BatchNorm``, or a class made of it; in ``sk.value_and_grad`` its statistics are those of the whole batch."""
    x, frozen, mask = read_call(module, args, kwargs)
    if module.is_initializing() or frozen is None or not hasattr(x, "dtype"):
        return run(*args, **kwargs)
    axes = spread_over(module, x, frozen, mask)
    short = not module.force_float32_reductions and plain_class(module) is nn.BatchNorm
    if axes is not None and short and why_not_features(module.axis, x.ndim) is why_not_norm(module, mask) is None:
        # Flax would average in a short dtype, at which XLA on CPU stops beside an Auto axis; ours does so in float32.
        applied: Any = Applied(_Whole(), None, "")  # type: ignore[arg-type]
        return batch_norm(module, applied, run, x, frozen if module.use_running_average is None else None)
    with setting(module, "axis_name", axes):
        return run(*args, **kwargs)


class _Whole:
    """A plan that cuts nothing."""

    def spatial_axes(self, ndim: int) -> dict[Any, int]:
        del ndim
        return {}


def group_norm(module: Any, applied: Applied, run: Callable[..., Any], x: Any, *, mask: Any = None) -> Any:
    """``nn.GroupNorm`` whose statistics are those of the whole, sharded image."""
    reduced = tuple(range(1, x.ndim)) if module.reduction_axes is None else dims_of(module.reduction_axes, x.ndim)
    groups = _groups(module, x.shape[-1])
    if groups is None or x.ndim - 1 not in reduced or is_local(x, reduced, applied):
        return run(whole(x), mask=mask)  # which says what is wrong, if something is
    reason = why_not_alone(module, mask)
    if reason is not None:
        say_once(applied, "GroupNorm", reason)
        return run(whole(x), mask=mask)
    scale, bias = _parameters(module, [x.shape[-1]])
    return norms.group_norm(NormSettings.of(module), x, scale, bias, applied, groups, reduced)


def instance_norm(module: Any, applied: Applied, run: Callable[..., Any], x: Any, *, mask: Any = None) -> Any:
    """``nn.InstanceNorm`` whose statistics are those of the whole, sharded image."""
    reason = why_not_features(module.feature_axes, x.ndim) or why_not_alone(module, mask)
    if reason is not None:
        say_once(applied, "InstanceNorm", reason)
        return run(whole(x), mask=mask)
    scale, bias = _parameters(module, [x.shape[-1]])
    return norms.instance_norm(NormSettings.of(module), x, scale, bias, applied)


def layer_norm(module: Any, applied: Applied, run: Callable[..., Any], x: Any, *, mask: Any = None) -> Any:
    """``nn.LayerNorm``; where it reduces spatial dims, with the statistics of the whole, sharded image."""
    return _layer_norm(module, applied, run, x, mask, centered=True)


def rms_norm(module: Any, applied: Applied, run: Callable[..., Any], x: Any, *, mask: Any = None) -> Any:
    """``nn.RMSNorm``; where it reduces spatial dims, with the mean square of the whole, sharded image."""
    return _layer_norm(module, applied, run, x, mask, centered=False)


def _layer_norm(module: Any, applied: Applied, run: Callable[..., Any], x: Any, mask: Any, centered: bool) -> Any:
    if is_local(x, dims_of(module.reduction_axes, x.ndim), applied):
        return run(x, mask=mask)  # elementwise in space: Flax's own code is right, with a mask or an axis_name too
    reason = why_not_alone(module, mask)
    if reason is not None:
        say_once(applied, "LayerNorm" if centered else "RMSNorm", reason)
        return run(whole(x), mask=mask)
    scale, bias = _parameters(module, [x.shape[d] for d in dims_of(module.feature_axes, x.ndim)])
    axes = (module.reduction_axes, module.feature_axes)
    return norms.layer_norm(NormSettings.of(module), x, scale, bias, applied, *axes, centered)


def _parameters(module: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    """Scale and bias, made as, and in the order that, Flax makes them; None where the layer has none."""

    def parameter(name: str, used: bool, init: Any) -> Any:
        if not used:
            return None
        value = module.param(name, init, shape, module.param_dtype)
        return value if module.force_float32_reductions else jnp.asarray(value, module.param_dtype)

    scale = parameter("scale", module.use_scale, module.scale_init)
    bias = parameter("bias", getattr(module, "use_bias", False), getattr(module, "bias_init", None))
    return scale, bias


def _groups(module: Any, features: int) -> int | None:
    """How many groups a GroupNorm makes; None for settings that Flax refuses."""
    count, size = module.num_groups, module.group_size
    if (count is None) == (size is None):
        return None
    if size is not None:
        count = features // size if features % size == 0 else 0
    return count if count > 0 and features % count == 0 else None
