"""All stored results in one table, ours over theirs, and a list of what lost. Pure: from JSON to lines, nothing runs.

A comparison is one benchmark on one platform against one other way to do the same. Of each measure (wall time, bytes
that a device receives, temporaries of a device, cycles that the TPU compiler estimates, seconds of tracing and
compiling) it has one ratio a row: below 1 ours is better; within 5% of 1 is a tie.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import markdown

TIE = 0.05
WORST = 3  # losses that are named, of each comparison and measure
MEASURES = ("wall", "bytes", "temporaries", "cycles", "compile")
NOTE = (
    "Cells: wins / ties (within 5%) / losses, **median** and worst ratio, ours over theirs, so below 1 ours is better. "
    "Bytes: what a device receives; cycles: the TPU compiler's estimate; compile: tracing and compiling. Forms that "
    '`method="auto"` doesn\'t choose and other buckets than the default stand in their own sections.'
)
CPU = "simulated CPU devices"
XLA = "XLA's partitioner"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One line of the table.

    Attributes:
      benchmark: the script.
      platform: hardware, or a target.
      compared: ours / theirs.
      where: versions and date.
      rows: by name, the ratios, ours over theirs, by measure.
    """

    benchmark: str
    platform: str
    compared: str
    where: str
    rows: Mapping[str, Mapping[str, float]]

    def ratios(self, measure: str) -> dict[str, float]:
        """By name of the row."""
        return {name: ratios[measure] for name, ratios in self.rows.items() if measure in ratios}


def ratio(ours: float, theirs: float) -> float:
    """Infinite where only theirs is nothing.

    Example:
      >>> ratio(3, 4), ratio(0, 0), ratio(1, 0)
      (0.75, 1.0, inf)
    """
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else math.inf


