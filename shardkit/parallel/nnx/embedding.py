"""``nnx.Embed`` with its table shared out over devices."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import numpy as jnp

from shardkit.parallel.tensor.embedding import attend, lookup
from shardkit.parallel.tensor.layers import Sharing


class ParallelEmbed(nnx.Embed):
    """``nnx.Embed`` with a cut table: by vocabulary (``shardkit_cut`` 0) or by features (1)."""

    shardkit_sharing: Sharing
    shardkit_cut: int

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError("Input type must be an integer or unsigned integer.")
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        return lookup(self.shardkit_sharing, self.shardkit_cut, table, inputs, out_sharding)

    def attend(self, query: Any, out_sharding: Any = None) -> Any:
        query, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        return attend(self.shardkit_sharing, self.shardkit_cut, query, table, out_sharding)
