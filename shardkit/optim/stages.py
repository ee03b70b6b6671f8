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

    A parameter takes ``8 + 8 / n`` bytes of each of ``n`` devices (float32 and Adam) in place of 16.
    Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20,
    https://arxiv.org/abs/1910.02054.

    Args:
      axis: the mesh axis over which state is cut, that of the batch. State is cut over what other axes are left, too,
        where they divide it: each device then keeps still less.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": jax.device_count()})
      >>> params = sk.shard_tensor(jnp.ones(8 * mesh.size), [sk.Replicate()], mesh)
      >>> state = sk.shard_optimizer(optax.trace(0.9), sk.ShardingStage1("dp"), mesh=mesh).init(params)
      >>> [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state)]  # a device's block
      [(8,)]
    """

    axis: str


@dataclasses.dataclass(frozen=True)
class ShardingStage2(ShardingStage1):
    """Stage 2 for ``sk.shard_optimizer``: optimizer state is sharded, and gradients, once reduced, exist only so.

    A parameter takes ``4 + 12 / n`` bytes of each of ``n`` devices (float32 and Adam) in place of 16.
    Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20,
    https://arxiv.org/abs/1910.02054.

    Args:
      axis: the mesh axis over which they are cut, that of the batch.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": jax.device_count()})
      >>> params = sk.shard_tensor(jnp.ones(8 * mesh.size), [sk.Replicate()], mesh)
      >>> tx = sk.shard_optimizer(optax.sgd(1.0), sk.ShardingStage2("dp"), mesh=mesh)
      >>> gradients = sk.reshard(params, [sk.Partial()])  # contributions: what sk.value_and_grad gives
      >>> updates, _ = tx.update(gradients, tx.init(params), params)
      >>> float(updates[0]), sk.placements(updates)
      (-1.0, (Replicate(),))
    """


@dataclasses.dataclass(frozen=True)
class ShardingStage3(ShardingStage2):
    """Stage 3 for ``sk.shard_optimizer``: optimizer state, gradients and parameters are sharded between steps.

    Parameters are, as ``sk.shard_params`` or a ``FullyShard`` plan leaves them, and are gathered where they are used.
    One takes ``16 / n`` bytes of each of ``n`` devices (float32 and Adam) in place of 16.
    Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20,
    https://arxiv.org/abs/1910.02054.

    Args:
      axis: the mesh axis over which they are cut, that of the batch.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": jax.device_count()})
      >>> params = sk.shard_params(jnp.ones(8 * mesh.size), "dp", mesh)
      >>> tx = sk.shard_optimizer(optax.sgd(1.0), sk.ShardingStage3("dp"), mesh=mesh)
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> sk.placements(optax.apply_updates(params, updates))
      (Shard(dim=0),)
    """
