"""Arrays that live on many devices: placements, sharded convolutions, and what they cost."""

import importlib
from typing import TYPE_CHECKING, Any

from shardkit import spatial
from shardkit.arrays import (
    Padded,
    PartialArray,
    from_local,
    from_unreduced,
    local_map,
    to_local,
    to_unreduced,
)
from shardkit.attention import (
    all_to_all_attention,
    flax_attention_fn,
    from_zigzag,
    ring_attention,
    to_zigzag,
    zigzag_order,
)
from shardkit.data import DataLoader, shard_batch, shard_dataloader
from shardkit.hosts import MissingProcessError, ProcessMismatchError, check_finite, check_same, progress
from shardkit.inspect import (
    Collective,
    CollectiveReport,
    Drawing,
    Explained,
    Explanation,
    MemoryReport,
    assert_collectives,
    collectives,
    explain,
    memory,
    show,
    target_mesh,
)
from shardkit.launch import initialize
from shardkit.meshes import make_mesh, sub_mesh
from shardkit.optim import (
    LossScaleState,
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    all_finite,
    clip_by_global_norm,
    dynamic_loss_scale,
    gather_on_use,
    global_norm,
    loss_scale,
    master_weights,
    reduce_gradients,
    shard_optimizer,
    shard_params,
    unshard_params,
    value_and_grad,
)
from shardkit.placements import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    placements,
    to_named_sharding,
    to_partition_spec,
)
from shardkit.reshard import ReshardPlan, ReshardStep, plan_reshard, reshard, shard_tensor, unshard
from shardkit.spatial import (
    halo_exchange,
    moments,
    ring_avg_pool,
    ring_conv,
    ring_conv_transpose,
    ring_global_pool,
    ring_local_response_norm,
    ring_max_pool,
    ring_min_pool,
    ring_pad,
    ring_reduce_window,
    ring_resize,
    ring_roll,
    ring_scale_and_translate,
)
from shardkit.spmd import (
    Partitioned,
    Program,
    constrain,
    infer_gradient_placements,
    infer_placements,
    on_mesh,
    partition,
)

if TYPE_CHECKING:  # at run time: see below
    from shardkit.checkpoint import Checkpointer, CheckpointError, latest_step, restore, save
    from shardkit.parallel import (
        ColWiseParallel,
        ConvParallel,
        DataParallel,
        FullyShard,
        PrepareLayerInput,
        PrepareLayerOutput,
        RingAttention,
        RowWiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize,
        parallelize_params,
    )
    from shardkit.parallel import ready as plans

__version__ = "0.1.0"

__all__ = [
    "Padded",
    "PartialArray",
    "from_local",
    "from_unreduced",
    "local_map",
    "to_local",
    "to_unreduced",
    "all_to_all_attention",
    "flax_attention_fn",
    "from_zigzag",
    "ring_attention",
    "to_zigzag",
    "zigzag_order",
    "Checkpointer",
    "CheckpointError",
    "latest_step",
    "restore",
    "save",
    "DataLoader",
    "shard_batch",
    "shard_dataloader",
    "MissingProcessError",
    "ProcessMismatchError",
    "check_finite",
    "check_same",
    "progress",
    "Collective",
    "CollectiveReport",
    "Drawing",
    "Explained",
    "Explanation",
    "MemoryReport",
    "assert_collectives",
    "collectives",
    "explain",
    "memory",
    "show",
    "target_mesh",
    "initialize",
    "make_mesh",
    "sub_mesh",
    "LossScaleState",
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
    "ColWiseParallel",
    "ConvParallel",
    "DataParallel",
    "FullyShard",
    "PrepareLayerInput",
    "PrepareLayerOutput",
    "RingAttention",
    "RowWiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize",
    "parallelize_params",
    "plans",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "placements",
    "to_named_sharding",
    "to_partition_spec",
    "ReshardPlan",
    "ReshardStep",
    "plan_reshard",
    "reshard",
    "shard_tensor",
    "unshard",
    "halo_exchange",
    "moments",
    "ring_avg_pool",
    "ring_conv",
    "ring_conv_transpose",
    "ring_global_pool",
    "ring_local_response_norm",
    "ring_max_pool",
    "ring_min_pool",
    "ring_pad",
    "ring_reduce_window",
    "ring_resize",
    "ring_roll",
    "ring_scale_and_translate",
    "Partitioned",
    "Program",
    "constrain",
    "infer_gradient_placements",
    "infer_placements",
    "on_mesh",
    "partition",
    "spatial",
]

# These need flax.nnx or read it, and that takes a third of the time JAX itself takes to import: a room comes when one
# of its names is first used.
_LATER = {
    "shardkit.checkpoint": ("Checkpointer", "CheckpointError", "latest_step", "restore", "save"),
    "shardkit.parallel": (
        "ColWiseParallel",
        "ConvParallel",
        "DataParallel",
        "FullyShard",
        "PrepareLayerInput",
        "PrepareLayerOutput",
        "RingAttention",
        "RowWiseParallel",
        "SequenceParallel",
        "loss_parallel",
        "parallelize",
        "parallelize_params",
    ),
}
_LATER_MODULES = {
    "checkpoint": "shardkit.checkpoint",
    "parallel": "shardkit.parallel",
    "plans": "shardkit.parallel.ready",
}

if not TYPE_CHECKING:  # a checker would take every name to be there

    def __getattr__(name: str) -> Any:
        if name in _LATER_MODULES:
            found = importlib.import_module(_LATER_MODULES[name])
        else:
            room = next((room for room, names in _LATER.items() if name in names), None)
            if room is None:
                raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
            found = getattr(importlib.import_module(room), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_LATER_MODULES})
