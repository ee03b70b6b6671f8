"""Batches: from what each process loads to global arrays on the mesh."""

from shardkit.data.batch import shard_batch
from shardkit.data.loader import DataLoader, shard_dataloader

__all__ = ["DataLoader", "shard_batch", "shard_dataloader"]
