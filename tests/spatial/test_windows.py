"""Who needs what, and how it travels: tables of integers, and a simulation of every exchange.

No JAX here. Elements are numbered from 1, so that 0 can only be a zero.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from shardkit.spatial.windows import (
    PADDING_MODES,
    Message,
    Window,
    block_size,
    extended_index,
    shard_halo,
    shard_window,
)

pytestmark = pytest.mark.smoke


# --- the simulation -------------------------------------------------------------------------------


def blocks_of(size, shards):
    """What each shard holds: elements 1.., and zeros in the padded tail."""
    block = block_size(size, shards)
    line = np.zeros(block * shards, int)
    line[:size] = np.arange(1, size + 1)
    return list(line.reshape(shards, block))


def deliver(message: Message, blocks):
    """What each shard receives: a permute gives zeros where nobody sends."""
    assert all(o >= 0 and o + message.length <= len(b) for o, b in zip(message.offsets, blocks, strict=True))
    pieces = [b[o : o + message.length] for o, b in zip(message.offsets, blocks, strict=True)]
    sources = [s for s, _ in message.pairs]
    targets = [t for _, t in message.pairs]
    assert len(set(sources)) == len(sources), "a permute takes each source once"
    assert len(set(targets)) == len(targets), "a permute takes each target once"
    if message.pairs and not message.travels:
        return pieces
    got = [np.zeros(message.length, int) for _ in blocks]
    for source, target in message.pairs:
        got[target] = pieces[source]
    return got


def spans_of(exchange):
    """Each shard's span after the exchange."""
    blocks = blocks_of(exchange.size, exchange.shards)
    received = [deliver(m, blocks) for m in exchange.messages]
    spans = []
    for i, block in enumerate(blocks):
        pieces = [r[i] for r in received]
        if exchange.table is not None:
            held = np.concatenate([block, *pieces])
            spans.append(np.array([held[k] if k >= 0 else 0 for k in exchange.table[i]], int))
            assert len(spans[-1]) == exchange.length
            continue
        before = len(exchange.before)
        line = np.concatenate([*pieces[:before], block, *pieces[before:]])
        assert len(line) == exchange.reach_lo + len(block) + exchange.reach_hi
        wide = np.pad(line, (max(0, -exchange.starts[i]), exchange.length + max(0, exchange.starts[i])))
        spans.append(wide[max(0, exchange.starts[i]) :][: exchange.length])
    return spans


def taps(window: Window, output, mode):
    """What each tap of one output reads: the element's index, None for a zero."""
    read = []
    for tap in range(window.kernel):
        position = output * window.stride - window.pad_lo + tap * window.rhs_dilation
        whole, rest = divmod(position, window.lhs_dilation)
        read.append(None if rest else extended_index(whole, window.size, mode))
    return read


def needed(window, shard, out_block, mode):
    outputs = range(shard * out_block, min((shard + 1) * out_block, window.output_size))
    return {e for o in outputs for e in taps(window, o, mode) if e is not None}


