"""Taking a convolution into the manual region its mesh axes need, and its result back out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from shardkit.arrays import Padded, crop_to, pad_to
from shardkit.meshes import platform_of
from shardkit.placements import axes_size, entry_names
from shardkit.spatial.convolution.apply import Indices
from shardkit.spatial.convolution.args import ConvCall
from shardkit.spatial.convolution.local import local_conv
from shardkit.spatial.convolution.method import choose_form, regime_of
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.exchange import clear_tail
from shardkit.spatial.operands import (
    Cut,
    axis_entries,
    explicit_axes,
    free_axes,
    in_manual_region,
    index_operands,
    padded_shape,
    read_indices,
)


@dataclasses.dataclass(frozen=True)
class _Region:
    """The static part of one call: what is manual, and how operands enter and leave."""

    conv: LocalConv
    mesh: Any
    axis_names: frozenset[str]
    shape: tuple[int, ...]  # of lhs as the region takes it
    in_specs: tuple[PartitionSpec, PartitionSpec]
    out_specs: PartitionSpec
    cuts: tuple[tuple[int, Cut], ...]
    reshard: bool  # Explicit axes: operands must be placed by us, in_specs only assert
    clear: bool  # zeros in the tails of the result
    nested: bool


def run_conv(call: ConvCall) -> Any:
    """The result of a call: an array, or a Padded where the input was one or an array couldn't stay sharded."""
    conv, array, rhs, cuts, mesh = call.conv, call.array, call.rhs, call.cuts, call.mesh
    out_logical = call.out_shape
    uneven = [
        out_dim
        for lhs_dim, out_dim in zip(conv.lhs_spec[2:], conv.out_spec[2:], strict=True)
        if lhs_dim in cuts and out_logical[out_dim] % cuts[lhs_dim].shards
    ]
    untyped = any(
        cuts[dim].manual or set(cuts[dim].axes) & set(explicit_axes(mesh))
        for dim, out_dim in zip(conv.lhs_spec[2:], conv.out_spec[2:], strict=True)
        if out_dim in uneven
    )
    wants_padded = call.padded or (bool(uneven) and untyped)
    outer = {d: c for d, c in cuts.items() if not c.manual}
    if not outer:
        free = free_axes(mesh, set())
        local = dataclasses.replace(conv, split_groups=_must_split(conv, free))
        regime = regime_of(conv, platform_of(mesh), array.shape, rhs.shape, bool(free))
        local = choose_form(local, call.method, regime, "ring_conv")
        out = _local(local, bool(uneven), read_indices(cuts, conv.lhs_spec[2:], ()), array, rhs)
    else:
        region = _region(call, outer, wants_padded and bool(uneven))
        out = _run_region(region, array, rhs)
    if wants_padded:
        return Padded(out, out_logical)
    return crop_to(out, out_logical) if uneven and outer else out


def _must_split(conv: LocalConv, free: list[str]) -> bool:
    return bool(free) and conv.feature_groups > 1


def _local(conv: LocalConv, clear: bool, at: Indices, x: Array, kernel: Array) -> Array:
    out = local_conv(conv, at, x, kernel)
    if clear:
        for dim, window, index in zip(conv.out_spec[2:], conv.windows, at, strict=True):
            out = clear_tail(out, window.window.output_size, window.exchange.shards, index, dim)
    return out


def _region(call: ConvCall, outer: dict[int, Cut], clear: bool) -> _Region:
    conv, array, rhs, cuts, mesh = call.conv, call.array, call.rhs, call.cuts, call.mesh
    ndim = array.ndim
    lhs_entries: list[Any] = [None] * ndim
    for dim, cut in outer.items():
        lhs_entries[dim] = cut.axis_name
    rhs_entries: list[Any] = [None] * ndim
    out_entries: list[Any] = [None] * ndim
    for lhs_dim, out_dim in zip(conv.lhs_spec, conv.out_spec, strict=True):
        if lhs_dim in outer:
            out_entries[out_dim] = outer[lhs_dim].axis_name
    names = {a for c in outer.values() for a in c.axes}
    typed = explicit_axes(mesh)
    if typed:
        conv = _place_explicit(conv, array, rhs, lhs_entries, rhs_entries, out_entries, typed)
        names |= set(typed)
    free = free_axes(mesh, names)
    conv = dataclasses.replace(conv, split_groups=_must_split(conv, free))
    shape = padded_shape(array.shape, cuts)
    block = _divided(shape, lhs_entries, mesh)
    regime = regime_of(conv, platform_of(mesh), block, _divided(rhs.shape, rhs_entries, mesh), bool(free))
    conv = choose_form(conv, call.method, regime, "ring_conv")
    return _Region(
        conv=conv,
        mesh=mesh,
        axis_names=frozenset(names),
        shape=shape,
        in_specs=(PartitionSpec(*lhs_entries), PartitionSpec(*rhs_entries)),
        out_specs=PartitionSpec(*out_entries),
        cuts=tuple(cuts.items()),
        reshard=bool(typed),
        clear=clear,
        nested=in_manual_region(),
    )


