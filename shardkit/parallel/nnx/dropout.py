"""``nnx.Dropout`` that knows which examples of a spread batch it has."""

from __future__ import annotations

from typing import Any

from flax import nnx

from shardkit.parallel.layers.dropout import nnx_dropout


class ParallelDropout(nnx.Dropout):
    """``nnx.Dropout``; in ``sk.value_and_grad(..., keys="shared")`` it drops what it would drop of the whole batch."""

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
        return nnx_dropout(self, inputs, deterministic=deterministic, rngs=rngs)
