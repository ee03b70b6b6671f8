"""Weak scaling on TPUs that aren't here: the same work a chip on 8, 64 and 256 chips, judged by their compiler.

    python benchmarks/scaling.py                          # all targets; needs the extra tpu-target
    python benchmarks/scaling.py --targets tpu:v5e:2x4    # these; stored rows of the others stay
    python benchmarks/scaling.py --rewrite                # tables and picture again from the stored results

A stack of 3x3 bf16 convolutions, forward and backward, each chip with a block of the same size, cut in W alone or in H
and W. Nothing runs. Bytes are what one chip receives in a step, by purpose as ``sk.explain`` finds it in the compiled
program; temporaries are the compiler's figure for one chip, cycles its estimate for the entry computation
(``described.py``); seconds are those of tracing and compiling, once, on this machine. With perfect weak scaling all but
the last stay as they are on 8 chips.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import described
import jax
import jax.numpy as jnp
import scaling_picture
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from tables import HERE, between, markdown, options, versions

import shardkit as sk

STORED = HERE / "results" / "scaling.json"
PICTURE = HERE / "results" / "scaling.svg"
FAMILIES = {
    "v5e": ("tpu:v5e:2x4", "tpu:v5e:8x8", "tpu:v5e:16x16"),
    "v5p": ("tpu:v5p:2x2x2", "tpu:v5p:4x4x4", "tpu:v5p:4x8x8"),
}
TARGETS = tuple(target for family in FAMILIES.values() for target in family)
BLOCK = (1, 128, 256, 128)  # of a chip: images, height, width, features
LAYERS = 2
SQUARE = {8: (2, 4), 64: (8, 8), 256: (16, 16)}  # chips along H and W
XLA, RING = "XLA's partitioner", "ring_conv"
PROGRAMS = ("stack cut in W", "stack cut in H x W")


@dataclasses.dataclass(frozen=True)
class Job:
    """One program.

    Attributes:
      target: as ``sk.target_mesh`` names it.
      program: one of ``PROGRAMS``.
      form: how it is partitioned.
    """

    target: str
    program: str
    form: str

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.target.rsplit(":", 1)[1].split("x")))

    @property
    def axes(self) -> dict[str, int]:
        return {"w": self.chips} if self.program.endswith("in W") else dict(zip("hw", SQUARE[self.chips], strict=True))


@dataclasses.dataclass
class Row:
    """What the compiler says of it.

    Attributes:
      job, mesh: which, on chips arranged how.
      purposes: bytes that one chip receives in a step, by what they are for.
      temporaries: bytes of one chip.
      mega_cycles: None where a loop's body would hide work.
      compile_s: tracing and compiling.
    """

    job: Job
    mesh: str
    purposes: dict[str, int]
    temporaries: int
    mega_cycles: float | None
    compile_s: float

    @property
    def received(self) -> int:
        return sum(self.purposes.values())


def stack(job: Job, mesh: Any) -> tuple[Callable, tuple]:
    """Convolutions with ReLU; the mean of squares, and gradients of input and kernels."""
    plain = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": described.NUMBERS}
    space = {axis: axis.upper() for axis in job.axes}

    def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if job.form == XLA:
            return jax.lax.conv_general_dilated(x, kernel, **plain)
        return sk.ring_conv(x, kernel, **plain, spatial_axes=space, mesh=mesh)

    def loss(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(conv(x, kernel))
        return jnp.mean(x**2)

    images, height, width, features = BLOCK
    shape = (images, height * job.axes.get("h", 1), width * job.axes["w"], features)
    cut = NamedSharding(mesh, PartitionSpec(None, "h" if "h" in job.axes else None, "w"))
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=cut)
    whole = NamedSharding(mesh, PartitionSpec())
    kernel = jax.ShapeDtypeStruct((3, 3, features, features), jnp.bfloat16, sharding=whole)
    return jax.value_and_grad(loss, (0, 1)), (x, [kernel] * LAYERS)


def measure(job: Job) -> Row:
    """Compiles it and reads what came out."""
    mesh = sk.target_mesh(job.target, job.axes)
    start = time.perf_counter()
    function, arguments = stack(job, mesh)
    compiled = jax.jit(function).lower(*arguments).compile()
    took = time.perf_counter() - start
    page, text = sk.explain(compiled, mesh=mesh), compiled.as_text() or ""
    return Row(
        job=job,
        mesh=" x ".join(f"{axis}={size}" for axis, size in job.axes.items()),
        purposes={name: found["bytes_per_device"] for name, found in page.to_dict()["purposes"].items()},
        temporaries=sk.memory(compiled).temporaries,
        mega_cycles=None if re.search(r" while\(", text) else described.estimated_cycles(text),
        compile_s=took,
    )


def jobs(targets: Iterable[str], only: str) -> list[Job]:
    """Those of the smallest meshes first, so that what fails fails early."""
    found = []
    for target in sorted(targets, key=lambda t: Job(t, "", "").chips):
        for program in PROGRAMS:
            found += [Job(target, program, form) for form in (RING, XLA)]
    return [job for job in found if only in job.program]


# --- tables ---------------------------------------------------------------------------------------


HEADINGS = (
    "program",
    "form",
    "chips",
    "mesh",
    "halos, kB (of 8 chips')",
    "all received, kB (of 8 chips')",
    "of that unexplained, kB",
    "temporaries, MB (of 8 chips')",
    "cycles, M (of 8 chips')",
    "compile, s",
)


def smallest(row: Row, rows: list[Row]) -> Row:
    """The same on the fewest chips of the same kind."""
    alike = [r for r in rows if key(r) == key(row)]
    return min(alike, key=lambda r: r.job.chips)


def key(row: Row) -> tuple[str, str, str]:
    return row.job.target.split(":")[1], row.job.program, row.job.form


def cells(row: Row, rows: list[Row]) -> list[str]:
    base = smallest(row, rows)

    def against(of: Callable[[Row], float | None], digits: int) -> str:
        value, first = of(row), of(base)
        if value is None or first is None:
            return "-"
        shown = f"{value:,.{digits}f}"
        return shown if row is base or not first else f"{shown} = **{value / first:.2f}**"

    return [
        row.job.program,
        row.job.form,
        str(row.job.chips),
        row.mesh,
        against(lambda r: r.purposes.get("halo", 0) / 1e3, 1),
        against(lambda r: r.received / 1e3, 1),
        f"{row.purposes.get('unexplained', 0) / 1e3:,.1f}",
        against(lambda r: r.temporaries / 1e6, 1),
        against(lambda r: r.mega_cycles, 2),
        f"{row.compile_s:.0f}",
    ]


def purposes_line(rows: list[Row]) -> str:
    """What is received besides halos, by program and form, on the most chips."""
    parts = []
    for row in rows:
        others = {name: n for name, n in row.purposes.items() if name != "halo"}
        if row.job.chips == max(r.job.chips for r in rows if key(r) == key(row)):
            said = ", ".join(f"{name} {n / 1e3:,.1f}" for name, n in others.items()) or "nothing"
            parts.append(f"{row.job.program}, {row.job.form}: {said}")
    return f"Besides halos, on the most chips, kB a chip: {'; '.join(parts)}."


def ordered(rows: list[Row]) -> list[Row]:
    families, forms = list(FAMILIES), [RING, XLA]

    def place(row: Row) -> tuple[int, ...]:
        family, program, form = key(row)
        return families.index(family), PROGRAMS.index(program), forms.index(form), row.job.chips

    return sorted(rows, key=place)


def lines(rows: list[Row], where: str) -> list[str]:
    """All of the section that is made of figures."""
    found = [f"{where}. {LAYERS} layers, {' x '.join(map(str, BLOCK))} bf16 a chip."]
    if PICTURE.exists():
        found += ["", f"![halos, temporaries and cycles a chip, over chips](results/{PICTURE.name})"]
    for family, targets in FAMILIES.items():
        some = [row for row in rows if key(row)[0] == family]
        if some:
            names = ", ".join(t for t in targets if t in {row.job.target for row in some})
            table = markdown(HEADINGS, [cells(row, some) for row in some])
            found += ["", f"{names}:", "", *table, "", purposes_line(some)]
    return found


def load() -> tuple[list[Row], str]:
    """What is stored; nothing, if nothing is."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {"rows": [], "versions": ""}
    return [Row(**row | {"job": Job(**row["job"])}) for row in stored["rows"]], stored["versions"]


