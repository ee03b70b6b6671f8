"""Softmax attention over columns that come piece by piece: the arithmetic of one tile.

The online softmax of Milakov and Gimelshein (https://arxiv.org/abs/1805.02867), and the backward pass from the
logarithm of the sum of Dao et al. (https://arxiv.org/abs/2205.14135). Shapes: ``K`` heads of keys, each for ``g`` heads
of queries; query ``[..., q, K, g, d]``, key ``[..., s, K, d]``, value ``[..., s, K, e]``, scores ``[..., K, g, q, s]``.
All but the operands of matrix products is float32, or float64 where these are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Rule:
    """What scores are made of, beyond their operands.

    Attributes:
      scale: of the products of query and key.
      keep_prob: weights that dropout keeps are divided by it.
      precision: of the matrix products.
    """

    scale: float
    keep_prob: float
    precision: Any


class State(NamedTuple):
    """What is known of some rows after some of their columns.

    Attributes:
      top: the largest score, ``[..., K, g, q]``; -inf where none was allowed.
      total: the sum of ``exp(score - top)``.
      weighted: the sum of ``exp(score - top) * value``, ``[..., K, g, q, e]``.
    """

    top: Array
    total: Array
    weighted: Array


class Gradients(NamedTuple):
    """What one tile adds to the gradients of its rows, its columns and its bias."""

    query: Array
    key: Array
    value: Array
    scores: Array


def wide(dtype: Any) -> Any:
    """The dtype in which sums are taken."""
    return jnp.promote_types(dtype, jnp.float32)


def scores(rule: Rule, query: Array, key: Array, bias: Array | None, allowed: Array | None) -> Array:
    """Scaled products plus bias, -inf where not allowed."""
    dtype = wide(query.dtype)
    products = _product("...qkgd,...skd->...kgqs", query, key, rule, dtype) * jnp.asarray(rule.scale, dtype)
    if bias is not None:
        products = products + bias.astype(dtype)
    return products if allowed is None else jnp.where(allowed, products, -jnp.inf)


def absorb(rule: Rule, state: State, found: Array, value: Array, keep: Array | None) -> State:
    """The state after these columns too."""
    top = jnp.maximum(state.top, found.max(-1))
    base = jnp.where(jnp.isneginf(top), 0, top)  # nothing allowed yet: -inf - -inf would be NaN
    weights = jnp.exp(found - base[..., None])
    shrink = jnp.exp(state.top - base)
    total = state.total * shrink + weights.sum(-1)
    used = _dropped(rule, weights, keep).astype(value.dtype)
    part = _product("...kgqs,...ske->...kgqe", used, value, rule, state.weighted.dtype)
    return State(top, total, state.weighted * shrink[..., None] + part)


def finish(state: State) -> tuple[Array, Array]:
    """(result ``[..., K, g, q, e]``, logarithm of the sum); 0 and +inf for rows to which nothing was allowed."""
    dead = state.total == 0
    result = state.weighted / jnp.where(dead, 1, state.total)[..., None]
    return result, jnp.where(dead, jnp.inf, state.top + jnp.log(jnp.where(dead, 1, state.total)))


def tile_gradients(
    rule: Rule,
    query: Array,
    key: Array,
    value: Array,
    found: Array,
    keep: Array | None,
    logsum: Array,
    cotangent: Array,
    delta: Array,
) -> Gradients:
    """The gradients of one tile, in the wide dtype.

    Args:
      found: the tile's scores.
      logsum: from ``finish``.
      cotangent: of the result, ``[..., q, K, g, e]``.
      delta: the sum of ``cotangent * result``, ``[..., K, g, q]``.
    """
    dtype = wide(query.dtype)
    weights = jnp.exp(found - logsum[..., None])
    per_weight = _product("...qkge,...ske->...kgqs", cotangent, value, rule, dtype)
    used = _dropped(rule, weights, keep).astype(cotangent.dtype)
    per_weight = _dropped(rule, per_weight, keep)
    per_score = weights * (per_weight - delta[..., None])
    short, scale = per_score.astype(query.dtype), jnp.asarray(rule.scale, dtype)
    return Gradients(
        query=_product("...kgqs,...skd->...qkgd", short, key, rule, dtype) * scale,
        key=_product("...kgqs,...qkgd->...skd", short, query, rule, dtype) * scale,
        value=_product("...kgqs,...qkge->...ske", used, cotangent, rule, dtype),
        scores=per_score,
    )


def _dropped(rule: Rule, x: Array, keep: Array | None) -> Array:
    return x if keep is None else jnp.where(keep, x / jnp.asarray(rule.keep_prob, x.dtype), 0)


def _product(subscripts: str, a: Array, b: Array, rule: Rule, dtype: Any) -> Array:
    return jnp.einsum(subscripts, a, b, precision=rule.precision, preferred_element_type=dtype)
