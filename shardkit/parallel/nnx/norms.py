"""nnx norms of inputs sharded in space."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import lax

from shardkit.arrays import Padded
from shardkit.parallel.layers.norms import (
    NormSettings,
    batch_norm,
    dims_of,
    group_norm,
    instance_norm,
    is_local,
    layer_norm,
    why_not_alone,
    why_not_features,
    why_not_norm,
)
from shardkit.parallel.layers.operands import array_of, like, say_once, whole
from shardkit.parallel.layers.spread import averaging, read_call
from shardkit.parallel.plans import Applied


def _operands(layer: Any, x: Any, *statistics: Any) -> tuple[Any, ...]:
    """Input, scale, bias and running statistics of a norm layer in its computation dtype."""
    scale, bias = (getattr(layer, name, None) for name in ("scale", "bias"))
    given = (None if p is None else p[...] for p in (scale, bias))
    array, *others = layer.promote_dtype((array_of(x), *given, *statistics), dtype=layer.dtype)
    return like(x, array), *others


def _running(old: Any, new: Any, momentum: float) -> Any:
    return lax.stop_gradient(momentum * old + (1 - momentum) * new).astype(old.dtype)


@dataclasses.dataclass(frozen=True)
class Averaging:
    """Around a batch norm's call: in ``sk.value_and_grad`` its statistics are those of the whole batch.

    Also of a class that is made of ``nnx.BatchNorm``, whatever else that does.
    """

    def __call__(self, layer: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs it."""
        x, frozen, mask = read_call(layer, args, kwargs)
        if not hasattr(x, "dtype"):
            return run(*args, **kwargs)
        with averaging(layer, x, frozen, mask):
            return run(*args, **kwargs)


class SpatialBatchNorm(nnx.BatchNorm):
    """``nnx.BatchNorm`` whose statistics are those of the whole, sharded batch."""

    shardkit_plan: Applied

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        frozen = use_running_average if use_running_average is not None else self.use_running_average
        reason = why_not_features(self.axis, x.ndim) or why_not_norm(self, mask)
        if reason is not None and not frozen:
            say_once(self.shardkit_plan, "BatchNorm", reason)
        if reason is not None or frozen is None or (frozen and not isinstance(x, Padded)):
            # With running averages there is nothing to reduce: Flax's own elementwise code is right.
            return nnx.BatchNorm.__call__(self, whole(x), use_running_average, mask=mask)
        x, scale, bias, *running = _operands(self, x, self.mean[...], self.var[...])
        settings, applied = NormSettings.of(self), self.shardkit_plan
        y, mean, var = batch_norm(settings, x, scale, bias, applied, running if frozen else None, self.axis_name)
        if not frozen:
            self.mean[...] = _running(self.mean[...], mean, self.momentum)
            self.var[...] = _running(self.var[...], var, self.momentum)
        return y


class SpatialGroupNorm(nnx.GroupNorm):
    """``nnx.GroupNorm`` whose statistics are those of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        reason = why_not_alone(self, mask)
        if self.reduction_axes is not None:
            reason = f"it has its own reduction_axes={self.reduction_axes}"
        if reason is not None:
            say_once(self.shardkit_plan, "GroupNorm", reason)
            return nnx.GroupNorm.__call__(self, whole(x), mask=mask)
        x, scale, bias = _operands(self, x)
        return group_norm(NormSettings.of(self), x, scale, bias, self.shardkit_plan, self.num_groups)


class SpatialInstanceNorm(nnx.InstanceNorm):
    """``nnx.InstanceNorm`` whose statistics are those of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        reason = why_not_features(self.feature_axes, x.ndim) or why_not_alone(self, mask)
        if reason is not None:
            say_once(self.shardkit_plan, "InstanceNorm", reason)
            return nnx.InstanceNorm.__call__(self, whole(x), mask=mask)
        x, scale, bias = _operands(self, x)
        return instance_norm(NormSettings.of(self), x, scale, bias, self.shardkit_plan)


def _layer_norm(layer: Any, x: Any, mask: Any, centered: bool) -> Any:
    """The result; None where Flax's own code is right, or all there is."""
    applied: Applied = layer.shardkit_plan
    if is_local(x, dims_of(layer.reduction_axes, x.ndim), applied):
        return None  # elementwise in space, with a mask or an axis_name too
    reason = why_not_alone(layer, mask)
    if reason is not None:
        say_once(applied, "LayerNorm" if centered else "RMSNorm", reason)
        return None
    x, scale, bias = _operands(layer, x)
    axes = (layer.reduction_axes, layer.feature_axes)
    return layer_norm(NormSettings.of(layer), x, scale, bias, applied, *axes, centered)


class SpatialLayerNorm(nnx.LayerNorm):
    """``nnx.LayerNorm``; where it reduces spatial dims, with the statistics of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        y = _layer_norm(self, x, mask, centered=True)
        return nnx.LayerNorm.__call__(self, whole(x), mask=mask) if y is None else y


class SpatialRMSNorm(nnx.RMSNorm):
    """``nnx.RMSNorm``; where it reduces spatial dims, with the mean square of the whole, sharded image."""

    shardkit_plan: Applied

    def __call__(self, x: Any, mask: Any = None) -> Any:
        y = _layer_norm(self, x, mask, centered=False)
        return nnx.RMSNorm.__call__(self, whole(x), mask=mask) if y is None else y
