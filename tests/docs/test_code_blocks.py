"""Every block of Python that people read runs, as they would run it: a page's blocks one after another."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import ROOT, blocks, python_blocks, read, texts
from stand_ins import NOT_RUN, stand_ins

# What it has of Python are lines of files, compared here and in tests/packaging/test_contributing.py.
QUOTING = "CONTRIBUTING.md"
RUN = [text for text in texts() if python_blocks(text) and text != QUOTING]
LANGUAGES = {"python", "sh", "text", ""}


def run(asked, folder):
    """What became of the blocks of the pages, by page."""
    result = folder / "result.json"
    known = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_X64"} | known
    command = [sys.executable, Path(__file__).with_name("run_blocks.py"), result, *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(RUN, tmp_path_factory.mktemp("blocks"))


@pytest.mark.not_smoke
@pytest.mark.parametrize("page", RUN)
def test_blocks_run(ran, page):
    for block in ran[page]:
        assert block["error"] is None, f"{page}:{block['line']}\n{block['error']}"
    assert [block["line"] for block in ran[page]] == [block.line for block in python_blocks(page)]


def test_no_block_is_left_out():
    assert NOT_RUN == {}
    assert {"README.md", "benchmarks/README.md", "docs/rooms/cli.md", "docs/rooms/hosts.md"} <= set(RUN)
    assert {text for text in texts() if python_blocks(text)} == {*RUN, QUOTING}
    assert len(python_blocks("README.md")) >= 10


def test_quoted_lines_are_those_of_the_package():
    def plain(text):
        lines = (line.partition("  # ")[0].strip().removesuffix(",") for line in text.splitlines())
        return {line for line in lines if line}

    package = plain("\n".join(path.read_text() for path in (ROOT / "shardkit").rglob("*.py")))
    for block in python_blocks(QUOTING):
        assert plain(block.text) <= package, block.line


def test_stand_ins_stand_for_something():
    from stand_ins import _STAND_INS

    headings = {(block.page, block.heading) for page in texts() for block in python_blocks(page)}
    assert set(_STAND_INS) <= headings


def test_a_block_that_fails_is_told(tmp_path):
    from pages import Block
    from run_blocks import run_block

    block = Block("README.md", "", 1, "python", "print(1 + 1)\n", "2\n")
    assert run_block(block, {}) is None
    assert "says that it prints" in run_block(block._replace(prints="3\n"), {})
    assert "ZeroDivisionError" in run_block(block._replace(text="1 / 0\n"), {})
    assert stand_ins(block) == []


@pytest.mark.parametrize("page", texts())
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page}:{block.line}"
        if block.language == "python":
            ast.parse(textwrap.dedent(block.text))
    assert not re.search(r"(?m)^ *<!-- prints -->\n(?! *```)", read(page))


@pytest.mark.parametrize("page", texts())
def test_files_that_a_page_names_are_there(page):
    for name in re.findall(r"`((?:examples|benchmarks|tests)/[\w/.]+)`", read(page)):
        assert (ROOT / name).exists(), name


def test_measured_numbers_are_those_of_the_readme_and_their_files_are_there():
    rows = re.findall(r"(?m)^\| (.+?) \| (.+?) \| (.+?) \|$", read("docs/measured.md"))[2:]
    assert len(rows) > 10
    readme = read("README.md")
    for number, _, results in rows:
        for decimal in re.findall(r"\d+\.\d+", number):
            assert decimal in readme, number
        stored = re.findall(r"`(\w+\.json)`", results)
        assert stored or results.startswith("not stored"), results
        for name in stored:
            assert (ROOT / "benchmarks" / "results" / name).is_file(), name
