"""Gradients and optimizers: Partial gradients, their reduction all together, norms over leaves of any placement.

``value_and_grad`` runs a loss on each device's part of a batch (``batch`` says what a part is). ``targets`` and
``buckets`` decide in placements and sizes where each gradient goes and what travels together; ``reduce`` does it;
``norms`` is for trees whose leaves live in different ways. ``shard_optimizer`` runs an optax optimizer with its state
as ``stored`` keeps it, according to ``stages``.
"""

from shardkit.optim.norms import all_finite, clip_by_global_norm, global_norm
from shardkit.optim.reduce import reduce_gradients
from shardkit.optim.shard_optimizer import ShardedState, shard_optimizer
from shardkit.optim.stages import ShardingStage1, ShardingStage2, ShardingStage3
from shardkit.optim.value_and_grad import value_and_grad

__all__ = [
    "ShardedState",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "all_finite",
    "clip_by_global_norm",
    "global_norm",
    "reduce_gradients",
    "shard_optimizer",
    "value_and_grad",
]
