"""Dropout that drops the same elements on any mesh, where examples of a batch are spread over devices.

Within a loss of ``value_and_grad(..., keys="shared")`` a layer has some rows of the batch, and draws the block of the
mask of all rows that is theirs. Elsewhere it's Flax's own dropout: a mask of what it's given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardkit.optim.examples import current_examples
from shardkit.parallel.layers.randomness import bernoulli_block
from shardkit.spatial.operands import explicit_axes


def keep_mask(
    key: Any,
    keep_prob: Any,
    x: Any,
    broadcast_dims: Sequence[int] = (),
    *,
    dims: Mapping[int, int] | None = None,
    out_sharding: Any = None,
) -> Any:
    """Which elements of ``x`` stay: of all examples' mask the block of those that are here.

    Args:
      key: one random key.
      keep_prob: how probable it is that an element stays.
      x: the array, or anything with its shape.
      broadcast_dims: dims along which one draw serves all elements.
      dims: which dim of ``x`` is which of the batch; None: each is its own.
      out_sharding: of the mask on Explicit axes, where no block is drawn (``jax.random.bernoulli``'s argument).

    Returns:
      Booleans of the shape of ``x``, with size 1 in ``broadcast_dims``.
    """
    shape = list(jnp.shape(x))
    for dim in broadcast_dims:
        shape[dim] = 1
    here = current_examples()
    if here is None:
        return jax.random.bernoulli(key, keep_prob, tuple(shape), out_sharding=out_sharding)
    starts, whole = here.block(x, dims, key, "dropout")
    once = [dim % len(shape) for dim in broadcast_dims]
    starts = [0 if dim in once else s for dim, s in enumerate(starts)]
    whole = [1 if dim in once else n for dim, n in enumerate(whole)]
    if all(isinstance(s, int) for s in starts):
        return jax.random.bernoulli(key, keep_prob, tuple(shape), out_sharding=out_sharding)
    return bernoulli_block(key, keep_prob, shape, starts, whole)


def dropout(
    x: Any,
    rate: Any,
    key: Any,
    broadcast_dims: Sequence[int] = (),
    *,
    dims: Mapping[int, int] | None = None,
    out_sharding: Any = None,
) -> Any:
    """Zeros in place of a part of the elements, the others scaled by ``1 / (1 - rate)``: Flax's formula.

    Args:
      x: the array; within a loss of ``value_and_grad(..., keys="shared")`` that of the examples here.
      rate: how probable it is that an element is dropped; below 1.
      key: one random key: the same on all devices, or one that's an example's own.
      broadcast_dims: dims along which one draw serves all elements.
      dims: which dim of ``x`` is which of the batch, of those that devices or microbatches cut (``{0: 1}``: examples
        are dim 1 of ``x``; ``{}``: ``x`` holds none); None: each is its own.
      out_sharding: as in ``jax.random.bernoulli``, for the mask.

    Raises:
      ValueError: a dim that can't be made of the rows of the batch that are here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> sorted(set(dropout(jnp.ones(100), 0.75, jax.random.key(0)).tolist()))
      [0.0, 4.0]
    """
    keep_prob = 1.0 - rate
    kept = keep_mask(key, keep_prob, x, broadcast_dims, dims=dims, out_sharding=out_sharding)
    kept = _placed_like(x, jnp.broadcast_to(kept, x.shape))
    return lax.select(kept, x / keep_prob, jnp.zeros_like(x))


def nnx_dropout(layer: nnx.Dropout, x: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
    """What ``nnx.Dropout.__call__`` gives, of the whole batch's mask where this is part of a batch.

    Keys are taken from the layer's stream as Flax does, and errors are Flax's own.
    """
    off = layer.deterministic if deterministic is None else deterministic
    source = layer.rngs if rngs is None else rngs
    drawn_here = off is not None and not off and layer.rate not in (0.0, 1.0)
    if current_examples() is None or not drawn_here or not isinstance(source, nnx.Rngs | nnx.RngStream | jax.Array):
        return nnx.Dropout.__call__(layer, x, deterministic=deterministic, rngs=rngs)
    if isinstance(source, nnx.Rngs):
        source = source[layer.rng_collection]
    key = source if isinstance(source, jax.Array) else source()
    return dropout(x, layer.rate, key, layer.broadcast_dims, out_sharding=jax.typeof(x).sharding)


def linen_dropout(module: linen.Dropout, inputs: Any, deterministic: bool | None = None, rng: Any = None) -> Any:
    """What ``linen.Dropout.__call__`` gives, of the whole batch's mask where this is part of a batch.

    For an interceptor (``linen.intercept_methods``), in place of the call: the key is made as in it.
    """
    off = linen.merge_param("deterministic", module.deterministic, deterministic)
    if module.rate == 0.0 or off:
        return inputs
    if module.rate == 1.0:  # no division by zero
        return jnp.zeros_like(inputs)
    key = module.make_rng(module.rng_collection) if rng is None else rng
    return dropout(inputs, module.rate, key, module.broadcast_dims)


def attention_dropout(weights: Any, rate: Any, key: Any, broadcast_dropout: bool = True) -> Any:
    """What Flax's ``dot_product_attention`` does to its weights: one mask for all examples and heads, or each its own.

    With ``broadcast_dropout``, Flax's default, its attention draws the same on any mesh as it is. Without, an
    ``attention_fn`` can use this between the weights (``dot_product_attention_weights(..., deterministic=True)``) and
    the values.

    Args:
      weights: ``[batch..., heads, queries, keys]``.
      rate: how probable it is that a weight is dropped; below 1.
      key: one random key.
      broadcast_dropout: one mask ``[queries, keys]`` for all.

    Raises:
      ValueError: devices share out the queries (a dim of the batch that is none of ``batch...``), or as ``dropout``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> w = attention_dropout(jnp.ones((2, 1, 2, 2)), 0.5, jax.random.key(0))
      >>> bool((w[0] == w[1]).all())
      True
    """
    here, leading = current_examples(), weights.ndim - 3
    cut = [] if here is None else [dim for dim, part in here.parts.items() if dim >= leading and part.cut.parts > 1]
    if cut:
        raise ValueError(
            f"attention_dropout: dims {cut} of the batch are cut, weights of shape {weights.shape} have {leading} dims "
            "of the batch before heads, queries and keys; which queries are here isn't known of them"
        )
    keep_prob = 1.0 - rate
    once = range(weights.ndim - 2) if broadcast_dropout else ()
    kept = _placed_like(weights, jnp.broadcast_to(keep_mask(key, keep_prob, weights, once), weights.shape))
    return weights * (kept.astype(weights.dtype) / jnp.asarray(keep_prob, weights.dtype))


def _placed_like(x: Any, mask: Any) -> Any:
    """On Explicit axes the mask where ``x`` is; elsewhere the compiler sees to it."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not explicit_axes(sharding.mesh) or jax.typeof(mask).sharding.spec == sharding.spec:
        return mask
    mesh = sharding.mesh if isinstance(x, Tracer) else x.sharding.mesh
    return jax.sharding.reshard(mask, NamedSharding(mesh, sharding.spec))
