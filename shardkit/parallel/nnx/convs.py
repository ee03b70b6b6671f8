"""nnx convolutions that run on inputs sharded in space."""

from __future__ import annotations

from typing import Any

from flax import nnx

from shardkit.parallel.layers.convs import ConvSettings, conv, conv_transpose, masked, why_not_conv
from shardkit.parallel.layers.operands import array_of, like, say_once, whole
from shardkit.parallel.plans import Applied


def _operands(layer: Any, x: Any) -> tuple[Any, Any, Any]:
    """Input, (masked) kernel and bias of a convolution in its computation dtype."""
    kernel = masked(layer.kernel[...], layer.mask)
    bias = layer.bias[...] if layer.bias is not None else None
    array, kernel, bias = layer.promote_dtype((array_of(x), kernel, bias), dtype=layer.dtype)
    return like(x, array), kernel, bias


class RingConv(nnx.Conv):
    """``nnx.Conv`` as a ring convolution."""

    shardkit_plan: Applied

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        settings = ConvSettings.of(self)
        reason = why_not_conv(settings, inputs.shape)
        if reason is None and out_sharding is not None:
            reason = f"it was called with out_sharding={out_sharding}"
        if reason is not None:
            say_once(self.shardkit_plan, "Conv", reason)
            return nnx.Conv.__call__(self, whole(inputs), out_sharding=out_sharding)
        return conv(settings, *_operands(self, inputs), self.shardkit_plan)


class RingConvTranspose(nnx.ConvTranspose):
    """``nnx.ConvTranspose`` as a ring convolution."""

    shardkit_plan: Applied

    def __call__(self, inputs: Any) -> Any:
        return conv_transpose(ConvSettings.of(self), *_operands(self, inputs), self.shardkit_plan)
