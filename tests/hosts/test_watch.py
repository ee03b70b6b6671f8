"""The watch in a process alone, and what it refuses."""

import pytest

from shardkit.hosts import progress, watch
from shardkit.hosts.marks import last_mark


def test_alone():
    assert watch() is None
    assert watch(process=0, processes=1) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stuck_timeout": 0}, "stuck_timeout must be a positive number of seconds; got 0"),
        ({"dead_timeout": -1.0}, "dead_timeout must be a positive number of seconds; got -1.0"),
        ({"interval": 0.0}, "interval must be a positive number of seconds; got 0.0"),
        ({"dead_timeout": 2.0}, "dead_timeout must be at least three intervals, .* got 2 s, and an interval of 1 s"),
        ({"process": 1}, "give both process and processes, or neither"),
    ],
)
def test_refused(given, says):
    with pytest.raises(ValueError, match=says):
        watch(**given)


def test_progress():
    progress("reading")
    before = last_mark()
    assert str(before) == "reading"
    progress("batch", 7)
    after = last_mark()
    assert str(after) == "batch 7"
    assert after.count == before.count + 1 and after.at >= before.at
