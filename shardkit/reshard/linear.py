"""A program of steps as one JAX primitive, so that its derivative, transpose and batch are programs of steps too.

JAX's own transposes of collectives know nothing of layouts: that of a local slice is an all-reduce, where an
all_gather does. As a primitive the whole program is differentiated by what it means: it leaves the value as it is, and
its transpose brings the cotangent from the destination's layout to the source's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.extend.core as jex_core
from jax import lax
from jax.core import Tracer
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.arrays.placing import keep_axes
from shardkit.meshes import manual_axes, mesh_of
from shardkit.placements import AnyMesh
from shardkit.reshard.local import Step, as_steps, take
from shardkit.reshard.regions import same_place
from shardkit.reshard.search import cheapest
from shardkit.reshard.states import Problem, State

LINEAR = ("sum", "mean")


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a program: how the stack (or array) that JAX sees stands for a state.

    Attributes:
      state: where the blocks are.
      lead: of each leading (Partial) dim of the stack its size: the axis's, or 1 where the axis is manual already.
      spec: of the stack, without axes that are manual already.
    """

    state: State
    lead: tuple[int, ...]
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps on a mesh.

    Attributes:
      mesh: the mesh.
      axis_names: its axes that aren't manual already, all of which the steps' region makes manual.
      problem: see ``states.Problem``.
      source, goal: its ends.
      steps: in order.
    """

    mesh: AnyMesh
    axis_names: tuple[str, ...]
    problem: Problem
    source: End
    goal: End
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        return f"{self.source.spec} -> {self.goal.spec}: {', '.join(step.kind for step in self.steps)}"

    def shape(self, end: End) -> tuple[int, ...]:
        """The global shape of the stack (or array) at one of the ends."""
        problem = self.problem
        return (*end.lead, *(problem.block(d, f) * problem.parts(f) for d, f in enumerate(end.state.dims)))

    def tangent(self) -> Program:
        """The linear map of tangents: contributions' weighted sum; what contributes nothing has tangent zero."""

        def linear(kind: str | None) -> str | None:
            return kind if kind is None or kind in LINEAR else "sum"

        problem = dataclasses.replace(
            self.problem, reduce=linear(self.problem.reduce), wanted=linear(self.problem.wanted)
        )
        return dataclasses.replace(self, problem=problem)

    def transpose(self) -> Program:
        """The linear map of cotangents, from the goal to the source."""
        problem = dataclasses.replace(self.problem, reduce=self.problem.wanted, wanted=self.problem.reduce)
        source, goal = self.source.state, self.goal.state
        if goal.partial or any(step.kind in ("copy", "collect") for step in self.steps):
            steps = _reversed(self.steps)
        else:
            # A whole value's cotangent goes back the cheapest way, then serves every contribution as it is.
            back = State(source.dims, ())
            plain = dataclasses.replace(problem, reduce=None, wanted=None)
            steps = as_steps(goal, cheapest(plain, goal, back))
            if source.partial:
                steps = (*steps, Step("copy", back, source))
        return dataclasses.replace(self, problem=problem, source=self.goal, goal=self.source, steps=steps)

    def batched(self, size: int) -> Program:
        """The same with another dim, the last, that no axis cuts."""

        def more(state: State) -> State:
            return State((*state.dims, ()), state.partial)

        def longer(end: End) -> End:
            return End(more(end.state), end.lead, PartitionSpec(*spec_entries(end.spec), None))

        return dataclasses.replace(
            self,
            problem=dataclasses.replace(self.problem, shape=(*self.problem.shape, size)),
            source=longer(self.source),
            goal=longer(self.goal),
            steps=tuple(Step(s.kind, more(s.before), more(s.after)) for s in self.steps),
        )


def _reversed(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The transposes of the steps, last first."""
    back = {
        "slice": "all_gather",
        "all_gather": "slice",
        "all_to_all": "all_to_all",
        "permute": "permute",
        "contribute": "collect",
        "collect": "contribute",
        "copy": "reduce",
        "reduce": "copy",
    }
    found: list[Step] = []
    for step in reversed(steps):
        if step.kind == "reduce_scatter":
            whole = State(step.before.dims, step.after.partial)
            turned = [Step("all_gather", step.after, whole), Step("copy", whole, step.before)]
        else:
            turned = [Step(back[step.kind], step.after, step.before)]
        if found and found[-1].kind == turned[0].kind == "all_gather":  # one collective for both
            turned[0] = Step("all_gather", found.pop().before, turned[0].after)
        found += turned
    return tuple(found)


reshard_p: jex_core.Primitive = jex_core.Primitive("sk_reshard")


def apply(program: Program, x: jax.Array) -> jax.Array:
    """The stack (or array) at the program's goal, from that at its source; differentiable."""
    out = reshard_p.bind(x, program=program)
    mesh = program.mesh
    traced = isinstance(x, Tracer) and not manual_axes()
    if traced and isinstance(mesh, Mesh) and AxisType.Explicit not in mesh.axis_types:
        # jit can't see on which devices a primitive runs. Where no argument says so either (a gradient that doesn't
        # read them), this does.
        out = lax.with_sharding_constraint(out, NamedSharding(mesh, program.goal.spec))
    return out


def _region(x: jax.Array, *, program: Program) -> jax.Array:
    def body(block: jax.Array) -> jax.Array:
        block = block.reshape(block.shape[len(program.source.lead) :])
        block = take(program.problem, program.steps, program.axis_names, block)
        return block.reshape((1,) * len(program.goal.lead) + block.shape)

    return jax.shard_map(
        body,
        mesh=program.mesh,
        in_specs=program.source.spec,
        out_specs=program.goal.spec,
        axis_names=set(program.axis_names),
        check_vma=False,  # derivatives don't come from the body, and it says where everything is
    )(x)


def _abstract(x: Any, *, program: Program) -> Any:
    if x.shape != program.shape(program.source):
        raise ValueError(f"a program for {program.shape(program.source)} was given {x.shape}; please report this")
    shape = program.shape(program.goal)
    mesh = x.sharding.mesh
    nothing = PartitionSpec(*[None] * len(shape))
    spec = nothing if mesh.empty else keep_axes(program.goal.spec, mesh, AxisType.Explicit)
    return x.update(shape=shape, sharding=NamedSharding(mesh, spec), weak_type=False)


@functools.lru_cache(4096)
def _compiled(program: Program):
    return jax.jit(functools.partial(apply, program))


def _eager(x: jax.Array, *, program: Program) -> jax.Array:
    if not isinstance(program.mesh, Mesh):
        known = mesh_of(x)
        if not isinstance(known, Mesh) or not same_place(known, program.mesh):
            raise ValueError(
                f"reshard knows a mesh of axes {dict(program.mesh.shape)}, but not its devices (a value being "
                "differentiated or batched doesn't tell); give mesh="
            )
        program = dataclasses.replace(program, mesh=known)
    return _compiled(program)(x)


reshard_p.def_impl(_eager)
reshard_p.def_abstract_eval(_abstract)
mlir.register_lowering(reshard_p, mlir.lower_fun(_region, multiple_results=False))