def ratios(**pairs: tuple[float | None, float | None]) -> dict[str, float]:
    """Of those measures that both sides have."""
    return {name: ratio(a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}


# --- readers: one a file of results ---------------------------------------------------------------


def ring_conv(data: Mapping[str, Any]) -> Iterator[Comparison]:
    rows = {
        f"{r['program']}, {r['devices']} devices": ratios(
            wall=(r["wall_ring_ms"], r["wall_xla_ms"]),
            bytes=(r["received_ring_kb"], r["received_xla_kb"]),
            temporaries=(r["temporaries_ring_mb"], r["temporaries_xla_mb"]),
        )
        for r in data["rows"]
    }
    yield Comparison("ring_conv", CPU, f"`ring_conv`, `ConvParallel` / {XLA}", data["versions"], rows)


def ring_conv_targets(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """What runs unless another form is asked for: "auto", or the only one."""
    theirs = {(r["target"], r["program"]): r for r in data["rows"] if r["form"] == XLA}
    for target in _unique(r["target"] for r in data["rows"]):
        rows = {
            r["program"]: ratios(
                cycles=(r["mega_cycles"], other["mega_cycles"]),
                temporaries=(r["temporaries_mb"], other["temporaries_mb"]),
                bytes=(r["received_kb"], other["received_kb"]),
            )
            for r in data["rows"]
            if r["target"] == target and r["form"] in ("auto", "ring") and (other := theirs[target, r["program"]])
        }
        platform = f"{CPU}, compiled only" if target == "cpu" else target
        yield Comparison("ring_conv --targets", platform, f"`ring_*`, as chosen / {XLA}", data["versions"], rows)


def regions(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """As chosen ("auto"); programs that XLA's partitioner was measured on, too."""
    theirs = {(r["target"], r["program"]): r for r in data["rows"] if r["form"] == XLA}
    for target in _unique(r["target"] for r in data["rows"]):
        rows = {
            r["program"]: ratios(
                cycles=(r["mega_cycles"], other["mega_cycles"]),
                wall=(r["wall_ms"], other["wall_ms"]),
                temporaries=(r["temporaries_mb"], other["temporaries_mb"]),
                bytes=(r["received_kb"], other["received_kb"]),
            )
            for r in data["rows"]
            if r["target"] == target and r["form"] == "region" and (other := theirs.get((target, r["program"])))
        }
        yield Comparison("regions", CPU if target == "cpu" else target, f"`region` / {XLA}", data["versions"], rows)


def reshard(data: Mapping[str, Any]) -> Iterator[Comparison]:
    names = [f"{r['transition']} on {r['mesh']}" for r in data["rows"]]
    compiled = [
        ratios(wall=(r["wall_ms"], r["wall_xla_ms"]), bytes=(r["received"], r["received_xla"])) for r in data["rows"]
    ]
    rows = dict(zip(names, compiled, strict=True))
    yield Comparison("reshard", CPU, "`reshard` in `jit` / `jit(out_shardings=)`", data["versions"], rows)
    eager = [ratios(wall=(r["eager_ms"], r["device_put_ms"])) for r in data["rows"]]
    rows = {name: found for name, found in zip(names, eager, strict=True) if found}
    yield Comparison("reshard", CPU, "`reshard`, eager / `device_put`", data["versions"], rows)


def optimizer(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """With the default buckets."""

    def job(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(v for k, v in row["job"].items() if k != "ours")

    theirs = {job(r): r for r in data["rows"] if not r["job"]["ours"]}
    pairs = [(r, theirs[job(r)]) for r in data["rows"] if r["job"]["ours"] and job(r) in theirs]

    def name(at: Mapping[str, Any]) -> str:
        layers = "" if at["layers"] is None else f", {at['layers']} layers"
        return f"stage {at['stage']}, microbatches {at['microbatches']}{layers}"

    for target in _unique(ours["job"]["target"] for ours, _ in pairs):
        rows = {
            name(ours["job"]): ratios(
                wall=(ours["wall_ms"], other["wall_ms"]),
                bytes=(ours["received_mb"], other["received_mb"]),
                temporaries=(ours["temporaries_mb"], other["temporaries_mb"]),
                cycles=(ours["mega_cycles"], other["mega_cycles"]),
            )
            for ours, other in pairs
            if ours["job"]["target"] == target
        }
        platform = {"cpu": CPU, "cpu, described": f"{CPU}, compiled only"}.get(target, target)
        compared = "`shard_optimizer` / the recipe in plain JAX"
        yield Comparison("optimizer", platform, compared, data["versions"], rows)


def partition(data: Mapping[str, Any]) -> Iterator[Comparison]:
    rows = {
        f"{r['name']} on {r['mesh']}": ratios(
            wall=r["wall_ms"],
            bytes=r["received"],
            temporaries=r["temporaries"],
            compile=tuple(map(sum, zip(r["trace_s"], r["compile_s"], strict=True))),
        )
        for r in data["rows"]
    }
    yield Comparison("partition", CPU, f"`partition` / {XLA}", data["versions"], rows)


def models(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """Whole models under plans, in every form of ours."""

    def row(r: Mapping[str, Any]) -> tuple[str, str, str]:
        return r["job"]["target"], r["job"]["model"], r["job"]["way"]

    theirs = {row(r): r for r in data["rows"] if r["job"]["form"] == XLA}
    pairs = [(r, theirs[row(r)]) for r in data["rows"] if r["job"]["form"] != XLA and row(r) in theirs]
    for target in _unique(row(ours)[0] for ours, _ in pairs):
        rows = {
            f"{ours['job']['model']}, {ours['job']['way']}, {ours['job']['form']}": ratios(
                bytes=(ours["received_kb"], other["received_kb"]),
                temporaries=(ours["temporaries_kb"], other["temporaries_kb"]),
                cycles=(ours["mega_cycles"], other["mega_cycles"]),
            )
            for ours, other in pairs
            if row(ours)[0] == target
        }
        platform = f"{CPU}, compiled only" if target == "cpu" else target
        yield Comparison("models", platform, "`parallelize` / annotated Flax models", data["versions"], rows)


def scaling(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """Against the other on as many chips; how each scales stands in its own section. Compiled once, so not timed."""

    def job(row: Mapping[str, Any]) -> tuple[str, str]:
        return row["job"]["target"], row["job"]["program"]

    theirs = {job(r): r for r in data["rows"] if r["job"]["form"] == XLA}
    pairs = [(r, theirs[job(r)]) for r in data["rows"] if r["job"]["form"] != XLA and job(r) in theirs]
    for family in _unique(job(ours)[0].split(":")[1] for ours, _ in pairs):
        rows = {
            f"{job(ours)[1]}, {job(ours)[0]}": ratios(
                bytes=(sum(ours["purposes"].values()), sum(other["purposes"].values())),
                temporaries=(ours["temporaries"], other["temporaries"]),
                cycles=(ours["mega_cycles"], other["mega_cycles"]),
            )
            for ours, other in pairs
            if job(ours)[0].split(":")[1] == family
        }
        yield Comparison("scaling", f"TPU {family}, 8 to 256 chips", f"`ring_conv` / {XLA}", data["versions"], rows)


def peers(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """What peers do to sharded arrays, where it is right; of the convolutions against ours in as many processes."""
    alone = ("shardkit, n processes", "shardkit, 1 process", "lax, one device", "torch, one process")
    for name, said in data.get("peers", {}).items():
        if name in alone:
            continue
        found = [(row, row["results"][name]) for row in data.get("rows", []) if name in row["results"]]
        rows = {}
        for row, result in found:
            for way in ("forward", "backward"):
                wall = ratios(wall=(result.get(f"ours_{way}_ms"), result.get(f"{way}_ms")))
                if wall:
                    shown = way if way == "forward" else "forward + backward"
                    rows[f"{row['case']}, {row['processes']} processes, {shown}"] = wall
        right = sum(result.get("forward") == "right" == result.get("backward") for _, result in found)
        compared = f"`ring_conv` / {name} (right in {right} of {len(found)} cases, both ways)"
        where = f"{said['versions']}, {said['date']}"
        yield Comparison("peers", "processes on one CPU", compared, where, rows)
    halos = data.get("halos") or {}
    if halos.get("rows"):
        rows = {}
        for r in halos["rows"]:
            edges = "periodic" if r["periodic"] else "zeros"
            theirs = r["pad, exchange"]
            pairs = {"wall": (r["ours"]["wall_ms"], theirs["wall_ms"]), "bytes": (r["ours"]["bytes"], theirs["bytes"])}
            rows[f"width {r['width']}, {edges}, {r['mesh']}"] = ratios(**pairs)
        right = sum(r["pad, exchange"]["gradient"] == "right" for r in halos["rows"])
        compared = f"`halo_exchange` / jaxDecomp (gradient right in {right} of {len(rows)})"
        yield Comparison("peers", CPU, compared, f"{halos['versions']}, {halos['date']}", rows)


def checkpoints(data: Mapping[str, Any]) -> Iterator[Comparison]:
    """Saves and restores against orbax by itself, which checks nothing; in the loop they are compared with a step."""
    rows = {}
    for r in data["beside"]:
        for what in ("waits", "on disk", "onto 8"):
            pair = (r[f"shardkit {what}"], r[f"orbax {what}"])
            rows[f"{r['megabytes']:.0f} MB, {what}"] = ratios(wall=pair)
    yield Comparison("checkpoints", CPU, "`Checkpointer`, `restore` / orbax", data["versions"], rows)


READERS: dict[str, Callable[[Mapping[str, Any]], Iterable[Comparison]]] = {
    reader.__name__: reader
    for reader in (
        ring_conv,
        ring_conv_targets,
        regions,
        reshard,
        optimizer,
        partition,
        models,
        scaling,
        checkpoints,
        peers,
    )
}


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def read(folder: Path) -> tuple[list[Comparison], list[str]]:
    """The comparisons of all results in a folder, and notes on those that can't be read."""
    found, notes = [], []
    for name, reader in READERS.items():
        path = folder / f"{name}.json"
        if not path.exists():
            notes.append(f"No stored results of {name}.")
            continue
        try:
            some = list(reader(json.loads(path.read_text())))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            notes.append(f"{path.name} can't be read: {type(error).__name__}: {error}.")
            continue
        found += some
    known = {*READERS, "tune"}  # tuning fills a table of ours, it compares with nobody
    unknown = sorted(path.name for path in folder.glob("*.json") if path.stem not in known)
    return found, notes + [f"Not in this table: {name}." for name in unknown]


# --- the table ------------------------------------------------------------------------------------


HEADINGS = ("benchmark", "platform", "ours / theirs", "rows", *MEASURES, "taken")


def tally(values: Sequence[float]) -> tuple[int, int, int]:
    """Wins, ties, losses.

    Example:
      >>> tally([0.5, 0.96, 1.04, 1.06])
      (1, 2, 1)
    """
    wins, losses = sum(v < 1 - TIE for v in values), sum(v > 1 + TIE for v in values)
    return wins, len(values) - wins - losses, losses


def cell(values: Sequence[float]) -> str:
    """Wins / ties / losses, the median and the worst."""
    if not values:
        return "-"
    counted = " / ".join(map(str, tally(values)))
    return f"{counted}, **{statistics.median(values):.2f}**, {shown(max(values))}"


def shown(value: float) -> str:
    return "from none" if math.isinf(value) else f"{value:.2f}"


def taken(where: str) -> str:
    """The date first, then the versions; what else is said is left out.

    Example:
      >>> taken("jax 0.10.2, Python 3.11.7, 2026-11-30; medians of 5 rounds")
      '2026-11-30: jax 0.10.2, Python 3.11.7'
    """
    said = where.split(";")[0]
    date = re.search(r"\d{4}-\d\d-\d\d", said)
    rest = ", ".join(part for part in said.split(", ") if date is None or part != date[0])
    return f"{date[0]}: {rest}" if date else rest


def cells(comparison: Comparison) -> list[str]:
    head = [comparison.benchmark, comparison.platform, comparison.compared, str(len(comparison.rows))]
    measures = [cell(list(comparison.ratios(measure).values())) for measure in MEASURES]
    return [*head, *measures, taken(comparison.where)]


def lost(comparison: Comparison) -> list[str]:
    """The worst rows of each measure, and how many more there are."""
    found = []
    for measure in MEASURES:
        worse = {name: value for name, value in comparison.ratios(measure).items() if value > 1 + TIE}
        order = sorted(worse, key=lambda name: -worse[name])
        named = "; ".join(f"{shown(worse[name])} {name}" for name in order[:WORST])
        more = f"; {len(order) - WORST} more" if len(order) > WORST else ""
        found += [f"  - {measure}: {named}{more}"] if order else []
    return found


def title(comparison: Comparison) -> str:
    return f"{comparison.benchmark}, {comparison.platform}, {comparison.compared}"


def lines(comparisons: Sequence[Comparison], notes: Sequence[str] = ()) -> list[str]:
    """The table, what lost, and the notes."""
    losses = {title(c): lost(c) for c in comparisons if c.rows}
    found = [
        NOTE,
        "",
        *markdown(HEADINGS, [cells(c) for c in comparisons]),
        "",
        f"What lost (the worst {WORST} rows by each measure):",
        "",
    ]
    for name, worst in losses.items():
        found += [f"- {name}:", *worst] if worst else []
    without = [name for name, worst in losses.items() if not worst]
    found += ["", f"Nothing lost in: {'; '.join(without)}."] if without else []
    return [*found, "", *notes] if notes else found
