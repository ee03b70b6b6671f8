"""A vocabulary that devices share out: rows of an embedding table, and scores of every entry.

Each device holds a block of the table's rows. A lookup takes the rows that are here, zeros for the others, and adds up
over devices: one of them has the row. Scores (a head that shares the table) are cut over the vocabulary, as
``loss_parallel`` takes them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit import scopes
from shardkit.arrays import Padded
from shardkit.arrays.placing import keep_axes
from shardkit.meshes import resolve_mesh
from shardkit.parallel.tensor.entering import sum_dtype
from shardkit.placements import axes_size, entry_names
from shardkit.spatial.operands import (
    Cut,
    as_array,
    axis_entries,
    cut_dims,
    explicit_axes,
    free_axes,
)


def vocabulary_lookup(
    table: Any,
    ids: Any,
    *,
    axis: str | tuple[str, ...] = "tp",
    mesh: Mesh | AbstractMesh | None = None,
    scatter_dim: int | None = None,
    batch_axes: str | Sequence[str] = (),
) -> Array:
    """``jnp.take(table, ids, axis=0)`` of a table whose rows are cut over a mesh axis.

    Each device looks up what it holds, and one all-reduce of the result adds that up; with ``scatter_dim`` it's one
    reduce-scatter, and each device goes on with its part of the sequence. Backward each device adds cotangents to its
    rows: nothing travels, but for the cotangent's parts (one all-gather) with ``scatter_dim``.

    Args:
      table: ``[vocabulary, features]``; inside a manual region of ``axis`` this device's block of rows. A table that
        is placed otherwise is resharded first. Its features stay cut over Explicit axes that don't cut ids; over axes
        that are left to the compiler it's put together.
      ids: integers of any shape, the same on all devices of ``axis``; other mesh axes may cut them. A negative id
        counts from the end; the row of one below ``-vocabulary``, or not below ``vocabulary``, is NaN.
      axis: the mesh axis that cuts the vocabulary; several, major first.
      mesh: else that of the table, or of ids, else the ambient one.
      scatter_dim: a dim of the result to be cut over ``axis`` (the sequence: 1 of ``[batch, sequence, features]``).
      batch_axes: mesh axes left to the compiler that cut dim 0 of ids. Named here they are taken over from it, which
        would gather the batch for the gradient, and for a scattered result (XLA can do no better in a region that's
        partly manual). Left to it all the same where they don't divide dim 0, or that is scattered.

    Returns:
      ``[*ids.shape, features]``, the same on all devices of ``axis``, or cut over it in ``scatter_dim``.

    Raises:
      ValueError: an unknown axis, a vocabulary or a dim to scatter that the axis doesn't divide, a table that isn't
        2-D, no such dim, a dim to scatter that another axis cuts.
      TypeError: ids that aren't integers, a table that isn't float or complex.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from shardkit.parallel.tensor.vocabulary import vocabulary_lookup
      >>> mesh = sk.make_mesh({"tp": 1})
      >>> vocabulary_lookup(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0]), mesh=mesh).tolist()
      [[4.0, 5.0], [0.0, 1.0]]
    """
    what = "vocabulary_lookup"
    ids = as_array(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{what}: ids must be integers, got {ids.dtype}")
    table, cut, where = _read_table(table, ids, axis, mesh, what)
    shape = (*ids.shape, table.shape[1])
    if scatter_dim is not None:
        scatter_dim = _read_dim(scatter_dim, shape, cut, "scatter_dim", "the result", what)
    ids_entries, rest = lead_entries(ids, cut, where), lead_entries(table, cut, where)[1]
    batch = _read_batch(batch_axes, ids.shape, scatter_dim, cut, where, what)
    if batch:
        ids_entries[0] = (*batch, *entry_names(ids_entries[0]))
    rest = without(rest, [a for entry in ids_entries for a in entry_names(entry)])
    out: list[Any] = [*ids_entries, rest]
    if scatter_dim is not None and not cut.manual:
        if out[scatter_dim] is not None:
            raise ValueError(
                f"{what}: dim {scatter_dim} of the result is cut over Explicit mesh axes "
                f"{entry_names(out[scatter_dim])} and can't be scattered over {cut.axis_name!r} as well; "
                "scatter another dim, or reshard ids"
            )
        out[scatter_dim] = held(cut)
    in_specs = PartitionSpec(held(cut), rest), PartitionSpec(*ids_entries)
    region = region_of(cut, where, in_specs, PartitionSpec(*out), batch)
    if free_axes(where, set(cut.axes)):
        # XLA stops the process when it is to partition a lookup, in a region that is partly manual, of a table and
        # ids which it cuts over the same axis.
        spec = keep_axes(in_specs[0], where, AxisType.Auto)
        table = lax.with_sharding_constraint(table, NamedSharding(where, spec))
    return run_region(region, _Lookup(cut, scatter_dim, sum_dtype(table.dtype, where)), table, ids)


def vocabulary_logits(
    query: Any,
    table: Any,
    *,
    axis: str | tuple[str, ...] = "tp",
    mesh: Mesh | AbstractMesh | None = None,
    sequence_dim: int | None = None,
    batch_axes: str | Sequence[str] = (),
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """``query @ table.T`` of a table whose rows are cut over a mesh axis: scores cut over the vocabulary.

    Nothing travels forward, and backward one all-reduce adds up the query's cotangent. A query that the axis cuts in
    ``sequence_dim`` is put together forward (one all-gather), and its cotangent scattered backward (one
    reduce-scatter).

    Args:
      query: ``[..., features]``; with ``sequence_dim``, inside a manual region of ``axis``, this device's part.
      table: ``[vocabulary, features]``; inside a manual region of ``axis`` this device's block of rows. Operands that
        are placed otherwise are resharded first.
      axis: the mesh axis that cuts the vocabulary; several, major first.
      mesh: else that of the table, or of the query, else the ambient one.
      sequence_dim: the dim of the query that ``axis`` cuts, if any; not the last.
      batch_axes: as of ``vocabulary_lookup``: mesh axes that cut dim 0 of the query, of use with ``sequence_dim``.
      precision, preferred_element_type: as in ``jnp.dot``.

    Returns:
      ``[..., vocabulary]``, cut over ``axis`` in the last dim; inside a manual region of it this device's block.

    Raises:
      ValueError: an unknown axis, a vocabulary or a sequence that the axis doesn't divide, a table that isn't 2-D,
        features that disagree, no such dim, a sequence that another axis cuts.
      TypeError: a table that isn't float or complex.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from shardkit.parallel.tensor.vocabulary import vocabulary_logits
      >>> vocabulary_logits(jnp.ones((2, 3)), jnp.ones((8, 3)), mesh=sk.make_mesh({"tp": 1})).shape
      (2, 8)
    """
    what = "vocabulary_logits"
    query = as_array(query)
    table, cut, where = _read_table(table, query, axis, mesh, what)
    if query.ndim < 1 or query.shape[-1] != table.shape[1]:
        raise ValueError(
            f"{what}: query {query.shape} must end with the table's {table.shape[1]} features ({table.shape})"
        )
    dim = None if sequence_dim is None else _read_dim(sequence_dim, query.shape, cut, "sequence_dim", "query", what)
    if dim == query.ndim - 1:
        raise ValueError(f"{what}: sequence_dim={sequence_dim} is the dim of features; it names another dim of query")
    lead = lead_entries(query, cut, where)[:-1]
    batch = _read_batch(batch_axes, query.shape[:-1], dim, cut, where, what)
    if batch:
        lead[0] = (*batch, *entry_names(lead[0]))
    table_spec = PartitionSpec(held(cut), None)
    product = _Scores(precision, preferred_element_type)
    scores = PartitionSpec(*lead, held(cut))
    if dim is None:
        region = region_of(cut, where, (PartitionSpec(*lead, None), table_spec), scores, batch)
        return run_region(region, product, query, table)
    before = [*lead, None]
    if not cut.manual:
        if lead[dim] is not None:
            raise ValueError(
                f"{what}: dim {dim} of query is cut over Explicit mesh axes {entry_names(lead[dim])} and can't be cut "
                f"over {cut.axis_name!r} as well; reshard query"
            )
        before[dim] = held(cut)
    # Apart from the product: a copy a device, in dim 0, is then all that the product keeps for backward, and the
    # sequence needn't be put together again there.
    copies = PartitionSpec(held(cut), *lead, None)
    gather = region_of(cut, where, (PartitionSpec(*before),), copies, batch)
    together = run_region(gather, _PutTogether(cut, dim), query)
    region = region_of(cut, where, (copies, table_spec), scores, batch)
    return run_region(region, _OfCopy(product), together, table)


# --- which part of a cut vocabulary is here ----------------------------------------------------------------


def read_cut(x: Any, dim: int, axis: Any, mesh: Mesh | AbstractMesh, what: str) -> tuple[Any, Cut]:
    """The array to work on (of a Padded its array), and how ``axis`` cuts its ``dim``.

    Raises:
      ValueError, TypeError: ``axis`` isn't one or several axes of the mesh.
    """
    axes = (axis,) if isinstance(axis, str) else axis
    if not isinstance(axes, tuple) or not axes or not all(isinstance(a, str) for a in axes):
        raise TypeError(f"{what}: axis must be the name of a mesh axis, or a tuple of names, got {axis!r}")
    unknown = [a for a in axes if a not in mesh.axis_names]
    if unknown or len(set(axes)) != len(axes):
        problem = f"names {unknown}" if unknown else "names an axis twice"
        raise ValueError(f"{what}: axis={axis!r} {problem}; the mesh has {tuple(mesh.axis_names)}")
    array, cuts = cut_dims(x, {dim: axes}, mesh, what)
    return array, cuts[dim]


def own_ids(ids: Array, cut: Cut, at: Any) -> tuple[Array, Array]:
    """Positions in this device's block, its size where the entry isn't here, and which ids are any entry's.

    Negative ones count from the end.
    """
    ids = ids.astype(jnp.promote_types(ids.dtype, _wide(ids.dtype)))
    if jnp.issubdtype(ids.dtype, jnp.signedinteger):
        ids = jnp.where(ids < 0, ids + cut.size, ids)
    valid = (ids >= 0) & (ids < cut.size)
    local = jnp.where(valid, ids, 0).astype(jnp.int32) - at * cut.block
    here = valid & (local >= 0) & (local < cut.block)
    return jnp.where(here, local, cut.block), valid


def _wide(dtype: Any) -> Any:
    """So that sums with a vocabulary's size don't overflow."""
    return jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32


# --- into the manual region, and out -----------------------------------------------------------------------


class Local(Protocol):
    """What a device does: its position along the cut's axes and its blocks in, its block of the result out. Hashable.

    Collectives over the cut's axes are its own.
    """

    def __call__(self, at: Any, /, *blocks: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Region:
    """The static part of a call: what becomes manual, and how operands enter and leave.

    Attributes:
      cut: how the vocabulary is cut.
      mesh: the mesh.
      axis_names: what becomes manual here; none where all that must be is.
      in_specs, out_specs: of the operands and results, along these axes.
    """

    cut: Cut
    mesh: Any
    axis_names: frozenset[str]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: Any


def region_of(
    cut: Cut, mesh: Any, in_specs: Sequence[PartitionSpec], out_specs: Any, batch: Sequence[str] = ()
) -> Region:
    """Of a cut, of specs that don't name axes which are manual already, and of other axes taken from the compiler."""
    names = {*entry_names(held(cut)), *explicit_axes(mesh), *batch}
    return Region(cut, mesh, frozenset(names), tuple(in_specs), out_specs)


