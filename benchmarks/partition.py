"""A training step partitioned by ``sk.partition`` beside the same step partitioned by XLA, in one run.

    python benchmarks/partition.py                       # every model and mesh, then how planning scales
    python benchmarks/partition.py --only gpt --dry      # rows whose name has this in it, results not written
    python benchmarks/partition.py --rewrite             # the tables again, from the stored results

Both are given the same function (forward, backward, AdamW of an unmodified Flax model of ``tests/spmd/models.py``) and
arguments placed alike, on simulated CPU devices; neither is told where results shall be.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AbstractMesh  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from tables import HERE, between, counts, in_turns, markdown, options, versions  # noqa: E402

import shardkit as sk  # noqa: E402


def _load_models() -> Any:
    """The models of the tests, which are no package here."""
    spec = importlib.util.spec_from_file_location("spmd_models", HERE.parent / "tests" / "spmd" / "models.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # where dataclasses look for their own module
    spec.loader.exec_module(found)
    return found


models = _load_models()
S = sk.Shard
DP, TP, SP, BOTH, SPACE = {"dp": 8}, {"tp": 8}, {"sp": 8}, {"dp": 2, "tp": 4}, {"dp": 2, "sp": 4}
BATCH = {"dp": S(0)}
MLP_CUTS = {"['up']['kernel']": 1, "['up']['bias']": 0, "['norm']": 0, "['down']['kernel']": 0}
EXPERTS = {"['up']": 0, "['down']": 0}
LAYERS, DEVICES = (12, 48), (8, 64, 512)
MEGATRON = models.COLUMNS_AND_ROWS


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
      make: of ``nnx.Rngs``, the model.
      loss: of its result and the second array.
      batch: the arrays.
    """

    make: Callable
    loss: Callable
    batch: tuple


def _models() -> dict[str, Model]:
    """Of sizes at which a step takes some milliseconds."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    def labels(below: int, *shape: int) -> np.ndarray:
        return rng.integers(0, below, shape).astype(np.int32)

    images, entropy = normal(16, 32, 32, 3), models.cross_entropy
    of = functools.partial
    series = normal(16, 64, 64)
    return {
        "MLP": Model(of(models.MLP, inputs=256, hidden=1024), entropy, (normal(256, 256), labels(8, 256))),
        "CNN with BatchNorm": Model(of(models.CNN, width=32, side=32), entropy, (images, labels(10, 16))),
        "ResNet": Model(of(models.ResNet, width=32), models.squares, (images, normal(16, 10))),
        "U-Net": Model(of(models.UNet, width=32), models.squares, (images, images[::-1])),
        "encoder": Model(of(models.Encoder, inputs=64, width=128, heads=8, layers=2), entropy, (series, labels(8, 16))),
        "GPT": Model(
            of(models.GPT, vocabulary=512, width=128, heads=8, context=64),
            entropy,
            (labels(512, 16, 64), labels(512, 16, 64)),
        ),
        "ViT": Model(of(models.ViT, width=128, heads=8, layers=2, side=32), entropy, (images, labels(10, 16))),
        "LSTM": Model(of(models.Recurrent, inputs=64, hidden=128), entropy, (series, labels(8, 16))),
        "GRU": Model(of(models.Recurrent, cell=nnx.GRUCell, inputs=64, hidden=128), entropy, (series, labels(8, 16))),
        "MoE": Model(of(models.MoE, width=128, experts=8, hidden=256), entropy, (normal(256, 128), labels(8, 256))),
    }


@dataclasses.dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
      model: which.
      way: what is cut, in words.
      mesh: axes and sizes.
      at: placements of both arrays of the batch, or of the first (then the second is whole).
      cuts: parts of parameters' paths, and the dim of those that "tp" cuts.
    """

    model: str
    way: str
    mesh: Mapping[str, int]
    at: Mapping[str, Any]
    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.way}"


