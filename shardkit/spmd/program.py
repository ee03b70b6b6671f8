"""``Program``: a partitioned function for people and tools: every value, where it is, and every reshard."""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkit.placements import AnyMesh, Layout, Placement
from shardkit.reshard.crossing import crossing as way_across
from shardkit.reshard.describe import ReshardStep, describe
from shardkit.reshard.plan import ReshardPlan, plan_reshard
from shardkit.reshard.regions import region_between, same_place
from shardkit.spmd.arrangement import Arrangement, Move, Run
from shardkit.spmd.graph import Node, Value
from shardkit.spmd.placed import Placed, block_shape, from_layout, text, to_layout, to_placements
from shardkit.spmd.ready import Ready, ReadyStage
from shardkit.spmd.stages import Crossing


@dataclasses.dataclass(frozen=True)
class ProgramStep:
    """One value of the program, or one reshard of it.

    Attributes:
      kind: "input", "op", "reshard" or "output".
      name: of the value it makes.
      op: the operation; of a reshard the kinds of collective ("slice" and "contribute" communicate nothing).
      operands: names of the values it takes.
      dtype, shape, local_shape: of the value: logical, and of one device's block.
      placements: where the value is, in mesh-axis order.
      where: the same in short: the axes that cut each dim, and what it's Partial over.
      source: the user's line.
      bytes: what one device receives in one run of this step.
      collectives: how many it runs.
      times: how often the step runs (in loops).
      depth: how many functions it is in.
      note: what else there is to know: who made it Partial, a strategy that isn't the plain one.
      reshard: of a reshard, its plan and ends.
    """

    kind: str
    name: str
    op: str
    operands: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    where: str
    source: str
    bytes: int = 0
    collectives: int = 0
    times: int = 1
    depth: int = 0
    note: str = ""
    reshard: ProgramReshard | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "reshard"}
        found["placements"] = [repr(p) for p in self.placements]
        if self.reshard is not None:
            found["before"] = [repr(p) for p in self.reshard.src]
            found["steps"] = [str(s) for s in self.reshard.steps]
        return found


@dataclasses.dataclass(frozen=True)
class ProgramReshard:
    """A reshard that was inserted.

    Attributes:
      value: the name of what is moved.
      src, dst: its placements before and after, in mesh-axis order.
      steps: those of the plan.
      bytes: what one device receives, in one run.
      collectives: the kinds it runs, as ``sk.collectives`` calls them.
      times: how often it runs.
      source: the line of the operation that needs it; "" for an output.
      made_by: of each Partial axis, the operation (and its line) that left the value Partial.
      plan: as ``sk.plan_reshard`` gives it.
      crosses: it's one half of a crossing between meshes (``sk.on_mesh``).
    """

    value: str
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]
    steps: tuple[ReshardStep, ...]
    bytes: int
    collectives: tuple[str, ...]
    times: int
    source: str
    made_by: dict[str, str]
    plan: ReshardPlan = dataclasses.field(repr=False)
    crosses: bool = False

    @property
    def bytes_per_device(self) -> int:
        """``bytes``, under the name that plans have."""
        return self.bytes


