"""Train the small GPT of train_charlm.py over several processes, as over several hosts: interrupted, and resumed.

The story: two processes train; one of them is killed, which ends the job; it's started again, goes on from its newest
checkpoint, and is asked to end (SIGTERM), which makes it save at once; four processes on another mesh finish it. The
losses are compared with those of one process that was never interrupted.

    python examples/train_multihost.py                 # the story, on simulated devices, with a picture
    python examples/train_multihost.py run             # one process trains; on a cluster, where processes are
    srun python examples/train_multihost.py run --mesh dp=8,tp=4 --checkpoints /shared/run1    # started by others, all
    python -m shardkit.launch -n 2 --devices-per-process 4 examples/train_multihost.py run     # two processes here
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from train_charlm import Gpt, make_loss, make_step, place, read_corpus, read_documents, read_mesh

import shardkit as sk

LAYERS, HEADS = 2, 4
# A signal takes up to a second to be heard by all processes, in which a small job does hundreds of steps.
PAUSE = 4.0


class Windows:
    """A text as records: windows side by side. What the data loader needs is a length and an index."""

    def __init__(self, text: np.ndarray, context: int):
        self.text, self.width = text, context + 1

    def __len__(self) -> int:
        return len(self.text) // self.width

    def __getitem__(self, number: int) -> np.ndarray:
        return self.text[number * self.width :][: self.width]


def train(arguments: argparse.Namespace) -> list[float]:
    """What every process runs. Nothing in it depends on how many there are."""
    sk.initialize()
    print(f"process id {os.getpid()}", flush=True)
    mesh = sk.make_mesh(read_mesh(arguments.mesh))
    corpus = read_corpus(read_documents()[1])
    model = Gpt(corpus.symbols, arguments.context, LAYERS, arguments.features, HEADS, nnx.Rngs(arguments.seed))
    graphdef, params = nnx.split(model)
    params = place(params, mesh)
    tx, step = make_step(make_loss(graphdef), mesh, 1, arguments.steps)
    batches = sk.shard_dataloader(
        Windows(corpus.train, arguments.context),
        {"dp": sk.Shard(0)},
        mesh,
        batch_size=arguments.batch,
        shuffle=True,
        seed=arguments.seed,
        epochs=None,
        uneven="drop",
    )
    losses = []
    with batches, sk.Checkpointer(arguments.checkpoints / "steps", every=arguments.every) as checkpoints:
        state = {"params": params, "optimizer": tx.init(params), "data": batches}
        state, done = checkpoints.resume(state)
        say(f"{jax.process_count()} processes, {jax.device_count()} devices, {dict(mesh.shape)}: from step {done} on")
        log = Log(arguments.checkpoints / "losses.csv", done)
        for number in range(done + 1, arguments.steps + 1):
            began = time.perf_counter()
            state["params"], state["optimizer"], loss = step(state["params"], state["optimizer"], next(batches))
            losses.append(float(loss))
            sk.check_finite(losses[-1], "the loss", number)
            trained = time.perf_counter()
            checkpoints.save(state, number)
            log.write(number, losses[-1], trained - began, time.perf_counter() - trained)
            if number == arguments.pause:
                time.sleep(PAUSE)
            if checkpoints.preempted:
                say(f"asked to end: saved after step {number}")
                break
    return losses


def say(words: str) -> None:
    """One process speaks for all."""
    if jax.process_index() == 0:
        print(words, flush=True)


class Log:
    """A table of losses, a row a step, that loses its rows after the step that a run goes on from."""

    HEADINGS = ("step", "loss", "seconds", "seconds of saving", "processes")

    def __init__(self, path: Path, done: int):
        self.path = path
        if jax.process_index() == 0:
            kept = [row for row in read_log(path) if int(row["step"]) <= done] if path.exists() else []
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, self.HEADINGS)
                writer.writeheader()
                writer.writerows(kept)

    def write(self, step: int, loss: float, seconds: float, saving: float) -> None:
        if jax.process_index() == 0:
            # repr of a float loses nothing.
            row = (step, repr(loss), f"{seconds:.4f}", f"{saving:.4f}", jax.process_count())
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow(row)
        say(f"step {step}: loss {loss:.4f}")


def read_log(path: Path) -> list[dict[str, str]]:
    """The rows of a table of losses."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tell(arguments: argparse.Namespace, console: Console) -> float:
    """The story. Returns the largest relative difference of a loss from the one process's."""
    steps = arguments.steps
    alone, moved = arguments.out / "alone", arguments.out / "moved"
    for folder in (alone, moved):
        if folder.exists():
            sys.exit(f"{folder} is there already; remove it, or give another --out")
        folder.mkdir(parents=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}")]
    with Progress(*columns, console=console) as progress:

        def start(what: str, folder: Path, processes: int, mesh: str, pause: int = 0) -> Run:
            task = progress.add_task(what, total=steps, state="starting")

            def show(step: int, words: str) -> None:
                progress.update(task, completed=step, state=words)

            return Run(arguments, {"checkpoints": folder, "mesh": mesh, "pause": pause}, processes, show)

        start("1 process, never interrupted", alone, 1, "dp=4,tp=2").finish()
        third = steps // 3
        start("2 processes, one is killed", moved, 2, "dp=4,tp=2", pause=third).kill_at(third)
        start("2 processes again, asked to end", moved, 2, "dp=4,tp=2", pause=2 * third).end_at(2 * third)
        start("4 processes, another mesh", moved, 4, "dp=8,tp=1").finish()
    return report(arguments, console, read_log(alone / "losses.csv"), read_log(moved / "losses.csv"))


