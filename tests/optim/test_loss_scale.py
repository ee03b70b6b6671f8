"""Loss scales that find themselves: the steps of the optimizer without one, or none, on every device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def params_of():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(8, 4)), "b": rng.normal(size=(4,))}


X = np.random.default_rng(1).normal(size=(16, 8))


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


def contributions(mesh, shape, dtype=np.float32, bad=None, value=np.nan):
    """A Partial gradient; ``bad``: the device whose contribution has one value that isn't finite."""
    shards = [np.full(shape, i + 1, dtype) for i in range(mesh.shape["dp"])]
    if bad is not None:
        shards[bad][(0,) * len(shape)] = value
    return sk.from_local(shards, [P], mesh)


def same_bits(got, wanted):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    return all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("stage", "jit"),
    [
        (sk.ShardingStage1, True),
        (sk.ShardingStage3, True),
        pytest.param(sk.ShardingStage2, False, marks=pytest.mark.slow),
    ],
)
def test_finite_steps_are_those_without(stage, jit, mesh_for):
    """The scale grows meanwhile. Powers of two round nothing: to the bit, where no compiler fuses differently."""
    mesh = mesh_for({"dp": 4})
    placed = jax.tree.map(lambda x: sk.shard_tensor(x, [R], mesh), params_of())
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    plain = sk.shard_optimizer(inner, stage("dp"))
    scaled = sk.shard_optimizer(sk.dynamic_loss_scale(inner, initial_scale=8.0, growth_interval=2), stage("dp"))

    def step(params, state, x, tx):
        def scaled_loss(p, x):
            return loss(p, x) * (sk.loss_scale(state) if tx is scaled else 1)

        _, grads = sk.value_and_grad(scaled_loss, batch_axes="dp", mesh=mesh)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step, static_argnums=3) if jit else step
    results = []
    for tx in (plain, scaled):
        params, state = placed, tx.init(placed)
        for _ in range(5):
            params, state = jax.block_until_ready(run(params, state, X, tx))
        results.append((params, state))
    (wanted, wanted_state), (got, state) = results
    pairs = [(got, wanted), (state.inner.inner, wanted_state.inner)]
    for ours, theirs in pairs if jit else ():
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-12, atol=1e-15)
    assert jit or all(same_bits(*pair) for pair in pairs)
    assert float(sk.loss_scale(state)) == 32 and int(state.inner.good_steps) == 1 and int(state.inner.skipped) == 0


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.not_smoke
@pytest.mark.every(2)
def test_what_one_device_finds_skips_the_step_on_all(bad, axis_types, mesh_for, ambient):
    mesh = mesh_for({"dp": 4}, axis_types)
    params = {"w": sk.shard_tensor(np.ones((8, 4), np.float32), [R], mesh)}
    tx = sk.shard_optimizer(sk.dynamic_loss_scale(optax.adam(0.1), initial_scale=8.0), sk.ShardingStage2("dp"))
    good, nan = ({"w": contributions(mesh, (8, 4), bad=which)} for which in (None, bad))
    with ambient(mesh):
        for update in (tx.update, jax.jit(tx.update)):
            _, before = jax.block_until_ready(update(good, tx.init(params), params))
            updates, after = jax.block_until_ready(update(nan, before, params))
            assert [np.asarray(x.data).any() for x in updates["w"].addressable_shards] == [False] * 4
            assert same_bits(after.inner.inner, before.inner.inner)
            assert all(float(x.data) == 4 for x in sk.loss_scale(after).addressable_shards)
            assert (int(after.inner.good_steps), int(after.inner.skipped)) == (0, 1)
            for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
                assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            updates, after = jax.block_until_ready(update(good, after, params))
            assert np.all(np.asarray(updates["w"]) < 0) and int(after.inner.good_steps) == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.not_smoke
