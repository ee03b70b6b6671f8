"""Column and row plans on linen layers: what each multiplies with is replaced for the call, its own code stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
from flax import linen as nn
from jax import numpy as jnp

from shardkit.parallel.layers.setting import setting
from shardkit.parallel.plans import ColWiseParallel
from shardkit.parallel.shares import Share, WeightPlan, of_einsum, of_embedding, of_linear
from shardkit.parallel.tensor.embedding import attend, lookup
from shardkit.parallel.tensor.layers import ParallelDot, ParallelEinsum, Sharing

TENSOR_LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Embed)
ATTENTION = (nn.MultiHeadDotProductAttention, nn.MultiHeadAttention, nn.SelfAttention)


def share_of(module: Any, plan: WeightPlan) -> Share:
    """What the plan cuts of the layer's parameters."""
    if isinstance(module, nn.Embed):
        return of_embedding(plan)
    if isinstance(module, nn.Einsum):
        if module.einsum_str is None:
            raise ValueError(f"{plan} needs an Einsum layer that was made with its einsum_str")
        share = of_einsum(plan, module.einsum_str, tuple(module.shape), None)
        if not isinstance(plan, ColWiseParallel) or not module.use_bias:
            return share
        text = module.einsum_str.replace(" ", "")
        weight, result = text.split(",")[1].split("->")
        kept = [c for c in result if c in weight]
        return of_einsum(plan, text, tuple(module.shape), tuple(module.shape[weight.index(c)] for c in kept))
    if isinstance(module, nn.DenseGeneral):
        return of_linear(plan, _count(module.axis), _count(module.features), _count(module.batch_dims))
    return of_linear(plan)


def outputs_of(module: Any) -> int:
    """Dims that the layer's weight gives its result."""
    return _count(module.features) if isinstance(module, nn.DenseGeneral) else 1


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple) else 1


def run_shared(
    module: Any,
    method: str,
    plan: WeightPlan,
    share: Share,
    sharing: Sharing,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The layer's call with a weight that is cut as ``share`` says.

    Raises:
      ValueError: it already multiplies in a way of its own.
    """
    if isinstance(module, nn.Embed):
        (values,) = (*args, *kwargs.values())  # whichever name it has
        return _embed(module, method, share, sharing, values)
    if isinstance(module, nn.Einsum):
        return _einsum(module, share, sharing, *args, **kwargs)
    for name in ("dot_general", "dot_general_cls"):
        if getattr(module, name) is not None:
            raise ValueError(f"{plan} on {sharing.path!r}: the layer has its own {name}; leave out one of the two")
    with setting(module, "dot_general", ParallelDot(sharing, share.weight_dim)):
        return run(*args, **kwargs)


def _embed(module: nn.Embed, method: str, share: Share, sharing: Sharing, values: Any) -> Any:
    cut = share.weight_dim
    if method == "attend":
        found = module.promote_dtype(values, module.embedding, dtype=module.dtype)
        query, table = cast(list[jax.Array], found)
        return attend(sharing, cut, query, table)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError("Input type must be an integer or unsigned integer.")
    (table,) = cast(list[jax.Array], module.promote_dtype(module.embedding, dtype=module.dtype, inexact=False))
    return lookup(sharing, cut, table, values)


def _einsum(module: nn.Einsum, share: Share, sharing: Sharing, inputs: Any, einsum_str: str | None = None) -> Any:
    if einsum_str is not None:
        raise ValueError(f"layer {sharing.path!r}: give its einsum_str when the layer is made, which its plan needs")
    assert module.einsum_str is not None
    text = module.einsum_str.replace(" ", "")
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    bias, laid = None, None
    if module.use_bias:
        weight, result = text.split(",")[1].split("->")
        sizes = {c: size for c, size in zip(weight, module.shape, strict=True) if c in result}
        bias = module.param("bias", module.bias_init, [sizes[c] for c in result if c in sizes], module.param_dtype)
        letters = list(result.replace("...", ""))
        extra = inputs.ndim - len(text.split(",")[0].replace("...", "")) if "..." in result else 0
        laid = [1] * extra if result.startswith("...") else []
        laid += [sizes.get(c, 1) for c in letters]
    inputs, kernel, bias = module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
    product = ParallelEinsum(sharing, share.weight_dim)
    y = product(text, inputs, kernel, module.precision, module.preferred_element_type)
    return y if bias is None else y + jnp.reshape(bias, laid)
