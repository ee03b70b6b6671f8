"""Ring convolutions against XLA's own partitioner: wall time, memory and what travels, in one run.

Both programs get the same arguments, placed alike, and are timed in turns (A B A B ...), so that a
machine whose speed drifts slows both; the ratio of the medians is what counts. Simulated CPU devices.

    python benchmarks/ring_conv.py                # the table in benchmarks/README.md
    python benchmarks/ring_conv.py --rounds 5 --devices 4
    python benchmarks/ring_conv.py --sweep 500    # no gather in 500 random configurations
    python benchmarks/ring_conv.py --targets      # compiled for TPU v5e and H100 (needs their compilers)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import described  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from tables import HERE, between, counts, in_turns, markdown, options, versions  # noqa: E402

import shardkit as sk  # noqa: E402

NUMBERS = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass
class Row:
    """One line of the table: the ring convolution's figures over XLA's."""

    program: str
    devices: int
    wall_xla_ms: float
    wall_ring_ms: float
    temporaries_xla_mb: float
    temporaries_ring_mb: float
    collectives_xla: dict[str, int]
    collectives_ring: dict[str, int]
    received_xla_kb: float
    received_ring_kb: float

    @property
    def wall_ratio(self) -> float:
        return self.wall_ring_ms / self.wall_xla_ms

    @property
    def temporaries_ratio(self) -> float:
        return self.temporaries_ring_mb / self.temporaries_xla_mb


def stack_program(mesh: Any, ring: bool, backward: bool) -> tuple[Callable, tuple]:
    """Four 3x3 convolutions with ReLU on 2 x 128 x 512 x 16 float32, width sharded; loss = mean of squares."""

    def conv(x, kernel):
        if ring:
            return sk.ring_conv(
                x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS, spatial_axes={"sp": "W"}, mesh=mesh
            )
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)

    def loss(x, kernels):
        for kernel in kernels:
            x = jax.nn.relu(conv(x, kernel))
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    x = sk.shard_tensor(rng.normal(size=(2, 128, 512, 16)).astype(np.float32), {"sp": sk.Shard(2)}, mesh)
    kernels = [sk.shard_tensor(rng.normal(size=(3, 3, 16, 16)).astype(np.float32) / 12, {}, mesh) for _ in range(4)]
    return (jax.grad(loss, (0, 1)) if backward else loss), (x, kernels)


class UNet(nnx.Module):
    """Two levels: strided convolutions down, transposed ones up, norms and skips."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.down1 = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.norm1 = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
        self.down2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.GroupNorm(32, num_groups=4, rngs=rngs)
        self.middle = nnx.Conv(32, 32, (3, 3), rngs=rngs)
        self.up1 = nnx.ConvTranspose(32, 16, (4, 4), strides=2, rngs=rngs)
        self.up2 = nnx.ConvTranspose(32, 8, (4, 4), strides=2, rngs=rngs)
        self.out = nnx.Conv(16, 3, (3, 3), rngs=rngs)

    def __call__(self, x):
        full = nnx.relu(self.stem(x))
        half = nnx.relu(self.norm1(self.down1(full)))
        quarter = nnx.relu(self.middle(nnx.relu(self.norm2(self.down2(half)))))
        half = jnp.concatenate([half, nnx.relu(self.up1(quarter))], -1)
        return self.out(jnp.concatenate([full, nnx.relu(self.up2(half))], -1))


def unet_program(mesh: Any, ring: bool, backward: bool) -> tuple[Callable, tuple]:
    """A U-Net on 2 x 128 x 256 x 3 float32, width sharded: its loss, or a whole SGD step."""
    model = UNet(nnx.Rngs(0))
    if ring:
        model = sk.parallelize(model, {"**": sk.ConvParallel("sp", dim="W")}, mesh)
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda leaf: sk.shard_tensor(leaf, {}, mesh), state)
    x = np.random.default_rng(0).normal(size=(2, 128, 256, 3)).astype(np.float32)
    x = sk.shard_tensor(x, {"sp": sk.Shard(2)}, mesh)
    optimizer = optax.sgd(1e-2)

    def loss(state, x):
        return jnp.mean((nnx.merge(graph, state)(x) - x) ** 2)

    def step(state, x):
        grads = jax.grad(loss)(state, x)
        updates, _ = optimizer.update(grads, optimizer.init(state))
        return optax.apply_updates(state, updates)

    return (step if backward else loss), (state, x)


