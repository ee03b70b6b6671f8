"""``region``: a function of arrays sharded in space that enters blocks once, stays in them, and leaves once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import Padded, crop_to, pad_to
from shardkit.meshes import platform_of, resolve_mesh
from shardkit.placements import entry_names
from shardkit.spatial.block_op import channels_last_letters
from shardkit.spatial.exchange import Index
from shardkit.spatial.operands import (
    Cut,
    as_array,
    axis_entries,
    cut_dims,
    explicit_axes,
    free_axes,
    in_manual_region,
    index_operands,
    parse_spatial_axes,
    read_indices,
)
from shardkit.spatial.regions.block import ANYTHING, Block, CutDim, Cuts, cleared, cropped, out_of_chunks
from shardkit.spatial.regions.choose import choose_every
from shardkit.spatial.regions.graph import Graph, graph_of
from shardkit.spatial.regions.left import everywhere
from shardkit.spatial.regions.margins import NONE
from shardkit.spatial.regions.plan import Plan, Setting, plan_graph
from shardkit.spatial.regions.program import RegionProgram, program_of
from shardkit.spatial.regions.run import execute
from shardkit.spatial.regions.step import Held, Whole


def region(
    fun: Callable[..., Any],
    *,
    spatial_axes: Any,
    mesh: Mesh | AbstractMesh | None = None,
    exchange_every: int | str = "auto",
) -> Region:
    """``fun`` on arrays that stay in blocks, with margins of their neighbours' elements, from its beginning to its end.

    ``fun`` is written for whole arrays, in plain JAX or Flax. It is traced once; convolutions, pooling, resizing,
    ``jnp.roll``, ``jnp.pad`` and slices of the sharded dims fetch halos where they need them, everything that works
    on each element alone acts on the margins as well, norms and means leave them out. On TPUs blocks may lie in chunks
    from the first convolution to the last. An operation without a rule, or one that mixes a sharded dim with
    others, leaves the layout: every device does all of it, and ``program`` shows where.

    Derivatives are those of the local program: what a layer received forward is kept for its kernel's gradient, the
    halos of its input's gradient travel once, and ``jax.checkpoint`` in ``fun`` is obeyed.

    Source of ``exchange_every``: J. Demmel, M. Hoemmen, M. Mohiyuddin, K. Yelick, "Avoiding Communication in Sparse
    Matrix Computations", IPDPS 2008.

    Args:
      fun: the function, of pytrees of arrays.
      spatial_axes: which mesh axis cuts which dim, ``{"sp": "W"}`` or ``{"sp": 2}`` (letters: "D", "H", "W" of
        channels-last arrays), of every array in ``fun``'s first argument that has the dim; all other
        arguments are whole on every device. Or a sequence of such mappings, one an argument, None where
        it's whole.
      mesh: else that of the arguments, else the ambient one.
      exchange_every: windows (layers) between two exchanges: margins then are as wide as these layers reach together,
        and the rim is computed twice. In a ``lax.scan``: turns, each with all its windows. "auto": what a model of
        the platform's links and work finds cheapest.

    Returns:
      A function with the arguments of ``fun``; ``.program(*args)`` gives a ``RegionProgram`` to print. Results lie
      in blocks as they come, those without a sharded dim are whole. Of uneven sizes: as ``ring_conv``.

    Raises:
      ValueError: what ``ring_conv`` refuses of ``spatial_axes``; ``exchange_every`` below 1.
      NotImplementedError: a host callback or a ``shard_map`` in ``fun``, by name and line.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> def diffuse(x):
      ...     return x + 0.1 * (jnp.roll(x, 1, 0) - 2 * x + jnp.roll(x, -1, 0))
      >>> step = sk.spatial.region(diffuse, spatial_axes={"sp": 0}, mesh=sk.make_mesh({"sp": 1}))
      >>> step(jnp.arange(4.0)).tolist()
      [0.4000000059604645, 1.0, 2.0, 2.5999999046325684]
    """
    number = isinstance(exchange_every, int | np.integer) and not isinstance(exchange_every, bool)
    if exchange_every != "auto" and not number:
        raise ValueError(f'region: exchange_every={exchange_every!r} is unknown; use a number of layers, or "auto"')
    if exchange_every != "auto" and int(exchange_every) < 1:
        raise ValueError(f"region: exchange_every={exchange_every} must be at least 1")
    return Region(fun, spatial_axes, mesh, exchange_every)


_KEPT = 64  # programs of one region
_RULE = re.compile(r"custom_(vjp|jvp)_call\[\s*name=(\w+)")


def _says_all(text: str) -> bool:
    """A jaxpr's text tells it from others: not so where a derivative's rule is the user's, which it doesn't show."""
    return all(kind == "jvp" and hasattr(jax.nn, name.lstrip("_")) for kind, name in _RULE.findall(text))


class Region:
    """What ``sk.spatial.region`` returns: call it as the function it was made of.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> step = sk.spatial.region(lambda x: 2 * x, spatial_axes={"sp": 0}, mesh=sk.make_mesh({"sp": 1}))
      >>> step(jnp.arange(3)).tolist(), step.why_leaves(jnp.arange(3))
      ([0, 2, 4], [])
    """

    def __init__(self, fun: Callable[..., Any], spatial_axes: Any, mesh: Any, exchange_every: int | str):
        functools.update_wrapper(self, fun)
        self._fun, self._axes, self._mesh, self._every = fun, spatial_axes, mesh, exchange_every
        self._reasons: dict[_Call, list[str]] = {}
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on blocks.

        Args:
          args, kwargs: as the function takes them. Arguments that ``spatial_axes`` cuts are given by position: arrays,
            or ``sk.Padded``; inside a manual region of the mesh axes, this device's blocks.

        Returns:
          What the function returns; values with a sharded dim lie in blocks, others are whole on every device.

        Raises:
          ValueError: no argument has the dims of ``spatial_axes``, or it doesn't fit them.
          NotImplementedError: a host callback or a ``shard_map`` in the function, by name and line.
        """
        call, arrays = self._read(args, kwargs)
        graph, out_tree, text = self._trace(call)
        # Traced anew for every call, compiled once: what ``fun`` closes over may be another array by now, and is an
        # argument of what was compiled.
        # Within a program it becomes part of that (see convolution/region.py); by itself it stays one, or JAX would run
        # its derivative operation by operation.
        inline = call.nested or isinstance(jnp.zeros(()), Tracer)
        key = (call, hashlib.sha256(text.encode()).hexdigest(), inline)
        program = self._programs.get(key)
        if program is None:
            program = jax.jit(functools.partial(_run_plan, self._plan(call, graph), call), inline=inline)
            if _says_all(text):
                self._programs[key] = program
                if len(self._programs) > _KEPT:
                    del self._programs[next(iter(self._programs))]
        return jax.tree.unflatten(out_tree, program(list(graph.consts), arrays))

    def program(self, *args: Any, **kwargs: Any) -> RegionProgram:
        """The function as it runs on blocks: what stays in the layout, what is exchanged, what leaves it.

        Args:
          args, kwargs: as for a call; shapes (``jax.ShapeDtypeStruct``) will do.

        Returns:
          A ``RegionProgram``: print it.
        """
        call, _ = self._read(args, kwargs)
        graph = self._trace(call)[0]
        plan = self._plan(call, graph)
        return program_of(plan, call.names)

    def why_leaves(self, *args: Any, **kwargs: Any) -> list[str]:
        """The operations that leave the layout: every device does all of them.

        Args:
          args, kwargs: as for a call; shapes (``jax.ShapeDtypeStruct``) will do.

        Returns:
          A text an operation, with its line and the reason; empty where none leaves.
        """
        call, _ = self._read(args, kwargs)
        if call not in self._reasons:
            try:
                graph = self._trace(call)[0]
                left = plan_graph(graph, self._lies(call, graph), Setting(1, platform_of(call.mesh))).left
                found = [f"{s.node.name} at {s.node.source or 'an unknown line'} {s.note}" for s in left]
            except NotImplementedError as err:
                found = [str(err)]
            self._reasons[call] = found
        return self._reasons[call]

    # --- one call ---

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Call, list[Any]]:
        flat, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Padded))
        flat = [x if isinstance(x, jax.ShapeDtypeStruct) else as_array(x) for x in flat]
        mesh = resolve_mesh(self._mesh, *flat, what="region")
        which = self._which(args, kwargs, mesh)
        inputs, arrays = [], []
        for x, axes in zip(flat, which, strict=True):
            array, cuts = x, {}
            if axes is not None:
                ndim = len(x.shape)
                letters = channels_last_letters(ndim) if ndim > 2 else {}
                fitting = {a: d for a, d in axes.items() if _has(d, ndim, letters)}
                if fitting:
                    named = parse_spatial_axes(fitting, ndim, letters, mesh, "region")
                    array, cuts = cut_dims(x, named, mesh, "region")
            elif isinstance(x, Padded):
                array = x.value
            shape = tuple(cuts[d].size if d in cuts else s for d, s in enumerate(x.shape))
            weak = getattr(jax.typeof(array), "weak_type", False) if not isinstance(x, jax.ShapeDtypeStruct) else False
            inputs.append(
                _Input(
                    shape,
                    np.dtype(x.dtype) if not _is_key(x) else x.dtype,
                    weak,
                    tuple(cuts.items()),
                    isinstance(x, Padded),
                )
            )
            arrays.append(array)
        if not any(i.cuts for i in inputs):
            raise ValueError(
                f"region: no argument has the dims of spatial_axes={self._axes!r}; shapes {[i.shape for i in inputs]}"
            )
        entries = tuple(_entries(a, i, mesh) for a, i in zip(arrays, inputs, strict=True))
        return _Call(tree, mesh, tuple(inputs), entries, in_manual_region()), arrays

    def _which(self, args: Any, kwargs: Any, mesh: Any) -> list[Any]:
        """The mapping of each leaf, None for those that are whole."""
        given = self._axes
        if isinstance(given, Mapping):
            given = (given,)
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ValueError(
                f'region: spatial_axes maps mesh axes to dims, for example {{"sp": "W"}}, or is a sequence of such '
                f"mappings, one an argument; got {given!r}"
            )
        if len(given) > len(args):
            raise ValueError(
                f"region: spatial_axes names {len(given)} arguments, but {len(args)} were given by position; give what "
                "is cut without its name"
            )
        for axes in given:
            if axes is not None:
                _check_axes(axes, mesh)
        each = [*given, *[None] * (len(args) - len(given))]
        found: list[Any] = []
        for arg, axes in zip(args, each, strict=True):
            found += [axes] * len(jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, Padded)))
        rest = jax.tree.leaves(kwargs, is_leaf=lambda x: isinstance(x, Padded))
        return found + [None] * len(rest)

    def _trace(self, call: _Call) -> tuple[Graph, Any, str]:
        """The graph of a call, the tree of its results, and what tells it from others."""

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(call.tree, leaves)
            return self._fun(*args, **kwargs)

        types = [jax.ShapeDtypeStruct(i.shape, i.dtype, weak_type=i.weak_type) for i in call.inputs]
        # Apart from the mesh that is ambient: shapes here are those of whole arrays, and lie nowhere yet.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*types)
        return graph_of(closed), jax.tree.structure(shapes), str(closed.jaxpr)

    def _lies(self, call: _Call, graph: Graph) -> Sequence[Cuts]:
        inputs = [i.lies | _others(e, i, call) for i, e in zip(call.inputs, call.entries, strict=True)]
        return [{}] * len(graph.consts) + inputs

    def _plan(self, call: _Call, graph: Graph) -> Plan:
        lies = self._lies(call, graph)
        platform = platform_of(call.mesh)
        if self._every != "auto":
            return plan_graph(graph, lies, Setting(int(self._every), platform))
        return choose_every(
            lambda every, turns: plan_graph(graph, lies, Setting(every, platform, turns)), call.mesh, platform
        )


