"""linen convolutions that run on inputs sharded in space: what an interceptor of ``__call__`` does instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkit.parallel.layers import convs
from shardkit.parallel.layers.convs import ConvSettings, masked, why_not_conv
from shardkit.parallel.layers.operands import array_of, like, say_once, whole
from shardkit.parallel.plans import Applied


def conv(module: Any, applied: Applied, run: Callable[..., Any], inputs: Any) -> Any:
    """``nn.Conv`` as a ring convolution."""
    settings = ConvSettings.of(module)
    reason = why_not_conv(settings, inputs.shape)
    channels, groups = inputs.shape[-1], settings.feature_group_count
    if reason is not None:
        say_once(applied, "Conv", reason)
    if reason is not None or channels % groups:  # Flax refuses the latter
        return run(whole(inputs))
    shape = (*settings.kernel_size, channels // groups, module.features)
    return convs.conv(settings, *_operands(module, inputs, shape), applied)


def conv_transpose(module: Any, applied: Applied, run: Callable[..., Any], inputs: Any) -> Any:
    """``nn.ConvTranspose`` as a ring convolution."""
    del run
    settings = ConvSettings.of(module)
    channels = (inputs.shape[-1], module.features)
    shape = (*settings.kernel_size, *(reversed(channels) if settings.transpose_kernel else channels))
    return convs.conv_transpose(settings, *_operands(module, inputs, shape), applied)


def _operands(module: Any, x: Any, kernel_shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Input, (masked) kernel and bias in the computation dtype; parameters are made as, and when, Flax makes them."""
    kernel = masked(module.param("kernel", module.kernel_init, kernel_shape, module.param_dtype), module.mask)
    bias = module.param("bias", module.bias_init, (module.features,), module.param_dtype) if module.use_bias else None
    array, kernel, bias = module.promote_dtype(array_of(x), kernel, bias, dtype=module.dtype)
    return like(x, array), kernel, bias
