"""Seeing what XLA will really do with a program: its collectives and its memory."""

from shardkit.inspect.assertions import assert_collectives
from shardkit.inspect.collectives import collectives
from shardkit.inspect.memory import MemoryReport, memory
from shardkit.inspect.report import Collective, CollectiveReport

__all__ = [
    "Collective",
    "CollectiveReport",
    "MemoryReport",
    "assert_collectives",
    "collectives",
    "memory",
]
