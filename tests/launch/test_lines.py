import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.launch import lines as module
from shardkit.launch.lines import Lines


def fed(chunks, times=None, interval=1.0):
    lines = Lines(interval)
    found = []
    for index, chunk in enumerate(chunks):
        found += lines.feed(chunk, 0.0 if times is None else times[index])
    return found + lines.rest()


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b""], []),
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"o", b"ne\nt", b"wo"], [b"one", b"two"]),
        ([b"\n\n"], [b"", b""]),
        ([b"dos\r\nline\r", b"\n"], [b"dos", b"line"]),
        ([b"no end"], [b"no end"]),
        ([b"1%\r2%\r3%"], [b"2%", b"3%"]),
        ([b"\r1%\r2%\r3%\n"], [b"2%", b"3%"]),
        ([b"1%\r", b"2%\r", b"3%\r", b"done\n"], [b"1%", b"done"]),
        ([b"99%\r    \r\n"], [b"99%", b"    "]),
        ([b"50%\r"], [b"50%"]),
    ],
)
def test_lines(chunks, expected):
    assert fed(chunks) == expected


def test_states_of_a_progress_bar_are_shown_at_intervals():
    chunks = [b"\r%d%%" % state for state in range(8)]
    assert fed(chunks, times=[0.5 * state for state in range(8)]) == [b"0%", b"2%", b"4%", b"6%", b"7%"]


def test_a_line_that_never_ends_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 4)
    lines = Lines()
    assert lines.feed(b"0123456789", 0.0) == [b"0123", b"4567"]
    assert lines.rest() == [b"89"]


@given(st.lists(st.text("ab\n").map(str.encode)))
def test_where_bytes_are_cut_does_not_matter(chunks):
    whole = b"".join(chunks)
    assert fed(chunks) == whole.split(b"\n")[: -1 if whole.endswith(b"\n") or not whole else None]


@given(st.lists(st.text("ab\r\n").map(str.encode)))
def test_nothing_is_left_out_without_an_interval(chunks):
    """Every state is shown at most once, in order, and what stands at the end of a line always is."""
    found = fed(chunks, interval=0.0)
    whole = b"".join(chunks).replace(b"\r\n", b"\n")
    states = [state for line in whole.split(b"\n") for state in line.split(b"\r")]
    rest = iter(states)
    assert all(line in rest for line in found)
