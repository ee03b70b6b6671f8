"""What is known of a value's users before it's made: what they were told to want, and what they wanted last time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardkit.spmd import moving
from shardkit.spmd.graph import Graph, Node, Value
from shardkit.spmd.placed import Placed, even
from shardkit.spmd.rules import RULES
from shardkit.spmd.rules.factored import Custom, Factored
from shardkit.spmd.setting import Goal, Setting, is_mark, is_same, mark_of


@dataclasses.dataclass
class Wants:
    """What is known of a value's users before it's made.

    Attributes:
      wishes: by number, where they'd like it.
      settled: by number, where it's taken at once, since somebody needs it there.
      near: wishes end at operations that sum over a dim: what's wished of a sum says little on how to compute it.
    """

    wishes: dict[int, Placed] = dataclasses.field(default_factory=dict)
    settled: dict[int, Placed] = dataclasses.field(default_factory=dict)
    near: bool = False


def fixed(
    graph: Graph, goals: Sequence[Goal], setting: Setting, hints: Sequence[Placed | None] | None, near: bool = False
) -> Wants:
    """What the user fixed, handed back to what it's made of."""
    wishes: dict[int, Placed] = {}
    for value, goal, hint in zip(graph.outputs, goals, hints or [None] * len(goals), strict=True):
        wish = goal if isinstance(goal, Placed) else hint
        if wish is not None:
            wishes.setdefault(value.number, wish)
    for node in reversed(graph.nodes):
        if is_mark(node):
            wishes.setdefault(node.inputs[0].number, mark_of(node, setting))
            continue
        if is_same(node):
            for source, result in zip(node.inputs, node.outputs, strict=True):
                if result.number in wishes:
                    wishes.setdefault(source.number, wishes[result.number])
        hand_back(node, wishes, setting, near)
    return Wants(wishes, near=near)


def hand_back(node: Node, wishes: dict[int, Placed], setting: Setting, near: bool) -> None:
    """A wish for a result as wishes for the operands."""
    wanted = [(i, wishes[v.number]) for i, v in enumerate(node.outputs) if v.number in wishes]
    if not wanted or node.bodies or node.op.name not in RULES:
        return
    rule = setting.rule(node)
    base = rule.base if isinstance(rule, Custom) else rule
    if base is None or (near and _sums(base)):
        return
    i, wish = wanted[0]
    cut = base.cut_of(base.results[i], wish, setting.sizes)
    if not cut:
        return
    for value, dims in zip(node.inputs, base.operands, strict=True):
        mine = {x: axes for x, axes in cut.items() if any(x in letters for letters in dims)}
        placed = base.placed(dims, mine, setting.sizes)
        if mine and placed is not None and value.constant is None and even(value.aval.shape, placed, setting.sizes):
            wishes.setdefault(value.number, placed)


def _sums(base: Factored) -> bool:
    """Whether a dim of its operands isn't there any more in its results."""
    return not {x for dims in base.operands for letters in dims for x in letters} <= {
        x for dims in base.results for letters in dims for x in letters
    }


def learned(
    graph: Graph,
    wants: Wants,
    made: Mapping[int, Placed],
    homes: Mapping[int, Placed],
    needed: Mapping[int, Sequence[Placed]],
    setting: Setting,
) -> Wants:
    """Where users needed values, as wishes for the next pass.

    Args:
      graph: the graph.
      wants: what was known before.
      made, homes: by number, where a value was made, and where it was for its users.
      needed: by number, where users needed it.
      setting: mesh and options.
    """
    wishes, settled = dict(wants.wishes), dict(wants.settled)
    values = {v.number: v for node in graph.nodes for v in node.outputs if v.number in made}
    for number in values:
        needs, home = needed.get(number, ()), homes[number]
        if not home.partial and number not in wishes and len({*needs}) == 1 and needs[0] != home:
            wishes[number] = needs[0]
    if len(wishes) > len(wants.wishes):
        for node in reversed(graph.nodes):
            hand_back(node, wishes, setting, wants.near)
    for number, value in values.items():
        needs = needed.get(number, ())
        whole = {p for p in needs if not p.partial}
        if made[number].partial and whole and len(needs) > 1:
            settled[number] = _best_reduced(value, made[number], whole, wishes.get(number), setting)
    return Wants(wishes, settled, wants.near)


def _best_reduced(value: Value, made: Placed, needs: set[Placed], wish: Placed | None, setting: Setting) -> Placed:
    """Where a Partial value is best taken at once, if it's needed at these places."""
    if wish is not None and not wish.partial:
        needs = {wish, *(p for p in needs if p != made.without_partial())}
    candidates = sorted({*needs, made.without_partial()})

    def total(first: Placed) -> tuple[float, float]:
        ways = [moving.cost(value.type, made, first, setting.sizes)]
        ways += [moving.cost(value.type, first, p, setting.sizes) for p in needs]
        return sum(b for b, _ in ways), sum(c for _, c in ways)

    return min(candidates, key=total)
