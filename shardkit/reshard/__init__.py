"""Moving arrays between placements."""

from shardkit.reshard.place import shard_tensor, unshard

__all__ = ["shard_tensor", "unshard"]
