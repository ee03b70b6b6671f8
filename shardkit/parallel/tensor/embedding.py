"""An embedding layer whose table is shared out: by vocabulary (dim 0) or by features (dim 1)."""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp

from shardkit.parallel.tensor.layers import ParallelEinsum, Sharing
from shardkit.parallel.tensor.vocabulary import vocabulary_lookup


def lookup(sharing: Sharing, cut: int, table: jax.Array, ids: Any, out_sharding: Any = None) -> jax.Array:
    """``jnp.take(table, ids, axis=0)``, the result whole (cut 0; by sequence if so planned) or cut in features (1)."""
    if out_sharding is not None:
        raise ValueError(f"layer {sharing.path!r}: its plan says where its result lives; leave out_sharding out")
    if table.shape[0] == 1:  # as Flax has it
        return jnp.broadcast_to(table, (*ids.shape, table.shape[1]))
    if cut == 1:
        return jnp.take(table, ids, axis=0)
    return vocabulary_lookup(
        table, ids, axis=sharing.axis, mesh=sharing.mesh, scatter_dim=sharing.sequence, batch_axes=sharing.batch
    )


def attend(sharing: Sharing, cut: int, query: jax.Array, table: jax.Array, out_sharding: Any = None) -> jax.Array:
    """``query @ table.T``: cut over classes (cut 0), or added up over features (1)."""
    dot = ParallelEinsum(sharing, cut)
    return dot("...f,vf->...v", query, table, out_sharding=out_sharding)
