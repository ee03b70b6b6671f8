"""How often neighbours exchange: k times less for every k-th layer, and nothing but permutes where nothing leaves."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.regions import region
from tests.spatial.regions.programs import check, conv, derivatives, kernels_of, plan_of, stack

W = {"sp": "W"}


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).normal(size=(2, 4, 16, 2))


@pytest.fixture(scope="module")
def kernels():
    return kernels_of(np.random.default_rng(1), *[(3, 3, 2, 2)] * 4)


def others(report) -> dict[str, int]:
    return {kind: n for kind, n in report.by_kind().items() if kind not in ("collective_permute", "all_reduce")}


def diffuse(x):
    for _ in range(4):
        x = x + 0.1 * (jnp.roll(x, 1, 2) + jnp.roll(x, -1, 2) - 2 * x)
    return x


def looped(x):
    return jax.lax.scan(lambda c, _: (c + 0.1 * (jnp.roll(c, 1, 2) - jnp.roll(c, -1, 2)), None), x, length=4)[0]


@pytest.fixture(scope="module")
def want(image, kernels):
    return jax.jit(derivatives(stack))(image, kernels)


@pytest.mark.parametrize(("every", "permutes"), [(1, 8), (2, 4), (4, 2)])
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_permutes_of_a_stack(every, permutes, image, kernels, want, mesh_for):
    mesh = mesh_for({"sp": 4})
    found = check(stack, image, kernels, mesh=mesh, axes=W, every=every, want=want)
    assert sk.placements(found.out) == (sk.Shard(2),)
    assert sk.placements(found.grads[0]) == (sk.Shard(2),)
    assert not found.plan.left and not others(found.report)
    assert found.report.count("collective_permute") == 2 * permutes
    assert found.report.count("all_reduce") == 1  # kernels' gradients, together
    forward = region(stack, spatial_axes=W, mesh=mesh, exchange_every=every)
    assert sk.collectives(jax.jit(forward), image, kernels).by_kind() == {"collective_permute": permutes}


@pytest.mark.parametrize(("every", "permutes"), [(1, 8), (2, 4), (4, 2), pytest.param(9, 2, marks=pytest.mark.slow)])
@pytest.mark.every(2)
def test_permutes_of_a_stencil(every, permutes, image, mesh_for):
    found = check(diffuse, image, mesh=mesh_for({"sp": 4}), axes=W, every=every)
    assert found.report.by_kind() == {"collective_permute": 2 * permutes}


@pytest.mark.parametrize("every", [2, 4, pytest.param(1, marks=pytest.mark.slow)])
def test_permutes_of_a_loop(every, image, mesh_for):
    # In the text of the program a loop's turn stands once.
    found = check(looped, image, mesh=mesh_for({"sp": 4}), axes=W, every=every)
    assert found.report.by_kind() == {"collective_permute": 4}
    (loop,) = [s for s in found.plan.steps if s.inner]
    ((_, turns),) = loop.inner
    assert turns == 4 // every


def test_auto_is_right(image, kernels, want, mesh_for):
    found = check(stack, image, kernels, mesh=mesh_for({"sp": 4}), axes=W, every="auto", want=want)
    assert not others(found.report)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_corners_take_two_passes(every, image, kernels, want, mesh_for):
    mesh = mesh_for({"a": 2, "b": 4})
    found = check(stack, image, kernels, mesh=mesh, axes={"a": "H", "b": "W"}, every=every, want=want)
    assert sk.placements(found.out) == (sk.Shard(1), sk.Shard(2))
    # On two devices both neighbours are one: a permute each way all the same.
    assert found.report.count("collective_permute") == 2 * 4 * (4 // every)
    assert not others(found.report)


@pytest.mark.parametrize(
    "size", [13, pytest.param(16, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.not_smoke
def test_margins_wider_than_the_neighbours_block(size, image, mesh_for):
    """Six layers reach six elements: over three blocks of two, or all of them."""
    kernels = kernels_of(np.random.default_rng(1), *[(1, 3, 2, 2)] * 6)
    mesh = mesh_for({"sp": 8})
    check(stack, image[:, :1, :size], kernels, mesh=mesh, axes=W, every=6)


@pytest.mark.parametrize(("every", "permutes"), [(3, 2), pytest.param(1, 6, marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_a_u_net(every, permutes, image, mesh_for):
    def net(x, ks):
        first = jax.nn.relu(conv(x, ks[0]))
        down = jax.lax.reduce_window(first, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        down = jax.nn.relu(conv(down, ks[1]))
        up = conv(down, ks[2], padding=1, lhs_dilation=(2, 2))
        return conv(jnp.concatenate([first, up], -1), ks[3])

    ks = kernels_of(np.random.default_rng(1), (3, 3, 2, 4), (3, 3, 4, 4), (2, 2, 4, 4), (3, 3, 8, 2))
    image = np.concatenate([image, image], 2)
    found = check(net, image, ks, mesh=mesh_for({"sp": 4}), axes=W, every=every)
    assert found.report.by_kind() == {"collective_permute": 2 * permutes, "all_reduce": 1}


@pytest.mark.not_smoke
def test_norms_sum_and_nothing_else(image, kernels, mesh_for):
    def net(x, ks):
        for k in ks[:2]:
            x = conv(x, k)
            x = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
            x = jax.nn.softmax(x)
        return x, x.max((1, 2)), jnp.mean(x)

    found = check(net, image, kernels, mesh=mesh_for({"sp": 4}), axes=W)
    assert not others(found.report) and found.report.count("collective_permute") == 8
    assert [sk.placements(o) for o in found.out] == [(sk.Shard(2),), (sk.Replicate(),), (sk.Replicate(),)]


def test_a_plan_counts_its_exchanges(image, kernels, mesh_for):
    for every, exchanges in ((1, 4), (2, 2), (3, 2), (4, 1)):
        made = region(stack, spatial_axes=W, mesh=mesh_for({"sp": 4}), exchange_every=every)
        plan = plan_of(made, image, kernels)
        assert (plan.exchanges, plan.left) == (exchanges, [])


def test_what_is_the_same_everywhere_is_summed_while_it_is_small():
    """Means and scales are spread over an image: their gradients are summed over the mesh before, not after."""

    def net(x, k, scale):
        y = conv(x, k)
        mean = y.mean((1, 2), keepdims=True)
        y = (y - mean) * jax.lax.rsqrt(((y - mean) ** 2).mean((1, 2), keepdims=True) + 1e-5)
        return (y * scale + jnp.ones(y.shape) * scale.sum()).sum()

    mesh, x, k = sk.make_mesh({"sp": 4}), jnp.ones((1, 8, 32, 3)), jnp.ones((3, 3, 3, 3))
    made = sk.spatial.region(net, spatial_axes={"sp": "W"}, mesh=mesh, exchange_every=1)
    report = sk.collectives(jax.jit(jax.grad(made, (0, 1, 2))), x, k, jnp.ones(3))
    assert report.bytes() < 8 * 32 * 3 * 8 / 2, report  # half an image of float64
