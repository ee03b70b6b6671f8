"""Operators on arrays sharded in space."""

from shardkit.spatial.convolution.forms import forms
from shardkit.spatial.convolution.ring import ring_conv
from shardkit.spatial.convolution.transpose import ring_conv_transpose
from shardkit.spatial.convolution.tuning import tune_conv
from shardkit.spatial.halo import halo_exchange
from shardkit.spatial.moments import moments
from shardkit.spatial.pad import ring_pad, ring_roll
from shardkit.spatial.pooling.global_pool import ring_global_pool
from shardkit.spatial.pooling.pool import ring_avg_pool, ring_max_pool, ring_min_pool, ring_reduce_window
from shardkit.spatial.pooling.response_norm import ring_local_response_norm
from shardkit.spatial.regions import Region, RegionProgram, region
from shardkit.spatial.resizing.resize import ring_resize, ring_scale_and_translate

__all__ = [
    "Region",
    "RegionProgram",
    "forms",
    "halo_exchange",
    "moments",
    "region",
    "ring_avg_pool",
    "ring_conv",
    "ring_conv_transpose",
    "ring_global_pool",
    "ring_local_response_norm",
    "ring_max_pool",
    "ring_min_pool",
    "ring_pad",
    "ring_reduce_window",
    "ring_resize",
    "ring_roll",
    "ring_scale_and_translate",
    "tune_conv",
]
