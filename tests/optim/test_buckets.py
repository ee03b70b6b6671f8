"""What travels together. No devices."""

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardkit.optim.buckets import Bucket, Slot, pack


def test_one_bucket_a_key():
    buckets = pack(["a", "b", "a"], [3, 1, 5], [4, 4, 4], None)
    assert buckets == [Bucket("a", (Slot(0, 0, 3), Slot(2, 3, 5))), Bucket("b", (Slot(1, 0, 1),))]
    assert [bucket.width for bucket in buckets] == [8, 1]


def test_limit():
    buckets = pack("aaaa", [2, 2, 9, 1], [4] * 4, 16)
    assert [[slot.leaf for slot in bucket.slots] for bucket in buckets] == [[0, 1], [2], [3]]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.sampled_from([2, 4])), max_size=12),
    st.none() | st.integers(1, 100),
)
def test_every_leaf_once_without_gaps(leaves, limit):
    keys = [(key, itemsize) for key, _, itemsize in leaves]
    sizes, itemsizes = [size for _, size, _ in leaves], [itemsize for _, _, itemsize in leaves]
    buckets = pack(keys, sizes, itemsizes, limit)
    assert sorted(slot.leaf for bucket in buckets for slot in bucket.slots) == list(range(len(leaves)))
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert (keys[slot.leaf], sizes[slot.leaf], slot.start) == (bucket.key, slot.size, end)
            end += slot.size
        assert bucket.width == end
        itemsize = itemsizes[bucket.slots[0].leaf]
        assert limit is None or end * itemsize <= limit or len([s for s in bucket.slots if s.size]) == 1


def test_by_themselves():
    """No bytes: nothing travels together."""
    assert [[s.leaf for s in b.slots] for b in pack("aab", [3, 1, 3], [4, 4, 4], 0)] == [[0], [1], [2]]


def test_refused():
    with pytest.raises(ValueError, match=re.escape("bucket_bytes=-1: a number of bytes; 0 leaves every array")):
        pack("a", [1], [4], -1)
