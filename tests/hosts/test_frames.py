"""Where a thread is, in the words of its author."""

import json
import sys

from shardkit.hosts.frames import where


def here():
    return where(sys._getframe())


def test_own_line():
    assert here() == f"test_frames.py:{here.__code__.co_firstlineno + 1} in here: return where(sys._getframe())"


def test_libraries_are_passed_over():
    """Called by json, which is called here: the user knows the call of json."""
    found = []

    def hook(pairs):
        found.append(where(sys._getframe().f_back))
        return pairs

    json.loads('{"a": 1}', object_pairs_hook=hook)
    assert "in test_libraries_are_passed_over: json.loads(" in found[0]


def test_only_libraries():
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    assert " in " in where(frame)
    assert where(None) == "nowhere"


def test_no_source_and_long_source():
    scope = {"where": where, "sys": sys}
    exec(compile("found = where(sys._getframe())", "<cell 3>", "exec"), scope)
    assert scope["found"] == "<cell 3>:1 in <module>"
    found = where(sys._getframe(), longest=20)
    assert found.endswith(": found = where(sys...")
