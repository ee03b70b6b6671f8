"""What every benchmark here writes down alike: versions, counts of collectives, tables in markdown."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).parent

SHORT = {
    "collective_permute": "permute",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}


def options(about: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """What every benchmark can be asked for; ``rounds``: as many by default, of those that are timed in turns."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="in turns, of which the median is taken")
    parser.add_argument("--dry", action="store_true", help="don't write the results")
    parser.add_argument("--rewrite", action="store_true", help="write the tables again from the stored results")
    return parser


def counts(kinds: Mapping[str, int]) -> str:
    """ "2 all-reduce, 1 permute", or "none"."""
    return ", ".join(f"{n} {SHORT.get(kind, kind)}" for kind, n in sorted(kinds.items())) or "none"


def versions() -> str:
    """What the figures were taken with, where and when."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{platform.machine()} with {cores} cores"
    return f"jax {jax.__version__}, Python {platform.python_version()}, {machine}, {datetime.date.today().isoformat()}"


def in_turns(programs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median wall time of each, in ms, run in turns so that a machine whose speed drifts slows all.

    Each round goes the other way round, so that none is always the one that finds a warm cache; two rounds before
    those that count.
    """
    wall: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 2):
        for name in list(programs) if number % 2 else list(programs)[::-1]:
            start = time.perf_counter()
            jax.block_until_ready(programs[name]())
            if number >= 2:
                wall[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) * 1e3 for name, times in wall.items()}


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, as lines."""
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def between(path: Path, name: str, lines: list[str]) -> None:
    """Put the lines between ``<!-- name: begin -->`` and ``<!-- name: end -->`` of a file."""
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = path.read_text().split(start)
    path.write_text(f"{before}{start}\n" + "\n".join(lines) + f"\n{end}" + rest.split(end)[1])
