"""Who is dead or stuck: tables of what was heard, without any process."""

import pytest

from shardkit.hosts.hearing import Hearing
from shardkit.hosts.verdict import NORMALLY, Heard, Said, failed, judge
from shardkit.hosts.words import processes

STUCK, DEAD = 100.0, 10.0


def heard(marks=0, quiet=0.0, silent=0.0, where="train.py:8 in train", ended="", ended_for=0.0):
    said = Said(1, "node", 42, marks, f"batch {marks}" if marks else "", quiet, where, ended, ended_for)
    return Heard(said, silent)


NEVER = Heard(None, 3.0)
ERROR = "by RuntimeError: oops"

TABLE = {
    "all is well": ([heard(5), heard(5), heard(6)], None),
    "nothing was ever marked": ([heard(0, 1e6), heard(0, 1e6)], None),
    "late, not dead": ([heard(5), heard(5, silent=9.9)], None),
    "not yet heard of": ([heard(5), NEVER], None),
    # Dead.
    "dead": ([heard(5), heard(5, silent=10), heard(5)], ("dead", 1)),
    "two dead": ([heard(5), heard(5, silent=11), heard(5, silent=99)], ("dead", 1, 2)),
    "never heard of": ([heard(0), Heard(None, 10.0)], ("dead", 1)),
    "ended, and silent since": ([heard(5), heard(5, silent=500, ended=NORMALLY)], None),
    "all ended": ([heard(5, 500, 0, ended=NORMALLY), heard(5, 500, 500, ended=NORMALLY)], None),
    "dead comes before stuck": ([heard(5, 200), heard(4, 200, silent=11)], ("dead", 1)),
    # Failed.
    "failed just now": ([heard(5), heard(5, ended=ERROR, ended_for=5)], None),
    "failed": ([heard(5), heard(5, ended=ERROR, ended_for=10)], ("failed", 1)),
    "failed, and gone": ([heard(5), heard(5, ended=ERROR, ended_for=1, silent=9)], ("failed", 1)),
    "failed as another is dead": ([heard(5, ended=ERROR, ended_for=11), heard(5, silent=9.5), heard(5)], None),
    "failed as another was dead": ([heard(5, ended=ERROR, ended_for=11), heard(5, silent=10), heard(5)], ("dead", 1)),
    "failed, and the rest ended": ([heard(5, ended=NORMALLY), heard(5, ended=ERROR, ended_for=1)], ("failed", 1)),
    # Stuck.
    "slow, not stuck": ([heard(5, 99), heard(5, 99)], None),
    "behind": ([heard(6, 101), heard(5, 101), heard(6, 99)], ("stuck", 1)),
    "behind, though others go on": ([heard(9, 1), heard(5, 100), heard(8, 50)], ("stuck", 1)),
    "behind, but not for long": ([heard(9, 1), heard(5, 99)], None),
    "two behind": ([heard(9, 120), heard(5, 120), heard(8, 110)], ("stuck", 1, 2)),
    "only process 0 marks": ([heard(9, 1), heard(0, 500), heard(0, 500)], None),
    "only process 0 marks, and it stopped": ([heard(9, 100), heard(0, 500)], ("stuck", 1)),
    "level, one elsewhere": ([heard(5, 100), heard(5, 100), heard(5, 100, where="io.py:3 in load")], ("stuck", 2)),
    "level, no majority": ([heard(5, 100), heard(5, 100, where="io.py:3 in load")], ("stuck", 0, 1)),
    "level, in one place": ([heard(5, 100), heard(5, 100), heard(5, 100)], ("stuck", 0, 1, 2)),
    "level, one goes on": ([heard(5, 100), heard(5, 99), heard(5, 100)], None),
    "silence counts as quiet": ([heard(5, 101), heard(4, 95, silent=5)], ("stuck", 1)),
    "one ended long ago": ([heard(5, 50), heard(5, 500, 500, ended=NORMALLY)], None),
    "the rest is stuck": ([heard(5, 100), heard(4, 500, 500, ended=NORMALLY)], ("stuck", 0)),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name):
    processes_heard, wanted = TABLE[name]
    found = judge(dict(enumerate(processes_heard)), stuck_timeout=STUCK, dead_timeout=DEAD)
    assert (found and (found.kind, *found.named)) == wanted


def test_without_a_stuck_timeout():
    assert judge({0: heard(9, 1e6), 1: heard(5, 1e6)}, stuck_timeout=None, dead_timeout=DEAD) is None


def test_words():
    """Who, where, since when, what the others do; and what to do if it's none."""
    found = judge({0: heard(6, 130), 1: heard(5, 130, where="io.py:3 in load")}, stuck_timeout=STUCK, dead_timeout=DEAD)
    assert found.text.splitlines() == [
        "process 1 (node, pid 42) is stuck: no progress for 130 s. If that was work, call sk.progress(...) within it, "
        "or give a larger stuck_timeout",
        "  process 1 (node, pid 42): at io.py:3 in load; 5 marks of progress, the last 'batch 5' 130 s ago",
        "  process 0 (node, pid 42): at train.py:8 in train; 6 marks of progress, the last 'batch 6' 130 s ago",
    ]
    found = failed(0, {0: heard(ended=ERROR, ended_for=2), 1: NEVER})
    assert found.text.splitlines() == [
        "process 0 (node, pid 42) failed: ended by an exception",
        "  process 0 (node, pid 42): ended by RuntimeError: oops 2 s ago; no marks",
        "  process 1: never heard of since it was connected",
    ]


def test_many_in_few_words():
    """A thousand processes at one place are one line; at many places, few lines."""
    alike = {p: heard(6, 130) for p in range(1000)} | {7: heard(5, 130, where="io.py:3 in load")}
    lines = judge(alike, stuck_timeout=STUCK, dead_timeout=DEAD).text.splitlines()
    assert len(lines) == 3 and "process 0 (node, pid 42), process 1 (node, pid 42), " in lines[2]
    assert " and 996 more: at train.py:8" in lines[2]
    scattered = {p: heard(6, 130, where=f"train.py:{p} in train") for p in range(1000)}
    lines = judge(scattered, stuck_timeout=STUCK, dead_timeout=DEAD).text.splitlines()
    assert len(lines) == 10 and lines[-1] == "  and 992 more such lines"
    assert lines[0].startswith("processes 0, 1, 2, 3, 4, 5, 6, 7 and 992 more are stuck: no progress for 130 s of each")


def test_processes():
    assert processes([3]) == "process 3"
    assert processes([3, 4]) == "processes 3, 4"
    assert processes(range(10)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def said(beat):
    return Said(beat, "node", 42)


def test_hearing():
    """Silence is time without a new beat."""
    hearing = Hearing([1, 2], now=100.0, longest=3.0)
    assert hearing.heard() == {1: Heard(None), 2: Heard(None)}
    hearing.look(101.0)
    hearing.hear({1: said(1), 7: said(1)})
    hearing.look(103.0)
    hearing.hear({1: said(1)})  # the same as before
    assert hearing.heard() == {1: Heard(said(1), 2.0), 2: Heard(None, 3.0)}
    hearing.hear({1: said(2)})
    assert hearing.heard()[1] == Heard(said(2), 0.0)


def test_own_sleep_is_not_the_others_silence():
    hearing = Hearing([1], now=0.0, longest=3.0)
    hearing.hear({1: said(1)})
    hearing.look(1.0)
    hearing.look(5000.0)  # this process was stopped
    assert hearing.heard()[1].silent == 4.0
    hearing.look(4000.0)  # a clock that goes back says nothing
    assert hearing.heard()[1].silent == 4.0
