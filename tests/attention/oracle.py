"""Attention on one device, written out: the oracle of this folder's tests."""

import jax
import jax.numpy as jnp
import numpy as np


def plain(query, key, value, *, causal=False, bias=None, mask=None, keep=None, keep_prob=1.0, scale=None):
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, -2) for x in (key, value))
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) * (scale or 1 / np.sqrt(query.shape[-1]))
    if bias is not None:
        scores = scores + bias
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool)) if causal else True
    allowed = allowed if mask is None else allowed & mask
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), -1)
    if keep is not None:
        weights = jnp.where(keep, weights / keep_prob, 0)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


def operands(batch=2, rows=32, cols=None, heads=4, kv_heads=None, depth=8, depth_v=None, seed=0):
    draw = np.random.default_rng(seed)  # of NumPy: nothing to compile
    cols, kv_heads, depth_v = cols or rows, kv_heads or heads, depth_v or depth
    shapes = (batch, rows, heads, depth), (batch, cols, kv_heads, depth), (batch, cols, kv_heads, depth_v)
    return tuple(jnp.asarray(draw.standard_normal(shape)) for shape in shapes)


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def coin(probability, *shape, seed=2):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < probability)


def pulled(fun):
    """(result, gradients) of all arguments, for a fixed cotangent; one program."""

    @jax.jit
    def run(*args):
        out, pull = jax.vjp(fun, *args)
        weights = jnp.sin(jnp.arange(float(out.size))).reshape(out.shape).astype(out.dtype)
        if any(e is not None for e in jax.typeof(out).sharding.spec):
            weights = jax.sharding.reshard(weights, jax.typeof(out).sharding)
        return out, pull(weights)

    return run


def assert_equal(found, expected, tolerance=1e-10):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=tolerance)
