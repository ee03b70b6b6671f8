"""Plans that share a layer's weight out over devices: by column (what comes out) or by row (what goes in)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from shardkit.parallel.plans.base import LayerPlan, check_axis_name


@dataclasses.dataclass(frozen=True)
class ColWiseParallel(LayerPlan):
    """Cut what a layer gives over a mesh axis: each device computes some of the features (or heads, or columns).

    Nothing travels forward; backward the input's gradient is added up over the axis, once for all layers that read that
    input. Follow it with ``sk.RowWiseParallel``, which takes the cut features in. Source: M. Shoeybi et al.,
    "Megatron-LM", https://arxiv.org/abs/1909.08053.

    Applies to nnx and linen ``Linear`` / ``Dense``, ``LinearGeneral`` / ``DenseGeneral``, ``Einsum``, ``Embed`` (cuts
    the features), and to ``MultiHeadAttention`` / ``MultiHeadDotProductAttention`` as a unit: its heads are cut, so
    query, key and value are column layers and its output a row layer.

    Args:
      axis: the mesh axis.
      gather_output: the result is put together on every device (an all-gather).

    Raises:
      TypeError: an axis that is no name.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> n = jax.device_count()
      >>> up = nnx.Linear(4, 8 * n, rngs=nnx.Rngs(0))
      >>> up = sk.parallelize(up, {"": sk.ColWiseParallel("tp")}, sk.make_mesh({"tp": n}))
      >>> y = up(jnp.ones((2, 4)))
      >>> sk.placements(up.kernel[...]), y.sharding.shard_shape(y.shape)  # a device's block
      ((Shard(dim=1),), (2, 8))
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
    reduce-scatter over the sequence, and backward an all-gather. Source: M. Shoeybi et al.,
    "Megatron-LM", https://arxiv.org/abs/1909.08053.

    Applies to the layers that ``sk.ColWiseParallel`` applies to. Of ``Embed`` it cuts the vocabulary: each device looks
    up what it holds; ``attend`` then gives logits that are cut over classes, as ``sk.loss_parallel`` takes them.

    Args:
      axis: the mesh axis.
      is_input_parallel: the input comes cut, from a column layer. False: it's whole, and each device takes its part
        (nothing travels for that forward; backward the parts of its gradient are put together).

    Raises:
      TypeError: an axis that is no name.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> n = jax.device_count()
      >>> down = nnx.Linear(8 * n, 4, rngs=nnx.Rngs(0))
      >>> down = sk.parallelize(down, {"": sk.RowWiseParallel("tp")}, sk.make_mesh({"tp": n}))
      >>> y = down(jnp.ones((2, 8 * n)))
      >>> sk.placements(down.kernel[...]), y.sharding.shard_shape(y.shape)  # a device has all of it
      ((Shard(dim=0),), (2, 4))
    """

    part: ClassVar[str] = "weight"

    axis: str = "tp"
    is_input_parallel: bool = True

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
