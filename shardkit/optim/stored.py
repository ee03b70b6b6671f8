"""State leaves as they're kept between steps: sharded along a dim, or, where none divides, as padded flat shards."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from shardkit.placements import AnyMesh, Placement, Replicate, Shard, layout_of
from shardkit.reshard import reshard


@functools.partial(jax.tree_util.register_dataclass, data_fields=["flat"], meta_fields=["shape"])
@dataclasses.dataclass(frozen=True)
class FlatShard:
    """An array of which no dim divides: its elements in one row, padded and cut.

    Attributes:
      flat: one dim, of a size that the axis divides.
      shape: of the array it stands for.
    """

    flat: Any
    shape: tuple[int, ...]


def store(x: Any, placements: tuple[Placement, ...], axis: str, mesh: AnyMesh) -> Any:
    """The leaf as it's kept: at its placements; flat where these don't cut it over ``axis``, unless it's too small."""
    parts = mesh.shape[axis]
    at = dict(zip(mesh.axis_names, placements, strict=True))
    if isinstance(at[axis], Shard) or math.prod(x.shape) < parts or parts == 1:
        return reshard(x, placements, mesh)
    flat = jnp.ravel(x)
    padded = -(-flat.size // parts) * parts
    flat = jnp.pad(flat, (0, padded - flat.size))
    return FlatShard(reshard(flat, {axis: Shard(0)}, mesh), tuple(x.shape))


def load(x: Any) -> Any:
    """The leaf as the optimizer sees it."""
    if not isinstance(x, FlatShard):
        return x
    return x.flat[: math.prod(x.shape)].reshape(x.shape)


def whole_placements(mesh: AnyMesh) -> tuple[Placement, ...]:
    """Replicated on every axis."""
    return (Replicate(),) * len(mesh.axis_names)


def known_placements(x: Any, mesh: AnyMesh) -> tuple[Placement, ...]:
    """Where an array lives; replicated, where that can't be read."""
    try:
        layout = layout_of(x).resolved(len(x.shape))
    except ValueError:  # on no mesh yet, or the compiler's to know
        return whole_placements(mesh)
    known = dict(zip(layout.mesh.axis_names, layout.placements, strict=True))
    return tuple(known.get(name, Replicate()) for name in mesh.axis_names)
