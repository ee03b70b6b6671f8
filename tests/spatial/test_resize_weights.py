"""Bands of weights against jax.image itself: an identity matrix, resized, shows the weight matrix."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from shardkit.spatial.resizing.plan import plan_dim
from shardkit.spatial.resizing.weights import METHODS, Resampling, dense, resize_band

WEIGHTED = [m for m in METHODS if m != "nearest"]
SIZES = [(1, 5), (12, 4), (5, 13), (30, 29), (40, 3)]


def matrix(dim: Resampling):
    band = resize_band(dim)
    return dense(band.starts, band.weights, dim.size)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("method", WEIGHTED)
@pytest.mark.every(2)
def test_resize_weights_are_those_of_jax(method, antialias):
    for size, out in SIZES:
        got = matrix(Resampling(size, out, 1.0 / (out / size), 0.0, method, antialias, "float64"))
        want = jax.image.resize(jnp.eye(size), (size, out), method, antialias)
        np.testing.assert_allclose(got, want, atol=1e-12, err_msg=f"{size} -> {out}")


@pytest.mark.parametrize("method", WEIGHTED)
@pytest.mark.every(3)
@pytest.mark.not_smoke
def test_weights_of_other_warps(method):
    for antialias, scale, shift in [(True, 0.4, 2.3), (False, 1.7, -3.1), (True, 1.0, 1.0), (True, -0.8, 9.5)]:
        inverse = 1.0 / np.float64(scale)
        got = matrix(Resampling(11, 9, float(inverse), float(shift * inverse), method, antialias, "float64"))
        want = jax.image.scale_and_translate(
            jnp.eye(11), (11, 9), (1,), jnp.array([scale]), jnp.array([shift]), method, antialias
        )
        np.testing.assert_allclose(got, want, atol=1e-12, err_msg=f"{scale} {shift}")


@pytest.mark.parametrize("method", WEIGHTED)
@pytest.mark.every(3)
@pytest.mark.not_smoke
def test_single_precision(method):
    with jax.enable_x64(False):
        for size, out in SIZES:
            got = matrix(Resampling(size, out, 1.0 / (out / size), 0.0, method, True, "float32"))
            want = jax.image.resize(jnp.eye(size, dtype=np.float32), (size, out), method)
            assert got.dtype == want.dtype == np.float32
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.not_smoke
def test_nearest_is_exact():
    """Where (o + 1/2) * size / out is no integer jax says the same; where it is, jax may be one below."""
    for size in (1, 7, 16, 30):
        for out in (1, 8, 15, 25, 29):
            outputs = np.arange(out)
            got = resize_band(Resampling(size, out, 1.0, method="nearest")).starts
            np.testing.assert_array_equal(got, [((2 * o + 1) * size) // (2 * out) for o in range(out)])
            want = np.asarray(jax.image.resize(jnp.arange(size), (out,), "nearest"))
            tie = (2 * outputs + 1) * size % (2 * out) == 0
            assert ((got == want) | (tie & (got == want + 1))).all(), (size, out)


@pytest.mark.parametrize(
    ("dim", "shards", "elements", "permutes"),
    [
        (Resampling(16, 32, 0.5), 4, 2, 2),  # bilinear, twice: one from either side
        (Resampling(16, 8, 2.0, antialias=False), 4, 0, 0),  # pairs averaged: all at home
        (Resampling(16, 8, 2.0), 4, 2, 2),
        (Resampling(16, 8, 2.0, method="area"), 4, 0, 0),
        (Resampling(98, 2, 49.0, method="area"), 2, 0, 0),
        (Resampling(16, 8, 1.0, method="nearest"), 4, 0, 0),
        (Resampling(16, 32, 1.0, method="nearest"), 4, 0, 0),
        (Resampling(16, 32, 0.5, method="lanczos3"), 4, 6, 2),
        (Resampling(16, 2, 8.0, method="area"), 4, 12, 4),  # two shards do all: 8 of which others hold
    ],
)
def test_what_travels(dim, shards, elements, permutes):
    exchange = plan_dim(dim, shards).exchange
    assert exchange.permutes <= permutes
    assert exchange.received <= elements


@pytest.mark.parametrize(("size", "out"), [(1200, 600), (600, 1200), (1000, 903)])
def test_chunks_read_what_their_outputs_need(size, out):
    """The matrices of chunks, put where they belong, are the dense weight matrix of every shard."""
    dim = Resampling(size, out, size / out, dtype="float64")
    plan = plan_dim(dim, 2)
    assert len(plan.chunks) > 1
    whole = matrix(dim)
    exchange = plan.exchange
    for shard in range(2):
        first = shard * exchange.block - exchange.reach_lo + (0 if plan.whole_line else exchange.starts[shard])
        column = shard * plan.out_block
        for chunk in plan.chunks:
            count = min(chunk.outputs, out - column)
            local = dense(chunk.offsets[shard], chunk.weights[shard], chunk.length)[:, :count]
            rows = first + chunk.start + np.arange(chunk.length)
            inside = (rows >= 0) & (rows < size)
            assert not local[~inside].any()
            want = whole[:, column : column + count]
            np.testing.assert_array_equal(local[inside], want[rows[inside]])
            np.testing.assert_allclose(local.sum(0), want.sum(0), atol=1e-12)
            column += count
