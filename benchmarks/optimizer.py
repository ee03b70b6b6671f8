"""A training step with sharded optimizer state beside the usual recipe for it in plain JAX, in one run.

    python benchmarks/optimizer.py                 # simulated CPU devices: bytes, collectives, memory, wall time
    python benchmarks/optimizer.py --targets       # and what the compilers for TPU v5e and H100 say, hardware or not
    python benchmarks/optimizer.py --rounds 5 --dry

The recipe: one ``jax.jit``, the batch sharded, ``with_sharding_constraint`` on optimizer state, on gradients (stages 2
and 3) and on parameters; microbatches by ``lax.scan``, split so that each stays spread over all devices. The model is a
transformer of 111 million parameters described by shapes (on the CPU: 4 million, run).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import gathering  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import transformer  # noqa: E402
from described import TARGETS, estimated_cycles, mesh_for  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from tables import HERE, between, in_turns, markdown, options, versions  # noqa: E402

import shardkit as sk  # noqa: E402

DEVICES = 8
SEQUENCES = 8  # a device
STAGES = {1: sk.ShardingStage1, 2: sk.ShardingStage2, 3: sk.ShardingStage3}


@dataclasses.dataclass(frozen=True)
class Job:
    """One program: ours or the recipe, of a stage, with so many microbatches.

    Attributes:
      target: "cpu" (the small model, which is run), "cpu, described" (the large one, compiled only), or a target of
        ``described.py``.
    """

    target: str
    ours: bool
    stage: int
    microbatches: int
    bucket_bytes: int | None = None
    layers: int | None = None

    @property
    def config(self) -> transformer.Config:
        config = transformer.SMALL if self.target == "cpu" else transformer.LARGE
        return config if self.layers is None else dataclasses.replace(config, layers=self.layers)


@dataclasses.dataclass
class Row:
    """What the compiler, and on the CPU the clock, says of one program.

    Attributes:
      job: which.
      reductions, moves: collectives of more than a scalar, those that sum and the others: (outside loops, in loops).
      received_mb: what a device receives in a step.
      temporaries_mb: of a device.
      mega_cycles: the TPU compiler's estimate for the entry computation; None elsewhere, or where loops hide work.
      wall_ms: on the CPU.
    """

    job: Job
    reductions: tuple[int, int]
    moves: tuple[int, int]
    received_mb: float
    temporaries_mb: float
    mega_cycles: float | None
    wall_ms: float | None


def cut(x: Any, mesh: Any) -> NamedSharding:
    """The recipe's place for state: the first dim that divides."""
    size = mesh.shape["dp"]
    dim = next((d for d, s in enumerate(x.shape) if s % size == 0 and s), None)
    entries = [] if dim is None else [None] * dim + ["dp"]
    return NamedSharding(mesh, PartitionSpec(*entries))


