"""Processes that say what they have, played by dictionaries."""

import pytest

from shardkit.data import parts
from shardkit.data.settling import settle, who_says
from shardkit.hosts import ProcessMismatchError

ROWS = parts.cut({"dp": 4, "tp": 2}, {0: ("dp",)}, 2)
BOTH = parts.cut({"dp": 4, "tp": 2}, {0: ("dp",), 1: ("tp",)}, 2)
BY_ROWS = [0, 0, 0, 0, 1, 1, 1, 1]  # dp goes across processes
BY_COLUMNS = [0, 1] * 4  # tp does
UNLIKE = [0, 0, 1, 1, 1, 1, 1, 1]  # one block, and three


def said(*shapes, facts=None, shared=None):
    """What processes say of a batch of one leaf."""
    return {
        p: {
            "facts": {} if facts is None else facts[p],
            "names": ["batch"],
            "shapes": [shape],
            "shared": [{} if shared is None else shared[p]],
        }
        for p, shape in enumerate(shapes)
    }


def blocks(words, cut, owners, uneven="error", **options):
    return settle(words, [cut], owners, uneven=uneven, what="f", **options)


@pytest.mark.parametrize(
    ("shapes", "cut", "owners", "wanted"),
    [
        ([(4, 6), (4, 6)], ROWS, BY_ROWS, (2, 6)),
        ([(4, 6), (4, 6)], BOTH, BY_ROWS, (2, 3)),
        ([(8, 3), (8, 3)], BOTH, BY_COLUMNS, (2, 3)),
        ([(2, 6), (6, 6)], BOTH, UNLIKE, (2, 3)),
        ([(8, 6)], BOTH, [0] * 8, (2, 3)),
        ([(0, 6), (0, 6)], BOTH, BY_ROWS, (0, 3)),
    ],
)
def test_sizes(shapes, cut, owners, wanted):
    assert blocks(said(*shapes), cut, owners).blocks == (wanted,)


@pytest.mark.parametrize(
    ("shapes", "cut", "owners", "wanted"),
    [
        ([(4, 6), (3, 6)], ROWS, BY_ROWS, 2),
        ([(4, 6), (1, 6)], ROWS, BY_ROWS, 2),
        ([(5, 6), (1, 6)], ROWS, BY_ROWS, 3),
        ([(7, 3), (7, 3)], BOTH, BY_COLUMNS, 2),
        ([(1, 6), (6, 6)], BOTH, UNLIKE, 2),
        ([(3, 6), (6, 6)], BOTH, UNLIKE, 3),
        ([(0, 6), (0, 6)], ROWS, BY_ROWS, 0),
    ],
)
def test_the_fullest_process_says_how_many_rows(shapes, cut, owners, wanted):
    found = blocks(said(*shapes), cut, owners, "pad")
    assert (found.share, found.blocks[0][0]) == (wanted, wanted)
    assert blocks(said(*shapes), cut, owners, "pad", least=9).blocks[0][0] == 9


def test_who_has_ended_brings_nothing():
    words = said((4, 6), (4, 6))
    del words[1]
    assert blocks(words, ROWS, BY_ROWS, "pad", ended=[1]).share == 2
    with pytest.raises(ProcessMismatchError, match=r"processes 0, 1 hold the same rows .*process 1: 0 rows"):
        blocks(words, BOTH, BY_COLUMNS, "pad", ended=[1])
    two = {0: {"facts": {}, "names": ["batch['s']", "x"], "shapes": [(), (4, 6)], "shared": [{}, {}]}}
    scalar = parts.cut({"dp": 4, "tp": 2}, {}, 0)
    with pytest.raises(ValueError, match=r"process 1 had no batch any more, .* for \[\"batch\['s'\]\"\]"):
        settle(two, [scalar, ROWS], BY_ROWS, uneven="pad", what="f", ended=[1])


@pytest.mark.parametrize(
    ("shapes", "cut", "owners", "kind", "message"),
    [
        ([(4, 6), (6, 6)], ROWS, BY_ROWS, ProcessMismatchError, "dim 0 of batch .*process 0: 4 for 2 of its 4 blocks"),
        ([(4, 6), (4, 8)], ROWS, BY_ROWS, ProcessMismatchError, "dim 1 of batch .*process 1: 8 for 1 of its 1 blocks"),
        (
            [(3, 6), (3, 6)],
            ROWS,
            BY_ROWS,
            ValueError,
            "3 elements in each .* of which a process holds 2",
        ),
        ([(8, 3), (8, 3)], BOTH, BY_ROWS, ValueError, "dim 1 of batch has 3 elements .*; pad or crop it yourself"),
        ([(6, 6)], ROWS, [0] * 8, ValueError, 'into 4 blocks, which doesn\'t come out even; uneven="pad"'),
    ],
)
def test_sizes_that_dont_come_out_even(shapes, cut, owners, kind, message):
    with pytest.raises(kind, match=message):
        blocks(said(*shapes), cut, owners)


def test_facts_and_data_that_differ():
    facts = [{"dtype": "f4"}, {"dtype": "f4"}, {"dtype": "f2", "more": 1}]
    with pytest.raises(ProcessMismatchError, match=r"dtype: process 2: f2; processes 0, 1: f4\n  more: process 2: 1; "):
        blocks(said((4, 6), (4, 6), (4, 6), facts=facts), ROWS, BY_ROWS)
    shared = [{"(0, 0)": "aa"}, {"(0, 0)": "bb"}]
    with pytest.raises(ProcessMismatchError, match=r"same part gave .*\n  batch: process 0: aa; process 1: bb"):
        blocks(said((8, 3), (8, 3), shared=shared), ROWS, BY_COLUMNS)


def test_rows_that_overlap():
    """Blocks 0 and 1 in one process, 1 and 2 in another."""
    cut = parts.Cut((3,), ((0,), (1,), (1,), (2,)))
    assert blocks(said((4,), (4,)), cut, [0, 0, 1, 1]).blocks == ((2,),)
    with pytest.raises(ValueError, match="overlap without being the same"):
        blocks(said((4,), (4,)), cut, [0, 0, 1, 1], "pad")


def test_no_rows_to_pad():
    with pytest.raises(ValueError, match="no leaf of the batch has one"):
        blocks(said(()), parts.cut({"a": 1}, {}, 0), [0], "pad")


def test_who_says():
    assert who_says({0: 1, 1: 1}) is None
    assert who_says({3: "a", 5: "b", 7: "b"}) == "process 3: a; processes 5, 7: b"
