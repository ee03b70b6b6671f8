"""Short parameters updated through long copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk

S, R = sk.Shard, sk.Replicate()
RNG = np.random.default_rng(0)
W = RNG.normal(size=(8, 6)).astype(np.float32)
X = RNG.normal(size=(16, 8)).astype(np.float32)


def loss(p, x):
    return jnp.mean((x.astype(p["w"].dtype) @ p["w"]) ** 2)


def test_the_copies_are_what_the_long_optimizer_makes():
    """Given the same gradients; and the parameters are the copies, rounded."""
    tx, plain = sk.master_weights(optax.adam(1e-3)), optax.adam(1e-3)
    w = {"w": jnp.asarray(W, jnp.bfloat16)}
    long = jax.tree.map(lambda x: x.astype(jnp.float32), w)
    state, state_long = tx.init(w), plain.init(long)
    for _ in range(20):
        grads = jax.grad(loss)(w, X)
        updates, state = tx.update(grads, state, w)
        w = optax.apply_updates(w, updates)
        updates, state_long = plain.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), state_long, long)
        long = optax.apply_updates(long, updates)
    np.testing.assert_array_equal(np.asarray(state.master["w"]), np.asarray(long["w"]))
    np.testing.assert_array_equal(
        np.asarray(w["w"], np.float32), np.asarray(long["w"].astype(jnp.bfloat16), np.float32)
    )
    assert w["w"].dtype == jnp.bfloat16 and state.inner[0].mu["w"].dtype == jnp.float32


@pytest.mark.parametrize("gather_dtype", [None, jnp.bfloat16], ids=str)
def test_sharded(gather_dtype, mesh_for):
    """Copies are cut like all state; updates may travel short without the parameters drifting from the copies."""
    mesh = mesh_for({"dp": 4})
    w = {"w": sk.shard_tensor(jnp.asarray(W, jnp.bfloat16), [R], mesh)}
    tx = sk.shard_optimizer(sk.master_weights(optax.adam(1e-3)), sk.ShardingStage1("dp"), gather_dtype=gather_dtype)
    state = tx.init(w)
    assert sk.placements(state.inner.master["w"]) == (S(0),)

    @jax.jit
    def step(params, state, x):
        _, grads = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        w, state = jax.block_until_ready(step(w, state, X))
    master = np.asarray(state.inner.master["w"])
    # Half a unit in the last place of bfloat16, and what a rounded update leaves undone.
    np.testing.assert_allclose(np.asarray(w["w"], np.float32), master, rtol=2.0**-8, atol=1e-5)
    assert w["w"].dtype == jnp.bfloat16 and w["w"].sharding.is_fully_replicated


def test_refused():
    tx = sk.master_weights(optax.sgd(0.1))
    w = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match=re.escape("call update(grads, state, params)")):
        tx.update(w, tx.init(w))