def lower_bound(window, shards, mode):
    """Elements that some shard needs and doesn't hold: no exchange can bring fewer to every shard."""
    block, out_block = block_size(window.size, shards), block_size(window.output_size, shards)
    return max(len({e for e in needed(window, i, out_block, mode) if e // block != i}) for i in range(shards))


def check(window, shards, mode):
    """Every tap of every output of every shard reads exactly the right element."""
    cut = shard_window(window, shards, mode)
    spans = spans_of(cut.exchange)
    assert cut.out_block == block_size(window.output_size, shards)
    for output in range(window.output_size):
        shard, local = divmod(output, cut.out_block)
        for tap, element in enumerate(taps(window, output, mode)):
            at = cut.phases[shard] + local * window.stride + tap * window.rhs_dilation
            whole, rest = divmod(at, window.lhs_dilation)
            assert at < cut.dilated_length + cut.phases[shard]
            got = 0 if rest else spans[shard][whole]
            assert got == (0 if element is None else element + 1), (shard, output, tap)
    return cut


# --- the simulation can fail ----------------------------------------------------------------------


def test_the_simulation_notices_a_wrong_offset():
    spans = spans_of(shard_window(Window(16, 3, 1, 1, 1), 4).exchange)
    assert spans[1].tolist() == [4, 5, 6, 7, 8, 9]
    shifted = spans_of(shard_window(Window(16, 3, 1, 2, 0), 4).exchange)
    assert shifted[1].tolist() == [3, 4, 5, 6, 7, 8]


# --- padding modes --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_extended_index_is_numpy_pad(mode, size):
    numpy_mode = {"circular": "wrap", "reflect": "reflect", "replicate": "edge"}[mode]
    expected = np.pad(np.arange(size), (7, 7), mode=numpy_mode)
    assert [extended_index(p, size, mode) for p in range(-7, size + 7)] == expected.tolist()


def test_extended_index_of_zeros():
    assert [extended_index(p, 2, "zeros") for p in range(-2, 4)] == [None, None, 0, 1, None, None]


def test_unknown_mode():
    with pytest.raises(ValueError, match="unknown padding mode 'mirror'; use one of"):
        extended_index(-1, 4, "mirror")


# --- windows --------------------------------------------------------------------------------------


def dense(window):
    """The linear map of a window with taps 1, 2, ..., as an integer matrix [outputs, inputs]."""
    matrix = np.zeros((window.output_size, window.size), int)
    for output in range(window.output_size):
        for tap, element in enumerate(taps(window, output, "zeros")):
            if element is not None:
                matrix[output, element] += tap + 1
    return matrix


def flipped(window):
    """The same with its taps in the reverse order."""
    matrix = np.zeros((window.output_size, window.size), int)
    for output in range(window.output_size):
        for tap, element in enumerate(taps(window, output, "zeros")):
            if element is not None:
                matrix[output, element] += window.kernel - tap
    return matrix


@pytest.mark.parametrize(
    ("window", "outputs"),
    [
        (Window(8, 3), 6),
        (Window(8, 3, 1, 1, 1), 8),
        (Window(8, 3, 2, 1, 1), 4),
        (Window(9, 2, 2), 4),
        (Window(9, 1, 4), 3),
        (Window(8, 3, 1, -1, -2), 3),
        (Window(8, 3, 1, 0, 0, 2, 1), 13),
        (Window(8, 3, 1, 2, 2, 1, 2), 8),
        (Window(2, 3), 0),
        (Window(3, 3), 1),
    ],
)
def test_output_size(window, outputs):
    assert window.output_size == outputs


@st.composite
def windows(draw, max_size=40):
    """Any window with at least one output; paddings may crop, and may leave a tail unread."""
    window = Window(
        size=draw(st.integers(1, max_size)),
        kernel=draw(st.integers(1, 6)),
        stride=draw(st.integers(1, 5)),
        pad_lo=draw(st.integers(-6, 9)),
        pad_hi=draw(st.integers(-6, 9)),
        lhs_dilation=draw(st.sampled_from([1, 1, 2, 3])),
        rhs_dilation=draw(st.sampled_from([1, 1, 2, 3])),
    )
    assume(window.output_size > 0)
    return window


@given(windows())
@settings(max_examples=200)
def test_the_input_gradient_is_the_transpose(window):
    gradient = window.input_gradient()
    assert gradient.output_size == window.size
    np.testing.assert_array_equal(flipped(gradient), dense(window).T)


# --- tables ---------------------------------------------------------------------------------------


def RIGHT(shards):  # noqa: N802
    """The pairs of a message to the right neighbour."""
    return tuple((i, i + 1) for i in range(shards - 1))


def LEFT(shards):  # noqa: N802
    return tuple((i + 1, i) for i in range(shards - 1))


# Window, shards and mode; messages before and after the block as (pairs, offset, length); where each shard's
# span starts in its line; the spans, where a 0 may also stand for an element that nobody reads.
TABLES = {
    "3 taps SAME, 4 shards of 4": (
        (Window(16, 3, 1, 1, 1), 4, "zeros"),
        [(RIGHT(4), 3, 1)],
        [(LEFT(4), 0, 1)],
        (0, 0, 0, 0),
        [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9], [8, 9, 10, 11, 12, 13], [12, 13, 14, 15, 16, 0]],
    ),
    "the same on a circle": (
        (Window(16, 3, 1, 1, 1), 4, "circular"),
        [((*RIGHT(4), (3, 0)), 3, 1)],
        [(((0, 3), *LEFT(4)), 0, 1)],
        (0, 0, 0, 0),
        [[16, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9], [8, 9, 10, 11, 12, 13], [12, 13, 14, 15, 16, 1]],
    ),
    "4 taps SAME: one element left, two right": (
        (Window(8, 4, 1, 1, 2), 2, "zeros"),
        [(RIGHT(2), 3, 1)],
        [(LEFT(2), 0, 2)],
        (0, 0),
        [[0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 0, 0]],
    ),
    "2 taps SAME: nothing comes from the left": (
        (Window(8, 2, 1, 0, 1), 2, "zeros"),
        [],
        [(LEFT(2), 0, 1)],
        (0, 0),
        [[1, 2, 3, 4, 5], [5, 6, 7, 8, 0]],
    ),
    "k=3 s=2 padded (1, 1) on two shards of 4: only the right shard looks left": (
        (Window(8, 3, 2, 1, 1), 2, "zeros"),
        [(RIGHT(2), 3, 1)],
        [],
        (0, 0),
        [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]],
    ),
    "k=3 s=2 SAME as lax pads it: only the left shard looks right": (
        (Window(8, 3, 2, 0, 1), 2, "zeros"),
        [],
        [(LEFT(2), 0, 1)],
        (0, 0),
        [[1, 2, 3, 4, 5], [5, 6, 7, 8, 0]],
    ),
    "k=s=2 on two shards of 5: the second window set begins one element into the block": (
        (Window(10, 2, 2), 2, "zeros"),
        [],
        [(LEFT(2), 0, 1)],
        (0, 1),
        [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]],
    ),
    "k=s=2 on aligned shards: nothing travels": (
        (Window(8, 2, 2), 2, "zeros"),
        [],
        [],
        (0, 0),
        [[1, 2, 3, 4], [5, 6, 7, 8]],
    ),
    "stride 4 > kernel 1: what falls between windows isn't sent": (
        (Window(16, 1, 4), 2, "zeros"),
        [],
        [],
        (0, 0),
        [[1, 2, 3, 4, 5], [9, 10, 11, 12, 13]],
    ),
    "a halo of 3 over blocks of 2: two hops, the far one thin": (
        (Window(8, 4, 1, 3, 0), 4, "zeros"),
        [(((0, 2), (1, 3)), 1, 1), (RIGHT(4), 0, 2)],
        [],
        (0, 0, 0, 0),
        [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 8]],
    ),
    "dim 5 over 4: a short shard and an empty one": (
        (Window(5, 3, 1, 1, 1), 4, "zeros"),
        [(((0, 1), (1, 2)), 1, 1)],
        [(((1, 0), (2, 1)), 0, 1)],
        (0, 0, 0, 0),
        [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 0, 0], [0, 0, 0, 0]],
    ),
    "one device: a circle onto itself, nothing travels": (
        (Window(4, 3, 1, 1, 1), 1, "circular"),
        [(((0, 0),), 3, 1)],
        [(((0, 0),), 0, 1)],
        (0,),
        [[4, 1, 2, 3, 4, 1]],
    ),
    "one device with zeros": ((Window(4, 3, 1, 1, 1), 1, "zeros"), [], [], (-1,), [[0, 1, 2, 3, 4, 0]]),
    "padding that crops: the first two elements aren't read": (
        (Window(8, 1, 1, -2, 0), 2, "zeros"),
        [],
        [(LEFT(2), 0, 1)],
        (2, 1),
        [[3, 4, 5], [6, 7, 8]],
    ),
    "transposed (lhs dilation 2), 4 taps": (
        (Window(4, 4, 1, 2, 2, 2), 2, "zeros"),
        [(RIGHT(2), 1, 1)],
        [(LEFT(2), 0, 1)],
        (0, 0),
        [[0, 1, 2, 3], [2, 3, 4, 0]],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    arguments, before, after, starts, spans = TABLES[name]
    exchange = check(*arguments).exchange
    assert exchange.table is None

    def read(messages):
        assert all(len(set(m.offsets)) == 1 for m in messages)
        return [(tuple(sorted(m.pairs)), m.offsets[0], m.length) for m in messages]

    assert (read(exchange.before), read(exchange.after)) == (before, after)
    assert exchange.starts == starts
    assert [s.tolist() for s in spans_of(exchange)] == spans
    assert exchange.permutes == sum(any(a != b for a, b in pairs) for pairs, _, _ in before + after)
    assert exchange.received == sum(n for pairs, _, n in before + after if any(a != b for a, b in pairs))


def test_a_reflection_is_a_table():
    exchange = check(Window(4, 3, 1, 1, 1), 2, "reflect").exchange
    # Every shard needs one element of the other; the mirrored one it holds already.
    assert exchange.messages == (Message(((1, 0), (0, 1)), (1, 0), 1),)
    assert exchange.table == ((1, 0, 1, 2), (2, 0, 1, 0))
    assert [s.tolist() for s in spans_of(exchange)] == [[2, 1, 2, 3], [2, 3, 4, 3]]


def test_phases_differ_where_stride_and_dilation_do_not_fit():
    cut = check(Window(6, 3, 1, 1, 1, 2), 3, "zeros")  # 11 outputs, 4 a shard
    assert (cut.out_block, cut.phases, cut.static_phase) == (4, (1, 1, 1), True)
    cut = check(Window(5, 3, 1, 1, 1, 2), 3, "zeros")  # 9 outputs, 3 a shard
    assert (cut.out_block, cut.phases) == (3, (1, 0, 1))
    assert cut.slices_output
    assert cut.outputs_computed == 4
    cut = check(Window(14, 3, 3, 1, 1, 2), 3, "zeros")  # stride 3: no slicing of outputs
    assert (cut.out_block, cut.phases) == (3, (1, 0, 1))
    assert not cut.static_phase
    assert not cut.slices_output
    assert cut.outputs_computed == cut.out_block


# --- properties -----------------------------------------------------------------------------------


@given(windows(), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from(PADDING_MODES))
@settings(max_examples=300)
def test_every_tap_reads_the_right_element(window, shards, mode):
    cut = check(window, shards, mode)
    exchange = cut.exchange
    assert exchange.received >= lower_bound(window, shards, mode)
    assert all(0 <= p < window.lhs_dilation for p in cut.phases)
    assert exchange.permutes == sum(any(s != t for s, t in m.pairs) for m in exchange.messages)
    if shards == 1:
        assert (exchange.permutes, exchange.received) == (0, 0)
    if cut.static_phase and exchange.aligned:  # one convolution with one padding does for all shards
        busy = -(-window.output_size // cut.out_block)
        firsts = [window.start(i * cut.out_block) - i * exchange.block * window.lhs_dilation for i in range(busy)]
        assert len(set(firsts)) == 1


@pytest.mark.slow
@given(windows(max_size=200), st.integers(1, 12), st.sampled_from(PADDING_MODES))
@settings(max_examples=2_000)
def test_every_tap_of_many_more_windows(window, shards, mode):
    assert check(window, shards, mode).exchange.received >= lower_bound(window, shards, mode)
    check(window.input_gradient(), shards, mode)


@given(
    shards=st.sampled_from([2, 3, 4, 8]),
    block=st.integers(1, 8),
    lo=st.integers(0, 5),
    hi=st.integers(0, 5),
    rhs_dilation=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "circular"]),
)
def test_same_convolutions_receive_the_lower_bound(shards, block, lo, hi, rhs_dilation, mode):
    """Stride 1, as many outputs as inputs, even blocks: the halos and not one element more."""
    lo, hi = lo * rhs_dilation, hi * rhs_dilation
    window = Window(shards * block, (lo + hi) // rhs_dilation + 1, 1, lo, hi, 1, rhs_dilation)
    assume(max(lo, hi) <= (shards - 1) * block)  # no further than once around
    assert window.output_size == window.size
    exchange = check(window, shards, mode).exchange
    assert exchange.aligned
    assert exchange.received == lo + hi
    assert exchange.permutes == -(-lo // block) + -(-hi // block)
    # Some shard needs all of it, where one lies far enough from both ends.
    inner = any(lo <= i * block and hi <= (shards - 1 - i) * block for i in range(shards))
    if rhs_dilation == 1 and (inner if mode == "zeros" else lo + hi + block <= window.size):
        assert exchange.received == lower_bound(window, shards, mode)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 6), st.integers(1, 5))
