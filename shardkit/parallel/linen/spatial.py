"""linen layers that run on inputs sharded in space: the same parameters and meaning, another ``__call__``.

A linen layer is a description without a place to put a plan, so its method is intercepted
(``flax.linen.intercept_methods``). There the module is inside its compact scope already, and ``module.param`` and
``module.variable`` make and find what Flax's own code would: same names, shapes and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import linen as nn

from shardkit.parallel.linen.convs import conv, conv_transpose
from shardkit.parallel.linen.elementwise import dropout, prelu
from shardkit.parallel.linen.norms import batch_norm, group_norm, instance_norm, layer_norm, rms_norm

__all__ = ["SPATIAL_LAYERS"]

# Flax layer -> what runs in place of its __call__: (module, applied, run, *args, **kwargs), where run(*args, **kwargs)
# is Flax's own code. Exact types only: a subclass has code of its own.
SPATIAL_LAYERS: dict[type, Callable[..., Any]] = {
    nn.Conv: conv,
    nn.ConvTranspose: conv_transpose,
    nn.BatchNorm: batch_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm: instance_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.Dropout: dropout,
    nn.PReLU: prelu,
}