@dataclasses.dataclass(frozen=True)
class _Input:
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    cuts: tuple[tuple[int, Cut], ...]
    padded: bool

    @property
    def lies(self) -> dict[int, CutDim]:
        return {d: CutDim(c.axes, c.shards, c.size) for d, c in self.cuts}


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one call."""

    tree: Any
    mesh: Any
    inputs: tuple[_Input, ...]
    entries: tuple[tuple[Any, ...], ...]  # of each input, the mesh axes of each dim in the manual region
    nested: bool

    @property
    def names(self) -> dict[str, int]:
        """Manual axes and their sizes."""
        used = {a for i in self.inputs for _, c in i.cuts for a in c.axes} | set(explicit_axes(self.mesh))
        return {a: self.mesh.shape[a] for a in self.mesh.axis_names if a in used}


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _has(dim: Any, ndim: int, letters: Mapping[str, int]) -> bool:
    """An array of this rank has the dim; arrays that don't are whole (the time of a simulation, say)."""
    if isinstance(dim, str):
        return dim in letters or ndim > 2  # an unknown letter is an error there
    return not isinstance(dim, int | np.integer) or bool(-ndim <= dim < ndim)


def _check_axes(axes: Any, mesh: Any) -> None:
    # Of numbers it's known with an array at hand whether there's such a dim.
    known = {a: d if isinstance(d, str) else 0 for a, d in axes.items()} if isinstance(axes, Mapping) else axes
    parse_spatial_axes(known, 5, channels_last_letters(5), mesh, "region")


