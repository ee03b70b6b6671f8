"""Reducing whole dims, some of them sharded: into the manual region that takes, and the small results back out."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit import scopes
from shardkit.arrays import Padded, crop_to, pad_to
from shardkit.meshes import resolve_mesh
from shardkit.placements import entry_names
from shardkit.spatial.block_op import channels_last_letters
from shardkit.spatial.exchange import Fill, Index, clear_tail
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


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Which elements are reduced on one device, and over which mesh axes its share is combined (static).

    Attributes:
      axis: the reduced array dims.
      cuts: how the named dims are cut.
      tails: other padded dims and how many elements of each count.
      count: logical elements in one result.
      axis_names: mesh axes that cut reduced dims.
    """

    axis: tuple[int, ...]
    cuts: tuple[tuple[int, Cut], ...]
    tails: tuple[tuple[int, int], ...]
    count: int
    axis_names: tuple[str, ...]

    def clear(self, x: Array, at: Sequence[Index], fill: Fill = None) -> Array:
        """``fill`` in place of elements that don't count."""
        for (dim, cut), index in zip(self.cuts, at, strict=True):
            x = clear_tail(x, cut.size, cut.shards, index, dim, fill)
        for dim, size in self.tails:
            x = clear_tail(x, size, 1, 0, dim, fill)
        return x

    def psum(self, x: Array) -> Array:
        if not self.axis_names:
            return x
        with scopes.scope(scopes.REDUCTION):
            return lax.psum(x, self.axis_names)


class LocalReduction(Protocol):
    """What a device does: its block in, finished results out, reduced dims kept with size 1. Hashable."""

    def __call__(self, reduction: Reduction, at: Sequence[Index], block: Array) -> tuple[Array, ...]: ...


def reduce_dims(
    local: LocalReduction,
    x: Any,
    axis: int | Sequence[int],
    *,
    spatial_axes: Any,
    keepdims: bool,
    mesh: Any,
    what: str,
    verb: str,
) -> tuple[Any, ...]:
    """The results of ``local``, replicated over the mesh axes that cut reduced dims.

    Args:
      local: what each device does.
      x: an array or ``sk.Padded``; inside a manual region this device's block.
      axis: array dims to reduce.
      spatial_axes, mesh: as the caller gave them.
      keepdims: keep reduced dims with size 1.
      what, verb: the caller and what it does, for messages.

    Returns:
      Dims that are cut but not reduced stay cut; where one of them doesn't divide and the mesh is Explicit,
      the results are ``Padded``.
    """
    x = as_array(x)
    mesh = resolve_mesh(mesh, x, what=what)
    named = parse_spatial_axes(spatial_axes, x.ndim, channels_last_letters(x.ndim), mesh, what)
    dims = tuple(operator.index(d) for d in ((axis,) if isinstance(axis, int | np.integer) else tuple(axis)))
    if any(not -x.ndim <= d < x.ndim for d in dims):
        raise ValueError(f"{what}: axis={axis} is out of range for {x.ndim} dims")
    dims = tuple(sorted(d % x.ndim for d in dims))
    if len(set(dims)) != len(dims):
        raise ValueError(f"{what}: axis={axis} names a dim twice")
    typed = explicit_axes(mesh)
    if typed and isinstance(x, Padded):
        # A padded dim that an Explicit axis shards: its tail lies on some devices only, so it's cut as well.
        for d, entry in enumerate(axis_entries(x.array)):
            if d not in named and entry is not None and x.array.shape[d] != x.logical_shape[d]:
                named[d] = entry_names(entry)
    array, cuts = cut_dims(x, named, mesh, what)
    logical = (
        x.logical_shape
        if isinstance(x, Padded)
        else tuple(cuts[d].size if d in cuts else s for d, s in enumerate(array.shape))
    )
    entries: list[Any] = [None] * x.ndim
    if typed:
        entries = axis_entries(array)
    for dim, cut in cuts.items():
        if not cut.manual:
            entries[dim] = cut.axis_name
    count = math.prod(logical[d] for d in dims)
    if not count:
        raise ValueError(f"{what}: no elements to {verb} over dims {dims} of shape {logical}; the batch is empty")
    tails = [(d, logical[d]) for d, s in enumerate(array.shape) if d not in cuts and s != logical[d]]
    for d, size in tails:
        if array.shape[d] < size:
            raise ValueError(
                f"{what}: dim {d} holds {array.shape[d]} of the {size} elements of shape {logical} here, and "
                "spatial_axes doesn't say which; name the mesh axis that cuts it, or give the shape of what is here"
            )
    over = [a for d, c in cuts.items() if d in dims for a in c.axes]
    over += [a for d in dims if d not in cuts for a in entry_names(entries[d])]
    reduction = Reduction(
        axis=dims,
        cuts=tuple(cuts.items()),
        tails=tuple(tails),
        count=count,
        axis_names=tuple(over),
    )
    here = {d: array.shape[d] for d, c in cuts.items() if c.manual}  # of these dims, blocks come and go
    kept_dims = [d for d in range(x.ndim) if keepdims or d not in dims]
    stop = tuple(1 if d in dims else here.get(d, logical[d]) for d in kept_dims)
    if all(c.manual for c in cuts.values()) and not typed:
        results = _finish(local, reduction, keepdims, array)
        return tuple(crop_to(r, stop) for r in results)
    region = _Region(
        local,
        reduction,
        keepdims,
        mesh,
        frozenset({a for e in entries for a in entry_names(e)} | set(typed)),
        padded_shape(array.shape, cuts),
        PartitionSpec(*entries),
        PartitionSpec(*(None if d in dims else entries[d] for d in kept_dims)),
        bool(typed),
        in_manual_region(),
    )
    results = _run(region, array)
    uneven = {a for d, c in cuts.items() if d not in dims and c.size % c.shards and not c.manual for a in c.axes}
    if uneven & set(typed):
        return tuple(Padded(r, stop) for r in results)
    return tuple(crop_to(r, stop) for r in results)


@dataclasses.dataclass(frozen=True)
class _Region:
    local: LocalReduction
    reduction: Reduction
    keepdims: bool
    mesh: Any
    axis_names: frozenset[str]
    shape: tuple[int, ...]
    in_spec: PartitionSpec
    out_spec: PartitionSpec
    reshard: bool
    nested: bool


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(region: _Region, x: Array) -> tuple[Array, ...]:
    x = pad_to(x, region.shape)
    if region.reshard:
        x = jax.sharding.reshard(x, NamedSharding(region.mesh, region.in_spec))
    body = functools.partial(_finish, region.local, region.reduction, region.keepdims)
    if region.nested:
        body = jax.checkpoint(body)  # see convolution/region.py: residuals may not leave a nested region
    cuts = dict(region.reduction.cuts)
    where, where_specs = index_operands(cuts, list(cuts), region.mesh)
    return jax.shard_map(
        body,
        mesh=region.mesh,
        in_specs=(region.in_spec, *where_specs),
        out_specs=region.out_spec,
        axis_names=set(region.axis_names),
    )(x, *where)


def _finish(local: LocalReduction, reduction: Reduction, keepdims: bool, x: Array, *where: Array) -> tuple[Array, ...]:
    cuts = dict(reduction.cuts)
    results = local(reduction, read_indices(cuts, list(cuts), where), x)
    return results if keepdims else tuple(lax.squeeze(r, reduction.axis) for r in results)
