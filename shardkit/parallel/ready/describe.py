"""What layers a model has: of nnx by looking, of linen by tracing it once with what it's called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen, nnx

from shardkit.parallel.nnx.apply import NNX, named_layers
from shardkit.parallel.paths import join_path
from shardkit.parallel.ready.guessing import Found

_NNX = {
    nnx.Linear: "linear",
    nnx.LinearGeneral: "linear",
    nnx.Embed: "embedding",
    nnx.MultiHeadAttention: "attention",
    nnx.LayerNorm: "norm",
    nnx.RMSNorm: "norm",
    nnx.Dropout: "dropout",
    nnx.Conv: "conv",
    nnx.ConvTranspose: "conv",
    nnx.BatchNorm: "spatial norm",
    nnx.GroupNorm: "spatial norm",
    nnx.InstanceNorm: "spatial norm",
}
_LINEN = {
    linen.Dense: "linear",
    linen.DenseGeneral: "linear",
    linen.Embed: "embedding",
    linen.MultiHeadDotProductAttention: "attention",
    linen.MultiHeadAttention: "attention",
    linen.SelfAttention: "attention",
    linen.LayerNorm: "norm",
    linen.RMSNorm: "norm",
    linen.Dropout: "dropout",
    linen.Conv: "conv",
    linen.ConvTranspose: "conv",
    linen.BatchNorm: "spatial norm",
    linen.GroupNorm: "spatial norm",
    linen.InstanceNorm: "spatial norm",
}


def describe(model: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> list[Found]:
    """Layers in the order they're found (nnx) or called (linen).

    Raises:
      TypeError: neither nnx nor linen; a linen model without what it's called with.
    """
    if isinstance(model, nnx.Module):
        return [_nnx(path, layer) for path, (_, layer) in named_layers(model).items()]
    if not isinstance(model, linen.Module):
        raise TypeError(f"a plan is guessed for a flax.nnx.Module or a flax.linen.Module, got {model!r}")
    if not args:
        raise TypeError(
            "the layers of a linen model are known once it's called: give what its init takes, e.g. "
            "plan.guess(model, jax.random.key(0), x)"
        )
    return traced(lambda: model.init(*args, **(kwargs or {})))


def traced(call: Any) -> list[Found]:
    """The linen layers that ``call()`` calls, each once."""
    found: dict[str, Found] = {}

    def look(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name in ("__call__", "attend"):
            path = join_path(context.module.path)
            found.setdefault(path, _linen(path, context.module, (*args, *kwargs.values())))
        return run(*args, **kwargs)

    with linen.intercept_methods(look):
        jax.eval_shape(call)
    return list(found.values())


def _size(value: Any) -> int:
    sizes = value if isinstance(value, list | tuple) else (value,)
    total = 1
    for size in sizes:
        total *= int(size)
    return total


def _nnx(path: str, layer: Any) -> Found:
    kind = _NNX.get(NNX.kind_of(layer), "other")
    name = type(layer).__name__
    if kind == "linear":
        return Found(path, kind, name, _size(layer.in_features), _size(layer.out_features))
    if kind == "embedding":
        return Found(path, kind, name, layer.num_embeddings, layer.features)
    if kind == "attention":
        return Found(path, kind, name, heads=layer.num_heads, kv_heads=layer.num_kv_heads)
    return Found(path, "model" if path == "" else kind, name)


def _linen(path: str, module: Any, args: Sequence[Any]) -> Found:
    kind = _LINEN.get(type(module), "other")
    name = type(module).__name__
    if kind == "linear":
        x = args[0]
        axes = module.axis if isinstance(module, linen.DenseGeneral) else -1
        dims = axes if isinstance(axes, list | tuple) else (axes,)
        return Found(path, kind, name, _size([x.shape[d] for d in dims]), _size(module.features))
    if kind == "embedding":
        return Found(path, kind, name, module.num_embeddings, module.features)
    if kind == "attention":
        return Found(path, kind, name, heads=module.num_heads, kv_heads=module.num_heads)
    return Found(path, "model" if path == "" else kind, name)
