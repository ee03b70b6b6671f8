"""nnx layers that work element by element, of inputs sharded in space."""

from __future__ import annotations

from typing import Any

from flax import nnx

from shardkit.arrays import Padded
from shardkit.parallel.layers.dropout import nnx_dropout
from shardkit.parallel.layers.elementwise import dropout, elementwise
from shardkit.parallel.plans import Applied


class SpatialPReLU(nnx.PReLU):
    """``nnx.PReLU`` that takes and gives ``sk.Padded``."""

    shardkit_plan: Applied

    def __call__(self, inputs: Any) -> Any:
        if not isinstance(inputs, Padded):
            return nnx.PReLU.__call__(self, inputs)
        return elementwise(inputs, self.shardkit_plan, lambda array: nnx.PReLU.__call__(self, array))


class SpatialDropout(nnx.Dropout):
    """``nnx.Dropout`` that takes and gives ``sk.Padded``, and drops the elements that it would drop of the whole."""

    shardkit_plan: Applied

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
        def run(array: Any) -> Any:
            return nnx_dropout(self, array, deterministic=deterministic, rngs=rngs)

        return dropout(inputs, self.rate, run)
