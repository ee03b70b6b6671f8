"""Rules told in letters: elementwise, contraction, reduction, arranging dims."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.rule_cases import check, found, placed

SIZES = {"dp": 2, "tp": 4}
rng = np.random.default_rng(0)
X = rng.normal(size=(8, 16))
W = rng.normal(size=(16, 8))


def results(ways):
    return {w.results[0] for w in ways}


def test_matmul_column():
    ways = check(
        lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        (X, W),
        [placed(None, None), placed(None, "tp")],
        SIZES,
    )
    assert placed(None, "tp") in results(ways)


def test_matmul_row():
    ways = check(
        lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        (X, W),
        [placed("dp", "tp"), placed("tp", None)],
        SIZES,
    )
    assert placed("dp", None, partial=("tp",)) in results(ways)


def test_uneven_contraction_is_masked():
    check(
        lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        (X[:, :7], W[:7]),
        [placed("dp", "tp"), placed("tp", None)],
        SIZES,
    )


def test_partial_passes():
    ways = check(
        lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        (X, W),
        [placed("dp", None, partial=("tp",)), placed(None, None)],
        SIZES,
    )
    assert placed("dp", None, partial=("tp",)) in results(ways)


@pytest.mark.parametrize("fun", [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.arctan2])
@pytest.mark.every(2)
def test_binary(fun):
    check(lambda x, y: fun(x, y), (X, X[::-1]), [placed("dp", "tp"), placed(None, "tp")], SIZES)
    check(lambda x, y: fun(x, y), (X, X[::-1]), [placed("dp", None, partial=("tp",)), placed(None, "tp")], SIZES)


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
def test_reductions(name):
    fun = getattr(lax, f"reduce_{name}")
    check(lambda x: fun(x, (1,)), (X,), [placed("dp", "tp")], SIZES)
    check(lambda x: fun(x, (0,)), (X[:7],), [placed("dp", "tp")], SIZES)


def test_reshape():
    x = rng.normal(size=(8, 4, 6))
    assert placed(("dp", "tp"), None) in results(
        check(lambda x: lax.reshape(x, (32, 6)), (x,), [placed(("dp", "tp"), None, None)], SIZES)
    )
    assert placed("dp", "tp", None) in results(
        check(lambda x: lax.reshape(x, (2, 4, 24)), (x,), [placed(("dp", "tp"), None, None)], SIZES)
    )
    check(lambda x: lax.reshape(x, (24, 8)), (x,), [placed("dp", "tp", None)], SIZES)


def test_arranging():
    check(lambda x: lax.transpose(x, (1, 0)), (X,), [placed("dp", "tp")], SIZES)
    check(lambda x: lax.broadcast_in_dim(x, (3, 8, 16), (1, 2)), (X,), [placed("dp", "tp")], SIZES)
    check(lambda x: lax.rev(x, (0,)), (X,), [placed("dp", "tp")], SIZES)
    check(lambda x: lax.slice(x, (0, 2), (8, 10)), (X,), [placed("dp", "tp")], SIZES)
    check(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0))), (X,), [placed("dp", "tp")], SIZES)
    check(lambda x, y: lax.concatenate([x, y], 1), (X, X), [placed("dp", "tp"), placed(None, None)], SIZES)


def test_iota():
    _, _, ways = found(lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1), (), [], SIZES, [placed("dp", "tp")])
    assert placed("dp", "tp") in results(ways)
    check(lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1), (), [], SIZES, [placed("dp", "tp")])