def _jobs() -> list[Job]:
    found = [Job(model, "batch", DP, BATCH) for model in _models()]
    width, both = {"sp": S(2)}, {"dp": S(0), "sp": S(2)}
    found += [Job("MLP", "columns, rows", TP, {}, MLP_CUTS), Job("MLP", "batch x columns, rows", BOTH, BATCH, MLP_CUTS)]
    for model in ("CNN with BatchNorm", "ResNet", "U-Net"):
        found += [Job(model, "width", SP, width), Job(model, "batch x width", SPACE, both)]
    for model in ("encoder", "GPT", "ViT"):
        found += [Job(model, "heads", TP, {}, MEGATRON), Job(model, "batch x heads", BOTH, BATCH, MEGATRON)]
    for model in ("encoder", "GPT"):
        found += [
            Job(model, "sequence", TP, {"tp": S(1)}),
            Job(model, "batch x sequence", BOTH, {"dp": S(0), "tp": S(1)}),
        ]
    found += [Job("MoE", "experts", TP, {}, EXPERTS), Job("MoE", "batch x experts", BOTH, BATCH, EXPERTS)]
    order = list(_models())
    return sorted(found, key=lambda job: order.index(job.model))


@dataclasses.dataclass
class Row:
    """Ours beside XLA's: (ours, XLA's) wherever there are two.

    Attributes:
      name, mesh: of the job.
      planned: bytes that the plan says a device receives.
      received: what it receives in the compiled programs; collectives in loops as often as they run.
      collectives: of the compiled program, by kind, those in loops once.
      in_loop: of these, how many are in loops.
      replicated: operations that ran whole for want of a rule.
      temporaries: bytes of a device.
      wall_ms: of a step, both under ``jax.jit``.
      unjitted_ms: of ours, called as it is: arguments are read and results labelled in Python.
      trace_s: tracing (and partitioning).
      compile_s: lowering and compiling.
    """

    name: str
    mesh: str
    planned: int
    received: tuple[int, int]
    collectives: tuple[dict[str, int], dict[str, int]]
    in_loop: tuple[int, int]
    replicated: int
    temporaries: tuple[int, int]
    wall_ms: tuple[float, float]
    unjitted_ms: float
    trace_s: tuple[float, float]
    compile_s: tuple[float, float]


def placed(job: Job, training: Any, batch: tuple, mesh: Any) -> tuple:
    """The arguments of a step, where the job says."""

    def one(path: Any, x: Any) -> Any:
        dim = models.cut_dim(path, x, job.cuts)
        return sk.shard_tensor(x, {} if dim is None else {"tp": S(dim)}, mesh)

    def of_batch(x: Any) -> Any:
        fits = {axis: p for axis, p in job.at.items() if p.dim < x.ndim}  # labels have no width
        return sk.shard_tensor(x, fits, mesh)

    return (*jax.tree_util.tree_map_with_path(one, training.state), *map(of_batch, batch))


def received(report: sk.CollectiveReport) -> int:
    return sum(c.bytes * (c.trip_count or 1) for c in report)


def measure(job: Job, rounds: int, compiles: int) -> Row:
    """Both programs of a job, traced and compiled in turns with nothing cached, then run in turns."""
    model = _models()[job.model]
    training = models.training(model.make, model.loss)
    mesh = sk.make_mesh(dict(job.mesh))
    arguments = placed(job, training, model.batch, mesh)
    times: dict[str, list[float]] = {name: [] for name in ("ours: trace", "ours: compile", "trace", "compile")}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        times[name].append(time.perf_counter() - start)
        return result

    where = jax.tree.map(sk.placements, arguments)

    def ours() -> Any:
        step = sk.partition(training.step, where, mesh=mesh)
        jitted = jax.jit(step)
        traced = timed("ours: trace", lambda: jitted.trace(*arguments))
        return step, jitted, timed("ours: compile", lambda: traced.lower().compile())

    def theirs() -> Any:
        step = jax.jit(training.step)
        traced = timed("trace", lambda: step.trace(*arguments))
        return step, step, timed("compile", lambda: traced.lower().compile())

    for number in range(compiles):
        made = {}
        for make in (ours, theirs) if number % 2 else (theirs, ours):
            jax.clear_caches()
            made[make] = make()
    (step, jitted, compiled), (_, plain, plain_compiled) = made[ours], made[theirs]
    wall = in_turns(
        {
            "ours": lambda: jitted(*arguments),
            "XLA": lambda: plain(*arguments),
            "unjitted": lambda: step(*arguments),
        },
        rounds,
    )
    reports = [sk.collectives(c, mesh=mesh) for c in (compiled, plain_compiled)]
    memory = [sk.memory(c).temporaries for c in (compiled, plain_compiled)]
    program = step.program(*arguments)
    middle = {name: statistics.median(t) for name, t in times.items()}
    return Row(
        name=job.name,
        mesh=" x ".join(f"{axis}={size}" for axis, size in job.mesh.items()),
        planned=int(program.bytes_per_device),
        received=(received(reports[0]), received(reports[1])),
        collectives=(reports[0].by_kind(), reports[1].by_kind()),
        in_loop=(reports[0].count(in_loop=True), reports[1].count(in_loop=True)),
        replicated=len(program.replicated),
        temporaries=(memory[0], memory[1]),
        wall_ms=(wall["ours"], wall["XLA"]),
        unjitted_ms=wall["unjitted"],
        trace_s=(middle["ours: trace"], middle["trace"]),
        compile_s=(middle["ours: compile"], middle["compile"]),
    )


