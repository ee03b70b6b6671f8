"""From a graph to steps on blocks: which operations stay in the layout, what each eats of margins, when to exchange.

Operations are taken in order; each is asked of the rules. Then margins are planned backwards: a *level* counts the
windows since the last exchange, ``every`` levels make a group, and where a value goes from one group into a later one,
what the later group will want of it in all is fetched at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from shardkit.spatial.regions import banded, calls, pointwise, reductions, shapes, windows
from shardkit.spatial.regions.block import ZEROS, Cuts
from shardkit.spatial.regions.graph import Graph, Node, Value, known
from shardkit.spatial.regions.left import bound, leave, put_together
from shardkit.spatial.regions.margins import NONE, Margin, wider
from shardkit.spatial.regions.step import LEFT, LOCAL, OWN, REDUCTION, WHOLE, Ensure, Held, Link, Step, Wants, Whole
from shardkit.spatial.regions.taking import taken
from shardkit.spatial.regions.views import ZERO, Extension, as_extension


@dataclasses.dataclass(frozen=True)
class Setting:
    """What planning knows beside the graph.

    Attributes:
      every: levels between exchanges; in a loop, turns.
      platform: of the devices.
      turns: in a loop ``every`` counts turns, each with all its windows; else levels there as well.
    """

    every: int
    platform: str
    turns: bool = True


@dataclasses.dataclass(frozen=True)
class _View:
    """Positions of a blocked dim of another value."""

    base: Value
    dim: int
    index: np.ndarray


@dataclasses.dataclass(eq=False)
class Plan:
    """Steps, and the margins of every value.

    Attributes:
      graph: what is planned.
      steps: in order.
      lies: of each value by number, how its dims lie in blocks (absent: whole).
      wants: of each value by number, the margins it's made with.
      fetched: of each value by number, the margins that are fetched for later groups, and modes.
      levels: of each value by number.
      modes: of each value by number, how its margins go on beyond the ends, where it's not all the same.
      groups: of each value by number, the group it's made in.
      every: see ``Setting``.
    """

    graph: Graph
    steps: list[Step]
    lies: dict[int, Cuts]
    wants: dict[int, dict[int, Margin]] = dataclasses.field(default_factory=dict)
    fetched: dict[int, dict[int, tuple[Margin, str]]] = dataclasses.field(default_factory=dict)
    levels: dict[int, int] = dataclasses.field(default_factory=dict)
    modes: dict[int, dict[int, str]] = dataclasses.field(default_factory=dict)
    groups: dict[int, int] = dataclasses.field(default_factory=dict)
    every: int = 1

    @property
    def stays(self) -> bool:
        """Every step acts on margins as on all else."""
        return all(s.kind in (LOCAL, WHOLE) for s in self.steps)

    @property
    def left(self) -> list[Step]:
        """Steps that left the layout, those in bodies too."""
        found = [s for s in self.steps if s.kind == LEFT]
        for step in self.steps:
            for inner, _ in step.inner:
                found += inner.left
        return found

    @property
    def exchanges(self) -> int:
        """Values whose margins are fetched, in bodies too."""
        own = sum(any(m != NONE for m, _ in found.values()) for found in self.fetched.values())
        return own + sum(inner.exchanges for s in self.steps for inner, _ in s.inner)

    @functools.cached_property
    def values(self) -> dict[int, Value]:
        """By number."""
        read = [v for s in self.steps for v in (*s.inputs, *s.outputs)]
        return {v.number: v for v in (*self.graph.inputs, *read)}


def plan_graph(graph: Graph, lies: Sequence[Cuts], setting: Setting, wants: Sequence[Wants] | None = None) -> Plan:
    """The plan of a graph whose inputs lie as ``lies``.

    Args:
      graph: the function.
      lies: of each input.
      setting: see there.
      wants: margins asked of each output.
    """
    planner = _Planner(setting)
    planner.lies.update({v.number: c for v, c in zip(graph.inputs, lies, strict=True) if c})
    for node in graph.nodes:
        planner.add(node)
    for value in graph.outputs:
        planner.solid(value)
    plan = Plan(graph, planner.steps, planner.lies, every=setting.every)
    with_margins(plan, setting.every, wants)
    return plan


class _Planner:
    def __init__(self, setting: Setting):
        self.setting = setting
        self.steps: list[Step] = []
        self.lies: dict[int, Cuts] = {}
        self.views: dict[int, _View] = {}
        self.put_off: dict[int, Node] = {}  # broadcasts that a reshape may turn into a repetition

    def cuts(self, value: Value) -> Cuts:
        return self.lies.get(value.number, {})

    def add(self, node: Node) -> None:
        if not any(v.number in known for v in node.inputs for known in (self.lies, self.views, self.put_off)):
            self._keep(_whole(node))
            return
        if self._as_view(node) or self._through_views(node):
            return
        if _adds_a_dim(node) is not None:
            self.put_off[node.outputs[0].number] = node
            return
        self._now(node)

    def _now(self, node: Node) -> None:
        lies = [self.solid(v) for v in node.inputs]
        if not any(lies):
            self._keep(_whole(node))
            return
        self._keep(self._step(node, lies))

    def _keep(self, step: Step) -> None:
        self.steps.append(step)
        for value, cuts in zip(step.outputs, step.cuts, strict=True):
            if cuts:
                self.lies[value.number] = cuts

    def _step(self, node: Node, lies: Sequence[Cuts]) -> Step:
        calls.refuse(node)
        found = None
        if node.body is not None:
            found = pointwise.rectified(node, lies) or calls.call(node, lies, self.setting, plan_graph)
        elif node.name == "conv_general_dilated":
            found = windows.convolution(node, lies, {})
        elif node.name.startswith("reduce_window"):
            found = windows.pooling(node, lies, {})
        else:
            found = pointwise.pointwise(node, lies)
            if found is None and node.name in shapes.RULES:
                found = shapes.RULES[node.name](node, lies)
            if found is None and node.name in reductions.RULES:
                found = reductions.RULES[node.name](node, lies)
            if found is None and node.name == "dot_general":
                found = banded.banded(node, lies)
        return found or leave(node, node.inputs, lies, _why(node, lies))

    # --- views ---

    def solid(self, value: Value) -> Cuts:
        """How a value lies; of a view, once it's laid out."""
        view, later = self.views.pop(value.number, None), self.put_off.pop(value.number, None)
        if later is not None:
            self._now(later)
        if view is None:
            return self.cuts(value)
        cuts, base = self.cuts(view.base), view.base
        assert value.maker is not None
        step = taken(value.maker, base, cuts, view.dim, view.index, value)
        if step is None:
            step = _gathered_view(value.maker, view, value)
        self._keep(step)
        return self.cuts(value)

    def _shown(self, value: Value, dim: int) -> _View | None:
        """A blocked value as a view of itself, a view as it is."""
        view = self.views.get(value.number)
        if view is not None:
            return view if view.dim == dim else None
        if dim in self.cuts(value):
            return _View(value, dim, np.arange(value.shape[dim]))
        return None

    def _as_view(self, node: Node) -> bool:
        found = self._slice(node) or self._reversed(node) or self._joined(node) or self._padded(node)
        found = found or self._gathered(node) or self._repeated(node) or self._merged(node)
        if found is None:
            return False
        (out,) = node.outputs
        self.views[out.number] = found
        return True

    def _dims(self, value: Value) -> set[int]:
        view = self.views.get(value.number)
        return set(self.cuts(view.base if view else value))

    def _slice(self, node: Node) -> _View | None:
        if node.name != "slice":
            return None
        p, (x,) = node.params, node.inputs
        strides = p["strides"] or (1,) * len(x.shape)
        cut = [
            d
            for d, size in enumerate(x.shape)
            if (p["start_indices"][d], p["limit_indices"][d], strides[d]) != (0, size, 1)
        ]
        if len(cut) != 1 or cut[0] not in self._dims(x):
            return None
        d = cut[0]
        view = self._shown(x, d) or self._solid_view(x, d)
        at = slice(p["start_indices"][d], p["limit_indices"][d], strides[d])
        return view and dataclasses.replace(view, index=view.index[at])

    def _solid_view(self, x: Value, dim: int) -> _View | None:
        self.solid(x)
        return self._shown(x, dim)

    def _reversed(self, node: Node) -> _View | None:
        if node.name != "rev" or len(node.params["dimensions"]) != 1:
            return None
        view = self._shown(node.inputs[0], node.params["dimensions"][0])
        return view and dataclasses.replace(view, index=view.index[::-1])

    def _joined(self, node: Node) -> _View | None:
        if node.name != "concatenate":
            return None
        dim = node.params["dimension"]
        views = [self._shown(v, dim) for v in node.inputs]
        if any(v is None or v.base is not views[0].base for v in views):  # type: ignore[union-attr]
            return None
        return dataclasses.replace(views[0], index=np.concatenate([v.index for v in views]))  # type: ignore[union-attr,arg-type]

    def _padded(self, node: Node) -> _View | None:
        if node.name != "pad":
            return None
        x, fill = node.inputs
        config = node.params["padding_config"]
        cut = [d for d, widths in enumerate(config) if tuple(widths) != (0, 0, 0)]
        value = known(fill)
        if len(cut) != 1 or cut[0] not in self._dims(x) or value is None or value != 0:
            return None
        (d,) = cut
        lo, hi, between = config[d]
        view = self._shown(x, d) or self._solid_view(x, d)
        if view is None or between:
            return None
        index = view.index[max(0, -lo) : len(view.index) - max(0, -hi)]
        ends = [np.full(max(0, n), ZERO) for n in (lo, hi)]
        return dataclasses.replace(view, index=np.concatenate([ends[0], index, ends[1]]))

    def _gathered(self, node: Node) -> _View | None:
        """``x[:, known positions]``, as nearest-neighbour resizing is traced."""
        if node.name != "gather" or not self._dims(node.inputs[0]):
            return None
        p, (x, positions) = node.params, node.inputs
        numbers, sizes = p["dimension_numbers"], p["slice_sizes"]
        if len(numbers.collapsed_slice_dims) != 1 or numbers.operand_batching_dims:
            return None
        (d,) = numbers.collapsed_slice_dims
        rest = [(i, s) for i, s in enumerate(x.shape) if i != d]
        out = node.outputs[0].shape
        same = tuple(numbers.start_index_map) == (d,) and all(sizes[i] == s for i, s in rest)
        kept = tuple(numbers.offset_dims) == tuple(i for i, _ in rest) and len(out) == len(x.shape)
        if not (same and kept) or d not in self._dims(x):
            return None
        index = known(positions)
        if index is None or index.ndim != 2 or index.shape[1] != 1:
            return None
        view = self._shown(x, d) or self._solid_view(x, d)
        index = index[:, 0]
        if view is None or (index < 0).any() or (index >= len(view.index)).any():
            return None
        return dataclasses.replace(view, index=view.index[index])

    def _repeated(self, node: Node) -> _View | None:
        """One position of a view, many times: how padding with the edge's value is traced."""
        if node.name != "broadcast_in_dim" or node.inputs[0].number not in self.views:
            return None
        (x,), view = node.inputs, self.views[node.inputs[0].number]
        shape, same = node.params["shape"], tuple(range(len(x.shape)))
        grown = [d for d in same if shape[d] != x.shape[d]] if len(shape) == len(x.shape) else []
        if tuple(node.params["broadcast_dimensions"]) != same or grown != [view.dim]:
            return None
        return dataclasses.replace(view, index=np.repeat(view.index, shape[view.dim]))

    def _merged(self, node: Node) -> _View | None:
        """A new dim beside a blocked one, merged with it: ``jnp.repeat`` (after it) and ``jnp.tile`` (before it)."""
        if node.name != "reshape" or node.inputs[0].number not in self.put_off:
            return None
        made = self.put_off[node.inputs[0].number]
        at, (x,) = _adds_a_dim(made), made.inputs
        before, after = made.outputs[0].shape, node.outputs[0].shape
        assert at is not None
        for first in (at - 1, at):
            if not 0 <= first < len(before) - 1:
                continue
            merged = (*before[:first], before[first] * before[first + 1], *before[first + 2 :])
            dim = first  # of x and of the result
            view = self._shown(x, dim) if merged == after else None
            if view is not None:
                many = np.repeat if first == at - 1 else np.tile
                return dataclasses.replace(view, index=many(view.index, before[at]))
        return None

    def _through_views(self, node: Node) -> bool:
        """A window that reads what a view shows in place."""
        if not node.inputs or node.inputs[0].number not in self.views:
            return False
        if any(v.number in self.views for v in node.inputs[1:]):
            return False
        rule = windows.convolution if node.name == "conv_general_dilated" else windows.pooling
        if node.name != "conv_general_dilated" and node.name != "reduce_window_sum":
            return False
        # Views of views: of several dims, one after the other.
        seen: dict[int, Extension] = {}
        value = node.inputs[0]
        while (view := self.views.get(value.number)) is not None:
            found = as_extension(view.index, view.base.shape[view.dim])
            if found is None or view.dim in seen:
                return False
            seen[view.dim], value = found, view.base
        step = rule(node, [self.cuts(value), *(self.cuts(v) for v in node.inputs[1:])], seen)
        if step is None:
            return False
        step.inputs = (value, *node.inputs[1:])
        self._keep(step)
        return True


