"""Leaves as they're kept between steps: sharded along a dim, or, where none divides, as padded flat shards."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardkit.arrays import is_whole
from shardkit.optim.described import is_described
from shardkit.placements import AnyMesh, Layout, Shard, layout_of
from shardkit.reshard import reshard


@functools.partial(jax.tree_util.register_dataclass, data_fields=["flat"], meta_fields=["shape", "axis"])
@dataclasses.dataclass(frozen=True)
class FlatShard:
    """An array of which no dim divides: its elements in one row, padded and cut. A pytree with one leaf.

    Attributes:
      flat: one dim, of a size that the axis divides.
      shape: of the array it stands for.
      axis: the mesh axis that cuts it.
    """

    flat: Any
    shape: tuple[int, ...]
    axis: str


def is_leaf(x: Any) -> bool:
    """Whether this pytree is to be taken for one leaf of a tree of parameters, gradients or state."""
    return isinstance(x, FlatShard) or is_whole(x)


def store(x: Any, layout: Layout, axis: str) -> Any:
    """The leaf as it's kept: at its layout; flat where that doesn't cut it over ``axis``, unless it's too small."""
    mesh, shape = layout.mesh, tuple(x.shape)
    parts, size = mesh.shape[axis], math.prod(shape)
    if axis in layout.shard_axes or size < parts or parts == 1:
        return reshard(x, layout.spec_for(len(shape)), mesh)
    padded = -(-size // parts) * parts
    row = x.update(shape=(padded,), sharding=None) if is_described(x) else jnp.pad(jnp.ravel(x), (0, padded - size))
    return FlatShard(reshard(row, {axis: Shard(0)}, mesh), shape, axis)


def load(x: Any) -> Any:
    """The leaf as an optimizer or a model sees it."""
    if not isinstance(x, FlatShard):
        return x
    flat = x.flat
    if is_described(flat):
        return reshard(flat.update(shape=x.shape, sharding=None), {}, flat.sharding.mesh)
    where = jax.typeof(flat).sharding
    if AxisType.Explicit in where.mesh.axis_types:  # types can't say that a size doesn't divide
        flat = jax.sharding.reshard(flat, NamedSharding(where.mesh, PartitionSpec(None)))
    return flat[: math.prod(x.shape)].reshape(x.shape)


def shorter(dtype: Any, x: Any) -> Any:
    """``dtype``, if it's a shorter float than the array's; else None."""
    both = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(x.dtype, jnp.floating)
    return dtype if both and jnp.finfo(dtype).bits < jnp.finfo(x.dtype).bits else None


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape that an optimizer or a model sees."""
    return x.shape if isinstance(x, FlatShard) else tuple(jnp.shape(x))


def found_layout(x: Any, mesh: AnyMesh) -> Layout | None:
    """Where an array lives on the mesh; None, where that can't be read: on none yet, or the compiler's to know.

    Raises:
      ValueError: it lives on a mesh of other axes.
    """
    try:
        layout = layout_of(x).resolved(len(x.shape))
    except ValueError:
        return None
    if tuple(layout.mesh.shape.items()) != tuple(mesh.shape.items()):
        raise ValueError(
            f"an array of shape {tuple(x.shape)} lives on mesh {dict(layout.mesh.shape)}, others on "
            f"{dict(mesh.shape)}; sk.reshard(x, placements, mesh) brings it there"
        )
    return layout.on(mesh)


def known_layout(x: Any, mesh: AnyMesh) -> Layout:
    """The same; replicated, where it can't be read."""
    found = None if isinstance(x, FlatShard) else found_layout(x, mesh)
    return Layout(mesh, {}).resolved(len(shape_of(x))) if found is None else found


def said_layout(where: Any, mesh: AnyMesh, ndim: int) -> Layout:
    """A layout from whatever says it: placements in any form, a sharding, an array that lives there."""
    if not isinstance(where, NamedSharding) and hasattr(where, "sharding"):
        where = layout_of(where)
    if isinstance(where, NamedSharding | Layout):
        where = layout_of(where).on(mesh).spec_for(ndim)
    return Layout(mesh, where).resolved(ndim)


def said_leaves(said: Any, structure: Any, what: str) -> list[Any]:
    """Of a tree that says where parameters live, what it says of each.

    Raises:
      ValueError: another structure than the parameters'.
    """
    try:
        return structure.flatten_up_to(said)
    except ValueError as err:
        raise ValueError(f"{what}: param_placements must have the structure of the parameters: {err}") from None
