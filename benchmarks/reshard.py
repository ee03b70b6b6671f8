"""sk.reshard against what JAX has: bytes, collectives and wall time of every kind of transition, in one run.

    python benchmarks/reshard.py                  # the table in benchmarks/README.md
    python benchmarks/reshard.py --rounds 5 --dry

XLA's side is ``jax.jit(lambda x: x, out_shardings=...)`` (for Partial: of the sum, maximum, ... over the stacked
contributions), ``jax.sharding.reshard`` on Explicit axes and, eagerly, ``jax.device_put``. Simulated CPU devices.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from tables import HERE, between, counts, in_turns, markdown, options, versions  # noqa: E402

import shardkit as sk  # noqa: E402

P = PartitionSpec
SHAPE = (128, 128, 128)  # float32: 8.4 MB


@dataclasses.dataclass(frozen=True)
class Transition:
    """From one layout to another: specs, and the axes over which the source is Partial."""

    mesh: tuple[int, ...]
    source: Any
    goal: Any
    partial: tuple[str, ...] = ()
    reduce: str = "sum"

    def __str__(self) -> str:
        waits = f" + {self.reduce} over {','.join(self.partial)}" if self.partial else ""
        return f"`{self.source}`{waits} -> `{self.goal}`"

    def axes(self) -> dict[str, int]:
        return dict(zip("xyz", self.mesh, strict=False))


TRANSITIONS = [
    # One axis.
    Transition((8,), P("x"), P()),
    Transition((8,), P(), P("x")),
    Transition((8,), P("x"), P(None, "x")),
    Transition((8,), P(None, "x"), P(None, None, "x")),
    Transition((8,), P(), P(), ("x",)),
    Transition((8,), P(), P("x"), ("x",)),
    Transition((8,), P(), P(None, "x"), ("x",)),
    Transition((8,), P(), P(), ("x",), "max"),
    Transition((8,), P(), P("x"), ("x",), "max"),
    Transition((8,), P(), P("x"), ("x",), "mean"),
    # Two axes: gathers, slices, all-to-alls.
    Transition((4, 2), P("y", None, "x"), P(None, ("x", "y"))),
    Transition((2, 4), P("x", "y"), P()),
    Transition((2, 4), P("x", "y"), P("x")),
    Transition((2, 4), P("x"), P("x", "y")),
    Transition((2, 4), P("x", "y"), P("x", None, "y")),
    Transition((2, 4), P("x", "y"), P(None, "y", "x")),
    Transition((2, 4), P("x", "y"), P(("x", "y"))),
    Transition((2, 4), P(("x", "y")), P("x", "y")),
    Transition((2, 4), P(("x", "y")), P(None, ("x", "y"))),
    Transition((2, 4), P(("x", "y")), P(None, ("y", "x"))),
    Transition((2, 4), P(("x", "y")), P("x")),
    Transition((2, 4), P("x"), P(None, "y")),
    # Axes trade places.
    Transition((2, 2), P("x", "y"), P("y", "x")),
    Transition((2, 4), P("x", "y"), P("y", "x")),
    Transition((4, 2), P("x", "y"), P("y", "x")),
    Transition((2, 4), P(("x", "y")), P(("y", "x"))),
    Transition((2, 4), P(("x", "y")), P("y", "x")),
    Transition((2, 4), P(("x", "y")), P("y")),
    Transition((2, 2), P("x"), P("y")),
    Transition((2, 4), P("x"), P("y")),
    Transition((4, 2), P("x"), P("y")),
    # Partial to mixed.
    Transition((2, 4), P(), P(), ("x", "y")),
    Transition((2, 4), P(), P("x", "y"), ("x", "y")),
    Transition((2, 4), P(), P("x"), ("x", "y")),
    Transition((2, 4), P(), P(), ("y",)),
    Transition((2, 4), P("x"), P("x", "y"), ("y",)),
    Transition((2, 4), P("x"), P("y"), ("y",)),
    Transition((2, 4), P("x"), P(), ("y",)),
    Transition((2, 4), P("x"), P(None, "y"), ("y",), "max"),
    # Three axes.
    Transition((2, 2, 2), P("x", "y", "z"), P("y", "z", "x")),
    Transition((2, 2, 2), P("x", "y", "z"), P("z", "y", "x")),
    Transition((2, 2, 2), P("x", "y"), P("z", "x")),
    Transition((2, 2, 2), P(("x", "y"), "z"), P("z", ("x", "y"))),
    Transition((2, 2, 2), P("x", ("y", "z")), P(("x", "y"), "z")),
    Transition((2, 2, 2), P("x"), P(("y", "z"))),
    Transition((2, 2, 2), P(None, "z"), P("z"), ("x", "y")),
    Transition((2, 2, 2), P("z"), P("z"), ("x", "y")),
    Transition((2, 2, 2), P(), P(None, ("x", "y"), "z"), ("x", "y", "z")),
]


@dataclasses.dataclass
class Row:
    """One transition: ours beside XLA's."""

    transition: str
    mesh: str
    planned_bytes: int
    received: int
    received_xla: int
    received_explicit: int | None
    collectives: dict[str, int]
    collectives_xla: dict[str, int]
    wall_ms: float
    wall_xla_ms: float
    eager_ms: float
    device_put_ms: float | None

    @property
    def bytes_ratio(self) -> float:
        """Ours over XLA's; 1 where neither receives anything."""
        if self.received == self.received_xla:
            return 1.0
        return self.received / self.received_xla if self.received_xla else float("inf")

    @property
    def wall_ratio(self) -> float:
        return self.wall_ms / self.wall_xla_ms


