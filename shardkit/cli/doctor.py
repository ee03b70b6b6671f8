"""``python -m shardkit doctor``: what is here, and what is wrong with it.

Exit status: 0 if no problem was found (notes aside), 1 if one was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardkit.cli import cluster, devices, packages, surroundings
from shardkit.cli.findings import PROBLEM, Finding, problems
from shardkit.cli.known_bad import Setup, check_known_bad

_DESCRIPTION = """Looks at versions, devices, the environment and other processes; says what is wrong and what to do.
Exit status: 0 if no problem was found, 1 if one was. Nothing is changed, and jax.distributed isn't started. Where
`import shardkit` itself fails, run it by its path: python path/to/site-packages/shardkit doctor"""


@dataclasses.dataclass(frozen=True)
class Examination:
    """Everything the doctor has seen."""

    versions: list[packages.Row]
    devices: devices.Devices | None
    meshes: list[tuple[dict[str, int], str]]
    extras: list[packages.Extra]
    clusters: list[cluster.Cluster]
    distributed: bool | None
    environment: dict[str, str]
    findings: list[Finding]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, for ``json.dumps``."""
        plain = dataclasses.asdict(self)
        plain["meshes"] = [{"axes": axes, "for": what, "code": devices.mesh_line(axes)} for axes, what in self.meshes]
        if self.devices is not None:
            plain["devices"]["count"] = self.devices.count
        plain["problems"] = len(problems(self.findings))
        return plain


def add_parser(subparsers: Any) -> None:
    """Adds ``doctor`` to the subcommands."""
    parser = subparsers.add_parser(
        "doctor", help="what is installed and found here, and what is wrong with it", description=_DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="for tools")
    parser.add_argument("--no-devices", action="store_true", help="don't start JAX to see its devices")
    parser.add_argument("--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="to wait for JAX (60)")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds, such as 60")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Examines, prints, and returns the exit status."""
    found = None if args.no_devices else devices.to_ask(args.timeout)
    seen = examine(os.environ, found)
    if args.json:
        json.dump(seen.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(seen, sys.stdout)
    return 1 if problems(seen.findings) else 0


def examine(env: Mapping[str, str], found: devices.Devices | None) -> Examination:
    """All checks on this machine.

    Args:
      env: the environment.
      found: the devices; None: not asked for.

    Example:
      >>> "JAX_NUM_CPU_DEVICES" in [f.name for f in examine({"JAX_NUM_CPU_DEVICES": "many"}, None).findings]
      True
    """
    python, version_of = platform.python_version(), packages.installed
    own = packages.read_own()
    rows, findings = packages.check_ranges(own, python, version_of)
    looked_at = [name for name in (*packages.LOOKED_AT, *packages.ACCELERATORS) if name != "shardkit"]
    versions = packages.versions_of(looked_at, version_of)
    rows += [packages.Row(n, versions[n], "as jax says", True) for n in packages.ACCELERATORS if n in versions]
    clusters = cluster.detect(env)
    setup = Setup(
        versions,
        found.platforms if found is not None else frozenset(),
        env,
        cluster.several(clusters),
        f"{platform.system()}-{platform.machine()}",
        found.simulated if found is not None else 0,
        os.cpu_count() or 1,
    )
    findings += packages.check_each_other(versions, {n: packages.requirements_of(n) for n in versions}, python)
    findings += surroundings.check_environment(env, versions)
    findings += cluster.check_cluster(clusters, env, version_of)
    findings += devices.check_devices(found) if found is not None else []
    findings += check_known_bad(setup)
    meshes = devices.suggest_meshes(found.count, found.hosts) if found is not None and found.count else []
    return Examination(
        rows,
        found,
        meshes,
        packages.read_extras(own, python, version_of),
        clusters,
        _is_distributed(),
        surroundings.relevant(env),
        sorted(findings, key=lambda finding: finding.level != PROBLEM),
    )


def _is_distributed() -> bool | None:
    """Whether ``jax.distributed`` has been started in this process; None where JAX isn't loaded (it's broken)."""
    jax = sys.modules.get("jax")
    return None if jax is None else jax.distributed.is_initialized()


def show(seen: Examination, file: TextIO) -> None:
    """Prints it: tables, plain where it's no terminal."""
    console = Console(file=file) if file.isatty() else Console(file=file, width=160, no_color=True)
    box = rich.box.SIMPLE_HEAD if console.is_terminal else None
    for title, headers, rows in _tables(seen):
        table = Table(
            *headers, title=Text(title), title_justify="left", title_style="bold", box=box, pad_edge=False,
            show_header=bool(headers),
        )  # fmt: skip
        for _ in rows[0] if rows and not headers else ():
            table.add_column()
        for row in rows:
            table.add_row(*map(Text, row))  # not str: "[...]" must not be read as markup
        console.print(table)
        console.print()
    for finding in seen.findings:
        style = "bold red" if finding.level == PROBLEM else "yellow"
        console.print(Text.assemble((f"{finding.level}: {finding.name}", style)), soft_wrap=True)
        for label, text in (("", finding.happens), ("do: ", finding.todo), ("source: ", finding.source)):
            if text:
                console.print(Text(f"  {label}{text}"), soft_wrap=True)
    count = len(problems(seen.findings))
    last = "no problem found" if not count else f"{count} problem{'' if count == 1 else 's'} found"
    console.print(Text(last, "bold red" if count else "bold green"))


def _tables(seen: Examination) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Title, headers and rows of each."""
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
        (
            "Versions",
            ("package", "installed", "supported", ""),
            [(row.name, row.version, row.supported, "ok" if row.fits else "PROBLEM") for row in seen.versions],
        )
    ]
    if seen.devices is not None and not seen.devices.error:
        found = seen.devices
        rows = [(group.platform, group.kind, str(group.count), _memory(group.memory)) for group in found.groups]
        where = f"process {found.index} of {found.processes}"
        tables.append((f"Devices ({where})", ("platform", "kind", "number", "memory each"), rows))
    if seen.meshes:
        rows = [(devices.mesh_line(axes), what) for axes, what in seen.meshes]
        tables.append(("Meshes to try", ("code", "for"), rows))
    rows = [
        (extra.name, "installed")
        if not extra.missing
        else (extra.name, f"missing {', '.join(extra.missing)}: {extra.command}")
        for extra in seen.extras
    ]
    tables.append(("Optional extras", ("extra", ""), rows))
    started = {True: "started", False: "not started", None: "not known (JAX isn't loaded)"}[seen.distributed]
    rows = [("jax.distributed", started, "")]
    for one in seen.clusters:
        place = (
            f"process {'?' if one.index is None else one.index} of {'?' if one.processes is None else one.processes}"
        )
        rows.append((one.name, f"{place} ({', '.join(one.evidence)})", one.start))
    if not seen.clusters:
        rows.append(("launcher", "none found: one process", ""))
    tables.append(("Processes", ("", "", "to start"), rows))
    rows = [*seen.environment.items()] or [("nothing of JAX or XLA is set", "")]
    tables.append(("Environment", ("variable", "value"), rows))
    return tables


def _memory(count: int | None) -> str:
    return "not said" if count is None else f"{count / 2**30:.1f} GiB"
