"""Moves in words: the lines of a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardkit.reshard.local import Step
from shardkit.reshard.moves import Move
from shardkit.reshard.route import Route
from shardkit.reshard.states import Problem, State


@dataclasses.dataclass(frozen=True)
class ReshardStep:
    """One line of a plan.

    Attributes:
      kind: "slice", "contribute" or "relabel" (nothing is communicated), "all_gather", "all_to_all", "psum", "pmax",
        "pmin", "psum_scatter", "ppermute", or "transfer" (between meshes).
      axes: the mesh axes it runs over; "x/2:4" is the part of size 4 of axis x that counts in steps of 2.
      bytes: what one device receives, in bytes: of a result of ``R`` bytes on one device and ``n`` devices,
        ``R (n - 1) / n`` for all_gather and all_to_all, ``R (n - 1)`` for psum_scatter, ``2 R (n - 1) / n`` for psum,
        pmax and pmin, ``R`` for ppermute. Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
        Communication Operations in MPICH", IJHPCA 19(1), 2005.
      peak_bytes: what one device holds during it, in bytes: its input and its result.
      before, after: the layouts it leads from and to, as text: the axes that cut each dim, "-" where none does.
      collective: the kind that ``sk.collectives`` calls it by in the compiled program; None if there's none.
      reduce: what a device does with the contributions it receives, where the collective doesn't.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
      >>> (step,) = sk.plan_reshard((8, 8), "float32", [sk.Partial()], [sk.Shard(0)], mesh).steps
      >>> step.kind, step.axes, step.bytes
      ('psum_scatter', ('x',), 192)
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    peak_bytes: int
    before: str
    after: str
    collective: str | None = None
    reduce: str | None = None

    def __str__(self) -> str:
        name = f"{self.kind} + {self.reduce}" if self.reduce else self.kind
        return f"{name:<17} {' '.join(self.axes):<12} {self.before} -> {self.after}   {self.bytes:,} bytes"


def describe(route: Route) -> tuple[ReshardStep, ...]:
    """The moves as lines of a plan; slices that follow one another are one line."""
    lines: list[ReshardStep] = []
    waits = route.problem.reduce
    for move, step in zip(route.moves, route.steps, strict=True):
        before, waits = waits, route.problem.wanted if move.kind == "contribute" else waits
        line = _line(route.problem, move, step, (before, waits))
        if lines and line.kind == lines[-1].kind == "slice":
            last = lines.pop()
            line = dataclasses.replace(line, axes=last.axes + line.axes, before=last.before)
        lines.append(line)
    return tuple(lines)


def _line(problem: Problem, move: Move, step: Step, waits: tuple[str | None, str | None]) -> ReshardStep:
    kind, collective, reduce = move.kind, None, None
    over: Any = sorted({f for f, _ in _placed(step.before) ^ _placed(step.after)})
    if kind == "permute":
        kind, collective = ("ppermute", "collective_permute") if move.collectives else ("relabel", None)
    elif kind in ("all_gather", "all_to_all"):
        collective = kind
    elif kind == "reduce":
        kind, collective = _REDUCTIONS[problem.reduce or "sum"]
        reduce = {"prod": "prod", "mean": "divide"}.get(problem.reduce or "sum")
    elif kind == "reduce_scatter":
        linear = problem.reduce in ("sum", "mean")
        kind, collective = ("psum_scatter", "reduce_scatter") if linear else ("all_to_all", "all_to_all")
        reduce = {"sum": None, "mean": "divide"}.get(problem.reduce or "sum", problem.reduce)
    return ReshardStep(
        kind=kind,
        axes=problem.factors.label(over),
        bytes=move.bytes,
        peak_bytes=move.peak,
        before=_text(problem, step.before, waits[0]),
        after=_text(problem, step.after, waits[1]),
        collective=collective,
        reduce=reduce,
    )


_REDUCTIONS = {
    "sum": ("psum", "all_reduce"),
    "mean": ("psum", "all_reduce"),
    "max": ("pmax", "all_reduce"),
    "any": ("pmax", "all_reduce"),
    "min": ("pmin", "all_reduce"),
    "all": ("pmin", "all_reduce"),
    "prod": ("all_gather", "all_gather"),
}


def _placed(state: State) -> set[tuple[int, Any]]:
    """What each factor does that doesn't replicate."""
    cut: set[tuple[int, Any]] = {(f, (d, i)) for d, factors in enumerate(state.dims) for i, f in enumerate(factors)}
    return cut | {(f, "partial") for f in state.partial}


def _text(problem: Problem, state: State, reduce: str | None) -> str:
    dims = ["*".join(problem.factors.label(factors)) or "-" for factors in state.dims]
    text = f"[{', '.join(dims)}]"
    if state.partial:
        text += f" {reduce} over {'*'.join(problem.factors.label(state.partial))}"
    return text