PROGRAMS = {"4-layer 3x3 stack": stack_program, "U-Net": unet_program}


def measure(name: str, devices: int, backward: bool, rounds: int) -> Row:
    """Compile both, look at both, time both in turns."""
    mesh = sk.make_mesh({"sp": devices})
    compiled, reports, memories, arguments = {}, {}, {}, {}
    for kind in ("xla", "ring"):
        function, arguments[kind] = PROGRAMS[name](mesh, kind == "ring", backward)
        compiled[kind] = jax.jit(function).lower(*arguments[kind]).compile()
        reports[kind] = sk.collectives(compiled[kind], mesh=mesh)
        memories[kind] = sk.memory(compiled[kind])
    wall = in_turns({kind: functools.partial(compiled[kind], *arguments[kind]) for kind in compiled}, rounds)
    return Row(
        program=f"{name}, {'forward + backward' if backward else 'forward'}",
        devices=devices,
        wall_xla_ms=wall["xla"],
        wall_ring_ms=wall["ring"],
        temporaries_xla_mb=memories["xla"].temporaries / 1e6,
        temporaries_ring_mb=memories["ring"].temporaries / 1e6,
        collectives_xla=dict(reports["xla"].by_kind()),
        collectives_ring=dict(reports["ring"].by_kind()),
        received_xla_kb=reports["xla"].bytes() / 1e3,
        received_ring_kb=reports["ring"].bytes() / 1e3,
    )


HEADINGS = (
    "program",
    "devices",
    "wall, ms: ring / XLA",
    "temporaries, MB a device: ring / XLA",
    "collectives: ring",
    "collectives: XLA",
    "received, kB a device: ring / XLA",
)


def cells(row: Row) -> list[str]:
    return [
        row.program,
        str(row.devices),
        f"{row.wall_ring_ms:.0f} / {row.wall_xla_ms:.0f} = **{row.wall_ratio:.2f}**",
        f"{row.temporaries_ring_mb:.2f} / {row.temporaries_xla_mb:.2f} = **{row.temporaries_ratio:.2f}**",
        counts(row.collectives_ring),
        counts(row.collectives_xla),
        f"{row.received_ring_kb:.0f} / {row.received_xla_kb:.0f}",
    ]


def table_of(rows: list[Row], columns: list[int]) -> list[str]:
    """Some columns of the table, as lines of markdown."""
    return markdown([HEADINGS[i] for i in columns], [[cells(row)[i] for i in columns] for row in rows])


def write(rows: list[Row], rounds: int, where: str) -> None:
    """The figures as JSON, the whole table in benchmarks/README.md, four devices of it in the README."""
    (HERE / "results").mkdir(exist_ok=True)
    data = {"versions": where, "rounds": rounds, "rows": [dataclasses.asdict(r) for r in rows]}
    (HERE / "results" / "ring_conv.json").write_text(json.dumps(data, indent=1) + "\n")
    note = f"{where}; medians of {rounds} interleaved rounds."
    between(HERE / "README.md", "ring_conv", [note, "", *table_of(rows, list(range(len(HEADINGS))))])
    few = [row for row in rows if row.devices == 4] or rows
    between(HERE.parent / "README.md", "measured", table_of(few, [0, 2, 3, 4, 5]))


