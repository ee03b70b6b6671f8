"""Whether anyone called: a file that is there until then."""

import os
import tempfile

from shardkit.launch import calling


def test_it_is_there_until_someone_calls():
    with calling.expected() as path:
        assert not calling.was_called(path)
        calling.called({"SHARDKIT_UNCALLED": path})
        assert calling.was_called(path)
        calling.called({"SHARDKIT_UNCALLED": path})
    calling.called({})


def test_nothing_is_left():
    with calling.expected() as path:
        pass
    assert not os.path.exists(path)


def test_where_no_file_can_be_made_nobody_is_warned(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with calling.expected() as path:
        assert path is None
        assert calling.was_called(path)
