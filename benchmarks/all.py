"""Every benchmark in turn, each in its own process, then one table of them all at the top of benchmarks/README.md.

    python benchmarks/all.py                     # make bench; takes long
    python benchmarks/all.py --only reshard partition
    python benchmarks/all.py --dry               # what would run, and what would be kept
    python benchmarks/all.py --table             # only the table, from the stored results

One that fails doesn't stop the others. What needs a compiler that isn't installed isn't run: its stored rows stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import summary
from rich.console import Console
from tables import HERE, between

COMPILERS = {"tpu": ("libtpu", "tpu-target"), "gpu": ("jax_plugins.xla_cuda12", "gpu-target")}


@dataclasses.dataclass(frozen=True)
class Run:
    """A script and its arguments.

    Attributes:
      script, arguments: what runs.
      needs: keys of `COMPILERS`.
      instead: arguments that do without these; None: not run.
    """

    script: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    instead: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return " ".join((f"{self.script}.py", *self.arguments))


RUNS = (
    Run("ring_conv"),
    Run("ring_conv", ("--targets",), needs=("tpu", "gpu")),
    Run("regions", needs=("tpu", "gpu"), instead=("--targets", "cpu")),
    Run("reshard"),
    Run("optimizer", ("--targets",), needs=("tpu", "gpu"), instead=("--only", "cpu")),
    Run("partition"),
    Run("models", ("--targets",), needs=("tpu", "gpu"), instead=("--only", "cpu")),
    Run("scaling", needs=("tpu",)),
    Run("checkpoints"),
    Run("peers"),  # says itself which peers aren't there
)


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def planned(runs: tuple[Run, ...], lacking: set[str]) -> tuple[list[Run], list[str]]:
    """What can run without some compilers, and what is kept instead."""
    todo, kept = [], []
    for run in runs:
        missing = [need for need in run.needs if need in lacking]
        if not missing:
            todo.append(run)
            continue
        extras = ", ".join(COMPILERS[need][1] for need in missing)
        kept.append(f"{run}: the compilers for {' and '.join(missing)} aren't here (extra {extras}): stored rows kept")
        if run.instead is not None:
            todo.append(dataclasses.replace(run, arguments=run.instead))
    return todo, kept


def run_all(todo: list[Run], console: Console, folder: Path = HERE) -> list[str]:
    """Runs one after the other, whose own progress is seen; says which failed."""
    failed = []
    # What isn't described hardware is simulated on the CPU, also where there's more.
    environment = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": _path(folder.parent)}
    for number, run in enumerate(todo, 1):
        console.rule(f"{number} of {len(todo)}: {run}")
        start = time.monotonic()
        command = [sys.executable, str(folder / f"{run.script}.py"), *run.arguments]
        code = subprocess.run(command, env=environment).returncode
        took = f"{(time.monotonic() - start) / 60:.1f} min"
        console.print(f"{run}: {'done' if code == 0 else f'FAILED (exit status {code})'} after {took}")
        if code:
            failed.append(f"{run}: exit status {code}; stored rows kept")
    return failed


def _path(root: Path) -> str:
    before = os.environ.get("PYTHONPATH")
    return f"{root}{os.pathsep}{before}" if before else str(root)


def write_table() -> list[str]:
    """The summary from the stored results; its notes."""
    comparisons, notes = summary.read(HERE / "results")
    between(HERE / "README.md", "summary", summary.lines(comparisons, notes))
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(run.script for run in RUNS))
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="these scripts")
    parser.add_argument("--dry", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--table", action="store_true", help="only write the table again, from the stored results")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    failed: list[str] = []
    if not arguments.table:
        lacking = {name for name, (module, _) in COMPILERS.items() if not installed(module)}
        todo, kept = planned(tuple(run for run in RUNS if run.script in arguments.only), lacking)
        if arguments.dry:
            console.print(
                "\n".join(["would run:", *(f"  {run}" for run in todo), "would keep:", *(f"  {k}" for k in kept)])
            )
            return
        failed = run_all(todo, console)
        console.rule("all done" if not failed else f"{len(failed)} of {len(todo)} failed")
        for line in (*kept, *failed):
            console.print(line)
    for note in write_table():
        console.print(note)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
