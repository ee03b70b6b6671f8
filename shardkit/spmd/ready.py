"""A program that is ready to run: its stages arranged, each a function of blocks on its own mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardkit.arrays import Padded, PartialArray
from shardkit.arrays.entering import enter
from shardkit.placements import AnyMesh, Layout, layout_of
from shardkit.reshard import reshard
from shardkit.reshard.regions import same_place
from shardkit.spmd.arguments import Call
from shardkit.spmd.arrangement import Arrangement
from shardkit.spmd.control import CONTROL
from shardkit.spmd.execute import execute
from shardkit.spmd.graph import Graph, Value
from shardkit.spmd.placed import Placed, Sizes, even, from_layout, to_layout
from shardkit.spmd.propagate import arrange
from shardkit.spmd.setting import REDUCED, Goal, Setting
from shardkit.spmd.stages import Crossing, Stage, split


@dataclasses.dataclass(eq=False)
class ReadyStage:
    """One stage, arranged.

    Attributes:
      stage: what it is.
      arrangement: where its values are.
      inputs, outputs: the layouts of the arrays that enter and leave.
      donated: positions of inputs that the user gave away, and no other stage reads.
      wrap: what is put around the function of whole arrays before it's compiled.
      run: the compiled function; made when first needed.
    """

    stage: Stage
    arrangement: Arrangement
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    donated: tuple[int, ...] = ()
    wrap: Callable[..., Any] | None = None
    run: Any = None

    def runnable(self) -> Any:
        """The function of whole arrays, jitted."""
        if self.run is None:
            region = _region(self)
            self.run = jax.jit(self.wrap(region) if self.wrap else region, donate_argnums=self.donated)
        return self.run

    @property
    def plain(self) -> bool:
        """Nothing that enters or leaves is Partial or padded."""
        graph = self.arrangement.graph
        pairs = [*zip(graph.inputs, self.inputs, strict=True), *zip(graph.outputs, self.outputs, strict=True)]
        return all(not la.partial_axes and la.padded_shape(v.aval.shape) == tuple(v.aval.shape) for v, la in pairs)

    @functools.cached_property
    def labels(self) -> list[Callable[..., Any]]:
        """Of each output, what it is once it has left."""
        return [_label(la, v) for la, v in zip(self.outputs, self.arrangement.graph.outputs, strict=True)]

    def described(self) -> list[jax.ShapeDtypeStruct]:
        """What enters, without data."""
        values = self.arrangement.graph.inputs
        return [_described(v, la) for v, la in zip(values, self.inputs, strict=True)]


@dataclasses.dataclass(eq=False)
class Ready:
    """A program.

    Attributes:
      graph: of the whole function.
      layouts: of its inputs.
      stages: in the order they run.
      crossings: by the number of the value that arrives.
      arrivals: by that number, the layouts it comes from and goes to.
    """

    graph: Graph
    layouts: tuple[Layout, ...]
    stages: list[ReadyStage]
    crossings: Mapping[int, Crossing]
    arrivals: Mapping[int, tuple[Layout, Layout]]

    def __call__(self, call: Call) -> list[Any]:
        """The outputs for the arrays of a call."""
        if len(self.stages) > 1 and any(isinstance(jax.tree.leaves(x)[0], Tracer) for x in call.arrays):
            raise ValueError(
                "partition: this function runs on several meshes (sk.on_mesh), and jax.jit compiles for one; call it "
                "outside jit, grad and vmap (each stage is jitted itself)"
            )
        names = dict(zip((v.number for v in self.graph.inputs), call.names, strict=True))
        env: dict[int, Any] = dict(zip(names, call.arrays, strict=True))
        outs: list[Any] = [None] * len(self.graph.outputs)
        for ready in self.stages:
            graph = ready.arrangement.graph
            given = [self._arrived(v, la, env) for v, la in zip(graph.inputs, ready.inputs, strict=True)]
            entered = [
                enter(x, la, names.get(v.number, "a value of another stage"), "partition")[0]
                for x, la, v in zip(given, ready.inputs, graph.inputs, strict=True)
            ]
            results = ready.runnable()(*entered)
            labelled = [label(x) for label, x in zip(ready.labels, results, strict=True)]
            for position, x in zip(ready.stage.results, labelled, strict=False):
                outs[position] = x
            shared = len(ready.stage.results)
            env.update((v.number, x) for v, x in zip(graph.outputs[shared:], labelled[shared:], strict=True))
        return outs

    def placed(self, call: Call) -> bool:
        """Whether all arrays of a call are plain ones, where they enter the one stage."""
        (stage,) = self.stages
        if len(stage.arrangement.graph.inputs) != len(call.arrays):
            return False
        return all(
            isinstance(x, jax.Array) and d.sharding is not None and x.sharding.is_equivalent_to(d.sharding, x.ndim)
            for x, d in zip(call.arrays, stage.described(), strict=True)
        )

    def _arrived(self, value: Value, layout: Layout, env: dict[int, Any]) -> Any:
        crossing = self.crossings.get(value.number)
        if crossing is not None and value.number not in env:
            source = crossing.source
            x = env[source.number] if source.constant is None else jnp.asarray(source.constant, source.aval.dtype)
            env[value.number] = reshard(x, layout)
        return env[value.number]


def make_ready(
    graph: Graph,
    layouts: Sequence[Layout],
    goals: Sequence[Any],
    mesh: AnyMesh,
    unknown: str,
    donated: Sequence[bool] = (),
) -> Ready:
    """Every stage of a graph, arranged.

    Args:
      graph: of the whole function.
      layouts: of its inputs.
      goals: of each output: a ``Layout``, ``REDUCED`` or ``ANYWHERE``.
      mesh: where values are that are made of constants only.
      unknown: "replicate" or "error".
      donated: of each input, whether it may be overwritten.

    Raises:
      ValueError: an output that shall be on another mesh than the one it is made on.
    """
    stages, crossings = split(graph, [la.mesh for la in layouts], mesh)
    arriving = {c.result.number: c for c in crossings}
    known: dict[int, Layout] = dict(zip((v.number for v in graph.inputs), layouts, strict=True))
    arrivals: dict[int, tuple[Layout, Layout]] = {}
    ready = []
    for stage in stages:
        for value in stage.graph.inputs:
            if value.number in arriving and value.number not in known:
                known[value.number] = target = _target(arriving[value.number], known, mesh)
                arrivals[value.number] = (known.get(arriving[value.number].source.number, target), target)
        ready.append(made := _arranged(stage, known, goals, unknown))
        for value, layout in zip(stage.graph.outputs, made.outputs, strict=True):
            known.setdefault(value.number, layout)
    given = {v.number for v, gone in zip(graph.inputs, donated, strict=False) if gone}
    for made in ready:
        others = {v.number for r in ready if r is not made for v in r.stage.graph.inputs}
        others |= {c.source.number for c in crossings}
        mine = enumerate(made.stage.graph.inputs)
        made.donated = tuple(i for i, v in mine if v.number in given - others)
    return Ready(graph, tuple(layouts), ready, arriving, arrivals)


def _target(crossing: Crossing, known: Mapping[int, Layout], mesh: AnyMesh) -> Layout:
    if crossing.layout is not None:
        return crossing.layout
    if crossing.back is None or crossing.back.number not in known:
        return Layout(mesh, {}).resolved(len(crossing.result.aval.shape))
    return known[crossing.back.number].without_partial()


def _arranged(stage: Stage, known: Mapping[int, Layout], goals: Sequence[Any], unknown: str) -> ReadyStage:
    mesh, graph = stage.mesh, stage.graph
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    layouts = tuple(known[v.number] for v in graph.inputs)
    inputs = [from_layout(la, len(v.aval.shape), sizes) for la, v in zip(layouts, graph.inputs, strict=True)]
    wanted = [_goal(goals[i], mesh, sizes, v) for i, v in zip(stage.results, graph.outputs, strict=False)]
    wanted += [REDUCED] * (len(graph.outputs) - len(wanted))
    captured = [_captured(v.constant, mesh, sizes) for v in graph.captured]
    found = arrange(graph, inputs, wanted, Setting(mesh, sizes, unknown, CONTROL), captured, starts=(False, True))
    outputs = [to_layout(p, mesh) for p in found.outputs]
    for at, i in enumerate(stage.results):
        if isinstance(goals[i], Layout):  # what was asked of axes of one device changes nothing but the label
            asked = dict(zip(mesh.axis_names, goals[i].placements, strict=True))
            outputs[at] = outputs[at].but({name: p for name, p in asked.items() if mesh.shape[name] == 1})
    return ReadyStage(stage, found, layouts, tuple(outputs))


def _goal(given: Any, mesh: AnyMesh, sizes: Sizes, value: Value) -> Goal:
    if not isinstance(given, Layout):
        return given
    if not same_place(given.mesh, mesh):
        raise ValueError(
            f"partition: an output is made on mesh {dict(mesh.shape)}, but out_placements puts it on "
            f"{dict(given.mesh.shape)}; take it there with sk.on_mesh in the function"
        )
    return from_layout(given, len(value.aval.shape), sizes)


def _captured(array: Any, mesh: AnyMesh, sizes: Sizes) -> Placed:
    """Where an array that the function captured is; whole on every device if it isn't on this mesh."""
    try:
        layout = layout_of(array)
    except ValueError:
        layout = None
    if layout is None or dict(layout.mesh.shape) != dict(mesh.shape):
        layout = Layout(mesh, {})
    return from_layout(layout, np.ndim(array), sizes)


