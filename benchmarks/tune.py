"""Fills the table that ``method="auto"`` of ``ring_conv`` reads: shardkit/spatial/convolution/forms.json.

    python benchmarks/tune.py                                         # every target below
    python benchmarks/tune.py --targets tpu:v5e:2x4,gpu:h100:8,cpu    # these; stored rows of others stay
    python benchmarks/tune.py --missing                               # only what isn't stored yet
    python benchmarks/tune.py --rewrite --write                       # fill the table from the stored rows

Each form of the stack of ``described.py`` (two layers of it), in each of its three regimes. A TPU's compiler estimates
cycles, and the least wins; a GPU's says nothing of time, and all forms receive the same bytes, so that the least
temporaries win; on the CPU forms are timed in turns, at smaller sizes. How ties are broken says
``shardkit/spatial/convolution/tuned.py``. Figures go to results/tune.json, with
--write the winners into the package. Described targets need the extras tpu-target and gpu-target.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import re
from collections.abc import Iterable
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import described  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from tables import HERE, in_turns, options  # noqa: E402

from shardkit.inspect.targets.names import parse_target  # noqa: E402
from shardkit.spatial.convolution.table import Form, parse_form, read_table  # noqa: E402
from shardkit.spatial.convolution.trial import CantRunError, trying  # noqa: E402
from shardkit.spatial.convolution.tuned import Trial, best_of  # noqa: E402

STORED = HERE / "results" / "tune.json"
TABLE = HERE.parent / "shardkit" / "spatial" / "convolution" / "forms.json"
# The first of a platform fills its rows; where others want other rows, that's printed.
TARGETS = ("tpu:v5e:2x4", "tpu:v5p:2x2x2", "tpu:v6e:2x4", "gpu:h100:8", "cpu")
LAYERS = 2
# Of the CPU, a run is a tenth of a second or so: images x height x width.
CPU_REGIMES = ((1, 8, 512), (2, 8, 256), (8, 8, 128))
LEAST_ELEMENTS, LEAST_FEATURES = 2**14, 64
MEASURE = {"tpu": "cycles", "gpu": "temporaries", "cpu": "seconds"}
# What decides, and by which version it was compiled.
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-plugin", "jax-cuda12-pjrt"), "cpu": ()}


@dataclasses.dataclass
class Row:
    """One form in one regime on one target.

    Attributes:
      target: as ``sk.target_mesh`` names it, or "cpu".
      regime: images x height x width, over 8 devices along the width.
      form: which.
      mega_cycles, temporaries_mb, received_kb, wall_ms: its figures; None where there is none.
      reason: why it can't run.
      taken: date and versions.
    """

    target: str
    regime: tuple[int, int, int]
    form: str
    taken: dict[str, str]
    mega_cycles: float | None = None
    temporaries_mb: float | None = None
    received_kb: float | None = None
    wall_ms: float | None = None
    reason: str | None = None

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        return self.target, tuple(self.regime), self.form

    def trial(self) -> Trial:
        return Trial(
            parse_form(self.form),
            seconds=None if self.wall_ms is None else self.wall_ms / 1e3,
            cycles=None if self.mega_cycles is None else self.mega_cycles * 1e6,
            temporaries=None if self.temporaries_mb is None else round(self.temporaries_mb * 1e6),
            reason=self.reason,
        )


def platform(target: str) -> str:
    """ "tpu", "gpu" or "cpu".

    Raises:
      ValueError: a target that isn't known; the message lists those that are.
    """
    return "cpu" if target == "cpu" else parse_target(target).platform


def candidates(target: str, images: int) -> list[Form]:
    """The forms worth a compilation: with one image "major" changes nothing."""
    if platform(target) != "tpu":
        names = ["concat", "overlap", "blocks 8", *(["blocks 2 major"] if images > 1 else [])]
    elif images == 1:
        names = ["concat", "overlap", "blocks 4", "blocks 8", "blocks 16"]
    else:
        counts = (2, 4, 8) if images >= 8 else (4, 8)
        names = ["concat", "overlap", *(f"blocks {n}{m}" for n in counts for m in ("", " major"))]
    return [parse_form(name) for name in names]


def taken(target: str) -> dict[str, str]:
    packages = ("jax", "jaxlib", *COMPILERS[platform(target)])
    return {"date": datetime.date.today().isoformat()} | {p: importlib.metadata.version(p) for p in packages}


def compile_one(target: str, regime: tuple[int, int, int], form: Form) -> Row:
    """The compiler's figures for a described target."""
    mesh = described.mesh_for(target, {"sp": 8})
    row = Row(target, regime, str(form), taken(target))
    jax.clear_caches()
    function, (x, kernels) = described.stack(mesh, "auto", *regime)
    try:
        with trying(form):
            found = described.read(target, described.name(regime), str(form), mesh, function, (x, kernels[:LAYERS]))
    except CantRunError as error:
        row.reason = str(error)
        return row
    except jax.errors.JaxRuntimeError as error:
        row.reason = f"the compiler refuses: {str(error).splitlines()[0]}"
        return row
    row.mega_cycles = None if found.loops else found.mega_cycles  # a loop's body would hide work
    row.temporaries_mb, row.received_kb = found.temporaries_mb, found.received_kb
    return row


