"""Checkpoints: a tree saved and restored on any mesh, whole or not at all (orbax writes the arrays)."""

from shardkit.checkpoint.api import latest_step, restore, save
from shardkit.checkpoint.checkpointer import Checkpointer
from shardkit.checkpoint.errors import CheckpointError

__all__ = ["CheckpointError", "Checkpointer", "latest_step", "restore", "save"]
