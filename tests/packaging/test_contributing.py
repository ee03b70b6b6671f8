"""CONTRIBUTING.md points at files, names and lines that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = r"(?:shardkit|tests|examples|benchmarks|notebooks|docs)/"
POINTERS = sorted(set(re.findall(rf"`({FOLDERS}[\w/.]+)(?:: ([^`]+))?`", TEXT)))
LINES = [
    (path, line)
    for path, code in (
        ("shardkit/spmd/rules/contraction.py", r"(    return Factored\(.*?\n    \))"),
        ("shardkit/parallel/nnx/elementwise.py", r"(class SpatialPReLU.*?\n\n\n)"),
        ("shardkit/inspect/targets/hardware.py", r'(    Hardware\("h200".*?\n)'),
    )
    for line in re.search(code, (ROOT / path).read_text(), re.DOTALL)[1].splitlines()
    if line.strip()
]


@pytest.mark.parametrize(("path", "name"), POINTERS)
def test_pointers(path, name):
    assert (ROOT / path).exists()
    assert not name or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (ROOT / path).read_text())


def test_there_are_pointers():
    assert len(POINTERS) > 20


@pytest.mark.parametrize(("path", "line"), LINES)
def test_quoted_code_is_that_of_the_file(path, line):
    assert line.strip().removesuffix(",") in TEXT


def test_marks_are_those_of_the_configuration():
    configured = re.findall(r'^  "(\w+)(?:\(\w\))?: ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = re.findall(r"^\| `(?:@pytest\.mark\.)?(\w+)(?:\(n\))?` \|", TEXT, re.MULTILINE)
    assert sorted(named) == sorted(configured)
