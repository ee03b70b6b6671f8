"""What stays the same for a program and the functions in it, and what it asks of rules and marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkit.arrays.kinds import check_dtype
from shardkit.placements import AnyMesh
from shardkit.spmd.graph import Node
from shardkit.spmd.marks import asked
from shardkit.spmd.placed import Placed, Sizes, from_layout
from shardkit.spmd.rules import RULES, Case, Factored, strategies
from shardkit.spmd.rules.factored import Custom
from shardkit.spmd.rules.strategy import Strategy

ANYWHERE = "anywhere"  # an output that may be left as it is, Partial too
REDUCED = "reduced"  # one that may be anywhere but Partial
Goal = Placed | str
MARKS = frozenset({"sk_constrain", "sharding_constraint", "sk_on_mesh"})
# Nothing is done to the value, and nothing asked: JAX puts "reshard" where types could say where values are (here
# they never do).
SAME = frozenset({"reshard", "mesh_cast", "pvary", "pcast"})


@dataclasses.dataclass(frozen=True)
class Setting:
    """What stays the same for a program and the functions in it.

    Attributes:
      mesh: to read what the user says in terms of it.
      sizes: of the axes that take part.
      unknown: "replicate" or "error": operations without a rule.
      control: strategies of operations that call functions, by name.
      manual: of the axes that a region of the user's has taken, if this is one.
      rules, ways: what was asked before, of operations that are alike.
    """

    mesh: AnyMesh
    sizes: Sizes
    unknown: str
    control: Mapping[str, Callable[..., Sequence[Strategy]]]
    manual: Sizes = dataclasses.field(default_factory=dict)
    rules: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)
    ways: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    def rule(self, node: Node) -> Factored | Custom:
        """What the table says of an operation."""
        if node.key not in self.rules:
            self.rules[node.key] = RULES[node.op.name](node.op)
        return self.rules[node.key]

    def strategies(
        self, node: Node, placed: tuple[Placed, ...], wishes: tuple[Placed | None, ...]
    ) -> Sequence[Strategy]:
        """Those of an operation with a rule."""
        key = node.key, placed, wishes
        if key not in self.ways:
            self.ways[key] = strategies(Case(node.op, placed, self.sizes, wishes, self.manual), self.rule(node))
        return self.ways[key]


def is_mark(node: Node) -> bool:
    """The user says where a value shall be."""
    return node.op.name in MARKS and not is_same(node)


def is_same(node: Node) -> bool:
    """Nothing is done, and nothing said: a cotangent that is back on its mesh, too."""
    return node.op.name in SAME or (node.op.name == "sk_on_mesh" and node.op.params["layout"] is None)


def mark_of(node: Node, setting: Setting, now: Placed | None = None) -> Placed:
    """Where a mark asks its value to be, which is ``now`` somewhere."""
    shape = tuple(node.outputs[0].aval.shape)
    try:
        layout = asked(node.op.name, node.op.params, setting.mesh, len(shape), None if now is None else now.dims)
        if layout.reduce is not None:
            check_dtype(layout.reduce, node.outputs[0].aval.dtype, "its Partial")
        placed = from_layout(layout, len(shape), setting.sizes)
    except (ValueError, TypeError) as err:
        raise type(err)(f"partition: {node.op.name} at {node.source or 'an unknown line'}: {err}") from err
    return placed
