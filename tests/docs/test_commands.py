"""Every command that people read is a real one: its scripts, options, targets and extras are there. None is run."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import ROOT, blocks, read, texts

from shardkit.cli import doctor, explain
from shardkit.launch.__main__ import parser as launch_parser

COMMAND = r"(?:python|make|pip|srun|gcloud|\.ci/run|\.venv/bin/\w+)(?=\s|$)"
# Scripts that stand for the reader's own.
READERS = ("train.py", "job.py")
# Others' programs, of which nothing can be checked here: their first words.
OTHERS = ("srun", "gcloud", "python -m paddle.distributed.launch")


def shells(text: str) -> list[str]:
    """The blocks of a text that are commands."""
    found = [block.text for block in blocks(text) if block.language in ("sh", "")]
    return [block for block in found if re.search(rf"(?m)^{COMMAND}", block)]


def commands() -> list[tuple[str, str]]:
    """(text, command) of all blocks, and of what stands between backquotes in a sentence."""
    found = []
    for text in texts():
        lines = [line.partition("#")[0] for block in shells(text) for line in block.splitlines()]
        prose = re.sub(r"(?ms)^ *```.*?^ *```", "", read(text))
        inline = re.findall(rf"`({COMMAND}[^`]*)`", prose)
        found += [(text, " ".join(command.split())) for command in [*lines, *inline] if command.strip()]
    return list(dict.fromkeys(found))


def options_of(script: Path) -> set[str]:
    """The options that a script of this project takes."""
    files = [script, script.with_name("tables.py")]  # where those are that all benchmarks have
    return {option for file in files if file.is_file() for option in re.findall(r'"(--[\w-]+)"', file.read_text())}


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Its arguments; a wrong one is an error, not the end."""
    try:
        return parser.parse_args(words)
    except SystemExit as error:
        raise AssertionError(words) from error


def cli() -> argparse.ArgumentParser:
    """That of ``python -m shardkit``."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    explain.add_parser(subparsers)
    doctor.add_parser(subparsers)
    return parser


def check(command: str) -> None:
    """Raises if it isn't one.

    A sentence may name a command without its arguments.
    """
    program, *words = shlex.split(command)
    if command.startswith(OTHERS) or command in (
        "python -m",
        "python -m shardkit explain",
        "python -m shardkit.launch",
    ):
        return
    if program == "make":
        assert words[0] in set(re.findall(r"(?m)^(\w+):", (ROOT / "Makefile").read_text()))
        for name, value in (word.split("=", 1) for word in words[1:]):
            assert name in re.findall(r"(?m)^(\w+) +\?=", (ROOT / "Makefile").read_text())
            if name == "BENCH":
                assert (ROOT / "benchmarks" / f"{value}.py").is_file()
            if name == "ARGS":
                check(f"python -m pytest {value}")
    elif program.endswith("pip"):
        extras = re.findall(r"(?m)^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text())
        assert words[0] == "install"
        ours = [word for word in words[1:] if word.startswith((".", "shardkit"))]
        assert {extra for word in ours for extra in re.findall(r"\[([\w-]+)\]", word)} <= set(extras)
    elif program == ".ci/run":
        assert (ROOT / program).stat().st_mode & 0o100
        assert not words
    elif program == ".venv/bin/pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").is_file()
    elif words[:2] == ["-m", "shardkit.launch"]:
        assert parse(launch_parser(), words[2:]).script
    elif words[:2] == ["-m", "shardkit"]:
        parse(cli(), words[2:])
    elif words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[2:] if word.startswith("tests"))
    else:
        assert program == "python"
        assert words[0] in READERS or (ROOT / words[0]).is_file()
        if words[0] not in READERS:
            assert {word for word in words[1:] if word.startswith("--")} <= options_of(ROOT / words[0])


@pytest.mark.parametrize(("text", "command"), commands())
def test_is_a_real_command(text, command):
    check(command)


def test_finds_the_commands():
    found = {command for _, command in commands()}
    assert {"make demo", ".ci/run", "python -m shardkit doctor", "make bench BENCH=reshard"} <= found
    assert {"python benchmarks/ring_conv.py --targets", "python -m shardkit.launch -n 4 train.py"} <= found
    assert len(found) > 40


@pytest.mark.parametrize(
    "command",
    [
        "make coffee",
        "make bench BENCH=coffee",
        "make test WHAT=coffee",
        'make test ARGS="tests/coffee"',
        "pip install '.[coffee]'",
        "python coffee.py",
        "python benchmarks/reshard.py --coffee",
        "python examples/train_fundus.py --rounds 3",
        "python -m shardkit.launch --coffee train.py",
        "python -m shardkit.launch -n 4",
        "python -m shardkit explain job.py:job",
        "python -m shardkit coffee",
        "python -m pytest tests/coffee",
    ],
)
def test_one_that_is_none_is_told(command):
    with pytest.raises((AssertionError, IndexError)):
        check(command)


@pytest.mark.parametrize(("text", "block"), [(text, block) for text in texts() for block in shells(text)])
def test_a_shell_reads_each_block(text, block):
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