def _region(ready: ReadyStage) -> Callable[..., Any]:
    """A stage as a function of whole arrays (and stacks of contributions)."""
    found, mesh = ready.arrangement, ready.stage.mesh
    kept = [to_layout(p, mesh).stack_spec(len(p.dims)) for p in found.captured]
    constants = [v.constant for v in found.graph.captured]

    def body(blocks: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        # Of a stack of contributions this device's, without leading dims.
        given = [b.reshape(b.shape[b.ndim - len(p.dims) :]) for b, p in zip(blocks, found.inputs, strict=True)]
        results = execute(found, given, captured)
        return [r.reshape((1,) * len(la.partial_axes) + r.shape) for r, la in zip(results, ready.outputs, strict=True)]

    mapped = jax.shard_map(
        body,
        mesh=mesh,  # type: ignore[arg-type]
        in_specs=([_spec(la, p) for la, p in zip(ready.inputs, found.inputs, strict=True)], kept),
        out_specs=[_spec(la, p) for la, p in zip(ready.outputs, found.outputs, strict=True)],
        check_vma=False,  # the program itself says where everything is
    )

    def run(*arrays: Any) -> list[Any]:
        return mapped(list(arrays), constants)

    return run


def _spec(layout: Layout, placed: Placed) -> Any:
    return layout.stack_spec(len(placed.dims))


def _described(value: Value, layout: Layout) -> jax.ShapeDtypeStruct:
    """What enters the region for a value: its stack of contributions, its padded blocks, itself."""
    shape = tuple(value.aval.shape)
    lead = tuple(layout.mesh.shape[a] for a in layout.partial_axes)
    sharding = NamedSharding(layout.mesh, layout.stack_spec(len(shape)))  # type: ignore[arg-type]
    return jax.ShapeDtypeStruct((*lead, *layout.padded_shape(shape)), value.aval.dtype, sharding=sharding)


def _label(layout: Layout, value: Value) -> Callable[..., Any]:
    """What makes of an array that left the region what it is."""
    shape, sizes = tuple(value.aval.shape), dict(layout.mesh.shape)
    padded = None if even(shape, from_layout(layout, len(shape), sizes), sizes) else shape
    if layout.partial_axes:
        return lambda x: PartialArray(x, layout, padded)
    return (lambda x: x) if padded is None else lambda x: Padded(x, padded)