class Run:
    """One start of the job under ``shardkit.launch``."""

    def __init__(self, arguments: argparse.Namespace, own: dict[str, Any], processes: int, show: Callable):
        alike = ("steps", "batch", "context", "features", "every", "seed")
        options = own | {name: getattr(arguments, name) for name in alike}
        launch = ["-m", "shardkit.launch", "-n", processes, "--devices-per-process", 8 // processes]
        job = [__file__, "run", *(part for name, value in options.items() for part in (f"--{name}", value))]
        self.said: list[str] = []
        self.pids: list[int] = []
        self.show, self.steps = show, arguments.steps
        self.process = subprocess.Popen(
            [sys.executable, *map(str, launch + job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def progress(self) -> Iterator[int]:
        """The steps, as they are done."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            words = line.rstrip().partition("] ")[2]
            if words.startswith("process id "):
                self.pids.append(int(words.removeprefix("process id ")))
            if words.startswith("step "):
                step = int(words.split()[1].rstrip(":"))
                self.show(step, words.partition(": ")[2])
                yield step
        self.process.wait()

    def finish(self, status: int = 0) -> None:
        """Until it ends, which it must do so."""
        for _ in self.progress():
            pass
        if self.process.returncode != status:
            sys.exit(f"the job ended with status {self.process.returncode}, not {status}:\n{''.join(self.said[-30:])}")

    def kill_at(self, step: int) -> None:
        """Kill one process after a step, as the machine it runs on would by failing."""
        self._signal_at(step, lambda: os.kill(self.pids[-1], signal.SIGKILL))
        self.finish(128 + signal.SIGKILL)

    def end_at(self, step: int) -> None:
        """Ask the job to end after a step, as a scheduler would."""
        self._signal_at(step, lambda: self.process.send_signal(signal.SIGTERM))
        self.finish()

    def _signal_at(self, step: int, send: Callable[[], Any]) -> None:
        if any(done >= step for done in self.progress()):
            send()


def report(arguments: argparse.Namespace, console: Console, alone: list[dict], moved: list[dict]) -> float:
    """The losses of both, side by side, as a table and a picture."""
    whole = [float(row["loss"]) for row in alone]
    parts = [float(row["loss"]) for row in moved]
    if len(whole) != len(parts):
        sys.exit(f"{len(parts)} steps were done by the interrupted job, {len(whole)} by the other")
    apart = [abs(a - b) / abs(a) for a, b in zip(whole, parts, strict=True)]
    table = Table(title="Losses of the interrupted job, beside those of one process that wasn't")
    for heading in ("steps", "processes", "last loss", "of one process", "largest difference"):
        table.add_column(heading, justify="right")
    for count in dict.fromkeys(row["processes"] for row in moved):
        there = [i for i, row in enumerate(moved) if row["processes"] == count]
        worst = max(apart[i] for i in there)
        last = there[-1]
        table.add_row(f"{there[0] + 1} - {last + 1}", count, f"{parts[last]:.6f}", f"{whole[last]:.6f}", f"{worst:.1e}")
    console.print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    picture = arguments.out / "multihost.png"
    draw(picture, whole, parts, [int(row["processes"]) for row in moved])
    console.print(f"Picture: {picture}")
    return max(apart)


def draw(path: Path, whole: list[float], parts: list[float], processes: list[int]) -> None:
    """Both curves, and where the job moved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    steps = np.arange(1, len(whole) + 1)
    axis.plot(steps, whole, color="0.75", linewidth=6, label="1 process, never interrupted")
    for count in dict.fromkeys(processes):
        there = [i for i, p in enumerate(processes) if p == count]
        axis.plot(steps[there], np.array(parts)[there], linewidth=2, label=f"{count} processes")
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats per character")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", nargs="?", choices=["story", "run"], default="story", help="(default: %(default)s)")
    parser.add_argument("--mesh", default="dp=4,tp=2", help="axes and sizes, of a run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="windows a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="characters a window (default: %(default)s)")
    parser.add_argument("--features", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--pause", type=int, default=0, help="a step after which a run waits for the story's signal")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--checkpoints", type=Path, default=Path("multihost"), help="a folder, of a run")
    parser.add_argument("--out", type=Path, default=Path("multihost"), help="a folder, of the story")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = read_arguments(argv)
    if arguments.what == "run":
        arguments.checkpoints.mkdir(parents=True, exist_ok=True)
        train(arguments)
        return
    console = Console()
    worst = tell(arguments, console)
    verdict = "equal" if worst <= 1e-5 else "DIFFERENT"
    console.print(f"Loss curves: {verdict}; largest relative difference {worst:.1e} over {arguments.steps} steps")
    if worst > 1e-5:
        sys.exit(1)


if __name__ == "__main__":
    main()