class Program:
    """A function with a placement on every value. Print it to read it before and after.

    Attributes:
      mesh: that it runs on.
    """

    def __init__(self, ready: Ready, mesh: AnyMesh, inputs: Sequence[str], outputs: Sequence[str], only: Any = None):
        self.mesh = mesh
        self._ready = ready
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._only = only

    @property
    def _stages(self) -> list[ReadyStage]:
        """Those that this program shows."""
        return [r for r in self._ready.stages if self._only is None or same_place(r.stage.mesh, self._only)]

    @functools.cached_property
    def steps(self) -> tuple[ProgramStep, ...]:
        """Inputs, operations, reshards and outputs, in order; those in loops right after the loop."""
        return tuple(_Reader(self._ready, self._inputs, self._outputs).steps(self._stages))

    @property
    def reshards(self) -> tuple[ProgramReshard, ...]:
        """What was inserted, in order. A crossing between meshes is two: one on either."""
        return tuple(s.reshard for s in self.steps if s.reshard is not None)

    @property
    def bytes_per_device(self) -> int:
        """What one device receives in one run of the program (on several meshes: one device of each, together)."""
        crossing = sum(s.bytes for s in self.steps if s.reshard is not None and s.reshard.crosses)
        return sum(r.arrangement.bytes for r in self._stages) + crossing

    @property
    def collectives(self) -> int:
        """How many collectives one run has, those in loops as often as they run."""
        crossing = sum(s.collectives for s in self.steps if s.reshard is not None and s.reshard.crosses)
        return sum(r.arrangement.collectives for r in self._stages) + crossing

    @property
    def meshes(self) -> tuple[AnyMesh, ...]:
        """Those that its stages run on, in order."""
        found: list[AnyMesh] = []
        for ready in self._stages:
            if not any(same_place(ready.stage.mesh, known) for known in found):
                found.append(ready.stage.mesh)
        return tuple(found)

    def for_mesh(self, mesh: AnyMesh) -> Program:
        """What the devices of one mesh do: its stages, and of each crossing its half.

        Raises:
          ValueError: nothing runs on that mesh.
        """
        if not any(same_place(mesh, known) for known in self.meshes):
            raise ValueError(
                f"nothing of this program runs on mesh {dict(mesh.shape)}; it has "
                f"{[dict(m.shape) for m in self.meshes]}"
            )
        return Program(self._ready, mesh, self._inputs, self._outputs, only=mesh)

    @property
    def in_placements(self) -> tuple[tuple[Placement, ...], ...]:
        """Of each input array."""
        return tuple(layout.placements for layout in self._ready.layouts)

    @property
    def out_placements(self) -> tuple[tuple[Placement, ...], ...]:
        """Of each output array."""
        return tuple(_placements(placed, r.stage.mesh) for r, _, placed in self._leaving)

    @property
    def _leaving(self) -> list[tuple[ReadyStage, Value, Placed]]:
        """Of each output, the stage it leaves, and where."""
        found: dict[int, Any] = {}
        for r in self._ready.stages:
            outs = zip(r.stage.results, r.arrangement.graph.outputs, r.arrangement.outputs, strict=False)
            found.update((i, (r, value, placed)) for i, value, placed in outs)
        return [found[i] for i in range(len(found))]

    @property
    def out_blocks(self) -> tuple[tuple[int, ...], ...]:
        """The shape of one device's block of each output array."""
        return tuple(block_shape(v.aval.shape, placed, r.arrangement.sizes) for r, v, placed in self._leaving)

    @property
    def out_origins(self) -> tuple[dict[str, str], ...]:
        """Of each output array, the axes it is Partial over, and the operation (with its line) that made it so."""
        found = []
        for r, value, placed in self._leaving:
            origins = r.arrangement.origins.get(r.arrangement.root(value).number, {})
            found.append({axis: _said(origins.get(axis)) for axis in placed.partial})
        return tuple(found)

    @property
    def replicated(self) -> tuple[ProgramStep, ...]:
        """Operations that every device does whole, for want of a rule."""
        return tuple(s for s in self.steps if s.note.startswith(_NO_RULE))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "mesh": {name: int(size) for name, size in self.mesh.shape.items()},
            "bytes_per_device": int(self.bytes_per_device),
            "collectives": int(self.collectives),
            "steps": [s.to_dict() for s in self.steps],
        }

    def __str__(self) -> str:
        before = [_before(s) for s in self.steps if s.kind != "reshard"]
        after = [_after(s) for s in self.steps]
        return "\n".join(
            [self._headline(), "", "before:", *_aligned(before), "", "after:", *_aligned(after), *self._losses()]
        )

    def _headline(self) -> str:
        count = len(self.reshards)
        meshes = " and ".join(f"mesh {dict(m.shape)}" for m in self.meshes)
        return (
            f"program on {meshes}: {self.bytes_per_device:,} bytes a device in {self.collectives} collectives, {count} "
            f"reshard{'' if count == 1 else 's'} inserted"
        )

    def _losses(self) -> list[str]:
        if not self.replicated:
            return []
        lines = ["", "whole on every device, for want of a rule:"]
        for step in self.replicated:
            gathered = sum(r.bytes * r.times for r in self.reshards if r.source == step.source and step.source)
            lines.append(f"  {step.op} -> {step.name}  {step.source}  (its operands: {gathered:,} bytes gathered)")
        return lines

    def _repr_html_(self) -> str:
        rows = []
        for step in self.steps:
            cells = [html.escape(c) for c in _after(step)]
            style = ' style="background:#fff3d6"' if step.kind == "reshard" else ""
            rows.append(f"<tr{style}>" + "".join(f'<td style="text-align:left">{c}</td>' for c in cells) + "</tr>")
        head = "".join(
            f'<th style="text-align:left">{c}</th>' for c in ("", "value", "type", "a block", "where", "", "line")
        )
        return (
            f"<div><p>{html.escape(self._headline())}</p><table style='font-family:monospace;white-space:pre'>"
            f"<tr>{head}</tr>{''.join(rows)}</table></div>"
        )


_NO_RULE = "no rule: whole on every device"
_MARKS = {"reshard": "*", "input": ">", "output": "<", "op": ""}


def _placements(placed: Placed, mesh: AnyMesh) -> tuple[Placement, ...]:
    return tuple(to_placements(placed, mesh)[name] for name in mesh.axis_names)


