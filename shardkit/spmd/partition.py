"""``partition``: a single-device function, run on a mesh, every collective one that we wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardkit.arrays.partial import is_whole
from shardkit.meshes import ambient_mesh, concrete_mesh, manual_axes, resolve_mesh
from shardkit.placements import AnyMesh, Layout
from shardkit.spmd.arguments import INFERRED, Call, abstract, read_call, spread
from shardkit.spmd.differentiated import with_own_derivative
from shardkit.spmd.looking import LOOKED, looked
from shardkit.spmd.program import Program
from shardkit.spmd.ready import Ready, make_ready
from shardkit.spmd.setting import ANYWHERE, REDUCED
from shardkit.spmd.trace import trace

UNKNOWN = ("replicate", "error")


def partition(
    fun: Callable[..., Any],
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

    Sources: Y. Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs",
    https://arxiv.org/abs/2105.04663; the rules say which dims belong together as Shardy's do
    (https://github.com/openxla/shardy, "Sharding propagation").

    Args:
      fun: of pytrees of arrays, written for one device. ``jax.grad`` and optax updates in it are operations like
        others; so are ``scan``, ``while_loop``, ``cond``, ``jax.checkpoint``. ``sk.constrain`` and
        ``lax.with_sharding_constraint`` say where a value shall be.
      in_placements: placements in any form, once for all arguments; or a tuple with one entry an argument, each
        placements or a pytree of them that is a prefix of the argument. None, or no entry for the last arguments: as
        the arrays are (replicated, if they don't say).
      out_placements: the same for the results. None: wherever they are cheapest, but not Partial; "inferred": Partial,
        too, as a ``PartialArray``.
      mesh: else that of a ``Layout``/``NamedSharding`` placement, of an argument, or the ambient one.
      unknown: "replicate": an operation without a rule runs on every device whole, which the program shows; "error".
      static_argnums: arguments that are no arrays, or not to be traced. What isn't an array is static anyway.
      donate_argnums: arguments whose memory results may take.

    Returns:
      A ``Partitioned``: call it as ``fun``; ``.program(*args)`` shows what it does.

    Raises:
      ValueError: placements that don't match the arguments, sizes that don't divide (give a ``Padded``), unknown
        options, no mesh; a mark in ``fun`` that names an axis the mesh doesn't have.
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
    return frozenset((given,) if isinstance(given, int) else tuple(given))


@dataclasses.dataclass
class _Made:
    """What is known of calls of one kind: the program, and the pytree of its results."""

    ready: Ready
    results: Any
    program: Program


class Partitioned:
    """A function with a placement for every value, as ``sk.partition`` makes it.

    Calling it runs it. Works under ``jax.jit`` too.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> double = sk.partition(lambda x: 2 * x, [sk.Shard(0)], mesh=sk.make_mesh({"dp": 1}))
      >>> double(jnp.arange(3)).tolist(), double.program(jnp.arange(3)).collectives
      ([0, 2, 4], 0)
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        in_placements: Any,
        out_placements: Any,
        mesh: AnyMesh | None,
        unknown: str,
        static: Any,
        donate: Any,
    ):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._in = in_placements
        self._out = out_placements
        self._mesh = mesh
        self._unknown = unknown
        self._static = static
        self._donate = donate
        self._known: dict[Any, _Made] = {}
        self._fast: dict[Any, _Made] = {}  # for arrays that are all where they enter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on the mesh.

        Args:
          args, kwargs: as the function takes them. Arrays that live elsewhere than ``in_placements`` says are moved.

        Returns:
          What the function returns, placed as ``out_placements`` says: arrays, ``sk.Padded``, ``sk.PartialArray``.

        Raises:
          ValueError: placements that don't match the arguments, sizes that don't divide, no mesh; called inside
            ``jax.shard_map``, or under another ambient mesh.
          NotImplementedError: host callbacks and other effects; an operation without a rule (``unknown="error"``).
          TypeError: static arguments that don't hash; the function looks at the values of others.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        kind = _kind(leaves, tree)
        if kind is not None and kind in self._fast:
            made = self._fast[kind]
            (stage,) = made.ready.stages
            results = [label(x) for label, x in zip(stage.labels, stage.runnable()(*leaves), strict=True)]
        else:
            call, made = self._prepare(args, kwargs)
            results = made.ready(call)
            if kind is not None and len(made.ready.stages) == 1 and not call.statics and made.ready.placed(call):
                self._fast[kind] = made
        return jax.tree.unflatten(jax.tree.structure(made.results), results)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program for XLA, for the machine its mesh is made of, as ``lower`` of a jitted function gives it.

        Args:
          args, kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do as arrays.

        Returns:
          A ``jax.stages.Lowered``, which ``sk.collectives`` and ``sk.memory`` take, too.

        Raises:
          ValueError: the function runs on several meshes (``sk.on_mesh``).
        """
        stage = self._only_stage(args, kwargs)
        return stage.runnable().lower(*stage.described())

    def _only_stage(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stages = self._prepare(args, kwargs)[1].ready.stages
        if len(stages) > 1:
            raise ValueError(
                "partition: this function runs on several meshes (sk.on_mesh), and a program for XLA on one; look at "
                ".program(...).for_mesh(mesh)"
            )
        return stages[0]

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The traced program, as ``trace`` of a jitted function gives it.

        Args:
          args, kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do as arrays.

        Returns:
          A ``jax.stages.Traced``.

        Raises:
          ValueError: the function runs on several meshes (``sk.on_mesh``).
        """
        stage = self._only_stage(args, kwargs)
        return stage.runnable().trace(*stage.described())

    def leaf_names(self, *args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        """The names of the arrays that go in and of those that come out.

        Args:
          args, kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do as arrays.

        Returns:
          Two lists of paths, "params['w']" and "result['loss']", in order.
        """
        call, made = self._prepare(args, kwargs)
        outputs = [f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree.flatten_with_path(made.results)[0]]
        return list(call.names), outputs

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these arguments, without running it.

        Args:
          args, kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do as arrays.

        Returns:
          A ``Program``: print it; ``.steps``, ``.reshards``, ``.bytes_per_device``, ``.to_dict()``.

        Raises:
          ValueError: placements that don't match the arguments, sizes that don't divide, no mesh; called inside
            ``jax.shard_map``, or under another ambient mesh.
          NotImplementedError: host callbacks and other effects; an operation without a rule (``unknown="error"``).
        """
        return self._prepare(args, kwargs)[1].program

    def inspect(self, *args: Any, **kwargs: Any) -> tuple[Program, Any]:
        """The program for these arguments, and what it returns, without running it.

        Args:
          args, kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do as arrays.

        Returns:
          A ``Program``, and a pytree of ``jax.ShapeDtypeStruct`` in the structure of the function's result.
        """
        made = self._prepare(args, kwargs)[1]
        return made.program, made.results

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, _Made]:
        mesh = self._find_mesh(args, kwargs)
        call = read_call(self._fun, args, kwargs, self._in, mesh, self._static, self._donate)
        try:
            key = (call.key, mesh, _traced_under())
            made = self._known.get(key)
        except TypeError as err:
            bad = [v for _, v in call.statics if getattr(type(v), "__hash__", None) is None]
            raise TypeError(
                f"partition: the static arguments {bad} don't hash, so that nobody can tell whether the program is "
                "known; use hashable ones"
            ) from err
        if made is None:
            made = self._known[key] = self._make(call, mesh)
        return call, made

    def _find_mesh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AnyMesh:
        given = self._mesh
        if given is None:
            said = jax.tree.leaves(self._in, is_leaf=lambda x: isinstance(x, Layout | NamedSharding))
            given = next((p.mesh for p in said if isinstance(p, Layout | NamedSharding)), None)
        arrays = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
        mesh = concrete_mesh(resolve_mesh(given, *arrays, what="partition"))
        if manual_axes():
            raise ValueError(
                f"partition: the mesh axes {sorted(manual_axes())} are manual here (inside jax.shard_map), where a "
                "value is one device's block already; call it outside"
            )
        ambient = ambient_mesh()
        if ambient is not None and (ambient.axis_names, ambient.axis_sizes) != (mesh.axis_names, mesh.axis_sizes):
            raise ValueError(
                f"partition: the program is for mesh {dict(mesh.shape)}, but {dict(ambient.shape)} is ambient "
                "(jax.set_mesh); call it under jax.set_mesh of its own mesh, or of none"
            )
        return mesh

    def _make(self, call: Call, mesh: AnyMesh) -> _Made:
        def flat(*values: Any) -> Any:
            args, kwargs = call.rebuild(values)
            return self._fun(*args, **kwargs)

        with _ambient(mesh):
            try:
                graph, results = trace(flat, *map(abstract, call.arrays))
            except LOOKED as error:
                raise looked(error, getattr(self._fun, "__name__", repr(self._fun))) from error
        ready = make_ready(graph, call.layouts, self._goals(results, mesh), mesh, self._unknown, call.donated)
        if graph.custom and len(ready.stages) == 1:
            (stage,) = ready.stages
            again = functools.partial(partition, mesh=mesh)
            stage.wrap = lambda region: with_own_derivative(
                region, flat, stage.inputs, stage.outputs, again, stage.plain
            )
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(results)[0]]
        return _Made(ready, results, Program(ready, mesh, call.names, names))

    def _goals(self, results: Any, mesh: AnyMesh) -> list[Any]:
        given = spread(self._out, results, "out_placements")
        goals: list[Any] = []
        for said, leaf in zip(given, jax.tree.leaves(results), strict=True):
            if said is None:
                goals.append(REDUCED)
            elif isinstance(said, str):
                if said != INFERRED:
                    raise ValueError(f'partition: out_placements has {said!r}; use placements, None or "inferred"')
                goals.append(ANYWHERE)
            else:
                try:
                    layout = Layout(getattr(said, "mesh", mesh), said).resolved(len(leaf.shape))
                except ValueError as err:
                    raise ValueError(f"partition: out_placements of a result of shape {leaf.shape}: {err}") from err
                layout.reduce  # noqa: B018  # two kinds are refused before anything else is
                goals.append(layout)
        return goals


def _kind(leaves: Sequence[Any], tree: Any) -> Any:
    """Equal for calls whose arrays differ in their numbers only; None where that isn't known at a glance."""
    if not leaves or not all(isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed for x in leaves):
        return None
    types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False), x.sharding) for x in leaves)  # keys have none
    return tree, types, _traced_under(), ambient_mesh()


# What, besides the arguments, a function may be traced differently for.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_softmax_custom_jvp",
    "jax_debug_nans",
)


def _traced_under() -> tuple[Any, ...]:
    return tuple(getattr(jax.config, name, None) for name in _OPTIONS)


def _ambient(mesh: AnyMesh) -> contextlib.AbstractContextManager[Any]:
    """The mesh with Auto axes: constraints in the traced function may name axes, and types stay free of them."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):  # so that a shard_map of the user's on the same mesh fits
        return jax.sharding.use_abstract_mesh(Mesh(mesh.devices, mesh.axis_names, axis_types=types).abstract_mesh)
    return jax.sharding.use_abstract_mesh(AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types))