# --- how planning scales --------------------------------------------------------------------------


@dataclasses.dataclass
class Scale:
    """A GPT of so many layers planned for so many devices, none of which is there.

    Attributes:
      layers, devices: of the job.
      operations: in the program, those in functions counted.
      trace_s: tracing alone, as ``jax.make_jaxpr`` does.
      total_s: tracing and partitioning.
    """

    layers: int
    devices: int
    operations: int
    trace_s: float
    total_s: float


def planned(layers: int, devices: int, rounds: int) -> Scale:
    """Medians."""
    model = functools.partial(models.GPT, vocabulary=512, width=64, heads=8, layers=layers, context=16)
    training = models.training(model, models.cross_entropy)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), training.state)
    tokens = jax.ShapeDtypeStruct((128, 16), np.int32)
    mesh = AbstractMesh((devices // 8, 8), ("dp", "tp"))

    def place(path: Any, x: Any) -> Any:
        dim = models.cut_dim(path, x, MEGATRON)
        return {"tp": sk.Replicate() if dim is None else S(dim)}

    where = (*jax.tree_util.tree_map_with_path(place, state), BATCH, BATCH)
    traces, totals = [], []
    program = None
    for _ in range(rounds):
        jax.clear_caches()
        start = time.perf_counter()
        jax.make_jaxpr(training.step)(*state, tokens, tokens)
        traces.append(time.perf_counter() - start)
        jax.clear_caches()
        start = time.perf_counter()
        program = sk.partition(training.step, where, mesh=mesh).program(*state, tokens, tokens)
        totals.append(time.perf_counter() - start)
    assert program is not None
    operations = sum(s.kind == "op" for s in program.steps)
    return Scale(layers, devices, operations, statistics.median(traces), statistics.median(totals))


# --- tables ---------------------------------------------------------------------------------------


HEADINGS = (
    "step",
    "mesh",
    "received, kB a device: ours / XLA",
    "the plan says, kB",
    "collectives (in loops): ours",
    "collectives (in loops): XLA",
    "wall, ms: ours / XLA",
    "ours outside jit, ms",
    "temporaries, kB a device: ours / XLA",
    "trace (ours: and partition), s: ours / XLA",
    "compile, s: ours / XLA",
)
SCALE_HEADINGS = (
    "GPT, layers",
    "devices",
    "operations",
    "trace + partition, s",
    "of that tracing, s",
    "s per 1000 operations",
)


def ratio(pair: tuple[float, float], digits: int, unit: float = 1.0) -> str:
    mine, theirs = (x / unit for x in pair)
    quotient = f"{mine / theirs:.2f}" if theirs else "-"
    return f"{mine:,.{digits}f} / {theirs:,.{digits}f} = **{quotient}**"


def cells(row: Row) -> list[str]:
    def found(i: int) -> str:
        return counts(row.collectives[i]) + (f" ({row.in_loop[i]})" if row.in_loop[i] else "")

    return [
        row.name + (f" ({row.replicated} operations whole)" if row.replicated else ""),
        row.mesh,
        ratio(row.received, 1, 1e3),
        f"{row.planned / 1e3:,.1f}" + ("" if row.planned == row.received[0] else " (**differs**)"),
        found(0),
        found(1),
        ratio(row.wall_ms, 1),
        f"{row.unjitted_ms:,.1f}",
        ratio(row.temporaries, 0, 1e3),
        ratio(row.trace_s, 2),
        ratio(row.compile_s, 2),
    ]


def scale_cells(row: Scale) -> list[str]:
    per = row.total_s / row.operations * 1e3
    return [
        f"{row.layers}",
        f"{row.devices}",
        f"{row.operations:,}",
        f"{row.total_s:.2f}",
        f"{row.trace_s:.2f}",
        f"{per:.2f}",
    ]


def summary(rows: list[Row]) -> str:
    """Wins and losses, counted."""

    def said(name: str, attribute: str, slack: float) -> str:
        ratios = [a / b for a, b in (getattr(r, attribute) for r in rows) if b]
        ends = f"median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
        return f"{name}: {ends}, above {slack:g} in {sum(x > slack for x in ratios)}"

    differs = sum(r.planned != r.received[0] for r in rows)
    parts = [
        said("bytes", "received", 1.0),
        said("wall", "wall_ms", 1.05),
        said("temporaries", "temporaries", 1.0),
        said("trace and partition", "trace_s", 1.0),
        said("compile", "compile_s", 1.0),
    ]
    plan = f"The compiled program differs from the plan in {differs}."
    return f"Ours over XLA's in {len(rows)} rows. {'; '.join(parts)}. {plan}"


def write(rows: list[Row], scale: list[Scale], where: str) -> None:
    """The figures as JSON, the tables in benchmarks/README.md."""
    (HERE / "results").mkdir(exist_ok=True)
    data = {
        "versions": where,
        "rows": [dataclasses.asdict(r) for r in rows],
        "scale": [dataclasses.asdict(s) for s in scale],
    }
    (HERE / "results" / "partition.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [where, ""]
    lines += [summary(rows), "", *markdown(HEADINGS, [cells(r) for r in rows]), ""] if rows else []
    lines += ["Planning for devices that are only described (dp x tp=8):", ""]
    lines += markdown(SCALE_HEADINGS, [scale_cells(s) for s in scale])
    between(HERE / "README.md", "partition", lines)


def load() -> tuple[list[Row], list[Scale], str]:
    """What is stored; nothing, if nothing is."""
    path = HERE / "results" / "partition.json"
    stored = json.loads(path.read_text()) if path.exists() else {"rows": [], "scale": [], "versions": ""}
    rows = [Row(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in stored["rows"]]
    return rows, [Scale(**s) for s in stored["scale"]], stored["versions"]


def main() -> None:
    parser = options(__doc__, rounds=15)
    parser.add_argument("--compiles", type=int, default=3, help="rounds of tracing and compiling")
    parser.add_argument("--only", help="rows with this in their name")
    parser.add_argument("--part", choices=("steps", "scale"), help="only this; stored results of the other stay")
    arguments = parser.parse_args()
    if arguments.rewrite:
        write(*load())
        return
    console = Console(width=220)
    rows: list[Row] = []
    scale: list[Scale] = []
    if arguments.part != "scale":
        jobs = [j for j in _jobs() if arguments.only is None or arguments.only.lower() in j.name.lower()]
        rows = [measure(job, arguments.rounds, arguments.compiles) for job in track(jobs, description="steps")]
        table = Table(title=f"A partitioned training step ({versions()})")
        for heading in HEADINGS:
            table.add_column(heading)
        for row in rows:
            table.add_row(*(cell.replace("*", "") for cell in cells(row)))
        console.print(table)
        console.print(summary(rows))
    if arguments.part != "steps":
        pairs = [(layers, devices) for layers in LAYERS for devices in DEVICES]
        scale = [planned(*pair, arguments.compiles) for pair in track(pairs, description="planning")]
        for line in scale:
            console.print(dict(zip(SCALE_HEADINGS, scale_cells(line), strict=True)))
    if not arguments.dry and arguments.only is None:
        if arguments.part is not None:
            stored_rows, stored_scale, _ = load()
            rows, scale = rows or stored_rows, scale or stored_scale
        rounds = f"medians of {arguments.rounds} interleaved rounds, tracing and compiling of {arguments.compiles}"
        write(rows, scale, f"{versions()}; {rounds}")


if __name__ == "__main__":
    main()
