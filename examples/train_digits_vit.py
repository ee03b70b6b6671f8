"""Train a vision transformer on handwritten digits: batch over "dp", tensor and sequence parallel over "tp".

The digits (1,797 images of 8 x 8 pixels, in scikit-learn) become 16 patches each. The model is plain Flax and sees
one device; one call of ``sk.parallelize`` gives each device some of the heads and of the MLP's features, cuts what
lies between over the patches, and has AdamW keep its state cut over the batch's axis as well.

    python examples/train_digits_vit.py                      # 8 simulated devices, dp=2 x tp=4
    python examples/train_digits_vit.py --mesh dp=4,tp=2 --steps 100
    python examples/train_digits_vit.py --check              # also on one device: same losses?
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import shardkit as sk

PATCH = 2  # pixels on a side
PATCHES = (8 // PATCH) ** 2
CHECKED = 10  # steps that --check repeats on one device

# What happens to which layer. Column layers get a sequence that is cut and put it together, row layers add up what
# devices have and leave it cut: so norms and sums between them work on 1/n of the patches. Attention is one unit, its
# heads are cut. The head of ten classes isn't named: it's whole on every device.
PLAN = {
    "patches": sk.SequenceParallel("tp"),
    "blocks/*/norm*": sk.SequenceParallel("tp"),
    "blocks/*/attention": [sk.ColWiseParallel("tp"), sk.SequenceParallel("tp")],
    "blocks/*/widen": [sk.ColWiseParallel("tp"), sk.SequenceParallel("tp")],
    "blocks/*/narrow": [sk.RowWiseParallel("tp"), sk.SequenceParallel("tp")],
    "norm": sk.SequenceParallel("tp"),
}


class Block(nnx.Module):
    """Attention and MLP, each on a normalized copy and added to what came in."""

    def __init__(self, features: int, heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, features, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(features, rngs=rngs)
        self.widen = nnx.Linear(features, 4 * features, rngs=rngs)
        self.narrow = nnx.Linear(4 * features, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, patches, features] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(nnx.gelu(self.widen(self.norm2(x))))


class ViT(nnx.Module):
    """A vision transformer with learned positions, classifying by the mean over patches."""

    def __init__(self, layers: int, features: int, heads: int, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.patches = nnx.Linear(PATCH * PATCH, features, rngs=rngs)
        # As large as the patches are: four pixels say little without where they are.
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (PATCHES, features)))
        self.blocks = nnx.List([Block(features, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, 10, kernel_init=small, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images [n, 8, 8] with intensities in [0, 1] to the logits of ten digits [n, 10]."""
        side = 8 // PATCH
        x = images.reshape(-1, side, PATCH, side, PATCH).swapaxes(2, 3).reshape(-1, PATCHES, PATCH * PATCH)
        x = self.patches(x) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images [n, 8, 8] with intensities in [0, 1], and the digit of each."""

    images: np.ndarray
    labels: np.ndarray


def load(seed: int) -> tuple[Digits, Digits]:
    """(training, held out): every fifth image of a random order is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    images, labels = (found.images[order] / 16).astype(np.float32), found.target[order].astype(np.int32)
    held_out = np.arange(len(order)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


def batch_for(step: int, digits: Digits, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(images, labels) of one step, drawn at random: the same for every mesh."""
    chosen = np.random.default_rng([seed, step]).integers(len(digits.labels), size=size)
    return digits.images[chosen], digits.labels[chosen]


def on_mesh(arrays: Sequence[np.ndarray], mesh: jax.sharding.Mesh | None) -> list[jax.Array]:
    """Arrays with their first dim cut over "dp"."""
    if mesh is None:
        return [jnp.asarray(x) for x in arrays]
    return [sk.shard_tensor(x, {"dp": sk.Shard(0)}, mesh) for x in arrays]


def make_model(arguments: argparse.Namespace, mesh: jax.sharding.Mesh | None) -> tuple[ViT, Any]:
    """(model, optimizer) on a mesh, or plain on one device."""

    def plain() -> ViT:
        return ViT(arguments.layers, arguments.features, arguments.heads, nnx.Rngs(arguments.seed))

    warmup = max(1, arguments.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, max(arguments.steps, warmup + 1), end_value=1e-5)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.05)
    if mesh is None:
        return plain(), adamw
    config = {"dp": {"axis": "dp", "stage": 2}, "mp": {"plan": PLAN}}
    return sk.parallelize(plain, config=config, mesh=mesh, optimizer=adamw)


def make_step(model: ViT, tx: Any, mesh: jax.sharding.Mesh | None) -> tuple[Any, Any, Callable]:
    """(static part of the model, parameters, training step)."""
    graphdef, params = nnx.split(model)

    def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    if mesh is None:
        value_and_grad = jax.value_and_grad(loss_of)
    else:
        # Within jit nobody can read where parameters live; with param_placements it's known.
        value_and_grad = sk.value_and_grad(loss_of, batch_axes="dp", mesh=mesh, param_placements=params)

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = value_and_grad(params, images, labels)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return graphdef, params, jax.jit(step)


@dataclasses.dataclass
class Trained:
    """What came out of a training, and what went in."""

    graphdef: Any
    params: Any
    state: Any
    program: Any  # the compiled step
    losses: list[float]
    seconds: list[float]


def train(
    digits: Digits, mesh: jax.sharding.Mesh | None, steps: int, arguments, console: Console, title: str
) -> Trained:
    """Train on a mesh, or on one device."""
    model, tx = make_model(arguments, mesh)
    graphdef, params, step = make_step(model, tx, mesh)
    done = Trained(graphdef, params, tx.init(params), None, [], [])
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, state="compiling")
        for number in range(steps):
            batch = on_mesh(batch_for(number, digits, arguments.batch, arguments.seed), mesh)
            if done.program is None:  # ahead of time, so that the report can look at this very program
                done.program = step.lower(done.params, done.state, *batch).compile()
            began = time.perf_counter()
            # Simulated devices share few threads: wait for each step, lest those of the next one block them.
            done.params, done.state, loss = jax.block_until_ready(done.program(done.params, done.state, *batch))
            done.seconds.append(time.perf_counter() - began)
            done.losses.append(float(loss))
            progress.update(task, advance=1, state=f"loss {done.losses[-1]:.3f}")
    return done


def classify(done: Trained, images: np.ndarray, mesh: jax.sharding.Mesh) -> np.ndarray:
    """How likely each image is each of ten digits [n, 10]."""

    @jax.jit
    def run(params: Any, images: jax.Array) -> jax.Array:
        return jax.nn.softmax(nnx.merge(done.graphdef, params)(images))

    missing = -len(images) % mesh.shape["dp"]  # "dp" has to divide them
    (whole,) = on_mesh([np.pad(images, [(0, missing), (0, 0), (0, 0)])], mesh)
    return np.asarray(run(done.params, whole))[: len(images)]


def bytes_of(tree: Any) -> tuple[int, int]:
    """(whole, most on one device) of the arrays of a tree."""
    held: dict[Any, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return sum(x.nbytes for x in jax.tree.leaves(tree)), max(held.values())


def report(console: Console, mesh: jax.sharding.Mesh, done: Trained, page: sk.Explanation) -> None:
    """What training cost, as tables that explain themselves."""
    held = Table(title=f"Kept between steps on {dict(mesh.shape)}")
    for heading in ("what", "whole", "per device", "part"):
        held.add_column(heading, justify="left" if heading == "what" else "right")
    for name, tree in (("parameters", done.params), ("optimizer state", done.state)):
        whole, one = bytes_of(tree)
        held.add_row(name, f"{whole / 1e3:,.0f} kB", f"{one / 1e3:,.0f} kB", f"{100 * one / whole:.1f} %")
    console.print(held)

    wire = Table(title="Collectives of one training step, by purpose (from the compiled program)")
    for heading in ("for", "kind", "over", "count", "largest", "received per device"):
        wire.add_column(heading, justify="left" if heading in ("for", "kind", "over") else "right")
    groups: dict[tuple, list[sk.Explained]] = {}
    for entry in page.collectives:
        one = entry.collective
        groups.setdefault((entry.purpose, one.kind, " x ".join(one.axes or ("?",))), []).append(entry)
    for key, entries in sorted(groups.items()):
        largest = max(e.collective.result_bytes for e in entries)
        received = sum(e.bytes for e in entries)
        wire.add_row(*key, str(len(entries)), f"{largest / 1e3:,.1f} kB", f"{received / 1e3:,.1f} kB")
    console.print(wire)
    if page.unexplained:
        console.print(f"{len(page.unexplained)} collectives that nothing in the program asks for:\n{page}")


def draw(path: Path, losses: Sequence[float], digits: Digits, chances: np.ndarray) -> None:
    """The loss curve, and 40 held-out digits with what the model says: mistakes first, in red."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    said = chances.argmax(axis=1)
    wrong = said != digits.labels
    shown = np.concatenate([np.flatnonzero(wrong)[:20], np.flatnonzero(~wrong)])[:40]
    figure = plt.figure(figsize=(13, 5.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5, 8))
    axis = left.subplots()
    axis.semilogy(np.arange(1, len(losses) + 1), losses, color="C0", linewidth=0.8, alpha=0.5, label="each step")
    width = min(20, len(losses))
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    axis.semilogy(np.arange(width, len(losses) + 1), smooth, color="C0", label=f"mean over {width} steps")
    axis.set(xlabel="step", ylabel="cross-entropy of a training batch (nats)", title="Training loss")
    axis.legend()
    right.suptitle(
        f"{np.mean(~wrong):.1%} of {len(wrong)} held-out digits are right; mistakes in red (digit said, true digit)"
    )
    axes = right.subplots(4, 10)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, i in zip(axes.flat, shown, strict=False):
        axis.imshow(digits.images[i], cmap="gray_r")
        if wrong[i]:
            axis.set_title(f"{said[i]}, is {digits.labels[i]}", color="C3", fontsize=9, fontweight="bold")
            axis.add_patch(plt.Rectangle((-0.5, -0.5), 8, 8, fill=False, edgecolor="C3", linewidth=3))
        else:
            axis.set_title(f"{said[i]}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read_mesh(text: str) -> dict[str, int]:
    """``dp=2,tp=4`` as a mapping."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise SystemExit(f"--mesh {text!r} is not of the form dp=2,tp=4") from None
    if set(sizes) - {"dp", "tp"}:
        raise SystemExit(f"--mesh {text!r} names axes {sorted(set(sizes) - {'dp', 'tp'})}; this job uses dp and tp")
    return {"dp": sizes.get("dp", 1), "tp": sizes.get("tp", 1)}


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mesh", default="dp=2,tp=4", help="sizes of the mesh axes")
    parser.add_argument("--batch", type=int, default=64, help="images a step, on all devices together")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="repeat the first steps on one device, compare the losses")
    parser.add_argument("--out", type=Path, default=Path("digits_vit.png"), help="where the picture goes")
    arguments = parser.parse_args(argv)
    small = [f"--{n}" for n in ("steps", "batch", "layers", "features", "heads") if getattr(arguments, n) < 1]
    if small:
        raise SystemExit(f"{', '.join(small)} must be at least 1")
    return arguments


def check_sizes(arguments: argparse.Namespace, sizes: dict[str, int]) -> None:
    """Everything that is cut divides."""
    dp, tp = sizes["dp"], sizes["tp"]
    if arguments.batch % dp:
        raise SystemExit(f"--batch {arguments.batch} does not divide over dp={dp}")
    if arguments.features % arguments.heads or arguments.heads % tp or PATCHES % tp:
        raise SystemExit(
            f"--features {arguments.features} must be a multiple of --heads {arguments.heads}, and both "
            f"--heads {arguments.heads} and the {PATCHES} patches of an image multiples of tp={tp}"
        )


def main(argv: list[str] | None = None) -> dict:
    arguments = read_arguments(argv)
    sizes = read_mesh(arguments.mesh)
    check_sizes(arguments, sizes)
    needed = sizes["dp"] * sizes["tp"]
    # Simulated devices: has to be said before JAX is first used. Real accelerators are used as they are.
    if jax.config.values.get("jax_num_cpu_devices", needed) < needed:
        jax.config.update("jax_num_cpu_devices", needed)
    console = Console()
    mesh = sk.make_mesh(sizes)
    training, held_out = load(arguments.seed)
    console.print(
        f"Digits: {len(training.labels):,} to train on, {len(held_out.labels)} held out; "
        f"{arguments.batch} a step, {arguments.batch // sizes['dp']} on each of {sizes['dp']} parts"
    )
    heads, patches = arguments.heads // sizes["tp"], PATCHES // sizes["tp"]
    console.print(
        f"Model: {arguments.layers} blocks of {arguments.features} features; each of {sizes['tp']} devices has "
        f"{heads} of {arguments.heads} heads, and {patches} of {PATCHES} patches between"
    )
    done = train(training, mesh, arguments.steps, arguments, console, f"training on {needed} devices")
    console.print(f"{1e3 * statistics.median(done.seconds):.0f} ms a step (median)")

    chances = classify(done, held_out.images, mesh)
    wrong = int(np.sum(chances.argmax(axis=1) != held_out.labels))
    accuracy = 1 - wrong / len(chances)
    console.print(f"Held-out digits: {accuracy:.2%} right, {wrong} of {len(chances)} wrong")
    page = sk.explain(done.program, mesh=mesh)
    report(console, mesh, done, page)
    draw(arguments.out, done.losses, held_out, chances)
    console.print(f"Picture: {arguments.out}")

    result = {"losses": done.losses, "accuracy": accuracy, "page": page}
    if arguments.check:
        steps = min(CHECKED, arguments.steps)
        alone = train(training, None, steps, arguments, console, "the same on one device")
        worst = max(abs(a - b) / abs(b) for a, b in zip(done.losses, alone.losses, strict=False))
        verdict = "equal" if worst <= 1e-5 else "DIFFERENT"
        console.print(f"Losses: {verdict}; largest relative difference {worst:.1e} over the first {steps} steps")
        result["check"] = worst
        if worst > 1e-5:
            sys.exit(1)
    return result


if __name__ == "__main__":
    main()