def _adds_a_dim(node: Node) -> int | None:
    """Where a broadcast puts its one new dim; None for others."""
    if node.name != "broadcast_in_dim":
        return None
    (x, *_), shape, dims = node.inputs, node.params["shape"], node.params["broadcast_dimensions"]
    new = [d for d in range(len(shape)) if d not in dims]
    same = all(shape[to] == s for to, s in zip(dims, x.shape, strict=True))
    return new[0] if len(new) == 1 and same and tuple(dims) == tuple(sorted(dims)) else None


def _whole(node: Node) -> Step:
    calls.refuse(node)

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        if node.name == "broadcast_in_dim":
            return [_spread(node, operands[0])]  # type: ignore[arg-type]
        if node.name in pointwise.NAMES and not node.primitive.multiple_results:
            return [_small(node, operands)]  # type: ignore[arg-type]
        return bound(node, [o.value for o in operands])  # type: ignore[union-attr]

    return Step(node, WHOLE, node.inputs, ({},) * len(node.outputs), ((),) * len(node.inputs), run, node.outputs)


def _spread(node: Node, x: Whole) -> Whole:
    """A broadcast that isn't laid out: dims of size 1 stand for it, until somebody needs a part."""
    shape, dims = tuple(node.params["shape"]), node.params["broadcast_dimensions"]
    small = [1] * len(shape)
    for d, to in enumerate(dims):
        small[to] = x.array.shape[d]
    return Whole(x.array.reshape(small) if small else x.array, shape)