def write_described(rows: list[described.Figures], where: str) -> None:
    """The compilers' figures as JSON, and as a table in benchmarks/README.md."""
    (HERE / "results").mkdir(exist_ok=True)
    data = {"versions": where, "rows": [dataclasses.asdict(r) for r in rows]}
    (HERE / "results" / "ring_conv_targets.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = markdown(described.HEADINGS, [described.cells(row, rows, counts) for row in rows])
    peaks = ", ".join(
        f"{described.peak_mega_cycles(regime, 8):.1f} ({described.name(regime)})" for regime in described.REGIMES
    )
    note = f"{where}. The flops alone, at the TPU's peak: {peaks} M cycles."
    between(HERE / "README.md", "targets", [note, "", *lines])


def compile_described(targets: list[str], dry: bool, console: Console) -> None:
    """Every program and form, compiled for each target."""
    jobs = described.jobs(targets)
    rows = []
    for target, program, form, run in track(jobs, description="compiling", console=console):
        rows.append(run())
        figures = rows[-1]
        cycles = "" if figures.mega_cycles is None else f"{figures.mega_cycles:.1f} M cycles, "
        console.print(f"{target} | {program} | {form}: {cycles}{figures.temporaries_mb:,.0f} MB")
    if not dry:
        write_described(rows, versions())


def sweep(count: int, console: Console) -> int:
    """How many of ``count`` random configurations gather, mix or sum an activation; forward and backward."""
    sys.path.insert(0, str(HERE.parent))
    import random

    from tests.spatial.conv_cases import NAMED, draw

    rng = random.Random(0)
    cases = [*NAMED.values(), *(draw(rng) for _ in range(count))]
    bad = {"ring": 0, "xla": 0}
    for number, case in enumerate(track(cases, description="compiling", console=console)):
        mesh = case.make_mesh()
        x, kernel = case.operands(dtype=np.float32)  # type: ignore[arg-type]
        x = sk.shard_tensor(x, case.placements(), mesh, uneven="pad")
        for kind, function in (("ring", case.ring(mesh)), ("xla", case.reference)):

            def loss(x, kernel, function=function):
                return jnp.sum(jnp.tanh(jnp.asarray(function(x, kernel))))

            # The input, and so its gradient, is Padded: what a program returns must not be what gathers.
            run = loss if kind == "ring" else (lambda x, kernel, loss=loss: loss(x.value, kernel))
            report = sk.collectives(jax.jit(jax.value_and_grad(run, (0, 1))), x, kernel, mesh=mesh)
            limit = max(kernel.nbytes, 64)
            bad[kind] += any(
                e.kind in ("all_gather", "all_to_all") or (e.kind == "all_reduce" and e.result_bytes > limit)
                for e in report
            )
        if number % 40 == 39:
            jax.clear_caches()
    console.print(
        f"{len(cases)} configurations, forward + backward: {bad['ring']} gather, mix or sum an activation with "
        f"ring_conv; {bad['xla']} with XLA's partitioner"
    )
    return bad["ring"]


def main() -> None:
    parser = options(__doc__, rounds=15)
    parser.add_argument("--devices", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--sweep", type=int, default=0, help="check that many random configurations instead")
    parser.add_argument(
        "--targets",
        nargs="*",
        help=f"compile for described hardware instead: {', '.join(described.TARGETS)} (default: both, and cpu)",
    )
    arguments = parser.parse_args()
    console = Console()
    if arguments.rewrite:
        stored = json.loads((HERE / "results" / "ring_conv.json").read_text())
        write([Row(**row) for row in stored["rows"]], stored["rounds"], stored["versions"])
        stored = json.loads((HERE / "results" / "ring_conv_targets.json").read_text())
        write_described([described.Figures(**row) for row in stored["rows"]], stored["versions"])
        return
    if arguments.targets is not None:
        compile_described(arguments.targets or [*described.TARGETS, "cpu"], arguments.dry, console)
        return
    if arguments.sweep:
        sys.exit(1 if sweep(arguments.sweep, console) else 0)
    jobs = [(name, n, back) for name in PROGRAMS for back in (False, True) for n in arguments.devices]
    rows = [measure(name, n, back, arguments.rounds) for name, n, back in track(jobs, description="measuring")]
    table = Table(title=f"ring_conv against XLA's partitioner ({versions()})")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(cell.replace("*", "") for cell in cells(row)))
    console.print(table)
    if not arguments.dry:
        write(rows, arguments.rounds, versions())


if __name__ == "__main__":
    main()
