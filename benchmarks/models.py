"""Whole Flax models under plans of shardkit beside the same models annotated for XLA's partitioner, in one run.

    python benchmarks/models.py                     # compiled for simulated CPU devices
    python benchmarks/models.py --targets           # and for TPU v5e and H100, which needn't be there
    python benchmarks/models.py --only gpu:h100:8 --dry
    python benchmarks/models.py --rows "GPT, tp" --dry

The loss, and gradients of all parameters placed as the parameters are, compiled and never run. Both have their
parameters and batches in the same places. Ours: ``sk.parallelize`` with ``sk.plans``, with ``sk.value_and_grad`` and
``sk.reduce_gradients`` over "dp" where there is one. The other: ``jax.lax.with_sharding_constraint`` on activations
between layers and inside them, ``jax.value_and_grad``. Both under one ``jax.jit``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

if jax.config.values.get("jax_num_cpu_devices") != 8:  # a test may have said so
    jax.config.update("jax_num_cpu_devices", 8)

import flax_models
import jax.numpy as jnp
import optax
from described import TARGETS, estimated_cycles, mesh_for
from flax import nnx
from flax_models import Gpt, LinenGpt, Sizes, UNet
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import HERE, between, counts, markdown, options, versions

import shardkit as sk

P = PartitionSpec
XLA = "XLA's partitioner"
TP, BOTH, FSDP, SP, SPACE = {"tp": 8}, {"dp": 2, "tp": 4}, {"dp": 8}, {"sp": 8}, {"dp": 2, "sp": 4}
IMAGES, CHANNELS = (16, 256, 512, 3), 32
LONG, FEATURES, HEADS = 8192, 512, 8

# Where parameters of a GPT are cut over "tp", by the end of their path: what ``sk.plans.transformer`` chooses.
CUTS = {
    r"(query|key|value)/kernel": P(None, "tp"),
    r"(query|key|value)/bias": P("tp"),
    r"out/kernel": P("tp"),
    r"(up|head)/kernel": P(None, "tp"),
    r"up/bias": P("tp"),
    r"down/kernel": P("tp"),
    r"embed/embedding": P("tp"),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One program.

    Attributes:
      target: "cpu" or one of ``described.py``.
      model: "GPT", "linen GPT", "U-Net" or "attention".
      way: what is cut, in words.
      form: ``XLA``, or which way of ours.
    """

    target: str
    model: str
    way: str
    form: str

    @property
    def ours(self) -> bool:
        return self.form != XLA

    @property
    def name(self) -> str:
        return f"{self.model}, {self.way}"

    @property
    def axes(self) -> dict[str, int]:
        if self.model in ("U-Net", "attention"):
            return SPACE if self.model == "U-Net" else SP
        return FSDP if self.way == "fsdp" else BOTH if self.way.startswith("dp") else TP

    @property
    def dtype(self) -> Any:
        """Of activations. The CPU's compiler turns those of 16 bits into 32."""
        return jnp.float32 if self.target == "cpu" else jnp.bfloat16

    @property
    def sizes(self) -> Sizes:
        return Sizes()


WAYS = ("tp", "tp + sequence", "dp x tp", "dp x tp + sequence")
PARALLEL, PLAIN = "loss_parallel", "plain loss"
SHORT_GATHERS = "plain loss, gather_dtype=bfloat16"


def jobs(targets: list[str]) -> list[Job]:
    """Every row of every target; of ways to write one loss, more where compiling is quick."""
    found = []
    for target in targets:
        quick = not target.startswith("tpu")
        losses = (PARALLEL, PLAIN) if target == "cpu" else (PARALLEL,)
        forms: dict[tuple[str, str], tuple[str, ...]] = {("GPT", way): losses for way in WAYS}
        if quick:
            forms["GPT", "tp"] = (PARALLEL, PLAIN)
        forms["GPT", "fsdp"] = (PLAIN,) if target == "cpu" else (PLAIN, SHORT_GATHERS)
        if target == "cpu":
            forms["linen GPT", WAYS[-1]] = (PARALLEL,)
        forms["U-Net", "dp x sp"] = ("unet",)
        forms["attention", "causal, sequence"] = ("ring", "all_to_all")
        found += [Job(target, *row, form) for row, own in forms.items() for form in (XLA, *own)]
    return found


# --- programs -------------------------------------------------------------------------------------


def noter(mesh: Any, places: Mapping[str, str]) -> flax_models.Note:
    """What annotates activations: names of dims to mesh axes."""

    def note(x: Any, *names: str | None) -> Any:
        spec = PartitionSpec(*(places.get(name) if name else None for name in names))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return note


