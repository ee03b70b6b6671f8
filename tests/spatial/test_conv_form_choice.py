"""The integers and choices behind the forms of a convolution: no mesh, no communication."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import jax
import numpy as np
import pytest

from shardkit.spatial.convolution.blocks import cut_into_chunks, from_chunks, to_chunks, why_not_chunks
from shardkit.spatial.convolution.local import input_gradient_conv
from shardkit.spatial.convolution.method import METHODS, Regime, choose_form, regime_of
from shardkit.spatial.convolution.overlap import Edge, edges, why_not_overlap
from shardkit.spatial.convolution.spec import Chunks
from shardkit.spatial.windows import Window, shard_window
from tests.spatial.conv_cases import Case, draw_for

SP4, W = (("sp", 4),), (("sp", "W"),)
LINE = Case(SP4, W, "NWC", "WIO", (64,), (3,))


# --- overlap: which outputs read a halo, and what they read ------------------------------------------------


@pytest.mark.parametrize(
    ("window", "shards", "lower", "upper"),
    [
        # window, shards; edge: outputs [first, stop), elements read [begin, end).
        (Window(16, 3, 1, 1, 1), 4, Edge(0, 1, -1, 2), Edge(3, 4, 2, 5)),
        (Window(16, 4, 1, 1, 2), 4, Edge(0, 1, -1, 3), Edge(2, 4, 1, 6)),
        (Window(16, 3, 2, 0, 1), 4, None, Edge(1, 2, 2, 5)),
        (Window(16, 3, 2, 1, 0), 4, Edge(0, 1, -1, 2), None),
        (Window(16, 2, 2), 4, None, None),
        (Window(32, 3, 1, 3, 3, 1, 3), 4, Edge(0, 3, -3, 6), Edge(5, 8, 2, 11)),
        (Window(16, 4, 1, 2, 2, 2), 4, Edge(0, 2, -1, 2), Edge(6, 8, 2, 5)),
        (Window(16, 3, 1, 1, 1), 1, None, None),
    ],
)
def test_edges(window, shards, lower, upper):
    assert edges(shard_window(window, shards)) == (lower, upper)


def reads(window: Window, output: int) -> set[int]:
    """Elements, counted along the whole dim and perhaps beyond its ends, that one output is made of."""
    start = output * window.stride - window.pad_lo
    taps = (start + tap * window.rhs_dilation for tap in range(window.kernel))
    return {t // window.lhs_dilation for t in taps if t % window.lhs_dilation == 0}


def test_edges_by_definition():
    """On drawn dims: outputs at no edge read the block alone, those at an edge what it says, nothing is wider."""
    rng = random.Random(5)
    seen = 0
    for _ in range(400):
        conv = draw_for(rng, "overlap").local_conv()
        for window, mode in zip(conv.windows, conv.modes, strict=True):
            exchange, w = window.exchange, window.window
            lower, upper = edges(window)
            assert (lower is None, upper is None) == (not exchange.before, not exchange.after)
            outside = {0: set(), 1: set()}
            for shard, local in itertools.product(range(exchange.shards), range(window.out_block)):
                output = shard * window.out_block + local
                if output >= w.output_size:
                    continue
                there = {e for e in reads(w, output) if mode == "circular" or 0 <= e < w.size}
                there = {e - shard * exchange.block for e in there}
                at = [e for e in (lower, upper) if e is not None and e.first <= local < e.stop]
                assert len(at) <= 1
                begin, end = (at[0].begin, at[0].end) if at else (0, exchange.block)
                assert all(begin <= e < end for e in there)
                outside[0] |= {local} if any(e < 0 for e in there) else set()
                outside[1] |= {local} if any(e >= exchange.block for e in there) else set()
            for edge, found in ((lower, outside[0]), (upper, outside[1])):
                if edge is not None and w.lhs_dilation == w.rhs_dilation == 1 and exchange.size % exchange.block == 0:
                    assert found <= set(range(edge.first, edge.stop))
                    if exchange.shards > 2 and exchange.size // exchange.block == exchange.shards:
                        assert found == set(range(edge.first, edge.stop))
                        seen += 1
    assert seen > 50


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"padding": "VALID"}, None),
        ({"padding": "VALID", "kernels": (6,)}, "windows begin at another place in each block of spatial dim 0"),
        ({"padding": ((1, 1),), "modes": ("replicate",)}, "padding_mode='replicate' lays its edges out"),
        ({"padding": ((1, 1),), "modes": ("circular",)}, None),
        ({"padding": ((1, 1),), "modes": ("circular",), "sizes": (63,)}, "padding_mode='circular' lays its edges out"),
        ({"sizes": (8,), "kernels": (7,)}, "halos in spatial dim 0 are wider than a block of 2"),
        ({"sizes": (8,)}, "no output of a block of 2 elements in spatial dim 0 reads the block alone"),
        ({"axes": (), "sizes": (8,)}, None),  # nothing travels
        ({"axes": (), "modes": ("reflect",), "padding": ((1, 1),)}, "padding_mode='reflect' lays its edges out"),
    ],
)
def test_why_not_overlap(changes, reason):
    found = why_not_overlap(dataclasses.replace(LINE, **changes).local_conv())
    assert (found is None) if reason is None else (found is not None and found.startswith(reason))


# --- blocks: chunks in the batch dim -----------------------------------------------------------------------


@pytest.mark.parametrize("major", [True, False])
@pytest.mark.parametrize("ndim", [3, 4, 5])
def test_chunks_lie_in_the_batch_dim_and_come_back(ndim, major):
    """Any two dims, by definition: cut with NumPy, laid one after the other or in turn."""
    x = np.arange(math.prod((6, 4, 12, 2, 8)[:ndim])).reshape((6, 4, 12, 2, 8)[:ndim])
    wanted = {}
    for batch, dim in itertools.permutations(range(ndim), 2):
        for count in (n for n in (1, 2, 4) if x.shape[dim] % n == 0):
            parts = np.split(x, count, axis=dim)
            if major:
                want = np.concatenate(parts, axis=batch)
            else:
                images = [np.take(part, [i], axis=batch) for i in range(x.shape[batch]) for part in parts]
                want = np.concatenate(images, axis=batch)
            wanted[batch, dim, Chunks(0, count, major)] = want

    @jax.jit
    def there_and_back(x):
        chunks = {key: to_chunks(x, *key) for key in wanted}
        return list(chunks.values()), [from_chunks(cut, *key) for key, cut in chunks.items()]

    for got, back, want in zip(*there_and_back(x), wanted.values(), strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(
    ("changes", "count", "reason"),
    [
        ({}, 8, None),
        ({}, 16, None),
        ({"kernels": (5,)}, 8, None),
        ({"kernels": (6,)}, 8, "8 chunks of 2 elements in spatial dim 0 are narrower than their halos"),
        ({"sizes": (60,)}, 2, "blocks of 15 inputs and 15 outputs in spatial dim 0 don't divide into 2 chunks"),
        ({"sizes": (62,)}, 8, None),  # the last chunk is short
        ({"strides": (16,)}, 2, "blocks of 16 inputs and 1 outputs in spatial dim 0 don't divide into 2 chunks"),
        ({"padding": "VALID", "kernels": (33,)}, 2, "windows begin at another place in each chunk of spatial dim 0"),
        ({"padding": ((1, 1),), "modes": ("reflect",)}, 2, "padding_mode='reflect' lays its edges out"),
        ({"padding": ((1, 1),), "modes": ("circular",)}, 2, None),
        ({"batch_groups": 2}, 2, "batch_group_count > 1"),
    ],
)
def test_why_not_chunks(changes, count, reason):
    found = why_not_chunks(dataclasses.replace(LINE, **changes).local_conv(), 0, count)
    assert (found is None) if reason is None else (found is not None and found.startswith(reason))


def test_chunks_are_shards_of_one_ring():
    conv = cut_into_chunks(LINE.local_conv(), Chunks(0, 8))
    assert (conv.method, conv.chunks) == ("blocks", Chunks(0, 8))
    exchange = conv.windows[0].exchange
    assert (exchange.shards, exchange.block) == (32, 2)
    assert exchange.before[0].pairs == tuple((i, i + 1) for i in range(31))
    assert conv.windows[0].window == LINE.local_conv().windows[0].window


# --- which form --------------------------------------------------------------------------------------------

BIG = Regime("cpu", 1, True, 2**14, 64)
EIGHT, EIGHT_MAJOR, FOUR_MAJOR = Chunks(0, 8), Chunks(0, 8, True), Chunks(0, 4, True)
UNALIGNED = dataclasses.replace(LINE, padding="VALID", kernels=(6,))


@pytest.mark.parametrize(
    ("case", "changes", "method", "chunks"),
    [
        (LINE, {}, "concat", None),
        (LINE, {"platform": "gpu"}, "overlap", None),
        (LINE, {"platform": "tpu"}, "blocks", EIGHT),
        (LINE, {"platform": "tpu", "images": 7}, "blocks", EIGHT),
        (LINE, {"platform": "tpu", "images": 8}, "blocks", FOUR_MAJOR),
        (LINE, {"platform": "tpu", "images": 8, "images_known": False}, "blocks", EIGHT),
        (LINE, {"platform": "METAL"}, "concat", None),  # nothing is known of it
        # Too small to matter.
        (LINE, {"platform": "tpu", "elements": 2**14 - 1}, "concat", None),
        (LINE, {"platform": "gpu", "elements": 2**14 - 1}, "concat", None),
        (LINE, {"platform": "tpu", "features": 63}, "concat", None),
        (LINE, {"platform": "gpu", "features": 63}, "concat", None),
        # The table's form can't run.
        (UNALIGNED, {"platform": "gpu"}, "concat", None),
        (UNALIGNED, {"platform": "tpu"}, "concat", None),
        (dataclasses.replace(LINE, sizes=(48,)), {"platform": "tpu"}, "concat", None),  # 12 isn't 8 chunks
    ],
)
def test_auto_is_the_table(case, changes, method, chunks):
    conv = choose_form(case.local_conv(), "auto", dataclasses.replace(BIG, **changes), "ring_conv")
    assert (conv.method, conv.chunks) == (method, chunks)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "METAL"])
def test_a_form_asked_for_is_the_one_that_runs(platform):
    """On every platform, however small the layer."""
    small = dataclasses.replace(BIG, platform=platform, elements=1, features=1)
    for method in METHODS[1:]:
        assert choose_form(LINE.local_conv(), method, small, "ring_conv").method == method


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("method", ["auto", "blocks"])
def test_a_batch_that_may_be_cut_further_is_never_minor(platform, method):
    """Merged as the minor part of a dim, a batch that the compiler shards would be gathered."""
    for images in (1, 7, 8, 64):
        conv = choose_form(LINE.local_conv(), method, Regime(platform, images, False, 2**20, 512), "ring_conv")
        assert conv.chunks is None or not conv.chunks.major


@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (LINE, Chunks(0, 8)),
        (dataclasses.replace(LINE, sizes=(48,)), Chunks(0, 4)),
        (dataclasses.replace(LINE, sizes=(24,)), Chunks(0, 2)),
        # Cut dims before others, the last of them first; more chunks of another dim before fewer of this one.
        (Case(SP4, W, "NHWC", "HWIO", (64, 64), (3, 3)), Chunks(1, 8)),
        (Case(SP4, (("sp", "H"),), "NHWC", "HWIO", (64, 64), (3, 3)), Chunks(0, 8)),
        (Case((("sq", 2), ("sp", 4)), (("sp", "H"), ("sq", "W")), "NHWC", "HWIO", (64, 64), (3, 3)), Chunks(1, 8)),
        (Case(SP4, W, "NHWC", "HWIO", (64, 48), (3, 3)), Chunks(0, 8)),
    ],
)
def test_blocks_cut_the_dim_that_gives_most_chunks(case, chunks):
    assert case.in_form("blocks").chunks == chunks


def test_the_regime_of_a_grouped_convolution():
    case = Case(SP4, W, "NHWC", "HWIO", (8, 64), (3, 3), feature_groups=2, features=(128, 64), batch=3)
    block, kernel = (3, 8, 16, 128), case.shapes()[1]
    found = regime_of(case.local_conv(), "tpu", block, kernel, free=True)
    assert found == Regime("tpu", images=3, images_known=False, elements=8 * 16, features=32)


def on_the_wire(conv):
    """(elements, permutes) that leave a device, of the plan: between chunks of one device nothing does."""
    found = []
    for position, window in enumerate(conv.windows):
        count = conv.chunks.count if conv.chunks is not None and conv.chunks.position == position else 1
        for message in window.exchange.messages:
            if any(a // count != b // count for a, b in message.pairs):
                found.append(message.length)
    return sum(found), len(found)


@pytest.mark.parametrize("method", ["overlap", "blocks"])
def test_a_form_sends_what_concat_sends_in_both_directions(method):
    rng = random.Random(3)
    for _ in range(300):
        case = draw_for(rng, method)
        conv, plain = case.in_form(method), case.local_conv()
        assert on_the_wire(conv) == on_the_wire(plain)
        back, plain_back = (input_gradient_conv(c) or c for c in (conv, plain))
        assert on_the_wire(back) == on_the_wire(plain_back)
