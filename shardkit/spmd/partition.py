"""``partition``: a single-device function, run on a mesh, every collective one that we wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from shardkit.arrays import Padded, PartialArray
from shardkit.arrays.entering import enter
from shardkit.arrays.partial import is_whole
from shardkit.meshes import concrete_mesh, manual_axes, resolve_mesh
from shardkit.placements import AnyMesh, Layout, Placements, layout_of
from shardkit.spmd.arguments import INFERRED, Call, abstract, read_call, shape_of, spread
from shardkit.spmd.arrangement import Arrangement
from shardkit.spmd.control import CONTROL
from shardkit.spmd.execute import execute
from shardkit.spmd.graph import Graph
from shardkit.spmd.placed import Placed, even, from_layout, to_layout
from shardkit.spmd.program import Program
from shardkit.spmd.propagate import ANYWHERE, REDUCED, Goal, Setting, arrange
from shardkit.spmd.trace import trace

UNKNOWN = ("replicate", "error")


def partition(
    fun: Callable,
    in_placements: Any,
    out_placements: Any = None,
    *,
    mesh: AnyMesh | None = None,
    unknown: str = "replicate",
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Partitioned:
    """The function, run on a mesh: every value gets a placement, every collective is one that we insert.

    ``fun`` is traced once for arguments of one kind, as by ``jax.jit``. Each operation then says which placements of
    its operands it can work with on blocks, the cheapest way is chosen (bytes received, then collectives, then
    memory), and a reshard is inserted exactly where a value isn't where its user needs it. What is contracted or
    reduced over a cut dim is Partial, passes through linear operations as such, and is reduced where that costs
    least. The result runs in one ``shard_map`` in which every mesh axis is manual.

    Args:
      fun: of pytrees of arrays, written for one device. ``jax.grad`` and optax updates in it are operations like others;
        so are ``scan``, ``while_loop``, ``cond``, ``jax.checkpoint``. ``sk.constrain`` and
        ``lax.with_sharding_constraint`` say where a value shall be.
      in_placements: placements in any form, once for all arguments; or a tuple with one entry an argument, each
        placements or a pytree of them that is a prefix of the argument. None: as the arrays are (replicated, if they
        don't say).
      out_placements: the same for the results. None: wherever they are cheapest, but not Partial; "inferred": Partial,
        too, as a ``PartialArray``.
      mesh: else that of a ``Layout``/``NamedSharding`` placement, of an argument, or the ambient one.
      unknown: "replicate": an operation without a rule runs on every device whole, which the program shows; "error".
      static_argnums: arguments that are no arrays, or not to be traced. What isn't an array is static anyway.
      donate_argnums: arguments whose memory results may take.

    Returns:
      A ``Partitioned``: call it as ``fun``; ``.program(*args)`` shows what it does.

    Raises:
      ValueError: placements that don't match the arguments, sizes that don't divide (give a ``Padded``), unknown options,
        no mesh; a mark in ``fun`` that names an axis the mesh doesn't have.
      NotImplementedError: host callbacks and other effects, by name and line; with ``unknown="error"`` an operation
        without a rule.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2,), ("tp",))
      >>> layer = sk.partition(
      ...     lambda x, w0, w1: jax.nn.relu(x @ w0) @ w1, ([sk.Replicate()], [sk.Shard(1)], [sk.Shard(0)]), mesh=mesh
      ... )
      >>> layer.program(jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))).bytes_per_device
      128
    """
    if unknown not in UNKNOWN:
        raise ValueError(f'partition: unknown={unknown!r} is unknown itself; use "replicate" or "error"')
    if isinstance(out_placements, str) and out_placements != INFERRED:
        raise ValueError(f'partition: out_placements={out_placements!r} is unknown; use placements, None or "inferred"')
    return Partitioned(
        fun, in_placements, out_placements, mesh, unknown, _positions(static_argnums), _positions(donate_argnums)
    )


def _positions(given: int | Sequence[int]) -> frozenset[int]:
    return frozenset((given,) if isinstance(given, int) else given)


@dataclasses.dataclass
class _Made:
    """A program that is ready to run."""

    graph: Graph
    arrangement: Arrangement
    results: Any
    program: Program
    run: Any = None


class Partitioned:
    """A function with a placement for every value; see ``partition``.

    Calling it runs it. Works under ``jax.jit`` too.
    """

    def __init__(self, fun, in_placements, out_placements, mesh, unknown, static, donate):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._in = in_placements
        self._out = out_placements
        self._mesh = mesh
        self._unknown = unknown
        self._static = static
        self._donate = donate
        self._known: dict[Any, _Made] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, mesh, made = self._prepare(args, kwargs)
        entered = [
            enter(x, la, name, "partition") for x, la, name in zip(call.arrays, call.layouts, call.names, strict=True)
        ]
        outs = self._runnable(made, call, mesh)(*(x for x, _ in entered))
        labelled = [
            _label(x, to_layout(p, mesh), tuple(s.shape))
            for x, p, s in zip(outs, made.arrangement.outputs, jax.tree.leaves(made.results), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(made.results), labelled)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As the method of a jitted function: the program for XLA, for the machine its mesh is made of.

        Args:
          args, kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do as arrays.

        Returns:
          A ``jax.stages.Lowered``, which ``sk.collectives`` and ``sk.memory`` take, too.
        """
        call, mesh, made = self._prepare(args, kwargs)
        given = [_described(x, la) for x, la in zip(call.arrays, call.layouts, strict=True)]
        return self._runnable(made, call, mesh).lower(*given)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these arguments, without running it; ``jax.ShapeDtypeStruct`` will do as arrays.

        Returns:
          A ``Program``: print it; ``.steps``, ``.reshards``, ``.bytes_per_device``, ``.to_dict()``.
        """
        return self._prepare(args, kwargs)[2].program

    def _runnable(self, made: _Made, call: Call, mesh: AnyMesh) -> Any:
        if made.run is None:
            donated = tuple(i for i, d in enumerate(call.donated) if d)
            specs = [la.stack_spec(len(shape_of(x))) for la, x in zip(call.layouts, call.arrays, strict=True)]
            made.run = jax.jit(_region(made, specs, mesh), donate_argnums=donated)
        return made.run

    def _prepare(self, args: tuple, kwargs: dict) -> tuple[Call, AnyMesh, _Made]:
        mesh = self._find_mesh(args, kwargs)
        call = read_call(self._fun, args, kwargs, self._in, mesh, self._static, self._donate)
        try:
            key = (call.key, mesh, bool(jax.config.jax_enable_x64))  # type: ignore[attr-defined]
            made = self._known.get(key)
        except TypeError as err:
            bad = [v for _, v in call.statics if getattr(type(v), "__hash__", None) is None]
            raise TypeError(
                f"partition: the static arguments {bad} don't hash, so that nobody can tell whether the program is known; "
                "use hashable ones"
            ) from err
        if made is None:
            made = self._known[key] = self._make(call, mesh)
        return call, mesh, made

    def _find_mesh(self, args: tuple, kwargs: dict) -> AnyMesh:
        given = self._mesh
        if given is None:
            said = jax.tree.leaves(self._in, is_leaf=lambda x: isinstance(x, Layout | NamedSharding))
            given = next((p.mesh for p in said if isinstance(p, Layout | NamedSharding)), None)
        arrays = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
        mesh = concrete_mesh(resolve_mesh(given, *arrays, what="partition"))
        if manual_axes():
            raise ValueError(
                f"partition: the mesh axes {sorted(manual_axes())} are manual here (inside jax.shard_map), where a value is "
                "one device's block already; call it outside"
            )
        return mesh

    def _make(self, call: Call, mesh: AnyMesh) -> _Made:
        sizes = {name: size for name, size in mesh.shape.items() if size > 1}

        def flat(*values: Any) -> Any:
            args, kwargs = call.rebuild(values)
            return self._fun(*args, **kwargs)

        with _ambient(mesh):
            graph, results = trace(flat, *map(abstract, call.arrays))
        goals = self._goals(results, mesh, sizes)
        setting = Setting(mesh, sizes, self._unknown, CONTROL)
        inputs = [from_layout(la, len(v.aval.shape), sizes) for la, v in zip(call.layouts, graph.inputs, strict=True)]
        captured = [_captured(v.constant, mesh, sizes) for v in graph.captured]
        arrangement = arrange(graph, inputs, goals, setting, captured)
        program = Program(
            arrangement, mesh, call.names, [jax.tree_util.keystr(p) for p, _ in jax.tree.flatten_with_path(results)[0]]
        )
        return _Made(graph, arrangement, results, program)

    def _goals(self, results: Any, mesh: AnyMesh, sizes: Any) -> list[Goal]:
        given = spread(self._out, results, "out_placements")
        goals: list[Goal] = []
        for said, leaf in zip(given, jax.tree.leaves(results), strict=True):
            if said is None:
                goals.append(REDUCED)
            elif said == INFERRED:
                goals.append(ANYWHERE)
            elif isinstance(said, str):
                raise ValueError(f'partition: out_placements has {said!r}; use placements, None or "inferred"')
            else:
                layout = Layout(mesh, said).resolved(len(leaf.shape))
                layout.reduce  # noqa: B018
                goals.append(from_layout(layout, len(leaf.shape), sizes))
        return goals


def _described(x: Any, layout: Layout) -> jax.ShapeDtypeStruct:
    """What enters the region for an argument: its stack of contributions, its padded blocks, itself."""
    lead = tuple(layout.mesh.shape[a] for a in layout.partial_axes)
    shape = (*lead, *layout.padded_shape(shape_of(x)))
    sharding = NamedSharding(layout.mesh, layout.stack_spec(len(shape) - len(lead)))  # type: ignore[arg-type]
    return jax.ShapeDtypeStruct(shape, abstract(x).dtype, sharding=sharding)


def _ambient(mesh: AnyMesh) -> contextlib.AbstractContextManager[Any]:
    """The mesh with Auto axes: constraints in the traced function may name axes, and types stay free of them."""
    abstract = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.sharding.use_abstract_mesh(abstract)


def _captured(array: Any, mesh: AnyMesh, sizes: Any) -> Placed:
    """Where an array that the function captured is."""
    try:
        layout = layout_of(array)
    except ValueError:
        layout = None
    if layout is None or dict(layout.mesh.shape) != dict(mesh.shape):
        layout = Layout(mesh, {})
    return from_layout(layout, np.ndim(array), sizes)


def _region(made: _Made, in_specs: Sequence[Any], mesh: AnyMesh) -> Callable:
    """The program as a function of whole arrays (and stacks of contributions)."""
    arrangement, graph = made.arrangement, made.graph
    outs = [to_layout(p, mesh) for p in arrangement.outputs]
    kept = [to_layout(p, mesh).stack_spec(len(p.dims)) for p in arrangement.captured]
    constants = [v.constant for v in graph.captured]

    def body(blocks: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        # Of a stack of contributions this device's, without leading dims.
        given = [b.reshape(b.shape[b.ndim - len(p.dims) :]) for b, p in zip(blocks, arrangement.inputs, strict=True)]
        results = execute(arrangement, given, captured)
        return [r.reshape((1,) * len(p.partial) + r.shape) for r, p in zip(results, arrangement.outputs, strict=True)]

    mapped = jax.shard_map(
        body,
        mesh=mesh,  # type: ignore[arg-type]
        in_specs=(list(in_specs), kept),
        out_specs=[la.stack_spec(len(p.dims)) for la, p in zip(outs, arrangement.outputs, strict=True)],
        check_vma=False,  # the program itself says where everything is
    )

    def run(*arrays: Any) -> list[Any]:
        return mapped(list(arrays), constants)

    return run


def _label(x: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
    placed = from_layout(layout, len(shape), dict(layout.mesh.shape))
    padded = None if even(shape, placed, dict(layout.mesh.shape)) else shape
    if layout.partial_axes:
        return PartialArray(x, layout, padded)
    return x if padded is None else Padded(x, padded)
