"""Where no element stands (margins beyond the ends, padded tails): nothing there reaches a value or a gradient."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from tests.spatial.regions.programs import check, conv, kernels_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(1, 2, 16, 2))
K = kernels_of(RNG, (3, 3, 2, 2))[0]
WIDTHS = 1 + np.abs(RNG.normal(size=(16, 1)))
W = {"sp": "W"}


def logarithm(x, k, a):
    return conv(jnp.sqrt(1 + jnp.log(jnp.abs(conv(x, k)) * a) ** 2), k)


def deviation(x, k, a):
    y = conv(x, k) * a
    return conv(y / (jnp.std(y, -1, keepdims=True) + 0.1), k)


def quotient(x, k, a):
    return conv(conv(x, k) * a / WIDTHS[: x.shape[2]], k)


def extremes(x, k, a):
    y = lax.reduce_window(conv(x, k), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return conv(conv(y * a, k), k)


def masked(x, k, a):
    kept = (jnp.arange(x.shape[2]) % 5 < 2)[:, None]
    y = jnp.where(kept, conv(x, k) * a, -1e30)
    return jax.nn.softmax(y, axis=2), conv(jnp.where(kept, x, 0), k), y.max((1, 2))


@pytest.mark.parametrize("fun", [logarithm, quotient, extremes])
@pytest.mark.not_smoke
def test_poles_outside(fun, mesh_for):
    """Margins and a tail."""
    check(fun, X[:, :, :13], K, 1.3, mesh=mesh_for({"sp": 4}), axes=W, every=4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 14, 5])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("fun", [logarithm, deviation, quotient, extremes, masked])
def test_poles_outside_in_full(fun, every, size, mesh_for):
    check(fun, X[:, :, :size], K, 1.3, mesh=mesh_for({"sp": 8}), axes=W, every=every)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_circle_cut_open_has_ends(every, mesh_for):
    """Rolled and cropped, or padded on one side only: what stands beyond is no longer what goes round."""

    def cropped(x, k):
        y = conv(jnp.tanh(jnp.roll(x, 1, 2)[:, :, :-1]), k)
        z = conv(jnp.pad(x, ((0, 0), (0, 0), (1, 0), (0, 0)), "wrap"), k, 1, [(1, 1), (0, 0)])
        return y, conv(jnp.tanh(z), k)

    check(cropped, X, K, mesh=mesh_for({"sp": 4}), axes=W, every=every)
