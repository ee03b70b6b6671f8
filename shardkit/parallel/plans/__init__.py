"""What a user says should happen to a layer: plain, static objects without arrays."""

from shardkit.parallel.plans.base import Applied, LayerPlan
from shardkit.parallel.plans.conv import ConvParallel
from shardkit.parallel.plans.data import DataParallel, FullyShard
from shardkit.parallel.plans.prepare import PrepareLayerInput, PrepareLayerOutput
from shardkit.parallel.plans.sequence import RingAttention, SequenceParallel
from shardkit.parallel.plans.tensor import ColWiseParallel, RowWiseParallel

__all__ = [
    "Applied",
    "ColWiseParallel",
    "ConvParallel",
    "DataParallel",
    "FullyShard",
    "LayerPlan",
    "PrepareLayerInput",
    "PrepareLayerOutput",
    "RingAttention",
    "RowWiseParallel",
    "SequenceParallel",
]
