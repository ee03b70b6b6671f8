"""``ring_conv``: a convolution whose input is sharded in space."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import Padded, pad_to
from shardkit.meshes import resolve_mesh
from shardkit.placements import axes_size
from shardkit.spatial.conv_local import Indices, LocalConv, local_conv
from shardkit.spatial.exchange import clear_tail
from shardkit.spatial.operands import (
    Cut,
    as_array,
    axis_entries,
    cut_dims,
    entry_names,
    explicit_axes,
    free_axes,
    in_manual_region,
    index_operands,
    padded_shape,
    parse_spatial_axes,
    read_indices,
)
from shardkit.spatial.windows import PADDING_MODES, Window, shard_window

METHODS = ("auto", "concat")


def ring_conv(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    spatial_axes: Mapping[Any, Any],
    padding_mode: Any = "zeros",
    method: str = "auto",
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    """``lax.conv_general_dilated`` on an input sharded in space: halos travel, nothing else.

    Each device convolves its block after fetching the thin edges it needs from its neighbours around
    the mesh axis. Values and all derivatives equal the unsharded convolution's. At most two permutes
    a sharded dim forward, two more for the input gradient, none for the kernel gradient (which is
    summed over the mesh axis: reduced at top level; inside a manual region it follows the kernel's
    own variance, so a kernel made varying with ``lax.pcast`` keeps a Partial gradient).

    Args:
      lhs: the input, a ``jax.Array`` or ``sk.Padded``; inside a manual region this device's block.
      rhs: the kernel, whole.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count, precision, preferred_element_type: as in ``lax.conv_general_dilated``;
        padding may be negative.
      spatial_axes: which mesh axis cuts which dim of ``lhs``: a number or a letter of
        ``dimension_numbers``, e.g. ``{"sp": "W"}``; several allowed. Other mesh axes stay with the
        compiler. A batch dim may be named too; that makes its axis manual (a grouped convolution then
        runs as one convolution instead of one a group).
      padding_mode: what lies beyond the edges of the spatial dims: "zeros", "circular", "reflect",
        "replicate"; one for all, one a spatial dim, or a mapping by letter or dim.
      method: "concat" (one convolution over the block with its halos) or "auto".
      mesh: else the mesh of ``lhs``, else the ambient one.

    Returns:
      The output, sharded over the same axes. A ``Padded`` input gives a ``Padded`` output. An array
      gives an array of the logical shape; where its size doesn't divide and the type can't say so
      (Explicit axes, or inside a manual region) a ``Padded`` comes back instead. To take an uneven
      result through a jit boundary without gathering it, return a ``Padded``:
      ``sk.shard_tensor(y, placements, uneven="pad")``.

    Raises:
      ValueError: unknown axis or dim letter, an axis used twice, features that disagree, padding or
        strides of the wrong length, no output, an empty batch, unknown mode or method.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> x, k = jnp.ones((1, 8, 9, 3)), jnp.ones((3, 3, 3, 4))
      >>> sk.ring_conv(x, k, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
      ...              spatial_axes={"sp": "W"}, mesh=mesh).shape
      (1, 8, 5, 4)
    """
    what = "ring_conv"
    lhs, rhs = as_array(lhs), as_array(rhs)
    if isinstance(rhs, Padded):
        rhs = rhs.value
    mesh = resolve_mesh(mesh, lhs, rhs, what=what)
    if lhs.ndim != rhs.ndim or lhs.ndim < 3:
        raise ValueError(
            f"{what}: lhs and rhs need equal rank of at least 3 (batch, feature, space), got shapes "
            f"{tuple(lhs.shape)} and {tuple(rhs.shape)}"
        )
    numbers, letters = _dimension_numbers(lhs.shape, rhs.shape, dimension_numbers, what)
    named = parse_spatial_axes(spatial_axes, lhs.ndim, letters, mesh, what)
    if numbers.lhs_spec[1] in named:
        raise ValueError(
            f"{what}: spatial_axes names dim {numbers.lhs_spec[1]}, which holds features; name spatial dims "
            "(feature axes of the mesh stay with the compiler)"
        )
    array, cuts = cut_dims(lhs, named, mesh, what)
    logical = _logical_shape(lhs, array, cuts)
    _check_features(logical, rhs.shape, numbers, feature_group_count, batch_group_count, what)
    if logical[numbers.lhs_spec[0]] == 0:
        raise ValueError(f"{what}: the batch is empty (shape {logical}); give at least one image")
    batch_cut = cuts.get(numbers.lhs_spec[0])
    if batch_cut is not None and (batch_group_count > 1 or batch_cut.size % batch_cut.shards):
        raise ValueError(
            f"{what}: the batch dim of {batch_cut.size} is named in spatial_axes, but mesh axis {batch_cut.axes} "
            f"of size {batch_cut.shards} doesn't divide it, or batch_group_count={batch_group_count} mixes it; "
            "leave it out of spatial_axes"
        )
    windows = _windows(
        logical, rhs.shape, numbers, window_strides, padding, lhs_dilation, rhs_dilation, what
    )
    modes = _modes(padding_mode, numbers, letters, what)
    _check_sizes(windows, modes, what)
    if method not in METHODS:
        raise ValueError(f"{what}: method={method!r} is unknown; use one of {METHODS}")
    conv = LocalConv(
        lhs_spec=tuple(numbers.lhs_spec),
        rhs_spec=tuple(numbers.rhs_spec),
        out_spec=tuple(numbers.out_spec),
        windows=tuple(
            shard_window(w, cuts[d].shards if d in cuts else 1, m)
            for d, w, m in zip(numbers.lhs_spec[2:], windows, modes, strict=True)
        ),
        axes=tuple(cuts[d].axis_name if d in cuts else None for d in numbers.lhs_spec[2:]),
        modes=modes,
        feature_groups=feature_group_count,
        batch_groups=batch_group_count,
        precision=_hashable(precision),
        preferred_element_type=None
        if preferred_element_type is None
        else np.dtype(preferred_element_type),
    )
    out_logical = [0] * lhs.ndim
    out_logical[numbers.out_spec[0]] = logical[numbers.lhs_spec[0]] // batch_group_count
    out_logical[numbers.out_spec[1]] = rhs.shape[numbers.rhs_spec[0]]
    for dim, window in zip(numbers.out_spec[2:], windows, strict=True):
        out_logical[dim] = window.output_size
    return _run(conv, array, rhs, cuts, mesh, tuple(out_logical), isinstance(lhs, Padded))


# --- the region -----------------------------------------------------------------------------------


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


def _run(
    conv: LocalConv,
    array: Any,
    rhs: Any,
    cuts: dict[int, Cut],
    mesh: Any,
    out_logical: tuple[int, ...],
    padded: bool,
) -> Any:
    uneven = [
        out_dim
        for lhs_dim, out_dim in zip(conv.lhs_spec[2:], conv.out_spec[2:], strict=True)
        if lhs_dim in cuts and out_logical[out_dim] % cuts[lhs_dim].shards
    ]
    untyped = any(
        cuts[l].manual or set(cuts[l].axes) & set(explicit_axes(mesh))
        for l, o in zip(conv.lhs_spec[2:], conv.out_spec[2:], strict=True)
        if o in uneven
    )
    wants_padded = padded or (bool(uneven) and untyped)
    outer = {d: c for d, c in cuts.items() if not c.manual}
    if not outer:
        free = free_axes(mesh, set())
        local = dataclasses.replace(conv, split_groups=_must_split(conv, free))
        out = _local(local, bool(uneven), read_indices(cuts, conv.lhs_spec[2:], ()), array, rhs)
    else:
        region = _region(conv, array, rhs, outer, cuts, mesh, wants_padded and bool(uneven))
        out = _run_region(region, array, rhs)
    if wants_padded:
        return Padded(out, out_logical)
    return lax.slice(out, (0,) * out.ndim, out_logical) if uneven and outer else out


def _must_split(conv: LocalConv, free: list[str]) -> bool:
    return bool(free) and conv.feature_groups > 1


def _local(conv: LocalConv, clear: bool, at: Indices, x: Array, kernel: Array) -> Array:
    out = local_conv(conv, at, x, kernel)
    if clear:
        for dim, window, index in zip(conv.out_spec[2:], conv.windows, at, strict=True):
            out = clear_tail(out, window.window.output_size, window.exchange.shards, index, dim)
    return out


def _region(
    conv: LocalConv, array: Any, rhs: Any, outer: dict[int, Cut], cuts: dict[int, Cut], mesh: Any, clear: bool
) -> _Region:
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
    conv = dataclasses.replace(conv, split_groups=_must_split(conv, free_axes(mesh, names)))
    return _Region(
        conv=conv,
        mesh=mesh,
        axis_names=frozenset(names),
        shape=padded_shape(array.shape, cuts),
        in_specs=(PartitionSpec(*lhs_entries), PartitionSpec(*rhs_entries)),
        out_specs=PartitionSpec(*out_entries),
        cuts=tuple(cuts.items()),
        reshard=bool(typed),
        clear=clear,
        nested=in_manual_region(),
    )


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


@functools.partial(jax.jit, static_argnums=0)
def _run_region(region: _Region, lhs: Array, rhs: Array) -> Array:
    lhs = pad_to(lhs, region.shape)
    if region.reshard:
        lhs = jax.sharding.reshard(lhs, NamedSharding(region.mesh, region.in_specs[0]))
        rhs = jax.sharding.reshard(rhs, NamedSharding(region.mesh, region.in_specs[1]))
    cuts, dims = dict(region.cuts), region.conv.lhs_spec[2:]

    def body(x, kernel, *where):
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


# --- reading the arguments ------------------------------------------------------------------------


def _hashable(precision: Any) -> Any:
    return tuple(precision) if isinstance(precision, list) else precision


def _dimension_numbers(lhs_shape, rhs_shape, given, what: str):
    try:
        numbers = lax.conv_dimension_numbers(tuple(lhs_shape), tuple(rhs_shape), given)
    except (ValueError, TypeError) as err:
        raise ValueError(f"{what}: dimension_numbers={given!r} don't fit rank {len(lhs_shape)}: {err}") from err
    if isinstance(given, Sequence) and not isinstance(given, lax.ConvDimensionNumbers) and isinstance(given[0], str):
        letters = {letter: dim for dim, letter in enumerate(given[0])}
    else:
        # No letters given: the usual ones, D H W in the order of the spatial dims.
        spatial = numbers.lhs_spec[2:]
        usual = "DHW"[-len(spatial) :] if len(spatial) <= 3 else ""
        letters = dict(zip(usual, spatial, strict=True)) if usual else {}
        letters |= {"N": numbers.lhs_spec[0], "C": numbers.lhs_spec[1]}
    return numbers, letters


def _logical_shape(lhs: Any, array: Any, cuts: dict[int, Cut]) -> tuple[int, ...]:
    if isinstance(lhs, Padded):
        return lhs.logical_shape
    return tuple(cuts[d].size if d in cuts else s for d, s in enumerate(array.shape))


def _check_features(lhs_shape, rhs_shape, numbers, feature_groups: int, batch_groups: int, what: str) -> None:
    features = lhs_shape[numbers.lhs_spec[1]]
    taps_in, taps_out = rhs_shape[numbers.rhs_spec[1]], rhs_shape[numbers.rhs_spec[0]]
    for name, value in (("feature_group_count", feature_groups), ("batch_group_count", batch_groups)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{what}: {name}={value!r} must be a positive integer")
    if feature_groups > 1 and batch_groups > 1:
        raise ValueError(f"{what}: feature_group_count and batch_group_count can't both be above 1")
    if features != taps_in * feature_groups:
        raise ValueError(
            f"{what}: lhs has {features} features, but the kernel of shape {tuple(rhs_shape)} takes {taps_in} in each "
            f"of {feature_groups} groups ({taps_in * feature_groups} in all)"
        )
    if taps_out % (feature_groups * batch_groups):
        raise ValueError(
            f"{what}: the kernel's {taps_out} output features can't be split into "
            f"{feature_groups * batch_groups} groups"
        )
    batch = lhs_shape[numbers.lhs_spec[0]]
    if batch % batch_groups:
        raise ValueError(f"{what}: batch_group_count={batch_groups} does not divide the batch of {batch}")


def _per_dim(given, count: int, name: str, what: str) -> tuple[int, ...]:
    if given is None:
        return (1,) * count
    try:
        values = tuple(operator.index(v) for v in given)
    except TypeError:
        raise ValueError(f"{what}: {name} takes one integer a spatial dim, got {given!r}") from None
    if len(values) != count:
        raise ValueError(f"{what}: {name}={values} has {len(values)} entries for {count} spatial dims")
    if any(v < 1 for v in values):
        raise ValueError(f"{what}: {name}={values} must be at least 1")
    return values


def _windows(lhs_shape, rhs_shape, numbers, strides, padding, lhs_dilation, rhs_dilation, what: str):
    count = len(numbers.lhs_spec) - 2
    strides = _per_dim(strides, count, "window_strides", what)
    ld = _per_dim(lhs_dilation, count, "lhs_dilation", what)
    rd = _per_dim(rhs_dilation, count, "rhs_dilation", what)
    sizes = [lhs_shape[d] for d in numbers.lhs_spec[2:]]
    kernels = [rhs_shape[d] for d in numbers.rhs_spec[2:]]
    if any(k < 1 for k in kernels):
        raise ValueError(f"{what}: the kernel of shape {tuple(rhs_shape)} has an empty spatial dim")
    pads = read_padding(padding, sizes, kernels, strides, ld, rd, what)
    return tuple(
        Window(size, kernel, s, lo, hi, a, b)
        for size, kernel, s, (lo, hi), a, b in zip(sizes, kernels, strides, pads, ld, rd, strict=True)
    )


def read_padding(padding, sizes, kernels, strides, lhs_dilation, rhs_dilation, what: str):
    """Padding as one (low, high) pair of integers a spatial dim, from a name or pairs."""
    count = len(sizes)
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(
                f"{what}: padding={padding!r} is unknown; use 'SAME', 'SAME_LOWER', 'VALID' or (low, high) pairs"
            )
        if any(d != 1 for d in lhs_dilation):
            raise ValueError(
                f"{what}: a padding name has no meaning with lhs_dilation={tuple(lhs_dilation)}; give (low, high) "
                "pairs, or use sk.ring_conv_transpose"
            )
        reach = [(k - 1) * d + 1 for k, d in zip(kernels, rhs_dilation, strict=True)]
        return lax.padtype_to_pads(sizes, reach, strides, padding.upper())
    try:
        pads = [(operator.index(lo), operator.index(hi)) for lo, hi in padding]
    except (TypeError, ValueError):
        raise ValueError(f"{what}: padding takes a name or one (low, high) pair a spatial dim, got {padding!r}") from None
    if len(pads) != count:
        raise ValueError(f"{what}: padding={padding!r} has {len(pads)} pairs for {count} spatial dims")
    return pads


def _modes(given: Any, numbers, letters: Mapping[str, int], what: str) -> tuple[str, ...]:
    spatial = numbers.lhs_spec[2:]
    if isinstance(given, str):
        modes = [given] * len(spatial)
    elif isinstance(given, Mapping):
        by_dim = {}
        for key, mode in given.items():
            dim = letters.get(key) if isinstance(key, str) else key
            if dim not in spatial:
                raise ValueError(f"{what}: padding_mode names dim {key!r}, which is no spatial dim of lhs")
            by_dim[dim] = mode
        modes = [by_dim.get(d, "zeros") for d in spatial]
    else:
        modes = list(given)
        if len(modes) != len(spatial):
            raise ValueError(f"{what}: padding_mode={given!r} has {len(modes)} entries for {len(spatial)} spatial dims")
    for mode in modes:
        if mode not in PADDING_MODES:
            raise ValueError(f"{what}: padding_mode={mode!r} is unknown; use one of {PADDING_MODES}")
    return tuple(modes)


def _check_sizes(windows: Sequence[Window], modes: Sequence[str], what: str) -> None:
    for position, (w, mode) in enumerate(zip(windows, modes, strict=True)):
        if w.output_size < 1:
            raise ValueError(
                f"{what}: no output in spatial dim {position}: {w.size} elements"
                f"{f' dilated to {w.dilated_size}' if w.lhs_dilation > 1 else ''} with padding "
                f"({w.pad_lo}, {w.pad_hi}) are fewer than the {w.reach} that the kernel covers"
            )
        beyond = max(-(-max(w.pad_lo, 0) // w.lhs_dilation), -(-max(w.pad_hi, 0) // w.lhs_dilation))
        if mode == "reflect" and beyond >= w.size > 1:
            raise ValueError(
                f"{what}: padding ({w.pad_lo}, {w.pad_hi}) reflects more than the {w.size} elements of spatial dim "
                f"{position} hold; pad at most {(w.size - 1) * w.lhs_dilation}"
            )

