"""Plans for the batch: spread over an axis, with parameters whole or sharded between uses."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from shardkit.parallel.plans.base import LayerPlan, check_axis_name, check_count, check_dim


@dataclasses.dataclass(frozen=True)
class DataParallel(LayerPlan):
    """The batch that a layer takes and gives is spread over a mesh axis; parameters are whole on every device.

    Args:
      axis: the mesh axis.
      dim: the batch's dim, counted from the front.

    Raises:
      TypeError: an axis that is no name, a dim that is no integer.
      ValueError: a negative dim.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> layer, n = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jax.device_count()
      >>> layer = sk.parallelize(layer, {"": sk.DataParallel("dp")}, sk.make_mesh({"dp": n}))
      >>> y = layer(jnp.ones((2 * n, 4)))
      >>> sk.placements(layer.kernel[...]), y.sharding.shard_shape(y.shape)  # a device's block
      ((Replicate(),), (2, 8))
    """

    part: ClassVar[str] = "data"

    axis: str = "dp"
    dim: int = 0

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
        check_dim(self, self.dim)


@dataclasses.dataclass(frozen=True)
class FullyShard(LayerPlan):
    """Parameters of a layer, and of all below it, are sharded over a mesh axis between uses (ZeRO stage 3, FSDP).

    Each takes the lowest dim that nothing cuts yet and that the axis divides; one that has none stays whole.
    ``sk.value_and_grad`` gathers them where they are used; under plain ``jax.jit`` the compiler does. Sources:
    S. Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054; Y. Zhao et al., "PyTorch FSDP",
    https://arxiv.org/abs/2304.11277.

    Args:
      axis: the mesh axis, that of the batch.
      min_size: parameters with fewer elements stay whole: they cost more messages than they save memory.
      first_dim: dims before it are never cut: 1 for layers stacked along dim 0 (``nnx.scan``, ``nn.scan``).

    Raises:
      TypeError: an axis that is no name, a number that is no integer.
      ValueError: a negative number.

    Example:
      >>> import shardkit as sk
      >>> from flax import nnx
      >>> layer = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> layer = sk.parallelize(layer, {"": sk.FullyShard("dp", min_size=16)}, sk.make_mesh({"dp": 1}))
      >>> sk.placements(layer.kernel[...]), sk.placements(layer.bias[...])
      ((Shard(dim=0),), (Replicate(),))
    """

    part: ClassVar[str] = "data"

    axis: str = "dp"
    min_size: int = 0
    first_dim: int = 0

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
        check_count(self, "min_size", self.min_size)
        check_count(self, "first_dim", self.first_dim)