REDUCE = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}


def source_layout(transition: Transition, mesh: Any) -> sk.Layout:
    cut = sk.Layout(mesh, transition.source)
    placements = dict(zip(mesh.axis_names, cut.placements, strict=True))
    return sk.Layout(mesh, placements | {axis: sk.Partial(transition.reduce) for axis in transition.partial})


def measure(transition: Transition, rounds: int) -> Row:
    """Compile both, look at both, time both in turns."""
    mesh = sk.make_mesh(transition.axes())
    goal = NamedSharding(mesh, transition.goal)
    plain = sk.Layout(mesh, transition.source)
    value = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE).astype(np.float32))
    layout = source_layout(transition, mesh) if transition.partial else plain
    x = sk.shard_tensor(value, plain)
    if transition.partial:
        lead = len(transition.partial)
        stack = jnp.broadcast_to(value, (*(mesh.shape[a] for a in transition.partial), *SHAPE))
        stack = jax.device_put(stack, NamedSharding(mesh, layout.stack_spec(len(SHAPE))))
        x = sk.PartialArray(stack, layout)
        fold = REDUCE[transition.reduce]
        theirs = jax.jit(lambda s: fold(s, axis=tuple(range(lead))), out_shardings=goal).lower(stack).compile()
        given: Any = stack
        ours = jax.jit(lambda s: sk.reshard(s, goal)).lower(x).compile()
    else:
        theirs = jax.jit(lambda a: a, out_shardings=goal).lower(x).compile()
        given = x
        ours = jax.jit(lambda a: sk.reshard(a, goal, src=plain)).lower(x).compile()
    report, report_xla = sk.collectives(ours, mesh=mesh), sk.collectives(theirs, mesh=mesh)
    runs = {"ours": lambda: ours(x), "xla": lambda: theirs(given), "eager": lambda: sk.reshard(x, goal)}
    if not transition.partial:
        runs["device_put"] = lambda: jax.device_put(x, goal)
    wall = in_turns(runs, rounds)
    return Row(
        transition=str(transition),
        mesh=" x ".join(map(str, transition.mesh)),
        planned_bytes=sk.plan_reshard(SHAPE, np.float32, layout, sk.Layout(mesh, goal), mesh).bytes_per_device,
        received=report.bytes(),
        received_xla=report_xla.bytes(),
        received_explicit=None if transition.partial else explicit_bytes(transition, value),
        collectives=dict(report.by_kind()),
        collectives_xla=dict(report_xla.by_kind()),
        wall_ms=wall["ours"],
        wall_xla_ms=wall["xla"],
        eager_ms=wall["eager"],
        device_put_ms=wall.get("device_put"),
    )


def explicit_bytes(transition: Transition, value: Any) -> int:
    """What jax.sharding.reshard receives, on Explicit axes."""
    mesh = sk.make_mesh(transition.axes(), axis_types="explicit")
    x = jax.device_put(value, NamedSharding(mesh, transition.source))
    with jax.set_mesh(mesh):
        return sk.collectives(jax.jit(lambda a: jax.sharding.reshard(a, transition.goal)), x, mesh=mesh).bytes()


def overhead() -> tuple[float, float, float]:
    """Microseconds of an eager sk.reshard, of its compiled program alone, and of device_put; a tiny array."""
    mesh = sk.make_mesh({"x": 2, "y": 4})
    source, goal = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("x", None, "y"))
    x = jax.device_put(jnp.zeros((8, 8, 8)), source)
    compiled = jax.jit(lambda a: sk.reshard(a, goal, src=source))
    runs = {
        "eager": lambda: sk.reshard(x, goal),
        "compiled": lambda: compiled(x),
        "put": lambda: jax.device_put(x, goal),
    }
    wall = in_turns(runs, 300)
    return wall["eager"] * 1e3, wall["compiled"] * 1e3, wall["put"] * 1e3


