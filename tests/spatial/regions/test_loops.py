"""``lax.scan`` in regions: turns that share an exchange, what is carried, sliced and stacked."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.regions import region
from tests.spatial.regions.programs import check, conv, kernels_of, same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(1, 2, 32, 2))
KERNEL = kernels_of(RNG, (3, 3, 2, 2))[0]
W = {"sp": "W"}


def smoothed(x, k):
    """Seven turns, with a mean a turn."""

    def turn(c, _):
        c = jnp.tanh(conv(c, k))
        return c, c.mean()

    return lax.scan(turn, x, None, length=7)


@pytest.mark.parametrize("every", [3, 9, pytest.param(1, marks=pytest.mark.slow)])
def test_turns_that_exchange_divide_the_length_or_not(every, mesh_for):
    found = check(smoothed, X, KERNEL, mesh=mesh_for({"sp": 4}), axes=W, every=every)
    assert [sk.placements(o) for o in found.out] == [(sk.Shard(2),), (sk.Replicate(),)]
    assert set(found.report.by_kind()) == {"collective_permute", "all_reduce"}
    # A text of one loop, or of a loop and what is left over, forward and back.
    loops = 1 + (every == 3)
    assert found.report.count("collective_permute") == 4 * loops


def carried(reverse):
    """Two carries in blocks, one of zeros to begin with, and a counter; slices and results, some in blocks."""

    def run(x, k):
        def turn(c, s):
            a, b, i = c
            after = jnp.tanh(conv(a, k) + s["t"]), b + 0.1 * jnp.roll(a, 1, 2) * s["w"], i + 1
            return after, {"mean": after[0].mean(), "some": after[1][:, :1], "i": i}

        xs = {"t": jnp.arange(5.0), "w": x[None, ..., :1] * jnp.arange(5.0).reshape(5, 1, 1, 1, 1)}
        (a, b, i), ys = lax.scan(turn, (x, jnp.zeros_like(x), 0), xs, reverse=reverse)
        return a, b, ys["mean"], ys["some"], (i + ys["i"]).astype(x.dtype)

    return run


@pytest.mark.parametrize("reverse", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_carries_slices_and_results(reverse, mesh_for):
    found = check(carried(reverse), X, KERNEL, mesh=mesh_for({"sp": 4}), axes=W, every=3)
    assert [sk.placements(o)[0] for o in found.out[:4]] == [sk.Shard(2), sk.Shard(2), sk.Replicate(), sk.Shard(3)]
    assert set(found.report.by_kind()) == {"collective_permute", "all_reduce"}


@pytest.mark.not_smoke
def test_keys_and_checkpoints_in_turns(mesh_for):
    def noisy(x, k):
        @jax.checkpoint
        def turn(c, key):
            return jax.nn.relu(conv(conv(c, k), k)) + jax.random.normal(key, c.shape, c.dtype), None

        return lax.scan(turn, x, jax.random.split(jax.random.key(0), 3))[0]

    check(noisy, X, KERNEL, mesh=mesh_for({"sp": 4}), axes=W, every=2)


def test_no_turns(mesh_for):
    def none(x, k):
        return lax.scan(lambda c, _: (conv(c, k), c.sum()), x, None, length=0)

    check(none, X, KERNEL, mesh=mesh_for({"sp": 4}), axes=W, every=2)


@pytest.mark.not_smoke
def test_a_loop_that_leaves_the_layout(mesh_for):
    def leaves(x, k):
        return lax.scan(lambda c, _: (jnp.sort(conv(c, k), 2), c.mean()), x, None, length=2)

    assert check(leaves, X, KERNEL, mesh=mesh_for({"sp": 4}), axes=W).plan.left


def test_counted_loops_and_branches(mesh_for):
    def run(x, k):
        x = lax.fori_loop(0, 3, lambda _, c: jnp.tanh(conv(c, k)), x)
        x = lax.cond(x.sum() > 0, lambda z: z + 1, lambda z: conv(z, k), x)
        return lax.while_loop(lambda c: c.sum() < -1e9, lambda c: c + 1, x)

    made = region(run, spatial_axes=W, mesh=mesh_for({"sp": 4}))
    same(jax.jit(made)(X, KERNEL), run(X, KERNEL))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("size", [32, 13])
def test_loops_on_more_meshes(devices, size, mesh_for):
    for every in (1, 2, 3, 5):
        check(carried(True), X[:, :, :size], KERNEL, mesh=mesh_for({"sp": devices}), axes=W, every=every)
        check(smoothed, X[:, :, :size], KERNEL, mesh=mesh_for({"sp": devices}), axes=W, every=every)


def test_a_loop_is_one_loop(mesh_for):
    """Forward: a turn's permutes stand in a loop, once."""
    made = region(smoothed, spatial_axes=W, mesh=mesh_for({"sp": 4}), exchange_every=7)
    report = sk.collectives(jax.jit(made), X, KERNEL)
    assert report.count("collective_permute") == 2


@pytest.mark.parametrize(("every", "permutes"), [(1, 2), ("auto", 4)])
def test_a_deep_body(every, permutes, monkeypatch):
    """A turn of several layers: one exchange for all, or (auto, where work counts) one a layer; beside a free axis."""
    from shardkit.spatial.regions import choose
    from shardkit.spatial.regions.platforms import Platform

    monkeypatch.setattr(choose, "platform_figures", lambda mesh, platform: Platform(1e-12, 1e15, 1e3, 1e15))
    mesh, kernels = sk.make_mesh({"dp": 2, "sp": 4}), kernels_of(np.random.default_rng(1), (3, 3, 2, 2), (3, 3, 2, 2))

    def net(x, kernels):
        def turn(c, _):
            for k in kernels:
                c = jnp.tanh(conv(c, k))
            return c, None

        return lax.scan(turn, x, None, length=3)[0]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 16, 2)))
    made = jax.jit(sk.spatial.region(net, spatial_axes={"sp": "W"}, mesh=mesh, exchange_every=every))
    same(made(x, kernels), net(x, kernels))
    assert sk.collectives(made, x, kernels).by_kind()["collective_permute"] == permutes
