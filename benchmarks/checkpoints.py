"""Checkpoints: how long the training loop waits for a save, and what digests cost, beside orbax by itself.

    python benchmarks/checkpoints.py             # make bench BENCH=checkpoints
    python benchmarks/checkpoints.py --rewrite

The first table: examples/train_multihost.py over 1, 2 and 4 processes of this machine, as its log has it: the median
step, and what its loop waits for a save, every ten steps and after every step, where it also waits until the one before
is on disk. The second: parameters and state of AdamW (stage 2) of a given size on 8 simulated devices, saved and
restored by shardkit (which checks every file) and by orbax alone, in turns: how long the loop waits, when all is on
disk, and restoring onto 4, 8 and 16 devices.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 16)

import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from rich.progress import track  # noqa: E402
from tables import HERE, between, markdown, options, versions  # noqa: E402

import shardkit as sk  # noqa: E402

STORED = HERE / "results" / "checkpoints.json"
EXAMPLE = HERE.parent / "examples" / "train_multihost.py"
PROCESSES = {1: "dp=4,tp=2", 2: "dp=4,tp=2", 4: "dp=4,tp=2"}
EVERY = (10, 1)
STEPS = {10: 80, 1: 30}
MEGABYTES = (3, 30, 300)


def in_the_loop(processes: int, mesh: str) -> dict[str, Any]:
    """The example: medians of seconds, of a step and of each way to save."""
    found: dict[str, Any] = {"processes": processes, "mesh": mesh}
    for every in EVERY:
        step, found[f"every {every}"] = _logged(processes, mesh, every)
        found.setdefault("step", step)
    return found


def _logged(processes: int, mesh: str, every: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "shardkit.launch", "-n", processes, "--devices-per-process", 8 // processes]
        job = [EXAMPLE, "run", "--mesh", mesh, "--steps", STEPS[every], "--every", every, "--checkpoints", folder]
        subprocess.run([sys.executable, *map(str, launch + job)], check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "losses.csv").read_text().splitlines()
    names = lines[0].split(",")
    # Without the first steps, which compile, and the first save, which imports.
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[max(6, every + 2) :]]
    step = statistics.median(float(row["seconds"]) for row in rows)
    saves = [float(row["seconds of saving"]) for row in rows if int(row["step"]) % every == 0]
    return step, statistics.median(saves)


def state(devices: int, megabytes: float, fill: float) -> Any:
    """Parameters and optimizer state of about this size on some devices."""
    mesh = sk.make_mesh({"dp": devices}, devices=jax.devices()[:devices])
    layers = 10
    width = round((megabytes * 1e6 / 3 / 4 / layers) ** 0.5) // 16 * 16
    rng = np.random.default_rng(0)
    values = {f"layer{i}": rng.normal(size=(width, width)).astype(np.float32) * fill for i in range(layers)}
    params = {name: sk.shard_tensor(x, {}, mesh) for name, x in values.items()}
    tx = sk.shard_optimizer(optax.adamw(1e-3), sk.ShardingStage2("dp"), mesh=mesh)
    return {"params": params, "state": tx.init(params)}


def seconds(fun: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fun())
    return time.perf_counter() - start


def beside_orbax(megabytes: float, rounds: int) -> dict[str, Any]:
    """Medians of seconds of both, in turns."""
    tree = state(8, megabytes, 1.0)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for number in range(rounds):
        for name in ("shardkit", "orbax") if number % 2 else ("orbax", "shardkit"):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                if name == "shardkit":
                    with sk.Checkpointer(folder, preemption=False) as writer:
                        start = time.perf_counter()
                        writer.save(tree, 1)
                        note("shardkit waits", time.perf_counter() - start)
                        writer.wait()
                        note("shardkit on disk", time.perf_counter() - start)
                    for devices in (4, 8, 16):
                        target = state(devices, megabytes, 0.0)
                        note(f"shardkit onto {devices}", seconds(lambda t=target: sk.restore(folder, t)))
                    note("shardkit onto 8, not checked", seconds(lambda: sk.restore(folder, tree, verify=False)))
                else:
                    plain = {"params": tree["params"], "state": tree["state"].inner}
                    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
                    with ocp.AsyncCheckpointer(handler) as writer:
                        start = time.perf_counter()
                        writer.save(Path(folder) / "1", args=ocp.args.PyTreeSave(plain))
                        note("orbax waits", time.perf_counter() - start)
                        writer.wait_until_finished()
                        note("orbax on disk", time.perf_counter() - start)
                        how = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding), plain)
                        read = ocp.args.PyTreeRestore(item=plain, restore_args=how)
                        restore = functools.partial(writer.restore, Path(folder) / "1", args=read)
                        note("orbax onto 8", seconds(restore))
    held = sum(x.nbytes for x in jax.tree.leaves(tree))
    return {"megabytes": held / 1e6} | {name: statistics.median(values) for name, values in found.items()}


def write(stored: dict[str, Any]) -> None:
    """Both tables, into benchmarks/README.md."""
    loop = []
    for r in stored["loop"]:
        waits = [f"{1e3 * r[f'every {n}']:.0f} = **{r[f'every {n}'] / r['step']:.2f}** steps" for n in EVERY]
        loop.append([str(r["processes"]), r["mesh"], f"{1e3 * r['step']:.0f}", *waits])
    beside = []
    for r in stored["beside"]:
        pairs = [(r[f"shardkit {what}"], r[f"orbax {what}"]) for what in ("waits", "on disk", "onto 8")]
        cells = [f"{1e3 * a:.0f} / {1e3 * b:.0f} = **{a / b:.2f}**" for a, b in pairs]
        others = [f"{1e3 * r[f'shardkit {what}']:.0f}" for what in ("onto 8, not checked", "onto 4", "onto 16")]
        beside.append([f"{r['megabytes']:.0f}", *cells, *others])
    between(
        HERE / "README.md",
        "checkpoints",
        [
            *markdown(
                ["processes", "mesh", "a step, ms", "the loop waits for a save, ms: every 10 steps", "every step"], loop
            ),
            "",
            *markdown(
                [
                    "MB",
                    "the loop waits, ms: shardkit / orbax",
                    "on disk, ms: shardkit / orbax",
                    "restored onto 8 devices, ms: shardkit / orbax",
                    "the same, not checked",
                    "onto 4",
                    "onto 16",
                ],
                beside,
            ),
            "",
            f"{stored['versions']}.",
        ],
    )


def main() -> None:
    arguments = options(__doc__, rounds=5).parse_args()
    if arguments.rewrite:
        write(json.loads(STORED.read_text()))
        return
    loop = [in_the_loop(*item) for item in track(PROCESSES.items(), "the example")]
    beside = [beside_orbax(size, arguments.rounds) for size in track(MEGABYTES, "beside orbax")]
    stored = {"versions": versions(), "loop": loop, "beside": beside}
    if arguments.dry:
        print(json.dumps(stored, indent=1))
        return
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    write(stored)


if __name__ == "__main__":
    main()
