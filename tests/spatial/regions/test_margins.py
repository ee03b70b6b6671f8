"""Margins as tables of integers, against the positions that windows read one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardkit.spatial.regions.margins import NONE, is_regular, needed, on_a_line, suffices, wider
from shardkit.spatial.regions.margins import given as margin_given
from shardkit.spatial.regions.views import repeating
from shardkit.spatial.windows import Window, block_size

SMALL = st.integers(0, 6)
MARGINS = st.tuples(SMALL, SMALL)


def regular_cases(count: int) -> list[tuple[Window, int]]:
    """Windows and shards whose outputs begin at the same place of every block."""
    rng, found = random.Random(0), []
    while len(found) < count:
        shards, dilation = rng.randint(1, 4), rng.choice([1, 1, 2, 3])
        pads = rng.randint(-2, 6), rng.randint(-2, 6)
        window = Window(rng.randint(1, 24), rng.randint(1, 5), rng.randint(1, 3), *pads, dilation, rng.randint(1, 2))
        if is_regular(window, shards):
            found.append((window, shards))
    return found


REGULAR = st.sampled_from(regular_cases(300))


def reads(window: Window, output: int) -> list[int]:
    """Elements (perhaps none of the dim's) that a window reads: those of its taps that fall on the dilated grid."""
    taps = [window.start(output) + t * window.rhs_dilation for t in range(window.kernel)]
    return [p // window.lhs_dilation for p in taps if p % window.lhs_dilation == 0]


def wanted_outputs(window: Window, shards: int, shard: int, out: tuple[int, int]) -> range:
    block = block_size(window.output_size, shards)
    return range(shard * block - out[0], (shard + 1) * block + out[1])


@given(REGULAR, MARGINS)
def test_needed_holds_all_that_is_read(case, out):
    (window, shards), block = case, block_size(case[0].size, case[1])
    lo, hi = needed(window, shards, out)
    assert min(lo, hi) >= 0
    for shard in range(shards):
        read = [p for j in wanted_outputs(window, shards, shard, out) for p in reads(window, j)]
        assert all(shard * block - lo <= p < (shard + 1) * block + hi for p in read)


@given(REGULAR, MARGINS)
def test_needed_is_no_wider_than_the_taps_reach(case, out):
    window, shards = case
    lo, hi = needed(window, shards, out)
    positions = [
        window.start(j) + t for j in wanted_outputs(window, shards, 0, out) for t in (0, window.reach - 1)
    ]  # taps between elements count as well: their zeros are laid out
    block = block_size(window.size, shards)
    assert lo <= max(0, -(min(positions) // window.lhs_dilation))
    assert hi <= max(0, max(positions) // window.lhs_dilation - (block - 1))


@given(REGULAR, MARGINS)
def test_given_is_the_widest_that_is_served(case, margin):
    window, shards = case
    lo, hi = margin_given(window, shards, margin)
    if min(lo, hi) < 0:
        return
    assert suffices(margin, needed(window, shards, (lo, hi)))
    for more in ((lo + 1, hi), (lo, hi + 1)):
        found = needed(window, shards, more)
        dilated = window.lhs_dilation > 1  # between elements nothing is needed
        assert dilated or not suffices(margin, found) or found == needed(window, shards, (lo, hi)) == NONE


@given(REGULAR, MARGINS, MARGINS)
def test_a_window_on_a_line_reads_what_the_whole_one_reads(case, out, extra):
    window, shards = case
    need = needed(window, shards, out)
    margin = need[0] + extra[0], need[1] + extra[1]
    line = on_a_line(window, shards, margin, out)
    block = block_size(window.size, shards)
    assert line.size == margin[0] + block + margin[1]
    outputs = wanted_outputs(window, shards, 1, out)
    assert line.output_size == len(outputs)
    for i, j in enumerate(outputs):
        assert [p - margin[0] + block for p in reads(line, i)] == reads(window, j)


@given(st.integers(1, 20), st.integers(2, 4), st.integers(1, 4), MARGINS)
def test_a_repetition_reads_as_its_window_does(size, times, shards, out):
    window = repeating(size, times)
    assert window.output_size == size * times
    assume(is_regular(window, shards))
    lo, hi = needed(window, shards, out)
    block = block_size(size, shards)
    first, last = (-out[0]) // times, (block * times - 1 + out[1]) // times
    assert lo >= -first and hi >= last - (block - 1)


@pytest.mark.parametrize(
    ("window", "shards", "regular_there", "needs"),
    [
        (Window(32, 3, 1, 1, 1), 4, True, (1, 1)),
        (Window(32, 2, 2), 4, True, (0, 0)),
        (Window(32, 3, 2, 0, 1), 4, True, (0, 1)),
        (Window(32, 3, 1), 4, True, (0, 2)),  # VALID: 30 outputs in blocks of 8
        (Window(32, 4, 1), 4, True, (0, 3)),
        (Window(32, 5, 1), 4, False, None),  # 28 in blocks of 7
        (Window(30, 3, 2, 0, 1), 4, True, (0, 1)),  # uneven on both sides
        (Window(16, 4, 1, 2, 2, 2), 4, True, (1, 1)),  # a transposed one
        (Window(9, 3, 3), 4, True, (0, 0)),
        (Window(10, 3, 2), 4, False, None),  # 4 in blocks of 1
        (Window(8, 1, 1, -1, 0), 4, True, (0, 1)),  # x[1:]
        (Window(2, 3, 1), 4, False, None),  # nothing comes out
    ],
)
def test_table(window, shards, regular_there, needs):
    assert is_regular(window, shards) is regular_there
    assert needs is None or needed(window, shards) == needs


def test_wider_and_suffices():
    assert wider((1, 0), (0, 2)) == (1, 2)
    assert suffices((1, 2), (1, 1)) and not suffices((1, 2), (2, 0))
