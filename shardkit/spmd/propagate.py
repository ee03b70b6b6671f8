"""Choosing a place for every value: forward, operation by operation, with what its users would like in mind.

Each operation takes the cheapest of its strategies, given where its operands are and what the choice will cost later: a
result left Partial must be reduced one day, one that a user has fixed must get there. A pass knows what its users want
from the pass before (the first only from what the user fixed), and the cheapest pass is kept, of at most twice
``PASSES``. So the time is linear in the number of operations.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from shardkit.spmd import costs, moving
from shardkit.spmd.arrangement import Arrangement, Move, Origins, Run, Step
from shardkit.spmd.costs import Price
from shardkit.spmd.graph import Graph, Node, Value
from shardkit.spmd.placed import Placed, block_shape, replicated
from shardkit.spmd.rules import RULES, Case, strategies
from shardkit.spmd.rules.creation import whole
from shardkit.spmd.rules.halos import AfterReading, read_key
from shardkit.spmd.rules.strategy import Strategy, Traffic
from shardkit.spmd.setting import ANYWHERE, REDUCED, Goal, Setting, is_mark, is_same, mark_of
from shardkit.spmd.wishes import Wants, fixed, learned

PASSES = 3


def arrange(
    graph: Graph,
    inputs: Sequence[Placed],
    goals: Sequence[Goal],
    setting: Setting,
    captured: Sequence[Placed] | None = None,
    hints: Sequence[Placed | None] | None = None,
    starts: Sequence[bool] = (False,),
) -> Arrangement:
    """Where every value of a graph is.

    Args:
      graph: the function.
      inputs: where its inputs are.
      goals: of each output: where it must leave, ``REDUCED`` or ``ANYWHERE``.
      setting: mesh and options.
      captured: where captured arrays are; None: whole on every device.
      hints: where outputs had better leave, of those that needn't.
      starts: whether what the user fixed is felt up to the next sum only (True), or as far back as it reaches: neither
        is always the cheaper. Both take twice the time, within loops twice for each.

    Raises:
      NotImplementedError: an operation without a rule, where ``setting.unknown`` is "error".
      ValueError: a mark that the mesh doesn't fit.
    """
    first, *others = [fixed(graph, goals, setting, hints, near) for near in starts]
    distinct = [first, *(wants for wants in others if wants.wishes != first.wishes)]
    ways = [_cheapest(graph, inputs, goals, setting, captured, wants) for wants in distinct]
    return min(ways, key=lambda way: way[0])[1]


def _cheapest(
    graph: Graph,
    inputs: Sequence[Placed],
    goals: Sequence[Goal],
    setting: Setting,
    captured: Sequence[Placed] | None,
    wants: Wants,
) -> tuple[Price, Arrangement]:
    """The cheapest of some passes, each of which knows what the one before has learned."""
    best: tuple[Price, Arrangement] | None = None
    for _ in range(PASSES):
        found = _Pass(graph, setting, wants)
        arrangement = found.run(inputs, goals, captured)
        price = Price(
            arrangement.bytes + costs.work(arrangement.flops), arrangement.collectives, len(arrangement.steps), 0
        )
        if best is None or price < best[0]:
            best = price, arrangement
        known = learned(graph, wants, found.made, found.homes, found.needed, setting)
        if known == wants:
            break
        wants = known
    assert best is not None
    return best


class _Pass:
    def __init__(self, graph: Graph, setting: Setting, wants: Wants):
        self.graph = graph
        self.setting = setting
        self.sizes = setting.sizes
        self.wants = wants
        self.homes: dict[int, Placed] = {}  # where a value is for its users
        self.made: dict[int, Placed] = {}  # where it is when it's made
        self.copies: dict[int, list[Placed]] = collections.defaultdict(list)
        self.aliases: dict[int, Value] = {}
        self.marked: dict[int, Placed] = {}  # where the user said an alias shall be
        self.origins: dict[int, Origins] = {}
        self.steps: list[Step] = []
        self.first_user = {v.number: node for node in reversed(graph.nodes) for v in node.inputs}
        self.uses = collections.Counter(v.number for node in graph.nodes for v in node.inputs)
        self.needed: dict[int, list[Placed]] = collections.defaultdict(list)
        self.read: set[Any] = set()  # halos that some operation has fetched

    def run(self, inputs: Sequence[Placed], goals: Sequence[Goal], captured: Sequence[Placed] | None) -> Arrangement:
        graph = self.graph
        kept = tuple(captured) if captured is not None else tuple(replicated(len(v.aval.shape)) for v in graph.captured)
        self.free = {v.number for v, goal in zip(graph.outputs, goals, strict=True) if goal == ANYWHERE}
        for value, placed in (*zip(graph.inputs, inputs, strict=True), *zip(graph.captured, kept, strict=True)):
            self._made(value, placed, dict.fromkeys(placed.partial))
        for node in graph.nodes:
            if is_mark(node):
                self._mark(node)
            elif is_same(node):
                self._rename(node)
            else:
                self._operate(node)
        outputs = tuple(self._leave(v, goal) for v, goal in zip(graph.outputs, goals, strict=True))
        return Arrangement(
            graph, self.sizes, tuple(inputs), kept, tuple(self.steps), self.homes, outputs, self.origins, self.aliases
        )

    # --- values -----------------------------------------------------------------------------------

    def root(self, value: Value) -> Value:
        while value.number in self.aliases:
            value = self.aliases[value.number]
        return value

    def home(self, value: Value) -> Placed:
        if value.number not in self.homes:  # a literal
            self.homes[value.number] = placed = replicated(len(value.aval.shape))
            self.copies[value.number].append(placed)
        return self.homes[value.number]

    def _made(self, value: Value, placed: Placed, origins: Origins) -> None:
        self.homes[value.number] = self.made[value.number] = placed
        self.copies[value.number].append(placed)
        if origins:
            self.origins[value.number] = origins
        settled = self.wants.settled.get(value.number)
        if settled is not None and placed.partial and settled != placed:
            self.bring(value, settled, self.first_user.get(value.number))
            self.homes[value.number] = settled

    def pinned(self, value: Value) -> Placed | None:
        """Where the user said a value shall be: whoever uses it takes it from there."""
        while value.number in self.aliases:
            if value.number in self.marked:
                return self.marked[value.number]
            value = self.aliases[value.number]
        return None

    def nearest(self, value: Value, goal: Placed) -> tuple[tuple[int, int], Placed]:
        """The cheapest way to a place from one where the value is already."""
        root = self.root(value)
        self.home(value)
        self.home(root)
        pin = self.pinned(value)
        if pin is not None and goal != pin:
            (there, count), _ = self._from_copies(root, pin)
            more, others = moving.cost(root.type, pin, goal, self.sizes)
            return (there + more, count + others), pin
        return self._from_copies(root, goal)

    def _from_copies(self, root: Value, goal: Placed) -> tuple[tuple[int, int], Placed]:
        held = self.copies[root.number]
        if goal in held:
            return (0, 0), goal
        return min(((moving.cost(root.type, p, goal, self.sizes), p) for p in held), key=lambda pair: pair[0])

    def bring(self, value: Value, goal: Placed, user: Node | None) -> None:
        """The moves that take a value to a place, unless it's there."""
        self.home(value)
        root, pin = self.root(value), self.pinned(value)
        self.home(root)
        self.needed[value.number].append(goal)
        if pin is not None and pin != goal:
            self._move(root, pin, user)
        self._move(root, goal, user, pin)

    def _move(self, root: Value, goal: Placed, user: Node | None, source: Placed | None = None) -> None:
        if goal in self.copies[root.number]:
            return
        if source is None or source not in self.copies[root.number]:
            source = self._from_copies(root, goal)[1]
        route = moving.way(root.type, source, goal, self.sizes)
        self.steps.append(Move(root, source, goal, route, user))
        self.copies[root.number].append(goal)

    # --- operations -------------------------------------------------------------------------------

    def _mark(self, node: Node) -> None:
        (source,), (result,) = node.inputs, node.outputs
        placed = mark_of(node, self.setting, self.home(source))
        self.aliases[result.number] = source
        self.marked[result.number] = placed
        self.homes[result.number] = placed
        if placed.partial:
            self.origins[result.number] = self.origins.get(
                self.root(source).number, dict.fromkeys(placed.partial, node)
            )

    def _rename(self, node: Node) -> None:
        for source, result in zip(node.inputs, node.outputs, strict=True):
            self.homes[result.number] = self.home(source)
            self.aliases[result.number] = source

    def _operate(self, node: Node) -> None:
        ways, replicated_only = self._ways(node)
        ways = _sharing_work([self.home(v) for v in node.inputs], ways)
        ways = [self._without_known(node, s) for s in ways]
        chosen = min(ways, key=lambda s: (self._price(node, s), _tidiness(s)))
        for value, placed in zip(node.inputs, chosen.operands, strict=True):
            self.bring(value, placed, node)
            self.uses[value.number] -= 1
        self.read.update(key for key, _ in self._reads(node, chosen))
        self.steps.append(Run(node, chosen, replicated_only))
        for value, placed in zip(node.outputs, chosen.results, strict=True):
            self._made(value, placed, self._why(node, chosen, placed))

    def _reads(self, node: Node, strategy: Strategy) -> list[tuple[Any, tuple[Traffic, ...]]]:
        """The halos that a strategy fetches: a key of each, and its permutes."""
        if not isinstance(strategy.run, AfterReading):
            return []
        found = []
        for read in strategy.run.reads:
            value, placed = node.inputs[read.operand], strategy.operands[read.operand]
            block = block_shape(value.aval.shape, placed, self.sizes)
            found.append((read_key(self.root(value), placed, read), read.traffic(block, value.aval.dtype)))
        return found

    def _without_known(self, node: Node, strategy: Strategy) -> Strategy:
        """What others have fetched of a neighbour isn't fetched again."""
        left = collections.Counter({(t.kind, t.axes, t.bytes): t.count for t in strategy.traffic})
        known = [traffic for key, traffic in self._reads(node, strategy) if key in self.read]
        if not known:
            return strategy
        for traffic in known:
            left.subtract({(t.kind, t.axes, t.bytes): t.count for t in traffic})
        rest = tuple(Traffic(*what, count) for what, count in left.items() if count > 0)
        return dataclasses.replace(strategy, traffic=rest, why=f"{strategy.why}, some of it shared")

    def _why(self, node: Node, chosen: Strategy, placed: Placed) -> Origins:
        found: dict[str, Node | None] = {}
        for axis in placed.partial:
            passed = [v for v, p in zip(node.inputs, chosen.operands, strict=True) if axis in p.partial]
            known = [self.origins.get(self.root(v).number, {}) for v in passed]
            found[axis] = next((k[axis] for k in known if axis in k), node)
        return found

    def _ways(self, node: Node) -> tuple[Sequence[Strategy], bool]:
        """The strategies of an operation, and whether that it runs replicated is for want of a rule."""
        wishes = tuple(self.wants.wishes.get(v.number) for v in node.outputs)
        homes = tuple(self.home(v) for v in node.inputs)
        if node.op.name in self.setting.control:
            return self.setting.control[node.op.name](node, homes, wishes, self.setting), False
        if node.op.name not in RULES:
            if self.setting.unknown == "error":
                raise NotImplementedError(
                    f"partition: the operation {node.op.name} at {node.source or 'an unknown line'} has no rule; with "
                    'unknown="replicate" every device does all of it'
                )
            return strategies(Case(node.op, homes, self.sizes, (None,) * len(wishes)), whole(node.op)), True
        found = [*self.setting.strategies(node, homes, wishes)]
        latest = tuple(self.pinned(v) or self.copies[self.root(v).number][-1] for v in node.inputs)
        if latest != homes:
            known = {(s.operands, s.results) for s in found}
            more = self.setting.strategies(node, latest, wishes)
            found += [s for s in more if (s.operands, s.results) not in known]
        return found, False

    def _price(self, node: Node, strategy: Strategy) -> Price:
        total, count, moves = float(strategy.bytes), float(strategy.collectives), 0
        seen = set()
        for value, placed in zip(node.inputs, strategy.operands, strict=True):
            if (value.number, placed) in seen:
                continue
            seen.add((value.number, placed))
            (received, collectives), source = self.nearest(value, placed)
            moves += source != placed
            if received and self.home(value).partial and not placed.partial:
                # Others will need it reduced, too.
                share = max(1, self.uses[value.number])
                received, collectives = received / share, collectives / share
            total += received
            count += collectives
        memory = 0
        for value, placed in zip(node.outputs, strategy.results, strict=True):
            received, collectives = self._later(value, placed)
            total += received
            count += collectives
            memory += costs.local_bytes(block_shape(value.aval.shape, placed, self.sizes), value.aval.dtype.itemsize)
        return Price(total + costs.work(strategy.flops), count, moves, memory)

    def _later(self, value: Value, placed: Placed) -> tuple[float, float]:
        """What a result costs one day, for where it is."""
        wish = self.wants.wishes.get(value.number)
        if wish is None or (wish.partial and wish.reduce != placed.reduce):
            wish = placed.without_partial() if value.number not in self.free else placed
        return moving.cost(value.type, placed, wish, self.sizes)

    # --- outputs ----------------------------------------------------------------------------------

    def _leave(self, value: Value, goal: Goal) -> Placed:
        placed = self.home(value)
        if isinstance(goal, Placed):
            placed = goal
        elif goal == REDUCED and placed.partial:
            held = [p for p in self.copies[self.root(value).number] if not p.partial]
            placed = held[0] if held else placed.without_partial()
        self.bring(value, placed, None)
        return placed


def _sharing_work(homes: Sequence[Placed], ways: Sequence[Strategy]) -> Sequence[Strategy]:
    """Without strategies by which every device would do what they could share.

    Work that is divided stays so: an operand isn't put together (to spare its result from being Partial, say) where all
    of them can be worked with as they are cut. What only moves data is no work.
    """
    least = min((s.flops for s in ways if _keeps_cuts(homes, s.operands)), default=None)
    if least is None:
        return ways
    return [s for s in ways if _keeps_cuts(homes, s.operands) or s.flops <= 1.01 * least]


def _keeps_cuts(before: Sequence[Placed], after: Sequence[Placed]) -> bool:
    """Whether what is cut stays cut as it is."""
    return all(
        b[: len(a)] == a for p, q in zip(before, after, strict=True) for a, b in zip(p.dims, q.dims, strict=True)
    )


def _tidiness(strategy: Strategy) -> tuple[int, int]:
    """Of two that cost the same: results that aren't Partial, then those cut more."""
    results = strategy.results
    return sum(len(p.partial) for p in results), -sum(len(p.cut_axes) for p in results)
