"""One device's part of a program: operations on blocks, inside a region where every mesh axis is manual."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.arrays.kinds import identity
from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.strategy import Op, Strategy


@dataclasses.dataclass(frozen=True)
class Here:
    """What code that works on blocks can ask.

    Attributes:
      sizes: of the mesh axes that take part.
    """

    sizes: Sizes

    def index(self, axes: Sequence[str]) -> Any:
        """This device's position along the axes together, the first one major; 0 for none."""
        found: Any = 0
        for axis in axes:
            found = found * self.sizes[axis] + lax.axis_index(axis)
        return found

    def count(self, axes: Sequence[str]) -> int:
        """Devices along the axes together."""
        return parts(axes, self.sizes)

    def mask(self, block: jax.Array, fills: Sequence[tuple[int, tuple[str, ...], int, str]]) -> jax.Array:
        """Padded tails replaced by what a reduction doesn't see.

        Args:
          block: of this device.
          fills: (dim, the axes that cut it, its logical size, the kind of reduction) of each padded dim.
        """
        for dim, axes, size, kind in fills:
            first = self.index(axes) * block.shape[dim]
            real = lax.broadcasted_iota(np.int32, block.shape, dim) + first < size
            nothing = identity(kind, block.dtype) if kind != "mean" else block.dtype.type(0)
            block = jnp.where(real, block, nothing)
        return block

    def run(self, op: Op, strategy: Strategy, blocks: Sequence[Any]) -> Sequence[Any]:
        """The blocks of an operation's results."""
        if strategy.run is not None:
            return strategy.run(self, *blocks)
        out = op.primitive.bind(*blocks, **(strategy.params or {}))
        return out if op.primitive.multiple_results else [out]