def held(cut: Cut) -> Any:
    """The PartitionSpec entry of the cut dim in a region's specs."""
    return cut.axis_name if must_enter(cut) else None


def must_enter(cut: Cut) -> bool:
    """Whether a region has to make the cut's axes manual: not again, and not for one device.

    (XLA refuses a collective over a manual axis of size one where other axes are its own.)
    """
    return not cut.manual and cut.shards > 1


def combined(reduce: Any, x: Any, cut: Cut, **options: Any) -> Any:
    """``reduce(x, axis_name)``, a collective, over the cut's axes; as it is where they are one device."""
    return reduce(x, cut.axis_name, **options) if cut.manual or cut.shards > 1 else x


def without(entry: Any, axes: Sequence[str]) -> Any:
    """A PartitionSpec entry without some axes."""
    left = tuple(a for a in entry_names(entry) if a not in axes)
    return left[0] if len(left) == 1 else left or None


def lead_entries(x: Any, cut: Cut, mesh: Any) -> list[Any]:
    """How the type of ``x`` says that other axes cut it, one entry a dim (Explicit axes; None for all others)."""
    if not explicit_axes(mesh):
        return [None] * x.ndim
    return [without(entry, cut.axes) for entry in axis_entries(x)]


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def run_region(region: Region, local: Local, *operands: Any) -> Any:
    """The results of ``local`` on blocks of the operands, which are all that's kept for backward.

    What ``local`` computes it computes again there: it must be cheap, or not needed. (Reverse mode couldn't carry it
    out of a region that's nested in another, and eagerly no device could be found for what depends on ``at`` alone.)
    """
    cut, mesh = region.cut, region.mesh

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(where: Any, *blocks: Any) -> Any:
        return local(where[0], *blocks)

    # Handed in: XLA refuses lax.axis_index in some regions that leave other axes to the compiler.
    if must_enter(cut):
        where = np.arange(cut.shards, dtype=np.int32)
    else:
        where = jnp.full((1,), lax.axis_index(cut.axis_name) if cut.manual else 0, jnp.int32)
    if not region.axis_names:
        return body(where, *operands)
    operands, specs = (where, *operands), (PartitionSpec(held(cut)), *region.in_specs)
    if explicit_axes(mesh):  # in_specs only assert there
        operands = tuple(
            jax.sharding.reshard(x, NamedSharding(mesh, keep_axes(spec, mesh, AxisType.Explicit)))
            for x, spec in zip(operands, specs, strict=True)
        )
    return jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=region.out_specs, axis_names=set(region.axis_names)
    )(*operands)


