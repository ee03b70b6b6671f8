"""Plans that share a layer's weight out over devices: by column (what comes out) or by row (what goes in)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from shardkit.parallel.plans.base import LayerPlan, check_axis_name


@dataclasses.dataclass(frozen=True)
class ColWiseParallel(LayerPlan):
    """Cut what a layer gives over a mesh axis: each device computes some of the features (or heads, or columns).

    Nothing travels forward; backward the input's gradient is added up over the axis, once for all layers that read that
    input. Follow it with ``sk.RowWiseParallel``, which takes the cut features in.

    Applies to nnx and linen ``Linear`` / ``Dense``, ``LinearGeneral`` / ``DenseGeneral``, ``Einsum``, ``Embed`` (cuts
    the features), and to ``MultiHeadAttention`` / ``MultiHeadDotProductAttention`` as a unit: its heads are cut, so
    query, key and value are column layers and its output a row layer.

    Args:
      axis: the mesh axis.
      gather_output: the result is put together on every device (an all-gather).

    Example:
      >>> import shardkit as sk
      >>> sk.ColWiseParallel("tp")
      ColWiseParallel(axis='tp', gather_output=False)
    """

    part: ClassVar[str] = "weight"

    axis: str = "tp"
    gather_output: bool = False

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)


@dataclasses.dataclass(frozen=True)
class RowWiseParallel(LayerPlan):
    """Cut what a layer takes over a mesh axis: each device multiplies its features, and results are added up.

    One all-reduce forward, nothing backward. With ``sk.SequenceParallel`` beside it (a list of both) the sum is a
    reduce-scatter over the sequence, and backward an all-gather.

    Applies to the layers that ``sk.ColWiseParallel`` applies to. Of ``Embed`` it cuts the vocabulary: each device looks
    up what it holds; ``attend`` then gives logits that are cut over classes, as ``sk.loss_parallel`` takes them.

    Args:
      axis: the mesh axis.
      is_input_parallel: the input comes cut, from a column layer. False: it's whole, and each device takes its part
        (nothing travels for that forward; backward the parts of its gradient are put together).

    Example:
      >>> import shardkit as sk
      >>> sk.RowWiseParallel("tp")
      RowWiseParallel(axis='tp', is_input_parallel=True)
    """

    part: ClassVar[str] = "weight"

    axis: str = "tp"
    is_input_parallel: bool = True

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
