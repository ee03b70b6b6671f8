"""Operators on arrays sharded in space."""

from shardkit.spatial.conv import ring_conv
from shardkit.spatial.halo import halo_exchange

__all__ = ["halo_exchange", "ring_conv"]
