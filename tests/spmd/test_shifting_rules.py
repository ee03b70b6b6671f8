"""Padding, cropping and slicing along cut dims: only edges travel."""

import numpy as np
import pytest
from jax import lax

from tests.spmd.rule_cases import check, placed

SIZES = {"dp": 2, "sp": 4}
rng = np.random.default_rng(0)
X = rng.normal(size=(4, 16, 3))
PLACE = [placed("dp", "sp", None)]


def along_space(ways):
    """The strategies that leave the dim cut, and what they receive."""
    found = [w for w in ways if w.results[0].dims[1] == ("sp",)]
    assert found
    return {w.bytes for w in found}


@pytest.mark.parametrize(
    "config", [(1, 1, 0), (2, 0, 0), (0, 3, 1), (-1, 1, 0), (-2, -3, 0), (1, 2, 2), (0, -1, 1), (5, 0, 0)]
)
@pytest.mark.parametrize("value", [0.0, -np.inf])
@pytest.mark.every(2)
def test_pad(config, value):
    if value and config[2] > 1:
        pytest.skip("one of the two is enough")
    ways = check(lambda x: lax.pad(x, value, ((0, 0, 0), config, (1, 0, 0))), (X,), PLACE, SIZES)
    assert max(along_space(ways)) < 3 * X[0].nbytes // 4 * 2


def test_pad_with_what_no_reduction_ignores():
    ways = check(lambda x: lax.pad(x, 1.5, ((0, 0, 0), (1, 1, 0), (0, 0, 0))), (X,), PLACE, SIZES)
    assert all(w.results[0].dims[1] == () for w in ways)


_MORE = [pytest.param(part, marks=pytest.mark.slow) for part in ((0, 15, 1), (0, 1, 1), (3, 13, 1))]


@pytest.mark.parametrize("part", [(1, 16, 1), (0, 16, 2), (1, 14, 3), (15, 16, 1), *_MORE])
def test_slice(part):
    start, limit, step = part
    along_space(check(lambda x: lax.slice(x, (0, start, 1), (4, limit, 3), (2, step, 1)), (X,), PLACE, SIZES))


@pytest.mark.not_smoke
def test_a_neighbours_edge_is_all_that_travels():
    ways = check(lambda x: lax.slice(x, (0, 1, 0), (4, 16, 3)), (X,), PLACE, SIZES)
    assert min(along_space(ways)) == 2 * 1 * 3 * 8
    aligned = check(lambda x: lax.slice(x, (0, 0, 0), (4, 16, 3), (1, 2, 1)), (X,), PLACE, SIZES)
    assert min(along_space(aligned)) == 0


@pytest.mark.not_smoke
def test_uneven_and_other_types():
    check(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0), (0, 0, 0))), (X[:, :13],), PLACE, SIZES)
    check(lambda x: lax.slice(x, (0, 2, 0), (4, 13, 3)), (X[:, :13],), PLACE, SIZES)
    whole = np.arange(4 * 16 * 3).reshape(4, 16, 3)
    check(lambda x: lax.pad(x, 0, ((0, 0, 0), (1, 1, 0), (0, 0, 0))), (whole,), PLACE, SIZES)
    check(lambda x: lax.slice(x, (0, 1, 0), (4, 16, 3)), (whole % 2 == 0,), PLACE, SIZES)


@pytest.mark.not_smoke
def test_partial_passes():
    places = [placed("dp", None, None, partial=("sp",))]
    for fun in (
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0), (0, 0, 0))),
        lambda x: lax.slice(x, (0, 1, 0), (4, 16, 3)),
    ):
        assert any(w.results[0].partial == ("sp",) for w in check(fun, (X,), places, SIZES))
