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


def share_out(layer: Any, plan: WeightPlan, share: Share, sharing: Sharing) -> None:
    """The layer multiplies with a weight that is cut as ``share`` says.

    Raises:
      ValueError: it already multiplies in a way of its own.
    """
    if isinstance(layer, nnx.Embed):
        layer.__class__ = ParallelEmbed
        table = cast(ParallelEmbed, layer)
        table.shardkit_sharing, table.shardkit_cut = sharing, share.weight_dim
    elif isinstance(layer, nnx.Einsum):
        _check_own(layer, "einsum_op", (jnp.einsum,), sharing.path, plan)
        layer.einsum_op = ParallelEinsum(sharing, share.weight_dim)
    else:
        _check_own(layer, "dot_general", (lax.dot_general, None), sharing.path, plan)
        if getattr(layer, "dot_general_cls", None) is not None:
            raise ValueError(
                f"{plan} on {sharing.path!r}: the layer has its own dot_general_cls; leave out one of the two"
            )
        layer.dot_general = ParallelDot(sharing, share.weight_dim)


def _check_own(layer: Any, name: str, plain: tuple[Any, ...], path: str, plan: Any) -> None:
    value = getattr(layer, name)
    if value not in plain and not isinstance(value, ParallelDot | ParallelEinsum):
        raise ValueError(f"{plan} on {path!r}: the layer has its own {name}; leave out one of the two")