def described(mesh: Any, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def place_of(path: str, shape: tuple[int, ...], axes: Mapping[str, int]) -> PartitionSpec:
    """Of a parameter: by ``CUTS`` where there's "tp"; where there's "dp" alone, its first dim that divides (fsdp)."""
    if "tp" in axes:
        return next((spec for end, spec in CUTS.items() if re.search(f"(^|/){end}$", path)), P())
    if "sp" in axes:
        return P()
    dim = next((d for d, size in enumerate(shape) if size % axes["dp"] == 0), None)
    return P() if dim is None else P(*[None] * dim, "dp")


def placed(tree: Any, mesh: Any) -> Any:
    """Parameters described where they live."""

    def one(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return described(mesh, x.shape, x.dtype, *place_of(name, x.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(one, tree)


Applied = tuple[Callable[[Any, Any], Any], Any]  # (parameters, batch) to the result; parameters


def nnx_model(model: nnx.Module, mesh: Any) -> Applied:
    graph, params = nnx.split(model)
    return lambda params, x: nnx.merge(graph, params)(x), placed(params, mesh)


def linen_model(plain: Any, model: Any, x: Any, mesh: Any) -> Applied:
    params = jax.eval_shape(plain.init, jax.random.key(0), jnp.zeros(x.shape, x.dtype))
    return lambda params, x: model.apply(params, x), placed(params, mesh)


def step_of(loss: Callable, params: Any, job: Job, mesh: Any, batch_axis: str | None) -> Callable:
    """The value and gradients of a loss."""
    if not job.ours or batch_axis is None:
        return jax.value_and_grad(loss)
    places = jax.tree.map(lambda x: x.sharding, params)
    gather_dtype = jnp.bfloat16 if job.form == SHORT_GATHERS else None
    run = sk.value_and_grad(loss, batch_axes=batch_axis, mesh=mesh, param_placements=places, gather_dtype=gather_dtype)

    def step(params: Any, *batch: Any) -> Any:
        value, grads = run(params, *batch)
        fuse = "reduce_scatter" if job.way == "fsdp" else "all_reduce"
        return value, sk.reduce_gradients(grads, fuse, axis=batch_axis, mesh=mesh)

    return step


def gpt(job: Job, mesh: Any) -> tuple[Callable, tuple]:
    """Next tokens of a GPT."""
    sizes, linen = job.sizes, job.model == "linen GPT"
    axis = "dp" if "dp" in job.axes else None
    ids = described(mesh, (sizes.batch, sizes.context), jnp.int32, axis)
    places = {"batch": "dp"} if axis else {}
    if "tp" in job.axes:
        places |= {"model": "tp"} | ({"sequence": "tp"} if "sequence" in job.way else {})
    note = flax_models.nothing if job.ours else noter(mesh, places)
    plain: Any = LinenGpt(sizes, job.dtype, flax_models.nothing)
    model: Any = LinenGpt(sizes, job.dtype, note) if linen else None
    if not linen:
        model = nnx.eval_shape(lambda: Gpt(sizes, job.dtype, note, nnx.Rngs(0)))
    if job.ours:
        config: dict[str, Any] = {}
        if axis:
            config["dp"] = {"axis": "dp", "stage": 3 if job.way == "fsdp" else 0}
        if "tp" in job.axes:
            sequence = "sequence" in job.way
            config["mp"] = {"plan": sk.plans.transformer("tp", sequence=sequence, verbose=False)}
        model = sk.parallelize(model, config=config, mesh=mesh)
    apply, params = linen_model(plain, model, ids, mesh) if linen else nnx_model(model, mesh)

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        logits = apply(params, ids).astype(jnp.float32)
        if job.form == PARALLEL:
            return sk.loss_parallel(logits, labels, axis="tp", mesh=mesh).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return step_of(loss, params, job, mesh, axis), (params, ids, ids)


def unet(job: Job, mesh: Any) -> tuple[Callable, tuple]:
    """Images to images."""
    note = flax_models.nothing if job.ours else noter(mesh, {"batch": "dp", "width": "sp"})
    model: Any = nnx.eval_shape(lambda: UNet(CHANNELS, job.dtype, note, nnx.Rngs(0)))
    if job.ours:
        config = {"dp": {"axis": "dp"}, "sp": {"plan": sk.plans.unet("sp", "W", verbose=False)}}
        model = sk.parallelize(model, config=config, mesh=mesh)
    apply, params = nnx_model(model, mesh)

    def loss(params: Any, images: jax.Array, wanted: jax.Array) -> jax.Array:
        return jnp.mean((apply(params, images).astype(jnp.float32) - wanted) ** 2)

    images = described(mesh, IMAGES, jnp.float32, "dp", None, "sp")
    return step_of(loss, params, job, mesh, "dp"), (params, images, images)


def attention(job: Job, mesh: Any) -> tuple[Callable, tuple]:
    """One layer over a long sequence; the gradient of its input too."""
    model: Any = nnx.eval_shape(
        lambda: nnx.MultiHeadAttention(
            HEADS, FEATURES, decode=False, keep_rngs=False, dtype=job.dtype, rngs=nnx.Rngs(0)
        )
    )
    note = flax_models.nothing if job.ours else noter(mesh, {"sequence": "sp"})
    if job.ours:
        model = sk.parallelize(model, {"": sk.RingAttention("sp", job.form, causal=True)}, mesh)
    graph, params = nnx.split(model)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, params)
        y = layer(x) if job.ours else layer(note(x, *flax_models.BETWEEN), is_causal=True)
        return jnp.mean(note(y, *flax_models.BETWEEN).astype(jnp.float32) ** 2)

    x = described(mesh, (1, LONG, FEATURES), job.dtype, None, "sp")
    return jax.value_and_grad(loss, (0, 1)), (placed(params, mesh), x)


BUILD = {"GPT": gpt, "linen GPT": gpt, "U-Net": unet, "attention": attention}


# --- figures --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """What the compiler says of one program.

    Attributes:
      job: which.
      collectives: by kind, those in loops once.
      in_loop: how many of these are in loops.
      received_kb: what a device receives in a step; collectives in loops as often as they run. None where the compiled
        program doesn't say how often that is, as the TPU's does not.
      temporaries_kb: of a device.
      mega_cycles: the TPU compiler's estimate for the entry computation; None elsewhere, or where loops hide work.
    """

    job: Job
    collectives: dict[str, int]
    in_loop: int
    received_kb: float | None
    temporaries_kb: float
    mega_cycles: float | None


def compiled(job: Job) -> tuple[Any, Any]:
    """The program and its mesh."""
    mesh = mesh_for(job.target, job.axes)
    step, arguments = BUILD[job.model](job, mesh)
    wanted = jax.tree.map(lambda x: x.sharding, arguments[0])
    if job.model == "attention":
        wanted = (wanted, arguments[1].sharding)
    outputs = (NamedSharding(mesh, PartitionSpec()), wanted)
    return jax.jit(step, out_shardings=outputs).lower(*arguments).compile(), mesh


def measure(job: Job) -> Row:
    program, mesh = compiled(job)
    report = sk.collectives(program, mesh=mesh)
    text = program.as_text() or ""
    loops = re.search(r" while\(", text)
    unknown = any(c.in_loop and c.trip_count is None for c in report)
    return Row(
        job=job,
        collectives=dict(report.by_kind()),
        in_loop=report.count(in_loop=True),
        received_kb=None if unknown else sum(c.bytes * (c.trip_count or 1) for c in report) / 1e3,
        temporaries_kb=sk.memory(program).temporaries / 1e3,
        mega_cycles=estimated_cycles(text) if job.target.startswith("tpu") and not loops else None,
    )


HEADINGS = (
    "target",
    "model, way",
    "form",
    "received, kB a device",
    "temporaries, kB a device",
    "cycles, M",
    "collectives (in loops)",
)


def cells(row: Row, rows: list[Row]) -> list[str]:
    base = next((r for r in rows if r.job == dataclasses.replace(row.job, form=XLA)), row)

    def against(name: str, digits: int = 0) -> str:
        value, whole = getattr(row, name), getattr(base, name)
        if value is None:
            return "-"
        shown = f"{value:,.{digits}f}"
        return shown if row is base or not whole else f"{shown} = **{value / whole:.2f}**"

    job, loops = row.job, f" ({row.in_loop})" if row.in_loop else ""
    figures = (against("received_kb"), against("temporaries_kb"), against("mega_cycles", 2))
    return [job.target, job.name, job.form, *figures, counts(row.collectives) + loops]


def write(rows: list[Row], where: str) -> None:
    """The figures as JSON, the table in benchmarks/README.md."""
    (HERE / "results").mkdir(exist_ok=True)
    data = {"versions": where, "rows": [dataclasses.asdict(r) for r in rows]}
    (HERE / "results" / "models.json").write_text(json.dumps(data, indent=1) + "\n")
    between(HERE / "README.md", "models", [where, "", *markdown(HEADINGS, [cells(r, rows) for r in rows])])


def load() -> tuple[list[Row], str]:
    stored = json.loads((HERE / "results" / "models.json").read_text())
    return [Row(job=Job(**row.pop("job")), **row) for row in stored["rows"]], stored["versions"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--targets", action="store_true", help=f"also {', '.join(TARGETS)}")
    parser.add_argument("--only", choices=("cpu", *TARGETS), help="one of these; stored rows of the others stay")
    parser.add_argument("--rows", help="only those with this in their name; results aren't written")
    arguments = parser.parse_args()
    if arguments.rewrite:
        write(*load())
        return
    targets = [arguments.only] if arguments.only else ["cpu", *(TARGETS if arguments.targets else ())]
    chosen = [job for job in jobs(targets) if (arguments.rows or "") in job.name]
    console = Console(width=200)
    rows = []
    for job in track(chosen, description="compiling"):
        start = time.perf_counter()
        rows.append(measure(job))
        took = f"{time.perf_counter() - start:.0f} s"
        console.print(" | ".join((took, *cells(rows[-1], rows))).replace("*", ""), highlight=False)
    table = Table(title=f"Whole models ({versions()})")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(cell.replace("*", "") for cell in cells(row, rows)))
    console.print(table)
    if not arguments.dry and not arguments.rows:
        if arguments.only and (HERE / "results" / "models.json").exists():
            before, _ = load()
            rows = [r for r in before if r.job.target != arguments.only] + rows
        write(rows, versions())


if __name__ == "__main__":
    main()