def _entries(array: Any, given: _Input, mesh: Any) -> tuple[Any, ...]:
    """What cuts each dim in the manual region: the named axes, and on Explicit axes what the type says beside."""
    entries: list[Any] = [None] * len(given.shape)
    typed = explicit_axes(mesh)
    if typed and isinstance(array, jax.Array):
        entries = axis_entries(array)
    named = {a for _, c in given.cuts for a in c.axes}
    for dim, entry in enumerate(entries):
        kept = tuple(n for n in entry_names(entry) if n not in named)
        whole = given.shape[dim] % max(1, int(np.prod([mesh.shape[n] for n in kept])))
        entries[dim] = None if not given.cuts or whole or not kept else (kept[0] if len(kept) == 1 else kept)
    for dim, cut in given.cuts:
        entries[dim] = None if cut.manual else cut.axis_name
    return tuple(entries)


def _others(entries: tuple[Any, ...], given: _Input, call: _Call) -> dict[int, CutDim]:
    """Dims that Explicit axes cut beside the named ones: batch and features as they are."""
    found, named = {}, dict(given.cuts)
    for dim, entry in enumerate(entries):
        if dim not in named and entry is not None:
            axes = entry_names(entry)
            found[dim] = CutDim(tuple(axes), int(np.prod([call.mesh.shape[a] for a in axes])), given.shape[dim])
    return found


