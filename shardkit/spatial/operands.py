"""What the spatial operators share: naming the sharded dims, and getting blocks in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.arrays import Padded
from shardkit.meshes import manual_axes
from shardkit.placements import axes_size

SpatialAxes = Mapping[Any, Any]


def parse_spatial_axes(
    spatial_axes: Any, ndim: int, letters: Mapping[str, int], mesh: Mesh | AbstractMesh, what: str
) -> dict[int, tuple[str, ...]]:
    """``{"sp": "W"}`` as array dims: ``{2: ("sp",)}``.

    Args:
      spatial_axes: mesh axis (or tuple of axes, major first) to array dim or letter. Two axes that
        name one dim cut it together, the earlier mesh axis major.
      ndim: rank of the array.
      letters: array dim of each letter.
      mesh: the mesh whose axes may be named.
      what: the caller, for messages.
    """
    example = 'for example spatial_axes={"sp": "W"} or {"sp": 2}'
    if not isinstance(spatial_axes, Mapping) or not spatial_axes:
        raise ValueError(f"{what}: spatial_axes maps mesh axes to array dims, {example}; got {spatial_axes!r}")
    found: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for key, value in spatial_axes.items():
        if not isinstance(key, str) and not (isinstance(key, tuple) and all(isinstance(k, str) for k in key)):
            raise TypeError(
                f"{what}: spatial_axes maps mesh axis names (or tuples of them), {example}; got key {key!r}"
            )
        axes = (key,) if isinstance(key, str) else key
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{what}: spatial_axes names mesh axis {axis!r}, but the mesh has {tuple(mesh.axis_names)}"
                )
            if axis in used:
                raise ValueError(
                    f"{what}: mesh axis {axis!r} is used twice in spatial_axes={spatial_axes!r}; an axis cuts one dim"
                )
            used.add(axis)
        if isinstance(value, str):
            if value not in letters:
                raise ValueError(
                    f"{what}: spatial_axes names dim {value!r}, but the dims are {sorted(letters)} "
                    f"(or a number from 0 to {ndim - 1})"
                )
            dim = letters[value]
        elif isinstance(value, int | np.integer) and not isinstance(value, bool):
            value = int(value)
            if not -ndim <= value < ndim:
                raise ValueError(f"{what}: spatial_axes names dim {value}, but the array has {ndim} dims")
            dim = value % ndim
        else:
            raise TypeError(f"{what}: a dim in spatial_axes is a number or a letter, got {value!r}; {example}")
        merged = (*found.get(dim, ()), *axes)
        if dim in found:
            merged = tuple(sorted(merged, key=mesh.axis_names.index))
        found[dim] = merged
    return found


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one array dim is cut: mesh axes, number of shards, logical size, and whether blocks are here already.

    Attributes:
      axes: mesh axes, major first.
      shards: devices along them.
      size: logical elements over all shards.
      manual: True inside a manual region of these axes: the array at hand is one block.
    """

    axes: tuple[str, ...]
    shards: int
    size: int
    manual: bool

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def block(self) -> int:
        return -(-self.size // self.shards)


def cut_dims(
    x: Any, dims: Mapping[int, tuple[str, ...]], mesh: Mesh | AbstractMesh, what: str
) -> tuple[Any, dict[int, Cut]]:
    """The array to work on, and how each named dim of it is cut.

    Outside a manual region the array comes back padded with zeros to what the mesh divides; inside it
    is this device's block.
    """
    padded = isinstance(x, Padded)
    array, logical = (x.array, x.logical_shape) if padded else (x, None)
    taken = manual_axes()
    cuts = {}
    for dim, axes in dims.items():
        shards = axes_size(mesh, axes)
        inside = [a in taken for a in axes]
        if any(inside) and not all(inside):
            raise ValueError(
                f"{what}: of the mesh axes {axes} that cut dim {dim}, only some are manual here; "
                "make all of them manual"
            )
        manual = all(inside)
        if logical is not None:
            size = logical[dim]
        else:
            size = array.shape[dim] * (shards if manual else 1)
        if size < 1:
            raise ValueError(f"{what}: dim {dim} of shape {tuple(x.shape)} is empty")
        cut = Cut(axes, shards, size, manual)
        if manual and array.shape[dim] != cut.block:
            raise ValueError(
                f"{what}: size {size} over {shards} shards makes blocks of {cut.block}, but this block has "
                f"{array.shape[dim]} elements in dim {dim}"
            )
        cuts[dim] = cut
    return array, cuts


def clear_tails(array: Any, shape: Sequence[int], dims: Sequence[int], fill: float = 0) -> Any:
    """``fill`` at and beyond ``shape`` in ``dims`` of a whole array: elementwise, so nothing moves."""
    sharding = jax.typeof(array).sharding
    typed = bool(explicit_axes(sharding.mesh))
    if typed and not isinstance(array, Tracer):
        # The type names no devices; as an argument of jit the array itself does.
        return jax.jit(clear_tails, static_argnums=(1, 2, 3))(array, tuple(shape), tuple(dims), fill)
    for dim in dims:
        if array.shape[dim] > shape[dim]:
            position = jax.lax.broadcasted_iota(np.int32, array.shape, dim, out_sharding=sharding if typed else None)
            array = jax.numpy.where(position < shape[dim], array, jax.numpy.asarray(fill, array.dtype))
    return array


def padded_shape(shape: Sequence[int], cuts: Mapping[int, Cut]) -> tuple[int, ...]:
    """The array shape the region takes: whole blocks in every cut dim, blocks as they are inside one."""
    return tuple(
        cuts[d].block * (1 if cuts[d].manual else cuts[d].shards) if d in cuts else s for d, s in enumerate(shape)
    )


def explicit_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Mesh axes whose placements are part of the types here."""
    return tuple(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit)


def free_axes(mesh: Mesh | AbstractMesh, manual: set[str]) -> list[str]:
    """Axes of size > 1 that stay with the compiler while ``manual`` ones are ours."""
    taken = manual | manual_axes() | set(explicit_axes(mesh))
    return [n for n in mesh.axis_names if n not in taken and mesh.shape[n] > 1]


def in_manual_region() -> bool:
    """True where some mesh axis is already manual."""
    return bool(manual_axes())


def as_array(x: Any) -> Any:
    """Lists and NumPy arrays as JAX arrays; Padded and tracers as they are."""
    return x if isinstance(x, Padded | jax.Array) else jax.numpy.asarray(x)


def axis_entries(x: Any) -> list[Any]:
    """The PartitionSpec entries that the type of ``x`` carries (Explicit axes), one a dim."""
    entries = list(spec_entries(jax.typeof(x).sharding.spec))
    return entries + [None] * (x.ndim - len(entries))


def index_operands(
    cuts: Mapping[int, Cut], dims: Sequence[int], mesh: Mesh | AbstractMesh
) -> tuple[list[Any], list[PartitionSpec]]:
    """For a region that makes the axes of ``cuts`` manual: arrays that tell each device where it is.

    A device's block of ``arange(n)``, cut over the axis, holds its position. ``lax.axis_index`` would say
    the same, but XLA refuses it in some regions that leave other axes to the compiler.
    """
    arrays, specs = [], []
    for dim in dims:
        cut = cuts.get(dim)
        if cut is not None and not cut.manual:
            spec = PartitionSpec(cut.axis_name)
            array: Any = np.arange(cut.shards, dtype=np.int32)
            if explicit_axes(mesh):
                array = jax.sharding.reshard(array, NamedSharding(mesh, spec))  # type: ignore[arg-type]
            arrays.append(array)
            specs.append(spec)
    return arrays, specs


def read_indices(cuts: Mapping[int, Cut], dims: Sequence[int], blocks: Sequence[Any]) -> tuple[Any, ...]:
    """This device's position for each dim, from what ``index_operands`` sent (0 where a dim isn't cut)."""
    rest = iter(blocks)
    found = []
    for dim in dims:
        cut = cuts.get(dim)
        if cut is None:
            found.append(0)
        else:
            found.append(jax.lax.axis_index(cut.axis_name) if cut.manual else next(rest)[0])
    return tuple(found)