def _type(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _call(step: ProgramStep) -> str:
    indent = "  " * step.depth
    if step.kind == "input":
        return f"{indent}{step.name}"
    if step.kind == "output":
        return f"{indent}{step.name} <- {step.operands[0]}"
    return f"{indent}{step.name} = {step.op}({', '.join(step.operands)})"


def _before(step: ProgramStep) -> list[str]:
    return [_MARKS[step.kind], _call(step), _type(step.dtype, step.shape), step.source]


def _after(step: ProgramStep) -> list[str]:
    costs = f"{step.bytes:,} bytes" if step.bytes or step.kind == "reshard" else ""
    if step.times > 1 and (step.bytes or step.kind == "reshard"):
        costs += f" x {step.times}"
    note = "; ".join(x for x in (costs, step.note) if x)
    shapes = [_type(step.dtype, step.shape), _type("", step.local_shape)]
    return [_MARKS[step.kind], _call(step), *shapes, step.where, note, step.source]


def _aligned(rows: Sequence[Sequence[str]], widest: int = 60) -> list[str]:
    widths = [min(widest, max((len(r[i]) for r in rows), default=0)) for i in range(len(rows[0]) if rows else 0)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _short(number: Any) -> str:
    return f"{number:.6g}" if isinstance(number, float) else str(number)


class _Reader:
    """Gives values names and makes the lines."""

    def __init__(self, ready: Ready, inputs: Sequence[str], outputs: Sequence[str]):
        self.ready = ready
        self.mesh: AnyMesh = ready.stages[0].stage.mesh if ready.stages else None  # type: ignore[assignment]
        self.outputs = tuple(outputs)
        self.names = dict(zip((v.number for v in ready.graph.inputs), inputs, strict=True))

    def name(self, value: Value) -> str:
        if value.number not in self.names:
            if value.constant is not None:
                scalar = value.scalar
                self.names[value.number] = "constant" if scalar is None else _short(np.asarray(scalar).item())
            else:
                self.names[value.number] = f"%{len(self.names)}"
        return self.names[value.number]

    def steps(self, stages: Sequence[ReadyStage]) -> Iterator[ProgramStep]:
        seen: set[int] = set()
        for r in stages:
            self.mesh = r.stage.mesh
            found = r.arrangement
            for value, layout in zip(self.ready.graph.inputs, self.ready.layouts, strict=True):
                if value.number not in seen and same_place(layout.mesh, self.mesh):
                    seen.add(value.number)
                    placed = from_layout(layout, len(value.aval.shape), found.sizes)
                    yield self._step("input", self.name(value), "", (), value, placed, "", found)
            for value in found.graph.inputs:
                if value.number in self.ready.arrivals and value.number not in seen:
                    seen.add(value.number)
                    yield self._arrival(value)
            yield from self._body(found, 0, 1)
            leaving = zip(r.stage.results, found.graph.outputs, found.outputs, strict=False)
            for i, value, placed in leaving:
                yield self._step(
                    "output", f"result{self.outputs[i]}", "", (self.name(value),), value, placed, "", found
                )
            for number, (source, goal) in self.ready.arrivals.items():
                crossing = self.ready.crossings[number]
                if any(crossing.source is v for v in found.graph.outputs):
                    yield self._departure(crossing, source, goal)

    def _departure(self, crossing: Crossing, source: Layout, goal: Layout) -> ProgramStep:
        """The half of a crossing on the mesh that is left."""
        value = crossing.source
        leave = source
        if region_between(source.mesh, goal.mesh) is None:
            leave = way_across(tuple(value.aval.shape), np.dtype(value.aval.dtype), source, goal).leave
        return self._half(crossing, value, source, leave, "send", 0)

    def _arrival(self, value: Value) -> ProgramStep:
        """The half on the mesh that is entered; the transfer is counted here."""
        source, goal = self.ready.arrivals[value.number]
        crossing = self.ready.crossings[value.number]
        shape, dtype = tuple(value.aval.shape), np.dtype(value.aval.dtype)
        if region_between(source.mesh, goal.mesh) is None:
            across = way_across(shape, dtype, source, goal)
            return self._half(crossing, value, across.enter, goal, "receive", across.bytes)
        plan = plan_reshard(shape, dtype, source, goal)
        return self._half(crossing, value, goal, goal, "receive", plan.bytes_per_device)

    def _half(
        self, crossing: Crossing, value: Value, source: Layout, goal: Layout, verb: str, transferred: int
    ) -> ProgramStep:
        plan = plan_reshard(tuple(value.aval.shape), value.aval.dtype, source, goal)
        name, origin = self.name(value), self.name(crossing.source)
        reshard = ProgramReshard(
            value=origin,
            src=source.placements,
            dst=goal.placements,
            steps=plan.steps,
            bytes=plan.bytes_per_device + transferred,
            collectives=plan.collectives,
            times=1,
            source=crossing.node.source,
            made_by={},
            plan=plan,
            crosses=True,
        )
        kinds = " + ".join(
            [*(s.kind for s in plan.steps), verb] if verb == "send" else [verb, *(s.kind for s in plan.steps)]
        )
        shape = tuple(value.aval.shape)
        placed = from_layout(goal, len(shape), dict(goal.mesh.shape))
        return ProgramStep(
            kind="reshard",
            name=name if verb == "receive" else f"{name}'",
            op=kinds,
            operands=(origin,),
            dtype=str(value.aval.dtype),
            shape=shape,
            local_shape=block_shape(shape, placed, dict(goal.mesh.shape)),
            placements=goal.placements,
            where=text(placed),
            source=crossing.node.source,
            bytes=reshard.bytes,
            collectives=len(plan.collectives),
            note=f"mesh {dict(goal.mesh.shape)}",
            reshard=reshard,
        )

    def _body(self, found: Arrangement, depth: int, times: int) -> Iterator[ProgramStep]:
        for step in found.steps:
            if isinstance(step, Move):
                yield self._reshard(step, found, depth, times)
            else:
                yield from self._run(step, found, depth, times)

    def _run(self, step: Run, found: Arrangement, depth: int, times: int) -> Iterator[ProgramStep]:
        node, strategy = step.node, step.strategy
        notes = [_NO_RULE] if step.replicated else []
        notes += [strategy.why] if strategy.why else []
        operands = tuple(self.name(found.root(v)) for v in node.inputs)
        traffic = sum(t.bytes * t.count for t in strategy.traffic)
        for i, (value, placed) in enumerate(zip(node.outputs, strategy.results, strict=True)):
            made = any(maker is node for maker in found.origins.get(value.number, {}).values())
            yield dataclasses.replace(
                self._step("op", self.name(value), node.op.name, operands, value, placed, node.source, found),
                bytes=traffic if i == 0 else 0,
                collectives=sum(t.count for t in strategy.traffic) if i == 0 else 0,
                times=times,
                depth=depth,
                note="; ".join([*notes, *(["made Partial here"] if made else [])]),
            )
        for _, body, often in strategy.bodies:
            for value, placed in zip(body.graph.inputs, body.inputs, strict=True):
                step_ = self._step("input", self.name(value), "", (), value, placed, "", body)
                yield dataclasses.replace(step_, depth=depth + 1, times=times * often)
            yield from self._body(body, depth + 1, times * often)

    def _step(
        self,
        kind: str,
        name: str,
        op: str,
        operands: tuple[str, ...],
        value: Value,
        placed: Placed,
        source: str,
        found: Arrangement,
    ) -> ProgramStep:
        shape = tuple(value.aval.shape)
        return ProgramStep(
            kind=kind,
            name=name,
            op=op,
            operands=operands,
            dtype=str(value.aval.dtype),
            shape=shape,
            local_shape=block_shape(shape, placed, found.sizes),
            placements=_placements(placed, self.mesh),
            where=text(placed),
            source=source,
        )

    def _reshard(self, move: Move, found: Arrangement, depth: int, times: int) -> ProgramStep:
        lines = describe(move.route)
        source = move.user.source if move.user is not None else ""
        name = self.name(move.value)
        origins = found.origins.get(move.value.number, {})
        gone = [a for a in move.source.partial if a not in move.goal.partial]
        made = {a: _said(origins.get(a)) for a in gone}
        ends = [to_layout(p, self.mesh) for p in (move.source, move.goal)]
        reshard = ProgramReshard(
            value=name,
            src=_placements(move.source, self.mesh),
            dst=_placements(move.goal, self.mesh),
            steps=lines,
            bytes=move.bytes,
            collectives=tuple(s.collective for s in lines if s.collective),
            times=times,
            source=source,
            made_by=made,
            plan=ReshardPlan(tuple(move.value.aval.shape), move.value.aval.dtype, ends[0], ends[1], lines),
        )
        kinds = " + ".join(s.kind for s in lines) or "relabel"
        why = ", ".join(sorted({f"Partial by {m}" for m in made.values() if m}))
        step = self._step("reshard", f"{name}'", kinds, (name,), move.value, move.goal, source, found)
        return dataclasses.replace(
            step,
            bytes=move.bytes,
            collectives=move.collectives,
            times=times,
            depth=depth,
            note=why,
            reshard=reshard,
        )


def _said(node: Node | None) -> str:
    """The operation that made a value Partial, and its line."""
    if node is None:
        return "the caller"
    return f"{node.op.name} at {node.source}" if node.source else node.op.name
