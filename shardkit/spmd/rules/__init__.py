"""How each operation can run on blocks, one file a family; the table by primitive name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkit.spmd.rules import (
    assembly,
    collectives,
    contraction,
    convolution,
    creation,
    elementwise,
    indexing,
    linear_algebra,
    ordering,
    pooling,
    reduction,
    shape,
    shifting,
)
from shardkit.spmd.rules.factored import Factored, strategies
from shardkit.spmd.rules.strategy import Case, Op, Strategy, Traffic, Type

Rule = Callable[[Op], Any]  # gives a Factored, or a Custom

RULES: dict[str, Rule] = {
    name: rule
    for family in (
        elementwise,
        contraction,
        reduction,
        shape,
        assembly,
        shifting,
        creation,
        convolution,
        pooling,
        indexing,
        ordering,
        linear_algebra,
        collectives,
    )
    for name, rule in family.RULES.items()
}

__all__ = ["RULES", "Case", "Factored", "Op", "Strategy", "Traffic", "Type", "strategies"]
