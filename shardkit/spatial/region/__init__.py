"""Regions: functions that stay in blocks and margins from their beginning to their end."""

from shardkit.spatial.region.api import Region, region
from shardkit.spatial.region.program import RegionProgram

__all__ = ["Region", "RegionProgram", "region"]
