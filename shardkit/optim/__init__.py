"""Gradients and optimizers: Partial gradients, their reduction all together, norms over leaves of any placement.

``value_and_grad`` runs a loss on each device's part of a batch: ``batch`` says what a part is, ``parameters`` how each
parameter enters, ``region`` what a device does with them. ``targets`` and ``buckets`` decide in placements and sizes
where each gradient goes and what travels together; ``reduce`` and ``gather`` do it, there and back, as one program
(``together``). ``norms`` is for trees whose leaves live in different ways. ``shard_optimizer`` runs an optax optimizer
with its state as ``stored`` keeps it, according to ``stages``, beside parameters whose places ``homes`` remembers;
``sharded_params`` does the same to parameters, which ``on_use`` gathers. ``loss_scale`` and ``master_weights`` are for
short floats.
"""

from shardkit.optim.loss_scale import LossScaleState, dynamic_loss_scale, loss_scale
from shardkit.optim.master_weights import MasterWeightsState, master_weights
from shardkit.optim.norms import all_finite, clip_by_global_norm, global_norm
from shardkit.optim.on_use import ShardedParam, gather_on_use
from shardkit.optim.reduce import reduce_gradients
from shardkit.optim.shard_optimizer import ShardedState, shard_optimizer
from shardkit.optim.sharded_params import shard_params, unshard_params
from shardkit.optim.stages import ShardingStage1, ShardingStage2, ShardingStage3
from shardkit.optim.stored import FlatShard
from shardkit.optim.value_and_grad import value_and_grad

__all__ = [
    "FlatShard",
    "LossScaleState",
    "MasterWeightsState",
    "ShardedParam",
    "ShardedState",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "all_finite",
    "clip_by_global_norm",
    "dynamic_loss_scale",
    "gather_on_use",
    "global_norm",
    "loss_scale",
    "master_weights",
    "reduce_gradients",
    "shard_optimizer",
    "shard_params",
    "unshard_params",
    "value_and_grad",
]
