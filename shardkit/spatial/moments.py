"""Mean and variance over dims that are sharded: sums and counts, never a mean of means."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import Padded, crop_to, pad_to
from shardkit.meshes import resolve_mesh
from shardkit.spatial.exchange import clear_tail
from shardkit.spatial.operands import (
    Cut,
    as_array,
    axis_entries,
    cut_dims,
    entry_names,
    explicit_axes,
    in_manual_region,
    index_operands,
    padded_shape,
    parse_spatial_axes,
    read_indices,
)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What one device adds up (static): which dims, what they count, and over which mesh axes."""

    axis: tuple[int, ...]
    cuts: tuple[tuple[int, Cut], ...]
    tails: tuple[tuple[int, int], ...]  # other padded dims and how many elements of each count
    count: int
    reduce_axes: tuple[str, ...]
    keepdims: bool
    fast_variance: bool
    dtype: Any


def moments(
    x: Any,
    axis: int | Sequence[int],
    *,
    spatial_axes: Mapping[Any, Any],
    keepdims: bool = False,
    dtype: Any = None,
    fast_variance: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
) -> tuple[Any, Any]:
    """Mean and variance of an array sharded in space, as batch, instance and group norms need them.

    Every device adds up its own elements (those of padded tails excluded), one all-reduce adds the
    sums, and the totals are divided by the number of logical elements. With ``fast_variance`` that
    one all-reduce carries both sums, and ``var = E[|x|^2] - |E[x]|^2``, clipped at zero; otherwise the
    variance is of the differences to the mean, in a second all-reduce.

    Args:
      x: an array or ``sk.Padded``; inside a manual region this device's block.
      axis: array dims to reduce.
      spatial_axes: which mesh axis cuts which array dim, ``{"sp": 2}``; "D", "H", "W" name the dims of
        a channels-last array (``...DHWC``).
      keepdims: keep reduced dims with size 1.
      dtype: at least this precision is used; never below float32.
      fast_variance: see above.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      (mean, var), replicated over the reduced mesh axes. Dims that are cut but not reduced stay cut;
      where one of them doesn't divide and the mesh is Explicit, they are ``Padded``.

    Raises:
      ValueError: a dim out of range or given twice, no element to average, a block of a Padded whose
        place in the whole isn't known.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mean, var = sk.moments(jnp.arange(6.0).reshape(1, 6, 1), (0, 1), spatial_axes={"sp": 1},
      ...                        mesh=sk.make_mesh({"sp": 1}))
      >>> float(mean[0])
      2.5
    """
    what = "moments"
    x = as_array(x)
    mesh = resolve_mesh(mesh, x, what=what)
    letters = {name: x.ndim - 2 - i for i, name in enumerate("WHD") if x.ndim - 2 - i > 0}
    named = parse_spatial_axes(spatial_axes, x.ndim, letters, mesh, what)
    dims = (axis,) if isinstance(axis, int) else tuple(axis)
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
        raise ValueError(f"{what}: no elements to average over dims {dims} of shape {logical}; the batch is empty")
    tails = [(d, logical[d]) for d, s in enumerate(array.shape) if d not in cuts and s != logical[d]]
    for d, size in tails:
        if array.shape[d] < size:
            raise ValueError(
                f"{what}: dim {d} holds {array.shape[d]} of the {size} elements of shape {logical} here, and "
                "spatial_axes doesn't say which; name the mesh axis that cuts it, or give the shape of what is here"
            )
    over = [a for d, c in cuts.items() if d in dims for a in c.axes]
    over += [a for d in dims if d not in cuts for a in entry_names(entries[d])]
    sums = _Sums(
        axis=dims,
        cuts=tuple(cuts.items()),
        tails=tuple(tails),
        count=count,
        reduce_axes=tuple(over),
        keepdims=keepdims,
        fast_variance=fast_variance,
        dtype=jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32),
    )
    here = {d: array.shape[d] for d, c in cuts.items() if c.manual}  # of these dims, blocks come and go
    kept_dims = [d for d in range(x.ndim) if keepdims or d not in dims]
    stop = tuple(1 if d in dims else here.get(d, logical[d]) for d in kept_dims)
    manual = {a for e in entries for a in entry_names(e)} | set(typed)
    if all(c.manual for c in cuts.values()) and not typed:
        mean, var = _local_moments(sums, array)
        return crop_to(mean, stop), crop_to(var, stop)
    kept = [e for d, e in enumerate(entries) if d not in dims]
    if keepdims:
        kept = [None if d in dims else e for d, e in enumerate(entries)]
    region = _Region(
        sums,
        mesh,
        frozenset(manual),
        padded_shape(array.shape, cuts),
        PartitionSpec(*entries),
        PartitionSpec(*kept),
        bool(typed),
        in_manual_region(),
    )
    mean, var = _run(region, array)
    uneven = {a for d, c in cuts.items() if d not in dims and c.size % c.shards and not c.manual for a in c.axes}
    if uneven & set(typed):
        return Padded(mean, stop), Padded(var, stop)
    return crop_to(mean, stop), crop_to(var, stop)


@dataclasses.dataclass(frozen=True)
class _Region:
    sums: _Sums
    mesh: Any
    axis_names: frozenset[str]
    shape: tuple[int, ...]
    in_spec: PartitionSpec
    out_spec: PartitionSpec
    reshard: bool
    nested: bool


@functools.partial(jax.jit, static_argnums=0)
def _run(region: _Region, x: Array) -> tuple[Array, Array]:
    x = pad_to(x, region.shape)
    if region.reshard:
        x = jax.sharding.reshard(x, NamedSharding(region.mesh, region.in_spec))
    body = functools.partial(_local_moments, region.sums)
    if region.nested:
        body = jax.checkpoint(body)  # see conv_region.py: residuals may not leave a nested region
    cuts = dict(region.sums.cuts)
    where, where_specs = index_operands(cuts, list(cuts), region.mesh)
    return jax.shard_map(
        body,
        mesh=region.mesh,
        in_specs=(region.in_spec, *where_specs),
        out_specs=(region.out_spec, region.out_spec),
        axis_names=set(region.axis_names),
    )(x, *where)


def _local_moments(sums: _Sums, x: Array, *where: Array) -> tuple[Array, Array]:
    cuts = dict(sums.cuts)
    at = read_indices(cuts, list(cuts), where)

    def cleared(values: Array) -> Array:
        for (dim, cut), index in zip(sums.cuts, at, strict=True):
            values = clear_tail(values, cut.size, cut.shards, index, dim)
        for dim, size in sums.tails:
            values = clear_tail(values, size, 1, 0, dim)
        return values

    def total(values: Array) -> Array:
        return values.sum(sums.axis, keepdims=True)

    def reduced(values: Array) -> Array:
        return lax.psum(values, sums.reduce_axes) if sums.reduce_axes else values

    # Cleared before anything else, too: a NaN in a tail would come back through the derivative of its square.
    x = cleared(x.astype(sums.dtype))
    if sums.fast_variance:
        first, second = total(x), total(_abs_squared(x))
        both = reduced(jnp.stack([first, second.astype(first.dtype)]))
        mean, square = both[0] / sums.count, jnp.real(both[1]) / sums.count
        var = jnp.maximum(square - _abs_squared(mean), 0)
    else:
        mean = reduced(total(x)) / sums.count
        var = reduced(total(cleared(_abs_squared(x - mean)))) / sums.count
    if not sums.keepdims:
        mean, var = (m.reshape([s for d, s in enumerate(m.shape) if d not in sums.axis]) for m in (mean, var))
    return mean, var


def _abs_squared(x: Array) -> Array:
    return jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else x * x
