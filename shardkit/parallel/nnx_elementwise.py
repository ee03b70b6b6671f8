"""nnx layers that work element by element: a Padded stays one, which their own code would unpad or refuse."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardkit.arrays import Padded, pad_to
from shardkit.parallel.nnx_operands import cleared, like
from shardkit.parallel.plans import Applied
from shardkit.spatial.operands import explicit_axes


class SpatialPReLU(nnx.PReLU):
    """``nnx.PReLU`` that takes and gives ``sk.Padded``."""

    shardkit_plan: Applied

    def __call__(self, inputs):
        if not isinstance(inputs, Padded):
            return nnx.PReLU.__call__(self, inputs)
        return like(inputs, nnx.PReLU.__call__(self, cleared(self, inputs).array))


class SpatialDropout(nnx.Dropout):
    """``nnx.Dropout`` that takes and gives ``sk.Padded``, and drops the elements that it would drop of the whole."""

    shardkit_plan: Applied

    def __call__(self, inputs, *, deterministic=None, rngs=None):
        if not isinstance(inputs, Padded):
            return nnx.Dropout.__call__(self, inputs, deterministic=deterministic, rngs=rngs)
        array = inputs.array
        inside = any(held < size for held, size in zip(array.shape, inputs.shape, strict=True))
        # Inside a manual region each device draws for its block, as it does of plain arrays.
        ones = jnp.ones(array.shape if inside else inputs.shape, np.float32)
        drawn = nnx.Dropout.__call__(self, ones, deterministic=deterministic, rngs=rngs)
        if drawn is ones:
            return inputs
        if self.rate == 1:
            return like(inputs, jnp.zeros_like(array))
        kept = _placed_like(array, pad_to(drawn != 0, array.shape))
        return like(inputs, lax.select(kept, array / (1 - self.rate), jnp.zeros_like(array)))


def _placed_like(array: Any, other: Any) -> Any:
    """On Explicit axes ``other`` sharded as ``array``; elsewhere the compiler sees to it."""
    sharding = jax.typeof(array).sharding
    mesh = sharding.mesh
    if mesh.empty or not explicit_axes(mesh):
        return other
    if not isinstance(array, Tracer):
        mesh = array.sharding.mesh
    return jax.sharding.reshard(other, NamedSharding(mesh, sharding.spec))