def places(tree: Any, mesh: Any, sharded: bool) -> Any:
    """Where parameters live: cut like state, or whole on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: cut(x, mesh) if sharded else whole, tree)


Program = tuple[Callable, Callable, Callable]  # parameters' places, init, step


def recipe(job: Job, mesh: Any, tx: optax.GradientTransformation, loss: Callable) -> Program:
    """In plain JAX."""
    place = functools.partial(places, mesh=mesh, sharded=job.stage == 3)

    def sharded(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, cut(x, mesh)), tree)

    def grads_of(params: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return value, sharded(grads) if job.stage > 1 else grads

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        if job.microbatches == 1:
            value, grads = grads_of(params, tokens)
        else:
            parts = tokens.reshape(-1, job.microbatches, tokens.shape[-1]).swapaxes(0, 1)
            parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, "dp")))

            def one(total: Any, part: jax.Array) -> Any:
                return jax.tree.map(jnp.add, total, grads_of(params, part)), None

            start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            (value, grads), _ = jax.lax.scan(one, start, parts)
            value, grads = jax.tree.map(lambda x: x / job.microbatches, (value, grads))
        updates, state = tx.update(grads, state, params)
        state = sharded(state)
        params = optax.apply_updates(params, updates)
        params = jax.tree.map(jax.lax.with_sharding_constraint, params, place(params))
        return params, state, value

    return place, lambda params: sharded(tx.init(params)), step


def ours(job: Job, mesh: Any, tx: optax.GradientTransformation, loss: Callable) -> Program:
    """The same with shardkit."""
    place = functools.partial(places, mesh=mesh, sharded=job.stage == 3)

    tx = sk.shard_optimizer(
        tx,
        STAGES[job.stage]("dp"),
        mesh=mesh,
        bucket_bytes=job.bucket_bytes,
        param_placements=place(transformer.shapes(job.config)),
    )

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = sk.value_and_grad(
            loss, batch_axes="dp", mesh=mesh, microbatches=job.microbatches, param_placements=place(params)
        )(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return place, tx.init, step


def build(job: Job, mesh: Any) -> tuple[Callable, tuple, Callable]:
    """The step, its arguments described, and what makes real ones."""
    config = job.config
    tx = optax.adam(1e-3)
    place, init, step = (ours if job.ours else recipe)(job, mesh, tx, functools.partial(transformer.loss, config))
    params = transformer.shapes(config)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, place(params))
    state = jax.eval_shape(init, params)
    # Where the program that makes state leaves it.
    places = jax.jit(init).lower(params).compile().output_shardings
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, places)
    batch = (SEQUENCES * DEVICES, config.context + 1)
    tokens = jax.ShapeDtypeStruct(batch, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("dp")))

    def real() -> tuple:
        values = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), transformer.create(config), params)
        given = jax.random.randint(jax.random.key(1), batch, 0, config.vocabulary)
        return values, jax.jit(init)(values), jax.device_put(given, tokens.sharding)

    return step, (params, state, tokens), real


def measure(job: Job) -> tuple[Row, Callable]:
    """What the compiler says, and what makes a function that runs one step."""
    mesh = mesh_for("cpu" if job.target.startswith("cpu") else job.target, {"dp": DEVICES})
    step, arguments, real = build(job, mesh)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    report = sk.collectives(compiled, mesh=mesh)
    text = compiled.as_text() or ""
    loops = len(re.findall(r" while\(", text))

    def found(*kinds: str) -> tuple[int, int]:
        big = [e for e in report if e.kind in kinds and e.bytes > 1024]
        return sum(not e.in_loop for e in big), sum(e.in_loop for e in big)

    def runs() -> Callable[[], Any]:
        params, state, tokens = real()
        held = [params, state]

        def run() -> Any:
            held[0], held[1], value = compiled(*held, tokens)
            return value

        return run

    row = Row(
        job=job,
        reductions=found("all_reduce", "reduce_scatter"),
        moves=found("all_gather", "all_to_all", "collective_permute"),
        received_mb=sum(e.bytes * (job.microbatches if e.in_loop else 1) for e in report) / 1e6,
        temporaries_mb=sk.memory(compiled).temporaries / 1e6,
        mega_cycles=estimated_cycles(text) if job.target.startswith("tpu") and not loops else None,
        wall_ms=None,
    )
    return row, runs


def kept(dtype: str) -> list[list[str]]:
    """Rows of the table of bytes a parameter that a device keeps, its reduced gradients counted."""
    mesh = sk.make_mesh({"dp": DEVICES})
    n, short = DEVICES, jnp.dtype(dtype) == jnp.bfloat16
    known = {1: 6 + 12 / n, 2: 2 + 16 / n, 3: 18 / n} if short else {1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}
    described = transformer.shapes(transformer.LARGE, jnp.dtype(dtype))
    count = transformer.LARGE.count

    def local(tree: Any, at: Any) -> int:
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(at), strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)

    rows = []
    for stage, make in STAGES.items():
        homes = places(described, mesh, stage == 3)
        params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), described, homes)
        inner = sk.master_weights(optax.adam(1e-3)) if short else optax.adam(1e-3)
        tx = sk.shard_optimizer(inner, make("dp"), mesh=mesh, param_placements=homes)
        state = jax.eval_shape(tx.init, params)
        state_places = jax.jit(tx.init).lower(params).compile().output_shardings
        parts = (local(params, homes), local(described, places(described, mesh, stage > 1)), local(state, state_places))
        shown = " + ".join(f"{part / count:.2f}" for part in parts)
        total = sum(parts) / count
        rows.append([dtype, f"{stage}", f"{shown} = **{total:.2f}**", f"{known[stage]:.2f}"])
    return rows


def pairs(target: str, cases: list[tuple[int, int]]) -> list[Job]:
    return [Job(target, ours, stage, m) for stage, m in cases for ours in (False, True)]


def bucket_jobs(target: str) -> list[Job]:
    limits = (0, 32 * 2**20, 2**40)
    return [Job(target, True, 2, m, limit) for m in (1, 8) for limit in limits]


HEADINGS = (
    "target",
    "stage, microbatches",
    "program",
    "reductions (in the loop)",
    "gathers and other moves (in the loop)",
    "received, MB",
    "temporaries, MB",
    "wall, ms, or cycles, M",
)


def cells(row: Row, rows: list[Row]) -> list[str]:
    job = row.job
    base = next((r for r in rows if r.job == dataclasses.replace(job, ours=False, bucket_bytes=None)), row)

    def against(name: str, digits: int) -> str:
        value, whole = getattr(row, name), getattr(base, name)
        if value is None:
            return "-"
        shown = f"{value:,.{digits}f}"
        return shown if row is base or not whole else f"{shown} = **{value / whole:.2f}**"

    program = "recipe" if not job.ours else "shardkit"
    if job.bucket_bytes is not None:
        program = {0: "leaf by leaf", 2**40: "one bucket"}.get(job.bucket_bytes, f"{job.bucket_bytes / 2**20:.0f} MB")
    if job.layers is not None:
        program += f", {job.layers} layers"
    return [
        job.target,
        f"{job.stage}, {job.microbatches}",
        program,
        "{} ({})".format(*row.reductions),
        "{} ({})".format(*row.moves),
        against("received_mb", 0),
        against("temporaries_mb", 0),
        against("wall_ms" if job.target == "cpu" else "mega_cycles", 0),
    ]


def write(rows: list[Row], kept_rows: list[list[str]], gathers: list[list[str]], where: str) -> None:
    """The figures as JSON, the tables in benchmarks/README.md."""
    (HERE / "results").mkdir(exist_ok=True)
    data = {"versions": where, "kept": kept_rows, "gathers": gathers, "rows": [dataclasses.asdict(r) for r in rows]}
    (HERE / "results" / "optimizer.json").write_text(json.dumps(data, indent=1) + "\n")
    plain = [r for r in rows if r.job.bucket_bytes is None]
    buckets = [r for r in rows if r.job.bucket_bytes is not None]
    lines = [where, "", *markdown(HEADINGS, [cells(row, rows) for row in plain]), ""]
    lines += ["Buckets:", "", *markdown(HEADINGS, [cells(row, rows) for row in buckets]), ""] if buckets else []
    names = ("parameters", "stage", "bytes a parameter: parameters + gradients + state", "the known table")
    lines += [f"Kept between steps, {DEVICES} devices, Adam:", "", *markdown(names, kept_rows)]
    if gathers:
        lines += ["", "Parameters of stage 3, gathered:", "", *markdown(gathering.HEADINGS, gathers)]
    between(HERE / "README.md", "optimizer", lines)


def load() -> tuple[list[Row], list[list[str]], list[list[str]], str]:
    stored = json.loads((HERE / "results" / "optimizer.json").read_text())
    rows = []
    for row in stored["rows"]:
        job = Job(**row.pop("job"))
        rows.append(Row(job=job, **row | {k: tuple(row[k]) for k in ("reductions", "moves")}))
    return rows, stored["kept"], stored["gathers"], stored["versions"]


def main() -> None:
    parser = options(__doc__, rounds=9)
    parser.add_argument("--targets", action="store_true", help=f"also {TARGETS}, and the large model on the CPU")
    parser.add_argument("--only", help="one target of these")
    arguments = parser.parse_args()
    if arguments.rewrite:
        write(*load())
        return
    targets = ["cpu", *(("cpu, described", *TARGETS) if arguments.targets else ())]
    targets = [t for t in targets if arguments.only in (None, t)]
    jobs = []
    for target in targets:
        if target == "cpu":
            jobs += pairs("cpu", [(stage, m) for stage in STAGES for m in (1, 8)])
            jobs += [Job("cpu", ours, 2, 1, None, layers) for layers in (2, 8) for ours in (False, True)]
        else:
            jobs += pairs(target, [(1, 1), (2, 1), (2, 8), (3, 1)]) + bucket_jobs(target)
    rows, runs = [], {}
    for job in track(jobs, description="compiling"):
        row, make = measure(job)
        rows.append(row)
        if job.target == "cpu" and job.layers is None:
            runs[job] = make
    for job in track([j for j in runs if j.ours], description="timing"):
        other = dataclasses.replace(job, ours=False)
        wall = in_turns({"recipe": runs[other](), "ours": runs[job]()}, arguments.rounds)
        for row in rows:
            if row.job in (job, other):
                row.wall_ms = wall["ours" if row.job.ours else "recipe"]
    gathers = gathering.table([t for t in targets if t != "cpu, described"])
    table = Table(title=f"A training step with sharded optimizer state ({versions()})")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(cell.replace("*", "") for cell in cells(row, rows)))
    console = Console(width=180)
    console.print(table)
    kept_rows = kept("float32") + kept("bfloat16")
    for line in kept_rows:
        console.print("bytes a parameter:", *(cell.replace("*", "") for cell in line))
    for line in gathers:
        console.print("gathered:", *line)
    if not arguments.dry:
        if arguments.only and (HERE / "results" / "optimizer.json").exists():
            before, _, gathers_before, _ = load()
            rows = [r for r in before if r.job.target != arguments.only] + rows
            gathers = [g for g in gathers_before if g[0] != arguments.only] + gathers
        write(rows, kept_rows, gathers, f"{versions()}; medians of {arguments.rounds} interleaved rounds")


if __name__ == "__main__":
    main()
