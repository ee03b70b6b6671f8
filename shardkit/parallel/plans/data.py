"""Plans for the batch: spread over an axis, with parameters whole or sharded between uses."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from shardkit.parallel.plans.base import LayerPlan, check_axis_name, check_dim


@dataclasses.dataclass(frozen=True)
class DataParallel(LayerPlan):
    """The batch that a layer takes and gives is spread over a mesh axis; parameters are whole on every device.

    Args:
      axis: the mesh axis.
      dim: the batch's dim, counted from the front.

    Example:
      >>> import shardkit as sk
      >>> sk.DataParallel("dp")
      DataParallel(axis='dp', dim=0)
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
    ``sk.value_and_grad`` gathers them where they are used; under plain ``jax.jit`` the compiler does.

    Args:
      axis: the mesh axis, that of the batch.
      min_size: parameters with fewer elements stay whole: they cost more messages than they save memory.
      first_dim: dims before it are never cut: 1 for layers stacked along dim 0 (``nnx.scan``, ``nn.scan``).

    Example:
      >>> import shardkit as sk
      >>> sk.FullyShard("dp")
      FullyShard(axis='dp', min_size=0, first_dim=0)
    """

    part: ClassVar[str] = "data"

    axis: str = "dp"
    min_size: int = 0
    first_dim: int = 0

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
        check_dim(self, self.min_size)
        check_dim(self, self.first_dim)
