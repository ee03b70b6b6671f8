"""A program with placements on every value: rules, propagation, partition, and the printed form."""

from shardkit.spmd.infer import (
    GradientPlacement,
    GradientReport,
    ReductionGroup,
    infer_gradient_placements,
    infer_placements,
)
from shardkit.spmd.marks import constrain, on_mesh
from shardkit.spmd.partition import Partitioned, partition
from shardkit.spmd.program import Program
from shardkit.spmd.program_steps import ProgramReshard, ProgramStep

__all__ = [
    "GradientPlacement",
    "GradientReport",
    "Partitioned",
    "Program",
    "ProgramReshard",
    "ProgramStep",
    "ReductionGroup",
    "constrain",
    "infer_gradient_placements",
    "infer_placements",
    "on_mesh",
    "partition",
]
