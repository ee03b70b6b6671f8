"""What sharded layers share: arrays inside Padded, and telling that a layer runs unsharded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardkit.arrays import Padded
from shardkit.meshes import manual_axes
from shardkit.parallel.plans import Applied
from shardkit.placements import axes_size
from shardkit.spatial.exchange import clear_tail
from shardkit.spatial.operands import axis_entries, clear_tails, explicit_axes


def array_of(x: Any) -> Any:
    return x.array if isinstance(x, Padded) else x


def whole(x: Any) -> Any:
    """For Flax's own code."""
    return x.value if isinstance(x, Padded) else x


def like(x: Any, array: Any, shape: tuple[int, ...] | None = None) -> Any:
    """``array`` as ``x`` is: a Padded (of the same logical shape, unless given) where that is one."""
    return Padded(array, x.logical_shape if shape is None else shape) if isinstance(x, Padded) else array


def cleared(applied: Applied, x: Any, fill: float = 0, cut: Mapping[Any, int] | None = None) -> Any:
    """``fill`` in padded tails; ``cut`` says which mesh axes cut which dims, if not as the plan does.

    A NaN there would reach the derivatives of parameters and statistics as NaN * 0.
    """
    if not isinstance(x, Padded):
        return x
    array = clear_tails(x.array, x.shape, range(x.ndim), fill)
    for axes, dim in (applied.plan.spatial_axes(x.ndim) if cut is None else cut).items():
        names = (axes,) if isinstance(axes, str) else axes
        if dim < x.ndim and manual_axes().issuperset(names):  # one block, which may hold an end
            array = clear_tail(array, x.shape[dim], axes_size(applied.mesh, names), lax.axis_index(axes), dim, fill)
    return like(x, array)


def placed_along(array: Any, other: Any) -> Any:
    """On Explicit axes ``other`` cut as ``array`` is, where it has the dim; on others the compiler sees to it."""
    mesh = jax.typeof(array).sharding.mesh
    if mesh.empty or not explicit_axes(mesh):
        return other
    if not isinstance(array, Tracer):
        mesh = array.sharding.mesh
    entries = [e if size > 1 else None for e, size in zip(axis_entries(array), other.shape, strict=True)]
    return jax.sharding.reshard(other, NamedSharding(mesh, PartitionSpec(*entries)))


def say_once(applied: Applied, kind: str, reason: str) -> None:
    """A layer that can't run sharded says so, with its name and the reason (Python shows it once)."""
    warnings.warn(f"layer {applied.path!r} ({kind}) runs unsharded: {reason}", UserWarning, stacklevel=3)