def time_all(regime: tuple[int, int, int], forms: Iterable[Form], rounds: int) -> list[Row]:
    """Wall times on simulated CPU devices, in float32, in turns."""
    mesh = described.mesh_for("cpu", {"sp": 8})
    _, (x, kernels) = described.stack(mesh, "auto", *regime)
    structs = jax.tree.map(lambda s: s.update(dtype=jnp.float32), (x, kernels[:LAYERS]))
    operands = jax.tree.map(lambda s: jax.device_put(jnp.ones(s.shape, s.dtype), s.sharding), structs)
    rows, programs = [], {}
    for form in forms:
        row = Row("cpu", regime, str(form), taken("cpu"))
        rows.append(row)
        function, _ = described.stack(mesh, "auto", *regime)
        try:
            with trying(form):
                compiled = jax.jit(function).lower(*structs).compile()
        except CantRunError as error:
            row.reason = str(error)
            continue
        row.temporaries_mb = compiled.memory_analysis().temp_size_in_bytes / 1e6
        programs[str(form)] = lambda run=compiled: run(*operands)
    wall = in_turns(programs, rounds)
    for row in rows:
        row.wall_ms = wall.get(row.form)
    return rows


def stored() -> dict[tuple, Row]:
    if not STORED.exists():
        return {}
    rows = [Row(**r | {"regime": tuple(r["regime"])}) for r in json.loads(STORED.read_text())["rows"]]
    return {row.key: row for row in rows}


def store(rows: Iterable[Row]) -> None:
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps({"layers": LAYERS, "rows": [dataclasses.asdict(r) for r in rows]}, indent=1) + "\n")


def measure(targets: list[str], missing: bool, rounds: int, dry: bool, console: Console) -> list[Row]:
    """Every form in every regime; stored as it comes, since all of it takes an hour."""
    rows = stored()
    jobs: list[tuple[str, tuple[int, int, int], list[Form]]] = []
    for target in targets:
        for regime in CPU_REGIMES if target == "cpu" else described.REGIMES:
            forms = candidates(target, regime[0])
            if missing:
                forms = [form for form in forms if (target, regime, str(form)) not in rows]
            # Those that are timed are timed together.
            jobs += [(target, regime, forms)] if target == "cpu" else [(target, regime, [f]) for f in forms]
    for target, regime, forms in track(jobs, description="tuning", console=console):
        found = time_all(regime, forms, rounds) if target == "cpu" else [compile_one(target, regime, forms[0])]
        rows |= {row.key: row for row in found}
        if not dry:
            store(rows.values())
    return list(rows.values())


# --- what follows from the figures -------------------------------------------------------------------------


def bounded(best: dict[int, str]) -> list[dict[str, Any]]:
    """Rows of the table, of the best form by images a device: each up to the next that has another.

    Example:
      >>> bounded({1: "blocks 8", 2: "blocks 8", 8: "blocks 2 major"})
      [{'images': 7, 'form': 'blocks 8'}, {'images': None, 'form': 'blocks 2 major'}]
    """
    rows: list[dict[str, Any]] = []
    for images, form in sorted(best.items()):
        if rows and rows[-1]["form"] == form:
            continue
        if rows:
            rows[-1]["images"] = images - 1
        rows.append({"images": None, "form": form})
    return rows


