"""Two unstable jets in shallow water, on a doubly periodic plane cut into blocks over many devices.

The model is plain JAX: a rotating shallow-water layer on a C grid, ``jnp.roll`` for neighbours, ``lax.scan`` over time
steps. It's written for one device. ``sk.spatial.region`` is the only line that knows of more: it keeps the fields in
blocks with margins of their neighbours' cells, and exchanges these once in ``--exchange-every`` steps. Margins then are
as wide as so many steps reach, and their cells are computed twice.

Mass is conserved to rounding, since what leaves a cell enters the next one. Energy decays a little by viscosity.

    python examples/shallow_water.py                         # 8 simulated devices, 2 x 4 blocks
    python examples/shallow_water.py --devices 8 --exchange-every 8     # 8 bands, an exchange in 8 steps
    python examples/shallow_water.py --steps 600 --check     # also on one device: same fields?
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import shardkit as sk

SIDE = 1.0e6  # of the plane, in m
CORIOLIS = 1.0e-4  # 1/s
GRAVITY = 0.1  # reduced, m/s^2: the layer lies on a denser one
DEPTH = 500.0  # at rest, in m
JET, WIDTH = 2.0, 4.0e4  # of the jets: m/s, m
MEANDER, WAVES = 1.2e4, (2, 3, 4, 5)  # of the jets at first: m, and how many a side
VISCOSITY = 0.25  # m/s, times the size of a cell: above JET^2 dt / (2 dx), else forward steps of advection grow

# --- the model: nothing about devices -------------------------------------------------------------------------


class State(NamedTuple):
    """Fields [y, x] on a C grid: u is half a cell east of h, v half a cell north of it, vorticity both."""

    h: jax.Array  # thickness, m
    u: jax.Array  # velocity to the east, m/s
    v: jax.Array  # velocity to the north, m/s


def east(a: jax.Array) -> jax.Array:
    """Each cell's neighbour at larger x."""
    return jnp.roll(a, -1, axis=1)


def west(a: jax.Array) -> jax.Array:
    """Each cell's neighbour at smaller x."""
    return jnp.roll(a, 1, axis=1)


def north(a: jax.Array) -> jax.Array:
    """Each cell's neighbour at larger y."""
    return jnp.roll(a, -1, axis=0)


def south(a: jax.Array) -> jax.Array:
    """Each cell's neighbour at smaller y."""
    return jnp.roll(a, 1, axis=0)


def potential_vorticity(s: State, dx: float) -> jax.Array:
    """(f + vorticity) / thickness at the corners of cells [y, x], in 1/(m s)."""
    vorticity = (east(s.v) - s.v - north(s.u) + s.u) / dx
    thickness = s.h + north(s.h)
    return (CORIOLIS + vorticity) / ((thickness + east(thickness)) / 4)


def turn(s: State, dx: float, dt: float) -> State:
    """One time step, forward-backward: thickness first, velocities from the new one.

    In space the energy-conserving scheme of Sadourny (1975, J. Atmos. Sci. 32, 680-689), and viscosity.
    """
    h, u, v = s

    def viscous(a: jax.Array) -> jax.Array:
        return VISCOSITY / dx * (east(a) + west(a) + north(a) + south(a) - 4 * a)

    # What flows out of a cell flows into its neighbour: the sum of h stays.
    flux_u, flux_v = u * (h + east(h)) / 2, v * (h + north(h)) / 2
    h = h - dt / dx * (flux_u - west(flux_u) + flux_v - south(flux_v))

    q = potential_vorticity(State(h, u, v), dx)
    head = GRAVITY * h + (u * u + west(u * u) + v * v + south(v * v)) / 4
    flux_v = v * (h + north(h)) / 2
    turning = q * (flux_v + east(flux_v)) / 2
    u = u + dt * ((turning + south(turning)) / 2 - (east(head) - head) / dx + viscous(u))

    flux_u = u * (h + east(h)) / 2  # of the new u: with the old one, turning would make velocities grow
    turning = q * (flux_u + north(flux_u)) / 2
    v = v + dt * (-(turning + west(turning)) / 2 - (north(head) - head) / dx + viscous(v))
    return State(h, u, v)


def advance(s: State, dx: float, dt: float, turns: int) -> State:
    """``turns`` time steps."""
    return lax.scan(lambda s, _: (turn(s, dx, dt), None), s, length=turns)[0]


