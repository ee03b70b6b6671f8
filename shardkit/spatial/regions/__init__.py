"""Regions: functions that stay in blocks and margins from their beginning to their end."""

from shardkit.spatial.regions.api import Region, region
from shardkit.spatial.regions.program import RegionProgram

__all__ = ["Region", "RegionProgram", "region"]