def test_patches_need_no_communication(shards, patches, patch):
    cut = check(Window(shards * patches * patch, patch, patch), shards, "zeros")
    assert (cut.exchange.permutes, cut.exchange.aligned) == (0, True)


@given(windows(), st.sampled_from([2, 3, 4, 8]))
def test_gradient_windows_run_on_the_same_shards(window, shards):
    check(window.input_gradient(), shards, "zeros")


@given(
    size=st.integers(1, 30),
    shards=st.sampled_from([1, 2, 3, 4, 8]),
    before=st.integers(0, 12),
    after=st.integers(0, 12),
    mode=st.sampled_from(PADDING_MODES),
)
@settings(max_examples=200)
def test_halos(size, shards, before, after, mode):
    exchange = shard_halo(size, shards, before, after, mode)
    block = block_size(size, shards)
    for i, span in enumerate(spans_of(exchange)):
        expected = [extended_index(p, size, mode) for p in range(i * block - before, (i + 1) * block + after)]
        assert span.tolist() == [0 if e is None else e + 1 for e in expected]
    if max(before, after) <= block and size == block * shards and mode in ("zeros", "circular"):
        assert exchange.permutes == (0 if shards == 1 else (before > 0) + (after > 0))
        assert exchange.received == (0 if shards == 1 else before + after)
