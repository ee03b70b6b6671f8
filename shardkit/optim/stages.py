"""How much of a training step's state each device keeps: the three stages.

The stages of S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC20: per parameter and of n devices, with float32 throughout and Adam, 16 bytes whole, 8 + 8/n with
stage 1, 4 + 12/n with stage 2, 16/n with stage 3.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ShardingStage1:
    """Stage 1 for ``sk.shard_optimizer``: optimizer state is sharded; gradients and parameters live as they did.

    Args:
      axis: the mesh axis over which state is cut, that of the batch. State is cut over what other axes are left, too,
        where they divide it: each device then keeps still less.

    Example:
      >>> import shardkit as sk
      >>> sk.ShardingStage1("dp")
      ShardingStage1(axis='dp')
    """

    axis: str


@dataclasses.dataclass(frozen=True)
class ShardingStage2(ShardingStage1):
    """Stage 2 for ``sk.shard_optimizer``: optimizer state is sharded, and gradients, once reduced, exist only so.

    Args:
      axis: the mesh axis over which they are cut, as for ``sk.ShardingStage1``.

    Example:
      >>> import shardkit as sk
      >>> sk.ShardingStage2("dp")
      ShardingStage2(axis='dp')
    """


@dataclasses.dataclass(frozen=True)
class ShardingStage3(ShardingStage2):
    """Stage 3 for ``sk.shard_optimizer``: optimizer state, gradients and parameters are sharded between steps.

    Parameters are, as ``sk.shard_params`` or a ``FullyShard`` plan leaves them, and are gathered where they are used.

    Args:
      axis: the mesh axis over which they are cut, as for ``sk.ShardingStage1``.

    Example:
      >>> import shardkit as sk
      >>> sk.ShardingStage3("dp")
      ShardingStage3(axis='dp')
    """