def _small(node: Node, operands: Sequence[Whole]) -> Whole:
    shape = node.outputs[0].shape
    held = np.broadcast_shapes(*(o.array.shape for o in operands))
    if len(held) != len(shape):
        return bound(node, [o.value for o in operands])[0]
    same = [Whole(o.array, held).value for o in operands]
    return dataclasses.replace(bound(node, same)[0], shape=shape)


def _gathered_view(node: Node, view: _View, output: Value) -> Step:
    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        x = put_together(here, operands[0]).value
        out = jnp.take(x, np.maximum(view.index, 0), axis=view.dim)
        shape = [1] * out.ndim
        shape[view.dim] = -1
        out = jnp.where((view.index >= 0).reshape(shape), out, jnp.zeros((), out.dtype))
        return [Whole(out, tuple(out.shape))]

    why = f"takes positions of dim {view.dim} from all over it"
    return Step(node, LEFT, (view.base,), ({},), ((),), run, (output,), why)


def _why(node: Node, lies: Sequence[Cuts]) -> str:
    dims = sorted({d for c in lies for d in c})
    ours = node.body is not None or node.name in (*pointwise.NAMES, *shapes.RULES, "conv_general_dilated")
    if ours or node.name.startswith(("reduce", "gather", "dynamic")):
        return f"mixes blocked dims {dims}"
    return f"no rule for {node.name!r} on blocked dims {dims}"