def winners(rows: Iterable[Row], target: str) -> dict[int, str]:
    """The best form of each regime that was measured, by images a device."""
    found: dict[int, list[Trial]] = {}
    for row in rows:
        if row.target == target:
            found.setdefault(row.regime[0], []).append(row.trial())
    return {images: str(best_of(trials, MEASURE[platform(target)]).form) for images, trials in found.items()}


def fill(rows: list[Row], before: dict[str, Any]) -> dict[str, Any]:
    """What the table's file should say; platforms that weren't measured stay as they are."""
    data = {"least_elements": LEAST_ELEMENTS, "least_features": LEAST_FEATURES, "platforms": {}}
    for name in MEASURE:
        targets = [t for t in TARGETS if platform(t) == name and any(r.target == t for r in rows)]
        if not targets:
            data["platforms"][name] = before["platforms"][name]
            continue
        entry: dict[str, Any] = {"rows": bounded(winners(rows, targets[0])), "decided_by": MEASURE[name]}
        entry["filled"] = {t: max((r.taken for r in rows if r.target == t), key=lambda k: k["date"]) for t in targets}
        entry["figures"] = {t: _figures(rows, t) for t in targets}
        data["platforms"][name] = entry
    read_table(data)
    return data


def disagreeing(rows: list[Row]) -> dict[str, list[dict[str, Any]]]:
    """The rows of targets that want others than the first target of their platform that was measured."""
    measured = [t for t in TARGETS if any(r.target == t for r in rows)]
    found = {t: bounded(winners(rows, t)) for t in measured}
    first = {platform(t): found[t] for t in reversed(measured)}
    return {t: found[t] for t in measured if found[t] != first[platform(t)]}


def _figures(rows: Iterable[Row], target: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.target == target:
            names = ("mega_cycles", "temporaries_mb", "received_kb", "wall_ms")
            figures = {n: round(v, 2) for n in names if (v := getattr(row, n)) is not None}
            of_regime = found.setdefault(" x ".join(map(str, row.regime)), {})
            of_regime[row.form] = figures if row.reason is None else {"reason": row.reason}
    return found


def as_text(data: dict[str, Any]) -> str:
    """JSON, with what has no structure below it on one line."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\{[^{}\[\]]*\}", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text) + "\n"


def shown(rows: list[Row], targets: list[str]) -> Table:
    table = Table(title="forms of a convolution; * the best of its regime")
    for heading in ("target", "images x height x width", "form", "cycles, M", "temporaries, MB", "wall, ms"):
        table.add_column(heading)
    for row in (r for target in targets for r in rows if r.target == target):
        best = winners(rows, row.target)[row.regime[0]] == row.form
        figures = ["-" if v is None else f"{v:,.1f}" for v in (row.mega_cycles, row.temporaries_mb, row.wall_ms)]
        if row.reason is not None:
            figures = [row.reason, "-", "-"]
        table.add_row(row.target, " x ".join(map(str, row.regime)), row.form + " *" * best, *figures)
    return table


def main() -> None:
    parser = options(__doc__, rounds=9)
    parser.add_argument("--targets", default=",".join(TARGETS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--missing", action="store_true", help="measure only what isn't stored")
    parser.add_argument("--write", action="store_true", help="fill the package's table with what was found")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    for target in targets:
        try:
            platform(target)
        except ValueError as error:
            parser.error(f"{error}; or cpu")
    console = Console()
    if arguments.rewrite:
        rows = list(stored().values())
    else:
        rows = measure(targets, arguments.missing, arguments.rounds, arguments.dry, console)
    console.print(shown(rows, targets))
    for target, other in disagreeing(rows).items():
        console.print(f"{target} wants other rows than the first target of its platform: {other}")
    if arguments.write:
        TABLE.write_text(as_text(fill(rows, json.loads(TABLE.read_text()))))
        console.print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