def _divided(shape: tuple[int, ...], entries: list[Any], mesh: Any) -> tuple[int, ...]:
    """What a device of the region holds of an operand."""
    return tuple(s // axes_size(mesh, entry_names(e)) for s, e in zip(shape, entries, strict=True))


def _place_explicit(
    conv: LocalConv,
    array: Any,
    rhs: Any,
    lhs_entries: list[Any],
    rhs_entries: list[Any],
    out_entries: list[Any],
    typed: tuple[str, ...],
) -> LocalConv:
    """On Explicit axes the operands' types say what else is sharded: batch and features stay as they are."""
    lhs_has, rhs_has = axis_entries(array), axis_entries(rhs)
    batch, feature = conv.lhs_spec[:2]
    for dim in conv.lhs_spec[2:]:
        extra = set(entry_names(lhs_has[dim])) - set(entry_names(lhs_entries[dim]))
        if extra:
            raise ValueError(
                f"ring_conv: dim {dim} of lhs is sharded over Explicit mesh axes {sorted(extra)} that spatial_axes "
                "doesn't name; add them to spatial_axes, or reshard lhs first"
            )
    used = {n for e in lhs_entries for n in entry_names(e)}
    if lhs_entries[batch] is None and lhs_has[batch] is not None:
        twice = sorted(used & set(entry_names(lhs_has[batch])))
        if twice:
            raise ValueError(
                f"ring_conv: the batch of lhs is sharded over Explicit mesh axes {twice}, which spatial_axes gives to "
                "another dim; reshard lhs first"
            )
        if conv.batch_groups > 1:
            raise ValueError(
                "ring_conv: batch_group_count > 1 mixes the batch, which is sharded over Explicit mesh axes "
                f"{entry_names(lhs_has[batch])}; reshard lhs to replicate the batch first"
            )
        lhs_entries[batch] = lhs_has[batch]
        out_entries[conv.out_spec[0]] = lhs_has[batch]
        used |= set(entry_names(lhs_has[batch]))
    contracted = tuple(n for n in entry_names(lhs_has[feature]) if n not in used)
    mesh = jax.typeof(array).sharding.mesh
    if contracted:
        parts = axes_size(mesh, contracted)
        if conv.feature_groups == 1:
            # Features are contracted: each device convolves its features, the outputs are summed.
            lhs_entries[feature] = rhs_entries[conv.rhs_spec[1]] = contracted
            conv = dataclasses.replace(conv, sum_over=contracted)
        elif conv.feature_groups % parts == 0:
            lhs_entries[feature] = rhs_entries[conv.rhs_spec[0]] = contracted
            out_entries[conv.out_spec[1]] = contracted
            conv = dataclasses.replace(conv, feature_groups=conv.feature_groups // parts)
        else:
            raise ValueError(
                f"ring_conv: lhs features are sharded over Explicit mesh axes {contracted} of size {parts}, which does "
                f"not divide feature_group_count={conv.feature_groups}; reshard lhs to replicate its features first"
            )
        used |= set(contracted)
    columns = tuple(n for n in entry_names(rhs_has[conv.rhs_spec[0]]) if n not in used)
    if columns and conv.feature_groups == 1 and conv.batch_groups == 1 and rhs_entries[conv.rhs_spec[0]] is None:
        rhs_entries[conv.rhs_spec[0]] = columns
        out_entries[conv.out_spec[1]] = columns
    return conv


# inline: as a function of its own, XLA simplifies it before it sees what stands around it. On one TPU chip that
# leaves every layer's chunks ("blocks") to be put together and cut again.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run_region(region: _Region, lhs: Array, rhs: Array) -> Array:
    lhs = pad_to(lhs, region.shape)
    if region.reshard:
        lhs = jax.sharding.reshard(lhs, NamedSharding(region.mesh, region.in_specs[0]))
        rhs = jax.sharding.reshard(rhs, NamedSharding(region.mesh, region.in_specs[1]))
    cuts, dims = dict(region.cuts), region.conv.lhs_spec[2:]

    def body(x: Array, kernel: Array, *where: Array) -> Any:
        return _local(region.conv, region.clear, read_indices(cuts, dims, where), x, kernel)

    if region.nested:
        # Reverse-mode AD may not carry values computed inside a shard_map out of one that is nested in
        # another (their shardings name axes the outer one has bound): keep the operands only.
        body = jax.checkpoint(body)
    where, where_specs = index_operands(cuts, dims, region.mesh)
    mapped = jax.shard_map(
        body,
        mesh=region.mesh,
        in_specs=(*region.in_specs, *where_specs),
        out_specs=region.out_specs,
        axis_names=set(region.axis_names),
    )
    return mapped(lhs, rhs, *where)
