"""Reading a convolution's arguments: lax's spellings, checked, as one static description."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from shardkit.arrays import Padded
from shardkit.meshes import resolve_mesh
from shardkit.spatial.convolution.method import METHODS
from shardkit.spatial.convolution.spec import LocalConv, halo_bytes
from shardkit.spatial.operands import Cut, as_array, clear_tails, cut_dims, padded_shape, parse_spatial_axes
from shardkit.spatial.window_reading import check_window, per_dim, read_modes, read_padding
from shardkit.spatial.windows import Window, shard_window


@dataclasses.dataclass
class ConvCall:
    """One call of ``ring_conv``, read and checked; nothing has moved yet.

    Attributes:
      conv: what each device will do.
      array, rhs: the operands (of a Padded its array).
      cuts: how the named dims of ``array`` are cut.
      mesh: the mesh in use.
      out_shape: the logical shape of the result.
      padded: the input was a Padded, so the result will be one.
      method: the form to run in, as the caller gave it.
    """

    conv: LocalConv
    array: Any
    rhs: Any
    cuts: dict[int, Cut]
    mesh: Any
    out_shape: tuple[int, ...]
    padded: bool
    method: str = "auto"

    @property
    def halo_bytes(self) -> int:
        """Bytes of halos a device receives in the forward pass, for the batch and features that ``array`` shows."""
        shape = padded_shape(self.array.shape, self.cuts)
        block = tuple(self.cuts[d].block if d in self.cuts else s for d, s in enumerate(shape))
        return halo_bytes(self.conv, block, self.array.dtype.itemsize)


def read_conv(
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
    mesh: Any = None,
) -> ConvCall:
    """The arguments of ``ring_conv``, checked and planned; see there."""
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
    if isinstance(lhs, Padded):
        array = _fit_padded(array, logical, cuts, numbers, batch_group_count, what)
    windows = _windows(logical, rhs.shape, numbers, window_strides, padding, lhs_dilation, rhs_dilation, what)
    space = numbers.lhs_spec[2:]
    modes = read_modes(
        padding_mode, space, letters, what, name="spatial dim", none_such="which is no spatial dim of lhs"
    )
    for position, (window, mode) in enumerate(zip(windows, modes, strict=True)):
        check_window(window, mode, f"spatial dim {position}", what, "kernel")
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
        feature_groups=int(feature_group_count),
        batch_groups=int(batch_group_count),
        precision=_hashable(precision),
        preferred_element_type=None if preferred_element_type is None else np.dtype(preferred_element_type),
    )
    out_logical = [0] * lhs.ndim
    out_logical[numbers.out_spec[0]] = logical[numbers.lhs_spec[0]] // batch_group_count
    out_logical[numbers.out_spec[1]] = rhs.shape[numbers.rhs_spec[0]]
    for dim, window in zip(numbers.out_spec[2:], windows, strict=True):
        out_logical[dim] = window.output_size
    return ConvCall(conv, array, rhs, cuts, mesh, tuple(out_logical), isinstance(lhs, Padded), method)


def _hashable(precision: Any) -> Any:
    return tuple(precision) if isinstance(precision, list) else precision


def _dimension_numbers(
    lhs_shape: Sequence[int], rhs_shape: Sequence[int], given: Any, what: str
) -> tuple[lax.ConvDimensionNumbers, dict[str, int]]:
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


def _fit_padded(
    array: Any,
    logical: tuple[int, ...],
    cuts: dict[int, Cut],
    numbers: lax.ConvDimensionNumbers,
    batch_groups: int,
    what: str,
) -> Any:
    """Of a Padded's array: the named dims in whole blocks, a padded batch cleared, all else as it counts."""
    batch = numbers.lhs_spec[0]
    for dim, (held, size) in enumerate(zip(array.shape, logical, strict=True)):
        cut = cuts.get(dim)
        if held == size or (cut is not None and (cut.manual or held == cut.block * cut.shards)):
            continue
        if held < size:
            raise ValueError(
                f"{what}: dim {dim} holds {held} of the {size} elements of shape {logical} here, and spatial_axes "
                "doesn't say which; name the mesh axis that cuts it"
            )
        if dim == batch and batch_groups == 1 and cut is None:
            array = clear_tails(array, logical, [dim])  # kept in whole blocks, so that the result is too
        else:
            array = lax.slice_in_dim(array, 0, size, axis=dim)
    return array


def _check_features(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    numbers: lax.ConvDimensionNumbers,
    feature_groups: int,
    batch_groups: int,
    what: str,
) -> None:
    features = lhs_shape[numbers.lhs_spec[1]]
    taps_in, taps_out = rhs_shape[numbers.rhs_spec[1]], rhs_shape[numbers.rhs_spec[0]]
    for name, value in (("feature_group_count", feature_groups), ("batch_group_count", batch_groups)):
        if not isinstance(value, int | np.integer) or value < 1:
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


def _windows(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    numbers: lax.ConvDimensionNumbers,
    strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    what: str,
) -> tuple[Window, ...]:
    count = len(numbers.lhs_spec) - 2
    strides = per_dim(strides, count, "window_strides", what, "spatial dim")
    ld = per_dim(lhs_dilation, count, "lhs_dilation", what, "spatial dim")
    rd = per_dim(rhs_dilation, count, "rhs_dilation", what, "spatial dim")
    sizes = [lhs_shape[d] for d in numbers.lhs_spec[2:]]
    kernels = [rhs_shape[d] for d in numbers.rhs_spec[2:]]
    if any(k < 1 for k in kernels):
        raise ValueError(f"{what}: the kernel of shape {tuple(rhs_shape)} has an empty spatial dim")
    pads = read_padding(padding, sizes, kernels, strides, ld, rd, what)
    return tuple(
        Window(size, kernel, s, lo, hi, a, b)
        for size, kernel, s, (lo, hi), a, b in zip(sizes, kernels, strides, pads, ld, rd, strict=True)
    )
