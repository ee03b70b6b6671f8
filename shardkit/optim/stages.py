"""How much of a training step's state each device keeps: the three stages.

The stages of S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC20: per parameter and of n devices, with float32 throughout and Adam, 16 bytes whole, 8 + 8/n with
stage 1, 4 + 12/n with stage 2, 16/n with stage 3.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ShardingStage1:
    """Optimizer state is sharded over ``axis``; gradients and parameters live as they did.

    Example:
      >>> import shardkit as sk
      >>> sk.ShardingStage1("dp")
      ShardingStage1(axis='dp')
    """

    axis: str


@dataclasses.dataclass(frozen=True)
class ShardingStage2(ShardingStage1):
    """And gradients, once reduced, exist only scattered.

    Example:
      >>> import shardkit as sk
      >>> sk.ShardingStage2("dp")
      ShardingStage2(axis='dp')
    """


@dataclasses.dataclass(frozen=True)
class ShardingStage3(ShardingStage2):
    """And parameters are sharded between steps, as their own placements say; they're gathered where they are used.

    Example:
      >>> import shardkit as sk
      >>> sk.ShardingStage3("dp")
      ShardingStage3(axis='dp')
    """