# --- what a device does ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lookup:
    cut: Cut
    scatter_dim: int | None
    sums: Any  # the dtype that rows are added up in

    def __call__(self, at: Any, block: Array, ids: Array) -> Array:
        local, valid = own_ids(ids, self.cut, at)
        rows = jnp.take(block, local, axis=0, mode="fill", fill_value=0)
        rows = jnp.where(valid[..., None], rows, jnp.nan)
        with scopes.scope(scopes.REDUCTION):
            if self.scatter_dim is None:
                return combined(lax.psum, rows.astype(self.sums), self.cut).astype(rows.dtype)
            wide = rows.astype(self.sums)
            wide = combined(lax.psum_scatter, wide, self.cut, scatter_dimension=self.scatter_dim, tiled=True)
            return wide.astype(rows.dtype)


@dataclasses.dataclass(frozen=True)
class _Scores:
    precision: Any
    preferred_element_type: Any

    def __call__(self, at: Any, query: Array, block: Array) -> Array:
        del at
        contract = (((query.ndim - 1,), (1,)), ((), ()))
        dtype = jnp.result_type(query, block)
        return lax.dot_general(
            query.astype(dtype),
            block.astype(dtype),
            contract,
            self.precision,
            preferred_element_type=self.preferred_element_type,
        )


