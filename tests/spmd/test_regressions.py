"""What random programs found, each as small as it gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import shardkit as sk
from shardkit.spmd import partition
from tests.spmd.rule_cases import check, found, placed

SIZES = {"dp": 2, "tp": 4}
X = np.random.default_rng(0).normal(size=(8, 16))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.stack([x, x], axis=1),
        lambda x: jnp.stack([x, x], axis=2),
        lambda x: jnp.unstack(x, axis=0),
        lambda x: jnp.unstack(x, axis=1),
        lambda x: lax.optimization_barrier(x),
        lambda x: checkpoint_name(x, "x"),
        lambda x: jax.device_put(x),
        lambda x: lax.bitcast_convert_type(x, jnp.int64),
        lambda x: lax.bitcast_convert_type(x, jnp.int32),
        lambda x: lax.reduce(x, np.float64(0), lambda a, b: a + 2 * b * 0.5, (1,)),
    ],
)
@pytest.mark.parametrize("where", [placed("dp", "tp"), placed(None, "tp"), placed(("dp", "tp"), None)])
@pytest.mark.every(3)
def test_operations_that_had_no_rule(fun, where):
    check(fun, (X,), [where], SIZES)


@pytest.mark.parametrize("reps", [(2, 1), (1, 3), (2, 2)])
def test_tile(reps):
    check(lambda x: jnp.tile(x, reps), (X,), [placed("dp", "tp")], SIZES)
    check(lambda x: jnp.tile(x, reps), (X[:7],), [placed("dp", "tp")], SIZES)


def test_tile_of_one_element_makes_its_own_part():
    wish = placed("tp", None)
    ways = check(lambda x: jnp.tile(x, (8, 1)), (X[:1],), [placed(None, None)], SIZES, [wish])
    assert wish in {w.results[0] for w in ways}


def test_xor():
    check(lambda x: lax.reduce_xor(x, (1,)), ((X * 100).astype(int),), [placed("dp", "tp")], SIZES)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("shape", [(8, 64), (32, 4, 4), (512,)])
@pytest.mark.every(3)
def test_reshape_of_dims_in_another_order(order, shape):
    x = np.random.default_rng(0).normal(size=(8, 16, 4))
    fun = lambda x: lax.reshape(x, shape, order)  # noqa: E731
    for where in (placed("dp", "tp", None), placed("tp", None, "dp"), placed(None, ("dp", "tp"), None)):
        check(fun, (x,), [where], SIZES)


def test_keys_of_the_old_kind():
    data = np.arange(16, dtype="uint32").reshape(8, 2)
    _, _, ways = found(lambda x: jax.random.wrap_key_data(x), (data,), [placed("dp", None)], SIZES)
    assert placed("dp") in {w.results[0] for w in ways}


@pytest.mark.parametrize("goal", [{"dp": sk.Shard(0)}, {"tp": sk.Shard(1)}])
def test_slice_that_starts_too_late_and_is_cut_then(goal):
    # XLA of jaxlib 0.10 merges two dynamic slices without clamping the first.
    mesh = sk.make_mesh(SIZES)
    run = partition(lambda x, i: lax.dynamic_slice(x, (i, i), (2, 16)), None, goal, mesh=mesh)
    for start in (0, 3, 7):
        np.testing.assert_array_equal(run(X, start), lax.dynamic_slice(X, (start, start), (2, 16)))