def merged(stored: list[Row], new: list[Row]) -> list[Row]:
    """The new rows, and of what wasn't measured the stored ones."""
    jobs_done = {row.job for row in new}
    return ordered([row for row in stored if row.job not in jobs_done] + new)


def store(rows: list[Row], where: str) -> None:
    """The figures as JSON."""
    STORED.parent.mkdir(exist_ok=True)
    data = {"versions": where, "block": BLOCK, "layers": LAYERS, "rows": [dataclasses.asdict(row) for row in rows]}
    STORED.write_text(json.dumps(data, indent=1) + "\n")


def show(rows: list[Row], where: str) -> None:
    """The picture, where matplotlib is there, and the tables in benchmarks/README.md."""
    if importlib.util.find_spec("matplotlib") is not None:
        scaling_picture.draw(rows, PICTURE)
    between(HERE / "README.md", "scaling", lines(rows, where))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--targets", nargs="*", choices=TARGETS, help="only these; stored rows of the others stay")
    parser.add_argument("--only", default="", help="only programs with this in their name, likewise")
    arguments = parser.parse_args()
    if arguments.rewrite:
        show(*load())
        return
    console = Console(width=200)
    rows: list[Row] = []
    todo = jobs(arguments.targets or TARGETS, arguments.only)
    for job in track(todo, description="compiling", console=console):
        rows.append(measure(job))
        console.print(dict(zip(HEADINGS, cells(rows[-1], rows), strict=True)), highlight=False)
        if not arguments.dry:  # what was done stays done
            store(merged(load()[0], rows), versions())
    if not arguments.dry:
        show(*load())


if __name__ == "__main__":
    main()
