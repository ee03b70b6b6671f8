"""Lists of positions, told what they are: runs of an extended dim, strides, repetitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.spatial.regions.views import ZERO, Extension, as_extension, as_repeat, as_stride
from shardkit.spatial.windows import PADDING_MODES, extended_index


def shown(extension: Extension) -> list[int]:
    positions = range(extension.offset, extension.offset + extension.length)
    found = [extended_index(p, extension.size, extension.mode) for p in positions]
    return [ZERO if p is None else p for p in found]


@given(st.integers(1, 12), st.integers(-8, 8), st.integers(1, 24), st.sampled_from(PADDING_MODES))
def test_a_run_of_the_extended_dim_is_found(size, offset, length, mode):
    index = shown(Extension(offset, length, size, mode))
    found = as_extension(np.asarray(index), size)
    pure_zeros = all(p == ZERO for p in index)
    # One element repeated says nothing of where its run begins; what is found must show the same.
    assert (found is not None or pure_zeros or len(set(index)) == 1 or mode == "reflect") and (
        found is None or shown(found) == index
    )


@given(st.lists(st.integers(-1, 7), min_size=1, max_size=10))
def test_whatever_is_found_shows_the_list(index):
    found = as_extension(np.asarray(index), 8)
    assert found is None or shown(found) == index


@pytest.mark.parametrize(
    ("index", "size", "extension"),
    [
        (np.roll(np.arange(6), 1), 6, Extension(-1, 6, 6, "circular")),
        (np.roll(np.arange(6), -2), 6, Extension(2, 6, 6, "circular")),
        (np.pad(np.arange(5), (2, 1), "wrap"), 5, Extension(-2, 8, 5, "circular")),
        (np.pad(np.arange(5), (2, 1), "reflect"), 5, Extension(-2, 8, 5, "reflect")),
        (np.pad(np.arange(5), (2, 1), "edge"), 5, Extension(-2, 8, 5, "replicate")),
        (np.pad(np.arange(5), (2, 1), constant_values=ZERO), 5, Extension(-2, 8, 5, "zeros")),
        (np.arange(6)[1:-2], 6, Extension(1, 3, 6, "zeros")),
        (np.arange(6)[::-1], 6, Extension(5, 6, 6, "reflect")),  # mirrored at the far end
        (np.array([0, 2, 1]), 3, None),
        (np.array([ZERO, ZERO]), 3, None),
    ],
)
def test_extensions(index, size, extension):
    assert as_extension(index, size) == extension


@given(st.integers(1, 30), st.integers(0, 29), st.integers(2, 5))
def test_strides(size, begin, step):
    index = np.arange(size)[begin::step]
    window = as_stride(index, size)
    assert (window is None) == (len(index) < 2)
    if window is not None:
        assert window.output_size == len(index)
        assert [window.start(j) for j in range(len(index))] == index.tolist()


@pytest.mark.parametrize("index", [[0, 1, 2], [0, 2, 3], [4, 2, 0], [ZERO, 1, 3], [0]])
def test_no_strides(index):
    assert as_stride(np.asarray(index), 5) is None


@given(st.integers(1, 9), st.integers(1, 5))
def test_repetitions(size, times):
    assert as_repeat(np.repeat(np.arange(size), times), size) == (times if times > 1 else None)
    assert size == 1 or times == 1 or as_repeat(np.tile(np.arange(size), times), size) is None