def totals(s: State) -> tuple[jax.Array, jax.Array]:
    """(mean thickness in m, energy above that of rest in m^3/s^2 a unit area)."""
    h, u, v = s
    kinetic = (u * u * (h + east(h)) + v * v * (h + north(h))) / 4
    return h.mean(), (kinetic + GRAVITY * (h - DEPTH) ** 2 / 2).mean()


def start(size: int, seed: int, dtype: str) -> State:
    """Two opposite jets that meander a little, in geostrophic balance: a stream function at the corners of cells."""
    dx, rng = SIDE / size, np.random.default_rng(seed)
    at = (np.arange(size) + 1) * dx
    x, y = at[None], at[:, None]

    def meander() -> np.ndarray:
        phases = rng.uniform(0, 2 * np.pi, len(WAVES))
        return sum(MEANDER * np.cos(2 * np.pi * k * x / SIDE + p) for k, p in zip(WAVES, phases, strict=True))

    lower, upper = ((y - at * SIDE - meander()) / WIDTH for at in (0.27, 0.73))
    stream = JET * WIDTH * (np.tanh(lower) - np.tanh(upper))
    below, left = np.roll(stream, 1, 0), np.roll(stream, 1, 1)
    middle = (stream + below + left + np.roll(below, 1, 1)) / 4
    h = DEPTH + CORIOLIS / GRAVITY * (middle - middle.mean())
    fields = h, -(stream - below) / dx, (stream - left) / dx
    return State(*(a.astype(dtype) for a in fields))


def time_step(size: int) -> tuple[float, float]:
    """(cell in m, time step in s): half of what the fastest wave needs to cross a cell."""
    dx = SIDE / size
    return dx, 0.5 * dx / (math.sqrt(GRAVITY * DEPTH) + JET)


# --- on a mesh ------------------------------------------------------------------------------------------------


def on_mesh(s: State, mesh: jax.sharding.Mesh) -> State:
    """Fields in blocks: "sy" cuts y, "sx" cuts x."""
    placements = {name: sk.Shard(dim) for name, dim in axes_of(mesh).items()}
    return State(*(sk.shard_tensor(a, placements, mesh) for a in s))


