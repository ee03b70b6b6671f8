"""The list of digests: written, read, checked, by itself and by sha256sum."""

import shutil
import subprocess

import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from shardkit.checkpoint import digests


@pytest.fixture
def folder(tmp_path):
    files = {"a": b"one", "d/b": b"", "d/e/c": bytes(range(256)) * 50_000}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    here = epath.Path(tmp_path)
    (here / digests.LIST).write_text(digests.to_text(digests.digests_of(here, sorted(files))))
    return here


def test_lists_every_file(folder):
    assert digests.files_below(folder) == [digests.LIST, "a", "d/b", "d/e/c"]
    assert sorted(digests.read_list(folder)) == ["a", "d/b", "d/e/c"]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
def test_is_what_sha256sum_reads(folder):
    done = subprocess.run(
        ["sha256sum", "--check", digests.LIST], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["a: OK", "d/b: OK", "d/e/c: OK"]


@pytest.mark.parametrize("name", ["a", "d/e/c"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend"])
def test_finds_damage(folder, name, damage):
    content = bytearray((folder / name).read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "truncate":
        del content[-1]
    else:
        content.append(0)
    (folder / name).write_bytes(bytes(content))
    assert digests.damaged_files(folder, digests.read_list(folder)) == [name]


def test_finds_what_is_gone(folder):
    listed = digests.read_list(folder)
    (folder / "d/b").unlink()
    assert digests.missing_files(folder, listed) == ["d/b"]
    assert digests.damaged_files(folder, listed) == ["d/b"]


@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", exclude_characters="\n\r"), min_size=1),
        st.binary(min_size=32, max_size=32),
    )
)
def test_text_loses_nothing(names):
    listed = {name: digest.hex() for name, digest in names.items() if name.splitlines() == [name]}
    assert digests.from_text(digests.to_text(listed)) == listed


@given(st.integers(1, 150))
def test_a_list_cut_short_is_refused_or_says_less(cut):
    text = digests.to_text({"a": "0" * 64, "d/b": "1" * 64})
    short = text[: max(0, len(text) - cut)]
    try:
        found = digests.from_text(short)
    except ValueError:
        return
    assert len(found) < 2  # cut between lines: the files that it doesn't name are seen by their number


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is missing"), (b"", "is empty"), (b"abc", "is damaged"), (b"\xff\xfe", "is damaged")],
)
def test_a_bad_list_is_named(folder, content, message):
    (folder / digests.LIST).unlink()
    if content is not None:
        (folder / digests.LIST).write_bytes(content)
    with pytest.raises(ValueError, match=f"{digests.LIST} {message}"):
        digests.read_list(folder)
