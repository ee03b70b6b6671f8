"""Every block of code that people read runs, as they would run it: a page's blocks one after another."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import ROOT, blocks, pages, python_blocks, read
from stand_ins import NOT_RUN, stand_ins

# Pages that start processes of their own; the rest share one.
SLOW = ("docs/rooms/cli.md", "docs/rooms/hosts.md")
FAST = [page for page in pages() if python_blocks(page) and page not in SLOW]
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
    return run(FAST, tmp_path_factory.mktemp("blocks"))


def check(page, told):
    for block in told:
        assert block["error"] is None, f"{page}:{block['line']}\n{block['error']}"
    assert [block["line"] for block in told] == [block.line for block in python_blocks(page)]


@pytest.mark.not_smoke
@pytest.mark.parametrize("page", FAST)
def test_blocks_run(ran, page):
    check(page, ran[page])


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_blocks_that_start_processes_run(page, tmp_path):
    check(page, run([page], tmp_path)[page])


def test_no_block_is_left_out():
    assert NOT_RUN == {}
    assert {page for page in pages() if python_blocks(page)} == {*FAST, *SLOW}
    assert len(python_blocks("README.md")) >= 10


def test_stand_ins_stand_for_something():
    from stand_ins import _STAND_INS

    headings = {(block.page, block.heading) for page in pages() for block in python_blocks(page)}
    assert set(_STAND_INS) <= headings


def test_a_block_that_fails_is_told(tmp_path):
    from pages import Block
    from run_blocks import run_block

    block = Block("README.md", "", 1, "python", "print(1 + 1)\n", "2\n")
    assert run_block(block, {}) is None
    assert "says that it prints" in run_block(block._replace(prints="3\n"), {})
    assert "ZeroDivisionError" in run_block(block._replace(text="1 / 0\n"), {})
    assert stand_ins(block) == []


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page}:{block.line}"
        if block.language == "python":
            ast.parse(block.text)
    assert not re.search(r"(?m)^ *<!-- prints -->\n(?! *```)", read(page))


def commands():
    """The lines of a shell on all pages."""
    for page in pages():
        for block in blocks(page):
            if block.language in ("sh", "") and re.search(r"(?m)^(make|python|pip|srun|gcloud)\b", block.text):
                for line in block.text.splitlines():
                    words = line.partition("#")[0].strip()
                    if words:
                        yield page, words


def test_commands_name_what_is_there():
    from shardkit.launch.__main__ import parser as launch_parser

    targets = set(re.findall(r"(?m)^(\w+):", (ROOT / "Makefile").read_text()))
    extras = set(re.findall(r"(?m)^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text()))
    seen = 0
    for page, line in commands():
        words = line.split()
        if words[0] == "make":
            assert words[1] in targets, (page, line)
        elif words[:3] == ["python", "-m", "shardkit.launch"]:
            assert launch_parser().parse_args(words[3:]).script, (page, line)
        elif words[:3] == ["python", "-m", "shardkit"]:
            assert words[3] in ("explain", "doctor"), (page, line)
        elif words[0] == "python" and words[1] not in ("train.py", "job.py"):
            assert (ROOT / words[1]).is_file(), (page, line)
        elif words[:2] == ["pip", "install"]:
            assert set(re.findall(r"\[([\w-]+)\]", line)) <= extras, (page, line)
        else:
            continue
        seen += 1
    assert seen >= 8


def test_commands_of_explain_parse():
    from shardkit.cli.explain import add_parser

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    given = [line.split()[3:] for _, line in commands() if line.startswith("python -m shardkit explain")]
    assert len(given) >= 2
    for words in given:
        parser.parse_args(words)


@pytest.mark.parametrize("page", pages())
def test_files_that_a_page_names_are_there(page):
    for name in re.findall(r"`((?:examples|benchmarks|tests)/[\w/.]+)`", read(page)):
        assert (ROOT / name).exists(), name
    for script in re.findall(r"`python ((?:examples|benchmarks)/\w+\.py)", read(page)):
        assert (ROOT / script).is_file(), script


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
