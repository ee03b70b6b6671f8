"""Seeing what XLA will really do with a program: its collectives and its memory."""

from shardkit.inspect.assertions import assert_collectives
from shardkit.inspect.collectives import collectives
from shardkit.inspect.drawing import Drawing, show
from shardkit.inspect.explaining import Explained, Explanation, explain
from shardkit.inspect.memory import MemoryReport, memory
from shardkit.inspect.report import Collective, CollectiveReport
from shardkit.inspect.targets import target_mesh

__all__ = [
    "Collective",
    "CollectiveReport",
    "Drawing",
    "Explained",
    "Explanation",
    "MemoryReport",
    "assert_collectives",
    "collectives",
    "explain",
    "memory",
    "show",
    "target_mesh",
]