# --- margins --------------------------------------------------------------------------------------------------


def with_margins(plan: Plan, every: int, wants: Sequence[Wants] | None = None) -> None:
    """Plan the margins of every value, in place."""
    plan.every, plan.levels = every, {}
    group: dict[int, int] = {}
    for step in plan.steps:
        inside = [plan.levels.get(v.number, 0) for v in step.inputs]
        level = max(inside, default=0)
        if step.kind in (OWN, REDUCTION):
            level = -(-level // every) * every
        elif step.eats:
            level += 1
        for value, cuts in zip(step.outputs, step.cuts, strict=True):
            plan.levels[value.number] = level if cuts else 0
        group[id(step)] = -(-level // every)
    _sink(plan, group)
    plan.wants, plan.fetched, plan.modes = {}, {}, {}
    for value, asked in zip(plan.graph.outputs, wants or [{}] * len(plan.graph.outputs), strict=True):
        _ask(plan.wants, value, asked)
    for step in reversed(plan.steps):
        want = wanted(plan, step)
        for value, links in zip(step.inputs, step.links, strict=True):
            if not links:
                continue
            free = step.kind in (OWN, REDUCTION)
            needs = {
                k.source: NONE if free and k.window is not None else k.needs(want.get(k.result, NONE)) for k in links
            }
            modes = {k.source: mode_of(plan, step, k) for k in links}
            for dim, mode in modes.items():
                if mode != ZEROS and not (free and step.kind == OWN):
                    plan.modes.setdefault(value.number, {})[dim] = mode
            if plan.groups.get(value.number, 0) < group[id(step)]:
                found = plan.fetched.setdefault(value.number, {})
                for dim, margin in needs.items():
                    before, mode = found.get(dim, (NONE, ZEROS))
                    found[dim] = wider(before, margin), (modes.get(dim, ZEROS) if mode == ZEROS else mode)
            else:
                _ask(plan.wants, value, needs)


def _sink(plan: Plan, group: dict[int, int]) -> None:
    """Steps in place that only later groups read go into the first of these, if what they read is fetched for it.

    Else both what they read and what they make would travel.
    """
    readers: dict[int, list[Step]] = {}
    for step in plan.steps:
        for value in step.inputs:
            readers.setdefault(value.number, []).append(step)
    kept = {v.number for v in plan.graph.outputs}
    late: dict[int, int] = {}  # where a step would go
    for step in reversed(plan.steps):
        after = [late.get(id(r), group[id(r)]) for v in step.outputs for r in readers.get(v.number, [])]
        movable = step.kind == LOCAL and not kept & {v.number for v in step.outputs}
        if movable and after and min(after) > group[id(step)]:
            late[id(step)] = min(after)
    makers = {v.number: s for s in plan.steps for v in s.outputs}
    settled = False
    while not settled:
        settled = True
        for step in plan.steps:
            if id(step) not in late:
                continue
            for value in step.inputs:
                maker = makers.get(value.number)
                if value.number not in plan.lies or (maker is not None and late.get(id(maker)) == late[id(step)]):
                    continue
                others = [r for r in readers[value.number] if id(r) not in late and r.kind != LOCAL]
                if not any(group[id(r)] == late[id(step)] for r in others):
                    del late[id(step)]
                    settled = False
                    break
    group.update(late)
    plan.groups = {v.number: group[id(s)] for s in plan.steps for v in s.outputs}


def wanted(plan: Plan, step: Step) -> dict[int, Margin]:
    """Margins that a step's results are made with."""
    found: dict[int, Margin] = {}
    for value in step.outputs:
        for dim, margin in plan.wants.get(value.number, {}).items():
            found[dim] = wider(found.get(dim, NONE), margin)
    return found if step.kind not in (OWN, LEFT, WHOLE) else {}


def mode_of(plan: Plan, step: Step, link: Link) -> str:
    """How the margin a link needs goes on beyond the ends: as its window reads, else as the results' readers do."""
    if link.window is not None:
        return link.mode
    modes = {plan.modes.get(v.number, {}).get(link.result, ZEROS) for v in step.outputs}
    return next((m for m in modes if m != ZEROS), ZEROS)


def _ask(wants: dict[int, dict[int, Margin]], value: Value, needs: Wants) -> None:
    found = wants.setdefault(value.number, {})
    for dim, margin in needs.items():
        found[dim] = wider(found.get(dim, NONE), margin)
