"""A graph with a place for every value, and the moves between them: what propagation makes and all else reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from shardkit.reshard.route import Route
from shardkit.spmd.graph import Graph, Node, Value
from shardkit.spmd.placed import Placed, Sizes
from shardkit.spmd.rules.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Move:
    """A value taken to another place.

    Attributes:
      value: the value.
      source, goal: from where (one of the places it's already at) and to where.
      route: how.
      user: the operation that needs it there; None: the caller of the program.
    """

    value: Value
    source: Placed
    goal: Placed
    route: Route
    user: Node | None

    @property
    def bytes(self) -> int:
        """What one device receives."""
        return self.route.cost[0]

    @property
    def collectives(self) -> int:
        """How many collectives it runs."""
        return self.route.cost[1]


@dataclasses.dataclass(frozen=True)
class Run:
    """An operation run on blocks.

    Attributes:
      node: the operation.
      strategy: how, and where operands and results are.
      replicated: it has no rule, so that every device does all of it.
    """

    node: Node
    strategy: Strategy
    replicated: bool = False


Step = Move | Run
Origins = Mapping[str, Node | None]  # of each Partial axis, the operation that made it so; None: it came so


@dataclasses.dataclass(frozen=True, eq=False)
class Arrangement:
    """A graph whose values are somewhere.

    Attributes:
      graph: the graph.
      sizes: of the mesh axes that take part.
      inputs, captured: where each input, each captured array comes.
      steps: moves and operations, in order.
      homes: by number, where each value is when it's made.
      outputs: where each output leaves.
      origins: by number, why values are Partial.
      aliases: by number, values that are others under another name (marked by the user).
    """

    graph: Graph
    sizes: Sizes
    inputs: tuple[Placed, ...]
    captured: tuple[Placed, ...]
    steps: tuple[Step, ...]
    homes: Mapping[int, Placed]
    outputs: tuple[Placed, ...]
    origins: Mapping[int, Origins]
    aliases: Mapping[int, Value]

    @property
    def moves(self) -> Iterator[Move]:
        """The moves of this graph itself, those in loops left out."""
        return (s for s in self.steps if isinstance(s, Move))

    @property
    def bytes(self) -> int:
        """What one device receives in a run."""
        return sum(s.bytes if isinstance(s, Move) else s.strategy.bytes for s in self.steps)

    @property
    def collectives(self) -> int:
        """How many collectives it runs."""
        return sum(s.collectives if isinstance(s, Move) else s.strategy.collectives for s in self.steps)

    @property
    def flops(self) -> float:
        """Of one device, roughly."""
        return sum(s.strategy.flops for s in self.steps if isinstance(s, Run))

    def root(self, value: Value) -> Value:
        """The value that this one is another name of."""
        while value.number in self.aliases:
            value = self.aliases[value.number]
        return value
