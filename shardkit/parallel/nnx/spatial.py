"""nnx layers that run on inputs sharded in space: the same parameters and meaning, another ``__call__``.

``parallelize`` changes a layer's class to its twin; nothing else about it changes, so state, checkpoints and the
model's own code stay as they are.
"""

from __future__ import annotations

from flax import nnx

from shardkit.parallel.nnx.convs import RingConv, RingConvTranspose
from shardkit.parallel.nnx.elementwise import SpatialDropout, SpatialPReLU
from shardkit.parallel.nnx.norms import (
    SpatialBatchNorm,
    SpatialGroupNorm,
    SpatialInstanceNorm,
    SpatialLayerNorm,
    SpatialRMSNorm,
)
from shardkit.parallel.nnx.regions import plain_inside

__all__ = [
    "SPATIAL_LAYERS",
    "RingConv",
    "RingConvTranspose",
    "SpatialBatchNorm",
    "SpatialDropout",
    "SpatialGroupNorm",
    "SpatialInstanceNorm",
    "SpatialLayerNorm",
    "SpatialPReLU",
    "SpatialRMSNorm",
]

# Flax layer -> its spatially sharded twin.
SPATIAL_LAYERS: dict[type, type] = {
    nnx.Conv: RingConv,
    nnx.ConvTranspose: RingConvTranspose,
    nnx.BatchNorm: SpatialBatchNorm,
    nnx.GroupNorm: SpatialGroupNorm,
    nnx.InstanceNorm: SpatialInstanceNorm,
    nnx.LayerNorm: SpatialLayerNorm,
    nnx.RMSNorm: SpatialRMSNorm,
    nnx.Dropout: SpatialDropout,
    nnx.PReLU: SpatialPReLU,
}

for _base, _twin in SPATIAL_LAYERS.items():
    plain_inside(_base, _twin)
