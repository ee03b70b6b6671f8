"""``Program``: a partitioned function for people and tools: every value, where it is, and every reshard."""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence
from typing import Any

from shardkit.placements import AnyMesh, Placement
from shardkit.reshard.regions import same_place
from shardkit.spmd.graph import Value
from shardkit.spmd.placed import Placed, block_shape
from shardkit.spmd.program_steps import ProgramReshard, ProgramStep
from shardkit.spmd.reading import NO_RULE, Reader, said
from shardkit.spmd.ready import Ready, ReadyStage


class Program:
    """A function with a placement on every value. Print it to read it before and after.

    Made by ``sk.Partitioned.program``.

    Attributes:
      mesh: that it runs on.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> program = sk.partition(jnp.sum, [sk.Shard(0)], mesh=mesh).program(jnp.ones(8, "float32"))
      >>> [step.kind for reshard in program.reshards for step in reshard.steps], program.collectives
      (['psum'], 1)
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
        return tuple(Reader(self._ready, self._inputs, self._outputs).steps(self._stages))

    @property
    def reshards(self) -> tuple[ProgramReshard, ...]:
        """The reshards that were inserted, in order. A crossing between meshes is two: one on either."""
        return tuple(s.reshard for s in self.steps if s.reshard is not None)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device receives in one run of the program (on several meshes: one of each, together)."""
        crossing = sum(s.bytes for s in self.steps if s.reshard is not None and s.reshard.crosses)
        return sum(r.arrangement.bytes for r in self._stages) + crossing

    @property
    def collectives(self) -> int:
        """How many collectives one run has, those in loops as often as they run."""
        crossing = sum(s.collectives for s in self.steps if s.reshard is not None and s.reshard.crosses)
        return sum(r.arrangement.collectives for r in self._stages) + crossing

    @property
    def meshes(self) -> tuple[AnyMesh, ...]:
        """The meshes that its stages run on, in order."""
        found: list[AnyMesh] = []
        for ready in self._stages:
            if not any(same_place(ready.stage.mesh, known) for known in found):
                found.append(ready.stage.mesh)
        return tuple(found)

    def for_mesh(self, mesh: AnyMesh) -> Program:
        """What the devices of one mesh do: its stages, and of each crossing its half.

        Args:
          mesh: one of ``meshes``.

        Returns:
          A ``Program`` of that part.

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
        """The placements of each input array, in mesh-axis order."""
        return tuple(layout.placements for layout in self._ready.layouts)

    @property
    def out_placements(self) -> tuple[tuple[Placement, ...], ...]:
        """The placements of each output array, in mesh-axis order."""
        layouts = {i: la for r in self._ready.stages for i, la in zip(r.stage.results, r.outputs, strict=False)}
        return tuple(layouts[i].placements for i in range(len(layouts)))

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
        """The shape of one device's block of each output array, in elements."""
        return tuple(block_shape(v.aval.shape, placed, r.arrangement.sizes) for r, v, placed in self._leaving)

    @property
    def out_origins(self) -> tuple[dict[str, str], ...]:
        """Of each output array, the axes it is Partial over, and the operation (with its line) that made it so."""
        found = []
        for r, value, placed in self._leaving:
            origins = r.arrangement.origins.get(r.arrangement.root(value).number, {})
            found.append({axis: said(origins.get(axis)) for axis in placed.partial})
        return tuple(found)

    @property
    def replicated(self) -> tuple[ProgramStep, ...]:
        """Operations that every device does whole, for want of a rule."""
        return tuple(s for s in self.steps if s.note.startswith(NO_RULE))

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

    def __repr__(self) -> str:
        return f"<{self._headline()}>"

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
        # On each cell: notebooks give cells a white-space of their own.
        cell = 'style="text-align:left;white-space:pre;padding:1px 8px"'
        rows = []
        for step in self.steps:
            cells = "".join(f"<td {cell}>{html.escape(c)}</td>" for c in _after(step))
            style = ' style="background:#fff3d6;color:#000"' if step.kind == "reshard" else ""
            rows.append(f"<tr{style}>{cells}</tr>")
        head = "".join(f"<th {cell}>{c}</th>" for c in ("", "value", "type", "a block", "where", "", "line"))
        table = "font-family:monospace;border-collapse:collapse"
        return (
            f'<div><p>{html.escape(self._headline())}</p><div style="max-height:40em;overflow:auto">'
            f'<table style="{table}"><tr>{head}</tr>{"".join(rows)}</table></div></div>'
        )


_MARKS = {"reshard": "*", "input": ">", "output": "<", "op": ""}


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