def test_an_overflow_of_the_sum_skips(dtype, mesh_for):
    """Every contribution is finite, their sum isn't."""
    mesh = mesh_for({"dp": 4})
    params = {"w": sk.shard_tensor(np.ones((8, 4), np.float32), [R], mesh)}
    tx = sk.shard_optimizer(sk.dynamic_loss_scale(optax.sgd(0.1)), sk.ShardingStage1("dp"))
    top = float(jnp.finfo(dtype).max)
    grads = {"w": sk.from_local([np.full((8, 4), top / 2, dtype)] * 4, [P], mesh)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert not np.any(np.asarray(updates["w"])) and float(sk.loss_scale(state)) == 2.0**14


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_short_floats_keep_small_gradients(dtype, mesh_for):
    """Divided in the dtype of the gradients they'd be zero, or rounded; so would moments kept in it."""
    mesh = mesh_for({"dp": 4})
    tiny = 2.0**-28  # under the smallest subnormal of float16
    params = {"w": sk.shard_tensor(np.zeros((8, 4), dtype), [R], mesh)}
    grads = {"w": sk.from_local([np.full((8, 4), tiny * 2.0**15 / 4, dtype)] * 4, [P], mesh)}
    tx = sk.shard_optimizer(sk.dynamic_loss_scale(optax.sgd(1.0, momentum=0.5)), sk.ShardingStage1("dp"))
    state = tx.init(params)
    shapes = jax.tree.map(lambda x: x.dtype, state)
    for momentum in (1.0, 1.5):
        updates, state = tx.update(grads, state, params)
        assert updates["w"].dtype == np.float32
        np.testing.assert_array_equal(np.asarray(updates["w"]), np.float32(-momentum * tiny))
    assert jax.tree.map(lambda x: x.dtype, state) == shapes
    assert optax.apply_updates(params, updates)["w"].dtype == dtype


@pytest.mark.not_smoke
def test_growth_and_bounds():
    tx = sk.dynamic_loss_scale(
        optax.sgd(1.0), initial_scale=2.0, growth_interval=2, factor=4.0, min_scale=1.0, max_scale=20.0
    )
    params = jnp.ones(2)
    state, scales = tx.init(params), []
    for value in [1, 1, 1, np.inf, 1, 1, 1, 1, 1, 1, np.nan, -np.inf, np.nan, np.nan, 1]:
        _, state = tx.update(jnp.array([1.0, value]), state, params)
        scales.append(float(sk.loss_scale(state)))
    assert scales == [2, 8, 8, 2, 2, 8, 8, 20, 20, 20, 5, 1.25, 1, 1, 1]
    assert (int(state.good_steps), int(state.skipped)) == (1, 5)


@pytest.mark.not_smoke
def test_extra_arguments_and_no_parameters():
    tx = sk.dynamic_loss_scale(optax.polyak_sgd(1.0), initial_scale=4.0)
    params = jnp.array([1.0, 2.0])
    updates, _ = tx.update(4 * params, tx.init(params), params, value=jnp.sum(params**2) / 2)
    wanted, _ = optax.polyak_sgd(1.0).update(params, optax.polyak_sgd(1.0).init(params), params, value=2.5)
    np.testing.assert_array_equal(updates, wanted)
    plain = sk.dynamic_loss_scale(optax.sgd(1.0), initial_scale=4.0)
    np.testing.assert_array_equal(plain.update(4 * params, plain.init(params))[0], -params)


@pytest.mark.not_smoke
def test_costs_no_reduction(mesh_for):
    """Beside the optimizer without it: sums of scalars only."""
    mesh = mesh_for({"dp": 4})
    params = {f"w{i}": sk.shard_tensor(np.ones((8, 8), np.float32), [R], mesh) for i in range(3)}
    grads = {k: contributions(mesh, (8, 8)) for k in params}

    def report(tx):
        tx = sk.shard_optimizer(tx, sk.ShardingStage2("dp"))
        return sk.collectives(tx.update, grads, tx.init(params), params)

    def large(tx):
        return sorted((c.kind, c.result_bytes) for c in report(tx) if c.result_bytes > 64)

    assert large(sk.dynamic_loss_scale(optax.adam(1e-2))) == large(optax.adam(1e-2)) != []
    added = [c for c in report(sk.dynamic_loss_scale(optax.adam(1e-2))) if c.result_bytes <= 64]
    assert {c.kind for c in added} == {"all_reduce"}


def test_where_the_scale_is_found(mesh_for):
    mesh = mesh_for({"dp": 4})
    params = {"w": sk.shard_tensor(np.ones((8, 4)), [R], mesh)}
    scaled = sk.dynamic_loss_scale(optax.adam(0.1), initial_scale=16.0)
    for tx in (
        scaled,
        optax.chain(optax.identity(), scaled),
        optax.MultiSteps(scaled, 2),
        sk.shard_optimizer(scaled, sk.ShardingStage1("dp")),
        sk.shard_optimizer(optax.masked(scaled, {"w": True}), sk.ShardingStage1("dp")),
    ):
        assert float(sk.loss_scale(tx.init(params))) == 16
    with refuses("loss_scale found no LossScaleState in the optimizer's state"):
        sk.loss_scale(optax.adam(0.1).init(params))
    for twice in (optax.chain(scaled, scaled), sk.dynamic_loss_scale(scaled)):
        with refuses("loss_scale found 2 LossScaleState"):
            sk.loss_scale(twice.init(params))


def test_refused(axis_types, mesh_for, ambient):
    mesh = mesh_for({"dp": 4}, axis_types)
    tx = sk.dynamic_loss_scale(optax.sgd(0.1))
    params = {"w": sk.shard_tensor(np.ones((8, 4), np.float32), [R], mesh)}
    grads = contributions(mesh, (8, 4))
    with ambient(mesh):
        for given in [grads] + ([sk.to_unreduced(grads)] if axis_types == "explicit" else []):
            with refuses("dynamic_loss_scale needs reduced gradients, but got", TypeError):
                tx.update({"w": given}, tx.init(params), params)
            with refuses("put it inside: sk.shard_optimizer(sk.dynamic_loss_scale(tx), stage)", TypeError):
                jax.jit(tx.update)({"w": given}, tx.init(params), params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_scale": 0.5}, "got min_scale=1.0, initial_scale=0.5, max_scale=16777216.0"),
        ({"initial_scale": 2.0**25}, "needs 0 < min_scale <= initial_scale <= max_scale, all finite"),
        ({"min_scale": 0.0}, "got min_scale=0.0"),
        ({"max_scale": np.inf}, "max_scale=inf"),
        ({"initial_scale": np.nan}, "initial_scale=nan"),
        ({"factor": 1.0}, "factor=1.0 must be finite and greater than 1"),
        ({"factor": np.nan}, "factor=nan must be finite"),
        ({"growth_interval": 0}, "growth_interval=0 must be a whole number of steps, at least 1"),
        ({"growth_interval": 1.5}, "growth_interval=1.5 must be a whole number"),
    ],
    ids=str,
)
def test_options_refused(options, message):
    with refuses(message):
        sk.dynamic_loss_scale(optax.sgd(0.1), **options)
