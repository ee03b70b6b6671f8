"""Blocks cut into chunks, as on TPUs: forced here, and carried from layer to layer."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.convolution.blocks import cut_into_chunks, why_not_chunks
from shardkit.spatial.convolution.method import choose_form
from shardkit.spatial.convolution.spec import Chunks
from shardkit.spatial.regions import block, windows
from tests.spatial.regions.programs import check, check_program, conv, draw, kernels_of, stack

RNG = np.random.default_rng(0)
W = {"sp": "W"}


@pytest.fixture
def chunked(monkeypatch):
    """``chunked(2, major=False)``: every convolution that can runs on so many chunks; counts those that did."""

    def force(count: int, major: bool = False) -> list[int]:
        seen: list[int] = []

        def choose(conv, method, regime, what):
            positions = sorted(range(len(conv.windows)), key=lambda p: (conv.axes[p] is None, -p))
            for position in positions:
                if conv.axes[position] is not None and why_not_chunks(conv, position, count) is None:
                    seen.append(count)
                    return cut_into_chunks(conv, Chunks(position, count, major))
            return choose_form(conv, method, regime, what)

        monkeypatch.setattr(windows, "choose_form", choose)
        return seen

    return force


@pytest.fixture
def moves(monkeypatch):
    """How often a block was cut into chunks."""
    made: list[int] = []
    plain = block.to_chunks

    def counted(*args):
        made.append(1)
        return plain(*args)

    monkeypatch.setattr(block, "to_chunks", counted)
    return made


def mixed(x, ks):
    """Pointwise work, a norm, pooling, a skip, a stride, a transposed layer, a bias of each column."""
    y = jax.nn.softplus(conv(x, ks[0]))
    y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-3)
    y = jnp.concatenate([y, conv(y, ks[1])], -1)
    y = y + jnp.sin(jnp.arange(y.shape[2], dtype=y.dtype))[:, None] + jnp.cos(y[:1, :1].mean((0, 1, 2)))
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    z = jax.nn.relu(conv(y, ks[2], 2))
    z = conv(z, ks[3], padding=[(1, 1), (1, 1)], lhs_dilation=(2, 2))
    return conv(jax.nn.softmax(z + y[..., :2]), ks[4]), z.max((1, 2))


SHAPES = (3, 3, 2, 2), (3, 3, 2, 2), (4, 4, 4, 2), (2, 2, 2, 2), (3, 3, 2, 2)


@pytest.mark.parametrize("major", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_a_net_on_chunks(major, chunked, mesh_for):
    seen = chunked(2, major)
    x, ks = RNG.normal(size=(2, 4, 32, 2)), kernels_of(RNG, *SHAPES)
    found = check(mixed, x, ks, mesh=mesh_for({"sp": 4}), axes=W)
    assert seen and set(found.report.by_kind()) == {"collective_permute", "all_reduce"}


def test_a_stack_is_cut_once(chunked, moves, mesh_for):
    chunked(2)
    x, ks = RNG.normal(size=(2, 4, 32, 2)), kernels_of(RNG, *[(3, 3, 2, 2)] * 3)
    found = check(stack, x, ks, mesh=mesh_for({"sp": 4}), axes=W)
    assert len(moves) == 1
    assert found.report.by_kind() == {"collective_permute": 12, "all_reduce": 1}
    assert sk.placements(found.out) == (sk.Shard(2),)


@pytest.mark.parametrize("size", [29, pytest.param(25, marks=pytest.mark.slow)])
def test_tails(size, chunked, mesh_for):
    seen = chunked(2 if size == 29 else 7)

    def net(x, ks):
        y = jnp.log(1.5 + jnp.tanh(conv(x, ks[0])))
        return conv(y, ks[1]), y.mean(), y.max((1, 2))

    x, ks = RNG.normal(size=(2, 2, size, 2)), kernels_of(RNG, *[(3, 3, 2, 2)] * 2)
    check(net, x, ks, mesh=mesh_for({"sp": 4}), axes=W)
    assert seen


@pytest.mark.not_smoke
def test_loops_on_chunks(chunked, moves, mesh_for):
    chunked(2)

    def loop(x, k):
        return lax.scan(lambda c, _: (jnp.tanh(conv(c, k)), c.mean()), x, None, length=4)

    check(loop, RNG.normal(size=(2, 2, 32, 2)), kernels_of(RNG, (3, 3, 2, 2))[0], mesh=mesh_for({"sp": 4}), axes=W)


@pytest.mark.not_smoke
def test_what_is_not_in_chunks_meets_what_is(chunked, mesh_for):
    """Views, resizing, rolls, transposes, other arguments beside chunks."""
    chunked(4)

    def net(x, ks):
        y = conv(x, ks[0])
        a = y + x + jnp.roll(y, 1, 2)
        b = jax.image.resize(y, (*y.shape[:2], 64, 2), "linear")[:, :, ::2]
        c = jnp.swapaxes(jnp.swapaxes(y, 1, 2) * 2, 1, 2) + jnp.repeat(y, 2, 2)[:, :, 1::2]
        return conv(a + b + c, ks[1]), y.reshape(2, 2, 32, 1, 2), y[1:]

    x, ks = RNG.normal(size=(2, 2, 32, 2)), kernels_of(RNG, *[(3, 3, 2, 2)] * 2)
    check(net, x, ks, mesh=mesh_for({"sp": 4}), axes=W)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_random_programs_on_chunks(seed, chunked):
    chunked([2, 3, 4][seed % 3], seed % 2 == 1)
    check_program(draw(seed))
    if seed % 32 == 31:
        jax.clear_caches()