def planning() -> tuple[float, float]:
    """The slowest cold plan of the transitions, in ms, and a cached one, in microseconds."""
    slowest = 0.0
    for transition in TRANSITIONS:
        mesh = jax.sharding.AbstractMesh(transition.mesh, tuple(transition.axes()))
        # Another shape than any planned before.
        layout, shape = source_layout(transition, mesh), tuple(2 * s for s in SHAPE)
        goal = sk.Layout(mesh, transition.goal)
        start = time.perf_counter()
        sk.plan_reshard(shape, np.float32, layout, goal, mesh)
        slowest = max(slowest, time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(1000):
        sk.plan_reshard(shape, np.float32, layout, goal, mesh)
    return slowest * 1e3, (time.perf_counter() - start) * 1e3


HEADINGS = (
    "transition",
    "mesh",
    "received, kB a device: ours / XLA",
    "collectives: ours",
    "collectives: XLA",
    "wall, ms: ours / XLA",
    "eager, ms: ours / device_put",
)


def cells(row: Row) -> list[str]:
    eager = "-" if row.device_put_ms is None else f"{row.device_put_ms:.1f}"
    return [
        row.transition,
        row.mesh,
        f"{row.received / 1e3:,.0f} / {row.received_xla / 1e3:,.0f} = **{row.bytes_ratio:.2f}**",
        counts(row.collectives),
        counts(row.collectives_xla),
        f"{row.wall_ms:.1f} / {row.wall_xla_ms:.1f} = **{row.wall_ratio:.2f}**",
        f"{row.eager_ms:.1f} / {eager}",
    ]


def summary(rows: list[Row], costs: dict[str, float], where: str, rounds: int) -> list[str]:
    fewer = sum(row.received < row.received_xla for row in rows)
    more = sum(row.received > row.received_xla for row in rows)
    slower = sum(row.wall_ratio > 1.05 for row in rows)
    explicit = sum(row.received_explicit not in (None, row.received_xla) for row in rows)
    return [
        f"{where}; float32[{','.join(map(str, SHAPE))}]; medians of {rounds} interleaved rounds. Of {len(rows)} "
        f"transitions {fewer} receive fewer bytes than XLA's program, {more} more, the others as many; in wall time "
        f"{slower} are more than 5% slower. `jax.sharding.reshard` on Explicit axes receives something else than "
        f"`jit(out_shardings=)` in {explicit}. In all the compiled program receives what the plan says.",
        "",
        f"An eager call on a tiny array: {costs['eager_us']:,.0f} us, of which the compiled program takes "
        f"{costs['compiled_us']:,.0f}; `device_put` {costs['put_us']:,.0f}. A plan: at most "
        f"{costs['plan_cold_ms']:.0f} ms cold, {costs['plan_cached_us']:.0f} us cached.",
    ]


def write(rows: list[Row], costs: dict[str, float], rounds: int, where: str) -> None:
    """The figures as JSON, the table in benchmarks/README.md."""
    (HERE / "results").mkdir(exist_ok=True)
    data = {"versions": where, "rounds": rounds, "costs": costs, "rows": [dataclasses.asdict(r) for r in rows]}
    (HERE / "results" / "reshard.json").write_text(json.dumps(data, indent=1) + "\n")
    table = markdown(HEADINGS, [cells(row) for row in rows])
    between(HERE / "README.md", "reshard", [*summary(rows, costs, where, rounds), "", *table])


def main() -> None:
    arguments = options(__doc__, rounds=15).parse_args()
    if arguments.rewrite:
        stored = json.loads((HERE / "results" / "reshard.json").read_text())
        write([Row(**row) for row in stored["rows"]], stored["costs"], stored["rounds"], stored["versions"])
        return
    names = ("plan_cold_ms", "plan_cached_us", "eager_us", "compiled_us", "put_us")
    costs: dict[str, float] = dict(zip(names, (*planning(), *overhead()), strict=True))
    rows = [measure(t, arguments.rounds) for t in track(TRANSITIONS, description="measuring")]
    table = Table(title=f"sk.reshard against XLA ({versions()})")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(cell.replace("*", "").replace("`", "") for cell in cells(row)))
    console = Console(width=200)
    console.print(table)
    console.print("\n".join(summary(rows, costs, versions(), arguments.rounds)))
    for row in rows:
        if row.planned_bytes != row.received:
            console.print(f"NOT AS PLANNED: {row.transition}: {row.received} received, {row.planned_bytes} planned")
    if not arguments.dry:
        write(rows, costs, arguments.rounds, versions())


if __name__ == "__main__":
    main()
