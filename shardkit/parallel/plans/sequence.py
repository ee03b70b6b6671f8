"""Plans that cut the sequence: between tensor-parallel layers, and through attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from shardkit.parallel.plans.base import LayerPlan, check_axis_name, check_dim

BACKENDS = ("ring", "all_to_all")


@dataclasses.dataclass(frozen=True)
class SequenceParallel(LayerPlan):
    """What a layer takes or gives between tensor-parallel layers is cut over the sequence, not whole on every device.

    On a norm, dropout or any other layer that treats positions one by one: input and output are cut. In a list with
    ``sk.ColWiseParallel``: the input comes cut and is put together (all-gather; backward a reduce-scatter). In a list
    with ``sk.RowWiseParallel``: the sum is a reduce-scatter (backward an all-gather). An all-reduce sends as much as the
    two together, so no byte more travels, and norms and dropout work on, and keep, 1/n of the activations.
    A layer of the lists whose input has no such dim (pooled before) takes it whole.

    Args:
      axis: the mesh axis, that of the tensor-parallel layers.
      dim: the sequence's dim, counted from the front: 1 of ``[batch, sequence, features]``.

    Example:
      >>> import shardkit as sk
      >>> {"block/norm": sk.SequenceParallel("tp"), "block/up": [sk.ColWiseParallel("tp"), sk.SequenceParallel("tp")]}
      {'block/norm': SequenceParallel(axis='tp', dim=1), 'block/up': [ColWiseParallel(axis='tp', gather_output=False), SequenceParallel(axis='tp', dim=1)]}
    """  # noqa: E501

    part: ClassVar[str] = "sequence"

    axis: str = "tp"
    dim: int = 1

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
        check_dim(self, self.dim)


@dataclasses.dataclass(frozen=True)
class RingAttention(LayerPlan):
    """Attention over a sequence that is cut over a mesh axis, exact: no device holds it whole, nor all scores.

    Applies to nnx ``MultiHeadAttention`` and linen ``MultiHeadDotProductAttention`` (and its subclass
    ``MultiHeadAttention``). See ``sk.ring_attention`` and ``sk.all_to_all_attention``.

    Args:
      axis: the mesh axis that cuts the sequence.
      backend: "ring": keys and values travel around the axis, for any number of heads. "all_to_all": heads are cut in
        place of the sequence meanwhile; the axis must divide the heads.
      causal: positions see those before them and themselves. (A mask given to the layer works too, but is as large as
        the sequence squared.)

    Example:
      >>> import shardkit as sk
      >>> sk.RingAttention("sp")
      RingAttention(axis='sp', backend='ring', causal=False)
    """

    part: ClassVar[str] = "attention"

    axis: str = "sp"
    backend: str = "ring"
    causal: bool = False

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
        if self.backend not in BACKENDS:
            raise ValueError(f"RingAttention: backend={self.backend!r} is unknown; use one of {BACKENDS}")
