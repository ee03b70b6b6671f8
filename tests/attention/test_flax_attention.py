import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shardkit.attention import flax_attention_fn
from tests.attention.oracle import assert_equal, operands


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("backend", "broadcast", "deterministic"),
    [
        ("ring", True, False),
        slow("ring", False, False),
        slow("ring", True, True),
        slow("all_to_all", True, False),
        slow("all_to_all", False, False),
        slow("all_to_all", True, True),
    ],
)
@pytest.mark.not_smoke
def test_nnx_with_dropout(mesh_for, backend, broadcast, deterministic):
    mesh = mesh_for({"sp": 2})
    x = jax.random.normal(jax.random.key(0), (2, 8, 8))
    mask = nnx.make_causal_mask(jnp.ones((2, 8)))

    @functools.partial(jax.jit, static_argnames="attention_fn")
    def run(**kwargs):
        layer = nnx.MultiHeadAttention(
            2, 8, dropout_rate=0.5, broadcast_dropout=broadcast, decode=False, rngs=nnx.Rngs(0), **kwargs
        )
        return layer(x, mask=mask, deterministic=deterministic)

    assert_equal(run(attention_fn=flax_attention_fn("sp", backend, mesh=mesh)), run(), 1e-5)


def test_linen(mesh_for):
    mesh = mesh_for({"sp": 2})
    x = jax.random.normal(jax.random.key(0), (2, 8, 8))
    fn = flax_attention_fn("sp", mesh=mesh, causal=True)
    assert hash(fn) == hash(flax_attention_fn("sp", mesh=mesh, causal=True))
    make = functools.partial(nn.MultiHeadDotProductAttention, num_heads=2, dropout_rate=0.3, deterministic=False)
    mask, rngs = nn.make_causal_mask(jnp.ones((2, 8))), {"dropout": jax.random.key(3)}
    plain = make()
    variables = jax.jit(plain.init)({"params": jax.random.key(1), **rngs}, x)

    def gradient(layer, **kwargs):
        return jax.jit(jax.grad(lambda v: (layer.apply(v, x, rngs=rngs, **kwargs) ** 2).sum()))(variables)

    assert_equal(gradient(make(attention_fn=fn)), gradient(plain, mask=mask), 1e-4)


def test_errors(mesh_for):
    with pytest.raises(ValueError, match="backend='x' is unknown"):
        flax_attention_fn("sp", "x")
    with pytest.raises(ValueError, match="order='x' is unknown"):
        flax_attention_fn("sp", order="x")
    with pytest.raises(ValueError, match='belong to backend="ring"'):
        flax_attention_fn("sp", "all_to_all", order="zigzag")
    with pytest.raises(ValueError, match="can't be sown"):
        flax_attention_fn("sp", mesh=mesh_for({"sp": 1}))(*operands(), module=object())
