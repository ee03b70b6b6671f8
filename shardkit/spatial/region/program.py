"""A region's program as people read it: line by line, what stays in the layout, what is exchanged, what leaves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardkit.spatial.region.plan import Plan


@dataclasses.dataclass(frozen=True)
class RegionProgram:
    """What ``Region.program`` returns; print it."""

    lines: tuple[Any, ...]


def program_of(plan: Plan, axes: Mapping[str, int]) -> RegionProgram:
    """The program of a plan."""
    return RegionProgram(tuple(plan.steps))
