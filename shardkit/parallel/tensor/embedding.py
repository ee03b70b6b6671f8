"""An embedding layer whose table is shared out: by vocabulary (dim 0) or by features (dim 1)."""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardkit.meshes import manual_axes, resolve_mesh
from shardkit.parallel.tensor.layers import ParallelEinsum, Sharing
from shardkit.parallel.tensor.vocabulary import vocabulary_lookup
from shardkit.placements import entry_names
from shardkit.spatial.operands import axis_entries, explicit_axes


def lookup(sharing: Sharing, cut: int, table: jax.Array, ids: Any, out_sharding: Any = None) -> jax.Array:
    """``jnp.take(table, ids, axis=0)``, the result whole (cut 0; by sequence if so planned) or cut in features (1)."""
    if out_sharding is not None:
        raise ValueError(f"layer {sharing.path!r}: its plan says where its result lives; leave out_sharding out")
    if table.shape[0] == 1:  # as Flax has it
        return jnp.broadcast_to(table, (*ids.shape, table.shape[1]))
    if cut == 1:
        return _columns(sharing, table, ids)
    return vocabulary_lookup(
        table, ids, axis=sharing.axis, mesh=sharing.mesh, scatter_dim=sharing.sequence, batch_axes=sharing.batch
    )


def attend(sharing: Sharing, cut: int, query: jax.Array, table: jax.Array, out_sharding: Any = None) -> jax.Array:
    """``query @ table.T``: cut over classes (cut 0), or added up over features (1)."""
    dot = ParallelEinsum(sharing, cut)
    return dot("...f,vf->...v", query, table, out_sharding=out_sharding)


def _columns(sharing: Sharing, table: jax.Array, ids: Any) -> jax.Array:
    """A lookup of which each device has some features: nothing travels."""
    mesh = resolve_mesh(sharing.mesh, what="an embedding layer")
    if sharing.axis in manual_axes() or not explicit_axes(mesh):
        return jnp.take(table, ids, axis=0)
    # On Explicit axes the derivative of a lookup wants to be told where it lives.
    rest = [tuple(n for n in entry_names(e) if n != sharing.axis) or None for e in axis_entries(ids)]
    specs = PartitionSpec(None, sharing.axis), PartitionSpec(*rest)
    table, ids = (
        jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip((table, ids), specs, strict=True)
    )

    def take(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.take(table, ids, axis=0)

    body = jax.checkpoint(take) if manual_axes() else take  # see spatial/convolution/region.py
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(*rest, sharing.axis),
        axis_names={sharing.axis, *explicit_axes(mesh)},
    )(table, ids)
