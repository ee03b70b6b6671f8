"""Operators with one operand: into the manual region their mesh axes need, and the result back out.

Pooling, resizing, padding and rolling differ in what a device does with its block; how blocks get in and
out is the same for all of them, and is said here once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit.arrays import Padded, crop_to, pad_to
from shardkit.meshes import resolve_mesh
from shardkit.placements import entry_names
from shardkit.spatial.exchange import Index, clear_tail
from shardkit.spatial.operands import (
    Cut,
    as_array,
    axis_entries,
    cut_dims,
    explicit_axes,
    in_manual_region,
    index_operands,
    padded_shape,
    parse_spatial_axes,
    read_indices,
)

At = Mapping[int, Index]  # this device's position along the mesh axes of each cut dim


class BlockOp(Protocol):
    """What a device does: its block in, its block of the result out. Hashable (it keys a compilation cache).

    Blocks of the result have ``ceil(size / shards)`` elements in cut dims, whatever in those of a tail. The
    operator does its own exchanges, and must not let elements of padded tails reach a result.
    """

    __call__: Callable[..., Array]  # (at, block, *whole)


@dataclasses.dataclass
class Operand:
    """The array an operator was given, read and checked; nothing has moved yet.

    Attributes:
      array: what is held (of a Padded its array; inside a manual region this device's block).
      shape: the logical shape.
      cuts: how the named dims are cut.
      mesh: the mesh in use.
      padded: it was a Padded, so the result will be one.
    """

    array: Any
    shape: tuple[int, ...]
    cuts: dict[int, Cut]
    mesh: Any
    padded: bool

    def axis_name(self, dim: int) -> Any:
        return self.cuts[dim].axis_name if dim in self.cuts else None

    def shards(self, dim: int) -> int:
        return self.cuts[dim].shards if dim in self.cuts else 1


def channels_last_letters(ndim: int, spatial: int | None = None) -> dict[str, int]:
    """Array dims of "D", "H", "W" where features come last: ``{"W": ndim - 2, ...}``; "N" and "C" too.

    Args:
      ndim: rank of the array.
      spatial: number of spatial dims; by default all between the first and the last.
    """
    count = min(3, ndim - 2 if spatial is None else spatial)
    letters = {name: ndim - 2 - i for i, name in zip(range(count), "WHD", strict=False)}
    letters["C"] = ndim - 1
    if ndim - 1 - (ndim - 2 if spatial is None else spatial) == 1:
        letters["N"] = 0
    return letters


def read_operand(
    x: Any,
    spatial_axes: Any,
    mesh: Any,
    *,
    letters: Mapping[str, int],
    mixed: Collection[int],
    what: str,
) -> Operand:
    """The operand of a call, checked.

    Args:
      x: what the caller gave: anything array-like, or a Padded.
      spatial_axes, mesh: as the caller gave them.
      letters: the array dim of each letter that spatial_axes may use.
      mixed: dims in which the operator mixes elements; the others pass through one by one.
      what: the caller, for messages.
    """
    x = as_array(x)
    mesh = resolve_mesh(mesh, x, what=what)
    named = parse_spatial_axes(spatial_axes, x.ndim, letters, mesh, what)
    array, cuts = cut_dims(x, named, mesh, what)
    shape = tuple(cuts[d].size if d in cuts else s for d, s in enumerate(array.shape))
    if isinstance(x, Padded):
        shape = x.logical_shape
        for dim, (held, size) in enumerate(zip(array.shape, shape, strict=True)):
            if held == size or dim in cuts:
                continue
            if held < size:
                raise ValueError(
                    f"{what}: dim {dim} holds {held} of the {size} elements of shape {shape} here, and spatial_axes "
                    "doesn't say which; name the mesh axis that cuts it"
                )
            if dim in mixed:
                array = lax.slice_in_dim(array, 0, size, axis=dim)
    return Operand(array, shape, cuts, mesh, isinstance(x, Padded))


@dataclasses.dataclass(frozen=True)
class _Region:
    op: BlockOp
    mesh: Any
    axis_names: frozenset[str]
    shape: tuple[int, ...]  # of the array as the region takes it
    spec: PartitionSpec
    cuts: tuple[tuple[int, Cut], ...]
    clear: tuple[tuple[int, int, int], ...]  # (dim, size, shards) of results whose tails become zeros
    reshard: bool  # Explicit axes: operands must be placed by us, in_specs only assert
    nested: bool


def run_block_op(
    op: BlockOp,
    operand: Operand,
    out_shape: Sequence[int],
    *,
    mixed: Collection[int],
    what: str,
    whole: Sequence[Array] = (),
) -> Any:
    """The result of ``op``: an array, or a Padded where the operand was one or an array couldn't stay sharded.

    Args:
      op: what each device does.
      operand: from ``read_operand``.
      out_shape: the logical shape of the result; equal to the operand's in dims that aren't mixed.
      mixed, what: as for ``read_operand``.
      whole: further operands of ``op`` that every device gets as they are (a traced initial value, say).
    """
    array, cuts, mesh = operand.array, operand.cuts, operand.mesh
    typed = explicit_axes(mesh)
    uneven = [d for d, cut in cuts.items() if out_shape[d] % cut.shards]
    untyped = any(cuts[d].manual or set(cuts[d].axes) & set(typed) for d in uneven)
    wants_padded = operand.padded or untyped
    clear = tuple((d, out_shape[d], cuts[d].shards) for d in uneven) if wants_padded else ()
    outer = {d: c for d, c in cuts.items() if not c.manual}
    if not outer:
        dims = list(cuts)
        at = dict(zip(dims, read_indices(cuts, dims, ()), strict=True))
        out = _cleared(op(at, array, *whole), clear, at)
    else:
        entries: list[Any] = [None] * array.ndim
        if typed:
            entries = axis_entries(array)
            for dim, entry in enumerate(entries):
                extra = set(entry_names(entry)) - set(outer[dim].axes if dim in outer else ())
                if extra and (dim in mixed or dim in outer):
                    raise ValueError(
                        f"{what}: dim {dim} is sharded over Explicit mesh axes {sorted(extra)} that spatial_axes "
                        "doesn't name; add them to spatial_axes, or reshard first"
                    )
                twice = set(entry_names(entry)) & {a for d, c in outer.items() if d != dim for a in c.axes}
                if twice:
                    raise ValueError(
                        f"{what}: dim {dim} is sharded over Explicit mesh axes {sorted(twice)}, which spatial_axes "
                        "gives to another dim; reshard first"
                    )
        for dim, cut in outer.items():
            entries[dim] = cut.axis_name
        names = {a for c in outer.values() for a in c.axes} | set(typed)
        region = _Region(
            op=op,
            mesh=mesh,
            axis_names=frozenset(names),
            shape=padded_shape(array.shape, cuts),
            spec=PartitionSpec(*entries),
            cuts=tuple(cuts.items()),
            clear=clear,
            reshard=bool(typed),
            nested=in_manual_region(),
        )
        out = _run(region, array, *whole)
    if wants_padded:
        return Padded(out, tuple(out_shape))
    return crop_to(out, tuple(out_shape)) if uneven else out


def _cleared(out: Array, clear: tuple[tuple[int, int, int], ...], at: At) -> Array:
    for dim, size, shards in clear:
        out = clear_tail(out, size, shards, at[dim], dim)
    return out


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(region: _Region, x: Array, *whole: Array) -> Array:
    x = pad_to(x, region.shape)
    if region.reshard:
        x = jax.sharding.reshard(x, NamedSharding(region.mesh, region.spec))
        whole = tuple(jax.sharding.reshard(w, NamedSharding(region.mesh, PartitionSpec())) for w in whole)
    cuts = dict(region.cuts)
    dims = list(cuts)

    def body(block: Array, whole: Any, *where: Array) -> Array:
        at = dict(zip(dims, read_indices(cuts, dims, where), strict=True))
        return _cleared(region.op(at, block, *whole), region.clear, at)

    if region.nested:
        body = jax.checkpoint(body)  # see convolution/region.py: residuals may not leave a nested region
    where, where_specs = index_operands(cuts, dims, region.mesh)
    return jax.shard_map(
        body,
        mesh=region.mesh,
        in_specs=(region.spec, PartitionSpec(), *where_specs),
        out_specs=region.spec,
        axis_names=set(region.axis_names),
    )(x, whole, *where)