@dataclasses.dataclass(frozen=True)
class _PutTogether:
    cut: Cut
    dim: int

    def __call__(self, at: Any, block: Array) -> Array:
        del at
        with scopes.scope(scopes.RESHARD):
            return combined(lax.all_gather, block, self.cut, axis=self.dim, tiled=True)[None]


@dataclasses.dataclass(frozen=True)
class _OfCopy:
    product: _Scores

    def __call__(self, at: Any, copy: Array, block: Array) -> Array:
        return self.product(at, copy[0], block)


# --- reading arguments -------------------------------------------------------------------------------------


def _read_table(table: Any, other: Any, axis: Any, mesh: Any, what: str) -> tuple[Any, Cut, Mesh | AbstractMesh]:
    if isinstance(table, Padded):
        raise TypeError(f"{what}: a table is an array, whose vocabulary the mesh axis divides, not a Padded")
    table = as_array(table)
    if table.ndim != 2:
        raise ValueError(f"{what}: table must be [vocabulary, features], got shape {table.shape}")
    if not jnp.issubdtype(table.dtype, jnp.inexact):
        raise TypeError(f"{what}: table must be float or complex, got {table.dtype}")
    mesh = resolve_mesh(mesh, table, other, what=what)
    table, cut = read_cut(table, 0, axis, mesh, what)
    if cut.size % cut.shards:
        raise ValueError(
            f"{what}: a vocabulary of {cut.size} can't be cut over mesh axis {cut.axis_name!r} of size {cut.shards}; "
            f"make the table {cut.block * cut.shards} rows long (the next that divides), or use another axis"
        )
    return table, cut, mesh


def _read_batch(
    axes: str | Sequence[str], shape: Sequence[int], other: int | None, cut: Cut, mesh: Any, what: str
) -> tuple[str, ...]:
    """Of the axes that cut dim 0 those to be taken from the compiler; ``other`` is the dim that ``cut`` cuts."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [n for n in names if n not in mesh.axis_names]
    if unknown or len(set(names)) != len(names):
        problem = f"names {unknown}" if unknown else "names an axis twice"
        raise ValueError(f"{what}: batch_axes={axes!r} {problem}; the mesh has {tuple(mesh.axis_names)}")
    twice = [n for n in names if n in cut.axes]
    if twice:
        raise ValueError(
            f"{what}: batch_axes={axes!r} names {twice}, which cut the vocabulary (axis={cut.axis_name!r})"
        )
    free = free_axes(mesh, set(cut.axes))
    found = tuple(n for n in names if n in free)
    return found if shape and other != 0 and shape[0] % axes_size(mesh, found) == 0 else ()


def _read_dim(dim: Any, shape: Sequence[int], cut: Cut, name: str, whose: str, what: str) -> int:
    """A dim, counted from the front, that the axis cuts."""
    try:
        number = operator.index(dim)
    except TypeError:
        raise TypeError(f"{what}: {name} is the number of a dim, got {dim!r}") from None
    if not -len(shape) <= number < len(shape):
        raise ValueError(f"{what}: {name}={dim}, but {whose} has {len(shape)} dims")
    number %= len(shape)
    blocks_are_here = cut.manual and whose != "the result"
    if not blocks_are_here and shape[number] % cut.shards:
        raise ValueError(
            f"{what}: dim {number} of {whose}, {tuple(shape)}, has {shape[number]} elements, which mesh axis "
            f"{cut.axis_name!r} of size {cut.shards} doesn't divide"
        )
    return number
