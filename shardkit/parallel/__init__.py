"""Plans for whole models.

``plans`` are what a user says, by path; ``parallelize`` puts them on nnx or linen models (``nnx``, ``linen``).
``matching`` finds each layer's plans, ``shares`` and ``claims`` say where its parameters go, ``steps`` what happens
around its call (``around``). ``ready`` guesses plans for whole models.
``layers`` and ``tensor`` are what layers compute, of neither framework.
"""

from shardkit.parallel.parallelize import parallelize
from shardkit.parallel.params import parallelize_params
from shardkit.parallel.plans import (
    ColWiseParallel,
    ConvParallel,
    DataParallel,
    FullyShard,
    PrepareLayerInput,
    PrepareLayerOutput,
    RingAttention,
    RowWiseParallel,
    SequenceParallel,
)
from shardkit.parallel.tensor.loss import loss_parallel

__all__ = [
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
]
