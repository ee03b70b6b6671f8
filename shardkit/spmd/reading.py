"""From a program that is ready to run to its lines: names for values, moves as plans, who made what Partial."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkit.placements import AnyMesh, Layout, Placement
from shardkit.reshard.crossing import crossing as way_across
from shardkit.reshard.describe import describe
from shardkit.reshard.plan import ReshardPlan, plan_reshard
from shardkit.reshard.regions import region_between, same_place
from shardkit.spmd.arrangement import Arrangement, Move, Run
from shardkit.spmd.graph import Node, Value
from shardkit.spmd.placed import Placed, block_shape, from_layout, text, to_layout, to_placements
from shardkit.spmd.program_steps import ProgramReshard, ProgramStep
from shardkit.spmd.ready import Ready, ReadyStage
from shardkit.spmd.stages import Crossing

NO_RULE = "no rule: whole on every device"


def in_order(placed: Placed, mesh: AnyMesh) -> tuple[Placement, ...]:
    """Placements in mesh-axis order."""
    return tuple(to_placements(placed, mesh)[name] for name in mesh.axis_names)


def _short(number: Any) -> str:
    return f"{number:.6g}" if isinstance(number, float) else str(number)


class Reader:
    """Gives values names and makes the lines."""

    def __init__(self, ready: Ready, inputs: Sequence[str], outputs: Sequence[str]):
        self.ready = ready
        self.mesh: AnyMesh = ready.stages[0].stage.mesh if ready.stages else None  # type: ignore[assignment]
        self.outputs: tuple[str, ...] = tuple(outputs)
        self.names: dict[int, str] = dict(zip((v.number for v in ready.graph.inputs), inputs, strict=True))

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
        notes = [NO_RULE] if step.replicated else []
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
            placements=in_order(placed, self.mesh),
            where=text(placed),
            source=source,
        )

    def _reshard(self, move: Move, found: Arrangement, depth: int, times: int) -> ProgramStep:
        lines = describe(move.route)
        source = move.user.source if move.user is not None else ""
        name = self.name(move.value)
        origins = found.origins.get(move.value.number, {})
        gone = [a for a in move.source.partial if a not in move.goal.partial]
        made = {a: said(origins.get(a)) for a in gone}
        ends = [to_layout(p, self.mesh) for p in (move.source, move.goal)]
        reshard = ProgramReshard(
            value=name,
            src=in_order(move.source, self.mesh),
            dst=in_order(move.goal, self.mesh),
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


def said(node: Node | None) -> str:
    """The operation that made a value Partial, and its line."""
    if node is None:
        return "the caller"
    return f"{node.op.name} at {node.source}" if node.source else node.op.name