def axes_of(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Which mesh axis cuts which dim."""
    return {name: {"sy": 0, "sx": 1}[name] for name in mesh.axis_names}


def compiled(s: State, mesh: jax.sharding.Mesh | None, turns: int, every: int | str) -> Any:
    """The program of ``turns`` time steps, in blocks on a mesh, or plain."""
    dx, dt = time_step(s.h.shape[0])

    def chunk(s: State) -> State:
        return advance(s, dx, dt, turns)

    if mesh is not None:
        chunk = sk.spatial.region(chunk, spatial_axes=axes_of(mesh), mesh=mesh, exchange_every=every)
    return jax.jit(chunk).lower(s).compile()


@dataclasses.dataclass
class Run:
    """What came out of a run: the last fields, and what was seen after each chunk (and before the first)."""

    state: State
    mass: list[float]
    energy: list[float]
    frames: dict[int, State]  # by time step
    seconds: list[float]  # of a time step


def simulate(s: State, program: Any, steps: int, turns: int, keep: set[int], console: Console, title: str) -> Run:
    """Run a compiled chunk again and again."""
    measure: Callable = jax.jit(totals)
    done = Run(s, [], [], {}, [])

    def look(step: int) -> None:
        mass, energy = measure(done.state)
        done.mass.append(float(mass))
        done.energy.append(float(energy))
        if step in keep:
            done.frames[step] = State(*map(np.asarray, done.state))

    look(0)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, state="")
        for step in range(turns, steps + 1, turns):
            began = time.perf_counter()
            # Simulated devices share few threads: wait for each chunk, lest those of the next one block them.
            done.state = jax.block_until_ready(program(done.state))
            done.seconds.append((time.perf_counter() - began) / turns)
            look(step)
            if not math.isfinite(done.energy[-1]):
                raise SystemExit(f"the flow blew up before step {step:,}: fields are no longer finite")
            progress.update(task, advance=turns, state=f"energy {done.energy[-1] / done.energy[0]:.1%}")
    return done


# --- what it cost, and what it looks like ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wire:
    """What one device receives in a time step, by its compiled program."""

    every: int  # time steps an exchange
    permutes: float
    kilobytes: float
    others: int  # collectives of other kinds


def wire_of(program: Any, mesh: jax.sharding.Mesh, turns: int) -> Wire:
    """Of a chunk of ``turns`` time steps: collectives in a loop count as often as it turns."""
    report = sk.collectives(program, mesh=mesh)
    permutes = report.select("collective_permute")
    runs = [p.trip_count or 1 for p in permutes]
    received = sum(n * p.bytes for n, p in zip(runs, permutes, strict=True))
    every = turns // max(runs, default=turns)
    return Wire(every, sum(runs) / turns, received / turns / 1e3, len(report) - len(permutes))


def report(console: Console, wires: list[tuple[str, Wire]], mesh: jax.sharding.Mesh, done: Run) -> None:
    """What each way of exchanging sends, and what was conserved."""
    table = Table(title=f"Collectives on {dict(mesh.shape)} by --exchange-every, per device (from compiled programs)")
    for heading in ("every", "steps an exchange", "permutes a step", "received a step", "others"):
        table.add_column(heading, justify="left" if heading == "every" else "right")
    for name, w in wires:
        table.add_row(name, str(w.every), f"{w.permutes:.2f}", f"{w.kilobytes:,.1f} kB", str(w.others))
    console.print(table)
    console.print(
        f"Mass: largest relative change {worst_change(done.mass):.1e}; "
        f"energy above rest: {done.energy[-1] / done.energy[0] - 1:+.2%} at the end"
    )


def worst_change(values: list[float]) -> float:
    """Largest relative difference from the first."""
    return max(abs(v / values[0] - 1) for v in values)


def draw(path: Path, done: Run, mesh: jax.sharding.Mesh, turns: int) -> None:
    """Thickness and potential vorticity at some times, borders of blocks on them, and what was conserved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = done.state.h.shape[0]
    dx, dt = time_step(size)
    km, day = SIDE / 1e3, 86400
    figure = plt.figure(figsize=(13.5, 8.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(6.1, 2.5))
    axes = top.subplots(2, len(done.frames), sharex=True, sharey=True, squeeze=False)
    vorticity = [np.asarray(potential_vorticity(s, dx)) * DEPTH / CORIOLIS for s in done.frames.values()]
    swing = max(np.abs(s.h - DEPTH).max() for s in done.frames.values())
    spread = max(np.abs(q - 1).max() for q in vorticity)
    for column, ((step, s), q) in enumerate(zip(done.frames.items(), vorticity, strict=True)):
        shown = (
            (s.h - DEPTH, "RdBu_r", -swing, swing),
            (q, "PuOr_r", 1 - spread, 1 + spread),
        )
        for row, (field, colors, low, high) in enumerate(shown):
            axis = axes[row, column]
            image = axis.imshow(field, cmap=colors, vmin=low, vmax=high, origin="lower", extent=(0, km, 0, km))
            borders(axis, mesh, size, km)
            axis.set(xticks=(0, km / 2, km), yticks=(0, km / 2, km))
            if column == len(done.frames) - 1:
                label = ("thickness minus 500 m (m)", "potential vorticity\n(that of rest = 1)")[row]
                top.colorbar(image, ax=axes[row], label=label, shrink=0.9, pad=0.01)
        axes[0, column].set_title(f"day {step * dt / day:.1f} (step {step:,})")
        axes[1, column].set_xlabel("x (km)")
    for axis in axes[:, 0]:
        axis.set_ylabel("y (km)")

    days = np.arange(len(done.mass)) * turns * dt / day
    left, right = bottom.subplots(1, 2)
    left.plot(days, np.array(done.mass) / done.mass[0] - 1, color="C0")
    left.set(xlabel="time (days)", ylabel="relative change", title="Mass: conserved to rounding")
    least = 4 * float(np.finfo(done.state.h.dtype).eps)
    left.set_ylim(-max(least, 1.2 * worst_change(done.mass)), max(least, 1.2 * worst_change(done.mass)))
    right.plot(days, 100 * (np.array(done.energy) / done.energy[0] - 1), color="C1")
    right.set(xlabel="time (days)", ylabel="change (%)", title="Energy above rest: viscosity takes some")
    for axis in (left, right):
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        axis.set_xlim(0, days[-1])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def borders(axis: Any, mesh: jax.sharding.Mesh, size: int, km: float) -> None:
    """Where devices meet."""
    for name, dim in axes_of(mesh).items():
        block = -(-size // mesh.shape[name])
        for i in range(block, size, block):
            line = axis.axhline if dim == 0 else axis.axvline
            line(i * km / size, color="black", linewidth=0.6, alpha=0.35, linestyle=(0, (4, 4)))


# --- the command ----------------------------------------------------------------------------------------------


def read_devices(text: str) -> dict[str, int]:
    """``2x4`` or ``8`` as the sizes of mesh axes."""
    parts = text.split("x")
    if len(parts) > 2 or not all(p.isdecimal() and int(p) for p in parts):
        raise SystemExit(f"--devices {text!r} is not of the form 2x4 (blocks along y and x) or 8 (along y alone)")
    return dict(zip(("sy", "sx"), map(int, parts), strict=False))


def read_every(text: str) -> int | str:
    """A number of time steps, or auto."""
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise SystemExit(f"--exchange-every {text!r} is neither a number of time steps nor auto")
    return text if text == "auto" else int(text)


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=192, help="cells along y and along x")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--chunk", type=int, help="time steps a call, by default 60, or a divisor of --steps below")
    parser.add_argument("--devices", default="2x4", help="blocks along y and x, or along y alone (8)")
    parser.add_argument("--exchange-every", default="2", help="time steps an exchange, or auto")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="the same on one device, compare the fields")
    parser.add_argument("--picture", type=Path, default=Path("shallow_water.png"), help="where the picture goes")
    arguments = parser.parse_args(argv)
    if arguments.size < 8 or arguments.steps < 1:
        raise SystemExit("--size must be at least 8 and --steps at least 1")
    if arguments.chunk is None:
        arguments.chunk = max(n for n in range(1, 61) if arguments.steps % n == 0)
    if arguments.chunk < 1 or arguments.steps % arguments.chunk:
        raise SystemExit(f"--steps {arguments.steps} is not a multiple of --chunk {arguments.chunk}")
    arguments.exchange_every = read_every(arguments.exchange_every)
    return arguments


def main(argv: list[str] | None = None) -> dict:
    arguments = read_arguments(argv)
    sizes = read_devices(arguments.devices)
    size, steps, turns, every = arguments.size, arguments.steps, arguments.chunk, arguments.exchange_every
    cut = [f"{name}={n}" for name, n in sizes.items() if size % n]
    if cut:
        raise SystemExit(f"--size {size} does not divide over {', '.join(cut)}")
    needed = math.prod(sizes.values())
    # Simulated devices: has to be said before JAX is first used. Real accelerators are used as they are.
    if jax.config.values.get("jax_num_cpu_devices", needed) < needed:
        jax.config.update("jax_num_cpu_devices", needed)
    if arguments.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    console = Console()
    mesh = sk.make_mesh(sizes)
    first = start(size, arguments.seed, arguments.dtype)
    dx, dt = time_step(size)
    blocks = " x ".join(str(size // sizes.get(name, 1)) for name in ("sy", "sx"))
    console.print(
        f"Plane: {size} x {size} cells of {dx / 1e3:.1f} km, {blocks} on each of {needed} devices; "
        f"{steps:,} steps of {dt:.0f} s are {steps * dt / 86400:.1f} days, {turns} steps a call"
    )
    s = on_mesh(first, mesh)
    wires = []
    with console.status("compiling"):
        program = compiled(s, mesh, turns, every)
        if every != 1:
            wires.append(("1", wire_of(compiled(s, mesh, turns, 1), mesh, turns)))
        wires.append((str(every), wire_of(program, mesh, turns)))

    keep = {round(i / 3 * (steps // turns)) * turns for i in range(4)}
    done = simulate(s, program, steps, turns, keep, console, f"on {needed} devices")
    console.print(f"{1e3 * statistics.median(done.seconds):.2f} ms a time step (median)")
    report(console, wires, mesh, done)
    draw(arguments.picture, done, mesh, turns)
    console.print(f"Picture: {arguments.picture}")

    result = {"run": done, "wires": dict(wires)}
    if arguments.check:
        alone = State(*map(jnp.asarray, first))
        plain = simulate(alone, compiled(alone, None, turns, 1), steps, turns, set(), console, "on one device")
        console.print(f"{1e3 * statistics.median(plain.seconds):.2f} ms a time step on one device (median)")
        worst = largest_difference(done.state, plain.state)
        verdict = "equal" if worst <= tolerance(arguments.dtype) else "DIFFERENT"
        console.print(f"Fields: {verdict}; largest difference {worst:.1e} of each one's largest value")
        result["check"] = worst
        if verdict != "equal":
            sys.exit(1)
    return result


def largest_difference(found: State, expected: State) -> float:
    """Of all fields, each relative to its largest deviation."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found, expected, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def tolerance(dtype: str) -> float:
    """Rounding, grown by an unstable flow: thousands of steps multiply it a thousandfold."""
    return 1e-10 if dtype == "float64" else 1e-3


if __name__ == "__main__":
    main()