@dataclasses.dataclass(frozen=True)
class _Device:
    """``Here``: see step.py."""

    platform: str
    free: bool
    names: tuple[str, ...]
    at: Mapping[tuple[str, ...], Index]
    sizes: Mapping[str, int]

    def where(self, axes: tuple[str, ...]) -> Index:
        """This device's position along mesh axes, the first major."""
        if axes in self.at:
            return self.at[axes]
        position: Any = 0
        for axis in axes:
            position = position * self.sizes[axis] + self.at[(axis,)]
        return position


def _run_plan(plan: Plan, call: _Call, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    mesh, names = call.mesh, call.names
    manual = {a for i in call.inputs for _, c in i.cuts if c.manual for a in c.axes}
    ours = {a: n for a, n in names.items() if a not in manual}
    free = bool(free_axes(mesh, set(names)))
    # Each axis tells its position by a dim of its own.
    cuts = {k: Cut((a,), n, n, a in manual) for k, (a, n) in enumerate(names.items())}
    dims = list(cuts)
    lies = [i.lies | _others(e, i, call) for i, e in zip(call.inputs, call.entries, strict=True)]
    outs: list[Held] = []

    def body(consts: Any, blocks: Any, *where: Any) -> Any:
        found = read_indices(cuts, dims, where)
        at = {cuts[k].axes: index for k, index in zip(dims, found, strict=True)}
        here = _Device(platform_of(mesh), free, tuple(names), at, names)
        held: list[Held] = [Whole(c, tuple(np.shape(c))) for c in consts]
        for x, given, place in zip(blocks, call.inputs, lies, strict=True):
            if place:
                held.append(Block(x, place, dict.fromkeys(place, NONE), dict.fromkeys(place, ANYTHING)))
            else:
                held.append(Whole(x, given.shape))
        outs[:] = [_leaving(o, here) for o in execute(plan, here, held)]
        return [o.array for o in outs]

    shapes = [v.shape for v in plan.graph.outputs]
    out_lies = [plan.lies.get(v.number, {}) for v in plan.graph.outputs]
    padded = any(i.padded for i in call.inputs)
    typed = set(explicit_axes(mesh)) | manual
    if not ours:
        results = body(consts, arrays)
    else:
        results = _mapped(call, ours, lies, cuts, dims, body, out_lies, consts, arrays)
    return [
        _finished(r, shape, cut, padded, typed, bool(ours))
        for r, shape, cut in zip(results, shapes, out_lies, strict=True)
    ]


def _mapped(
    call: _Call,
    ours: Mapping[str, int],
    lies: Sequence[Cuts],
    cuts: Mapping[int, Cut],
    dims: Sequence[int],
    body: Callable[..., Any],
    out_lies: Sequence[Cuts],
    consts: Sequence[Any],
    arrays: Sequence[Any],
) -> Any:
    mesh = call.mesh
    specs = [PartitionSpec(*e) for e in call.entries]
    given = []
    for x, spec, place in zip(arrays, specs, lies, strict=True):
        sizes = tuple(place[d].block * place[d].shards if d in place else s for d, s in enumerate(x.shape))
        x = pad_to(x, sizes) if place and not _is_key(x) else x
        if explicit_axes(mesh):
            x = jax.sharding.reshard(x, NamedSharding(mesh, spec))
        given.append(x)
    if explicit_axes(mesh):
        consts = [jax.sharding.reshard(c, NamedSharding(mesh, PartitionSpec())) for c in consts]
    where, where_specs = index_operands(cuts, dims, mesh)
    if call.nested:
        # Reverse-mode AD may not carry values out of a shard_map that is nested in another (see convolution/region.py).
        body = jax.checkpoint(body)
    out_specs = []
    for place in out_lies:
        entries: list[Any] = [None] * (max(place, default=-1) + 1)
        for dim, cut in place.items():
            kept = tuple(a for a in cut.axes if a in ours)
            entries[dim] = kept[0] if len(kept) == 1 else kept or None
        out_specs.append(PartitionSpec(*entries))
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=([PartitionSpec()] * len(consts), specs, *where_specs),
        out_specs=out_specs,
        axis_names=set(ours),
    )(list(consts), given, *where)


def _leaving(held: Held, here: _Device) -> Held:
    if isinstance(held, Whole):
        return Whole(everywhere(held.value, here.names, here), held.shape)
    block = out_of_chunks(cropped(held, {}), here.where)
    if any(c.has_tail for c in block.cuts.values()):
        block = cleared(dataclasses.replace(block, beyond=dict.fromkeys(block.cuts, ANYTHING)), here.where)
    return block


def _finished(x: Any, shape: tuple[int, ...], lies: Cuts, padded: bool, typed: set[str], mapped: bool) -> Any:
    uneven = any(c.has_tail or c.block * c.shards != c.size for c in lies.values())
    if not lies:
        return x
    if padded or (uneven and any(set(c.axes) & typed for c in lies.values())):
        return Padded(x, shape)
    return crop_to(x, shape) if uneven and mapped else x
