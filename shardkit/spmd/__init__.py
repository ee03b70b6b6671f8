"""A program with placements on every value: rules, propagation, partition, and the printed form."""

from shardkit.spmd.marks import constrain
from shardkit.spmd.partition import Partitioned, partition
from shardkit.spmd.program import Program, ProgramReshard, ProgramStep

__all__ = ["Partitioned", "Program", "ProgramReshard", "ProgramStep", "constrain", "partition"]
