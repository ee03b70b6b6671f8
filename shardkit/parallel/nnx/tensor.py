"""Column and row plans on nnx layers: what each multiplies with is replaced, its own code stays."""

from __future__ import annotations

from typing import Any, cast

from flax import nnx
from jax import lax
from jax import numpy as jnp

from shardkit.parallel.nnx.embedding import ParallelEmbed
from shardkit.parallel.nnx.wrapping import own_class
from shardkit.parallel.shares import Share, WeightPlan, of_einsum, of_embedding, of_linear
from shardkit.parallel.tensor.layers import ParallelDot, ParallelEinsum, Sharing

TENSOR_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Embed)
ATTENTION = (nnx.MultiHeadAttention,)


def share_of(layer: Any, plan: WeightPlan) -> Share:
    """What the plan cuts of the layer's parameters."""
    cls = own_class(layer)
    if issubclass(cls, nnx.Embed):
        return of_embedding(plan)
    if issubclass(cls, nnx.Einsum):
        if layer.einsum_str is None:
            raise ValueError(f"{plan} needs an Einsum layer that was made with its einsum_str")
        return of_einsum(plan, layer.einsum_str, layer.kernel_shape, layer.bias_shape)
    if issubclass(cls, nnx.LinearGeneral):
        return of_linear(plan, len(layer.in_features), len(layer.out_features), len(layer.batch_axis))
    return of_linear(plan)


def outputs_of(layer: Any) -> int:
    """Dims that the layer's weight gives its result."""
    return len(layer.out_features) if issubclass(own_class(layer), nnx.LinearGeneral) else 1


def check_own(layer: Any, plan: WeightPlan, path: str) -> None:
    """Raises ValueError where the layer multiplies in a way of its own already."""
    plain: dict[str, tuple[Any, ...]] = {
        "einsum_op": (jnp.einsum,),
        "dot_general": (lax.dot_general, None),
        "dot_general_cls": (None,),
    }
    for name, usual in plain.items():
        value = getattr(layer, name, usual[0])
        if value not in usual and not isinstance(value, ParallelDot | ParallelEinsum):
            raise ValueError(f"{plan} on {path!r}: the layer has its own {name}; leave out one of the two")


def share_out(layer: Any, share: Share, sharing: Sharing) -> None:
    """The layer multiplies with a weight that is cut as ``share`` says."""
    if isinstance(layer, nnx.Embed):
        layer.__class__ = ParallelEmbed
        table = cast(ParallelEmbed, layer)
        table.shardkit_sharing, table.shardkit_cut = sharing, share.weight_dim
    elif isinstance(layer, nnx.Einsum):
        layer.einsum_op = ParallelEinsum(sharing, share.weight_dim)
    else:
        layer.dot_general = ParallelDot(sharing, share.weight_dim)
