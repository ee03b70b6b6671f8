"""Sorts, the largest, cumulative sums."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardkit.reshard.cost import wire_bytes
from shardkit.spmd.rules.strategy import Traffic
from tests.spmd.rule_cases import check, placed

SIZES = {"dp": 2, "tp": 4}
rng = np.random.default_rng(0)
X = rng.normal(size=(4, 16))
TIES = rng.integers(-3, 1, size=(4, 16)).astype(float)
NANS = np.where(rng.random((4, 16)) < 0.2, np.nan, -abs(X))
NANS[0, 2:9] = -np.inf
NANS[1, 12] = -np.nan
LOW = np.full((4, 16), -np.inf)


def way_of(ways, operand, result):
    (found,) = (w for w in ways if w.operands[0] == operand and w.results[0] == result)
    return found


def test_sort():
    def fun(x, y):
        return lax.sort((x, y), dimension=1, num_keys=1)

    ways = check(fun, (TIES[:3], X[:3]), [placed("dp", None), placed(None, "tp")], SIZES)
    assert way_of(ways, placed("dp", None), placed("dp", None))
    assert all(not axes for w in ways for axes in (w.operands[0].dims[1], w.results[1].dims[1]))


@pytest.mark.parametrize("fun", [lax.argmax, lax.argmin])
@pytest.mark.every(2)
def test_argmax_over_a_cut_dim(fun):
    place = placed("dp", "tp")
    for x in (NANS, TIES):
        ways = check(lambda x: fun(x, 1, jnp.int32), (x,), [place], SIZES)
        way = way_of(ways, place, placed("dp"))
        expected = [Traffic("all_gather", ("tp",), wire_bytes("all_gather", 2 * 4 * n, 4)) for n in (8, 4)]
        assert list(way.traffic) == expected


@pytest.mark.not_smoke
def test_argmax_in_other_orders_and_dtypes():
    place = placed(None, ("tp", "dp"))
    assert way_of(check(lambda x: lax.argmax(x, 1, jnp.int32), (LOW[:, :11],), [place], SIZES), place, placed(None))
    for x in (TIES[:, :13].astype(np.int8), TIES > -2):
        check(lambda x: lax.argmax(x, 1, jnp.int32), (x,), [placed(None, "tp")], {"tp": 4})
    check(lambda x: lax.argmin(x, 0, jnp.int64), (X.T[:13],), [placed("tp", "dp")], SIZES)


def test_top_k_over_a_cut_dim():
    place = placed("dp", "tp")
    way = way_of(check(lambda x: lax.top_k(x, 3), (TIES,), [place], SIZES), place, placed("dp", None))
    assert [t.bytes for t in way.traffic] == [wire_bytes("all_gather", 2 * 3 * 4 * n, 4) for n in (8, 4)]
    for x in (NANS[:, :14].astype(jnp.bfloat16), TIES[:, :14].astype(np.int32)):
        check(lambda x: lax.top_k(x, 3), (x,), [placed(None, "tp")], {"tp": 4})
    few = check(lambda x: lax.top_k(x, 5), (TIES,), [placed(None, "tp")], {"tp": 4})
    assert all(not w.operands[0].dims[1] for w in few)


@pytest.mark.not_smoke
def test_top_k_over_several_axes():
    place = placed(None, ("tp", "dp"))
    assert way_of(check(lambda x: lax.top_k(x, 2), (TIES,), [place], SIZES), place, placed(None, None))


def test_top_k_finds_no_padding():
    """Floats are ordered by their bits: there are nans below minus infinity."""
    x = np.full((2, 7), -np.nan)
    assert way_of(
        check(lambda x: lax.top_k(x, 2), (x,), [placed(None, "tp")], SIZES), placed(None, "tp"), placed(None, None)
    )


def test_approx_top_k():
    ways = check(lambda x: tuple(lax.approx_max_k(x, 4)), (X,), [placed("dp", "tp")], SIZES)
    assert way_of(ways, placed("dp", None), placed("dp", None))


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
@pytest.mark.every(2)
def test_cumulative_over_a_cut_dim(name):
    fun = getattr(lax, name)
    place = placed("dp", "tp")
    ways = check(lambda x: fun(x, axis=1), (X - 1.5,), [place], SIZES)
    assert way_of(ways, place, place).traffic == (
        Traffic("all_gather", ("tp",), wire_bytes("all_gather", 2 * 4 * 8, 4)),
    )
    check(lambda x: fun(x, axis=1, reverse=True), (X[:, :13] - 1.5,), [placed(None, "tp")], SIZES)


@pytest.mark.not_smoke
def test_cumulative_with_nan_and_in_other_orders():
    place = placed(None, ("tp", "dp"))
    for fun, x in (
        (lax.cummax, NANS),
        (lax.cumlogsumexp, NANS),
        (lax.cummin, TIES.astype(np.int32)),
    ):
        assert way_of(check(lambda x, f=fun: f(x, axis=1, reverse=True), (x,), [place], SIZES), place, place)


@pytest.mark.not_smoke
def test_cumulative_of_contributions():
    kinds = {lax.cumsum: "sum", lax.cummax: "max", lax.cumprod: "prod"}
    for fun, kind in kinds.items():
        place = placed(None, None, partial=("tp",), reduce=kind)
        assert way_of(check(lambda x, f=fun: f(x, axis=1), (X,), [place], SIZES), place, place)
