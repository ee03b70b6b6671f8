"""Operators on arrays sharded in space."""

from shardkit.spatial.conv import ring_conv
from shardkit.spatial.conv_transpose import ring_conv_transpose
from shardkit.spatial.halo import halo_exchange
from shardkit.spatial.moments import moments

__all__ = ["halo_exchange", "moments", "ring_conv", "ring_conv_transpose"]
