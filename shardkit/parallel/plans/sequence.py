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
    with ``sk.RowWiseParallel``: the sum is a reduce-scatter (backward an all-gather). An all-reduce sends as much as
    the two together, so no byte more travels, and norms and dropout work on, and keep, 1/n of the activations.
    A layer of the lists whose input has no such dim (pooled before) takes it whole. Source: V. Korthikanti et al.,
    "Reducing Activation Recomputation in Large Transformer Models", https://arxiv.org/abs/2205.05198.

    Args:
      axis: the mesh axis, that of the tensor-parallel layers.
      dim: the sequence's dim, counted from the front: 1 of ``[batch, sequence, features]``.

    Raises:
      TypeError: an axis that is no name, a dim that is no integer.
      ValueError: a negative dim.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> n = jax.device_count()
      >>> model = nnx.Sequential(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 8 * n, rngs=nnx.Rngs(1)))
      >>> cut = sk.SequenceParallel("tp")
      >>> plan = {"layers/0": cut, "layers/1": [sk.ColWiseParallel("tp"), cut]}
      >>> model, x = sk.parallelize(model, plan, sk.make_mesh({"tp": n})), jnp.ones((2, 6 * n, 4))
      >>> norm = model.layers[0](x)
      >>> norm.sharding.shard_shape(norm.shape), model(x).shape == (2, 6 * n, 8 * n)  # a device's block
      ((2, 6, 4), True)
    """

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
    ``MultiHeadAttention``). ``sk.ring_attention`` and ``sk.all_to_all_attention`` do it. Sources: H. Liu et al.,
    https://arxiv.org/abs/2310.01889; S. Jacobs et al. (DeepSpeed-Ulysses), https://arxiv.org/abs/2309.14509.

    Args:
      axis: the mesh axis that cuts the sequence.
      backend: "ring": keys and values travel around the axis, for any number of heads. "all_to_all": heads are cut in
        place of the sequence meanwhile; the axis must divide the heads.
      causal: positions see those before them and themselves. (A mask given to the layer works too, but is as large as
        the sequence squared.)

    Raises:
      TypeError: an axis that is no name.
      ValueError: an unknown backend.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> layer, n = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), jax.device_count()
      >>> layer = sk.parallelize(layer, {"": sk.RingAttention("sp", causal=True)}, sk.make_mesh({"sp": n}))
      >>> y = layer(jnp.ones((1, 6 * n, 8)))
      >>> y.sharding.shard_shape(y.shape)  # a device's block
      (1, 6, 8)
    """

    part: ClassVar[str] = "attention"

    axis: str = "sp"
    backend: str = "ring"
    causal: bool = False

    def __post_init__(self) -> None:
        check_axis_name(self, self.axis)
        if self.backend not in BACKENDS:
            raise ValueError(f"RingAttention: backend={self.backend!r} is unknown; use one of {BACKENDS}")
