"""Train a restorer in flax.linen on one large retina photograph, its width sharded over many devices.

The twin of ``train_fundus.py``: the same photograph (1411 x 1411, shipped with scikit-image), made blurred and noisy,
the same small U-Net and the same loss, for models in ``flax.linen``. ``sk.parallelize`` gives back a module of the same
fields whose ``init`` and ``apply`` run sharded; variables keep Flax's names and shapes, so checkpoints stay what they
were. All else is plain JAX and optax.

    python examples/train_fundus_linen.py                      # 8 simulated devices, dp=2 x sp=4
    python examples/train_fundus_linen.py --mesh dp=1,sp=8 --steps 20 --scale 0.5
    python examples/train_fundus_linen.py --check              # also on one device: same loss curve?
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import shardkit as sk

NOISE = 0.15  # standard deviation, for intensities in [0, 1]
BLUR = 0.8  # standard deviation of the Gaussian blur, in pixels


class Restorer(nn.Module):
    """A small U-Net: two strided convolutions down, two transposed ones up, a norm, a skip."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Images [n, h, w, 3] with intensities around [0, 1], restored."""
        half = nn.relu(nn.Conv(8, (4, 4), strides=2, name="down1")(x))
        quarter = nn.Conv(16, (3, 3), strides=2, name="down2")(half)
        quarter = nn.relu(nn.GroupNorm(num_groups=4, name="norm")(quarter))
        quarter = quarter + nn.relu(nn.Conv(16, (3, 3), name="middle")(quarter))
        up = nn.ConvTranspose(8, (2, 2), strides=(2, 2), name="up1")(quarter)
        up = nn.relu(up)[:, : half.shape[1], : half.shape[2]]
        half = nn.relu(nn.Conv(8, (3, 3), name="fuse")(jnp.concatenate([half, up], axis=-1)))
        up = nn.ConvTranspose(3, (2, 2), strides=(2, 2), name="up2")(half)
        return up[:, : x.shape[1], : x.shape[2]]


def load_photograph(scale: float) -> np.ndarray:
    """The retina photograph and, behind it, its blurred twin: uint8 [h, w, 6], scaled."""
    from skimage.data import retina
    from skimage.filters import gaussian
    from skimage.transform import resize

    image = retina() / 255
    if scale != 1:
        side = max(16, round(image.shape[0] * scale))
        image = resize(image, (side, side), anti_aliasing=True)
    both = np.concatenate([image, gaussian(image, BLUR, channel_axis=-1)], axis=-1)
    return np.round(both * 255).astype(np.uint8)


def held_out_region(height: int, width: int) -> tuple[slice, slice]:
    """A window that no training loss ever sees; it lies across a shard seam in the middle."""
    return slice(round(height * 0.40), round(height * 0.60)), slice(round(width * 0.40), round(width * 0.60))


def augmented(image: np.ndarray, seen: np.ndarray, copies: int, rng: np.random.Generator):
    """``copies`` randomly turned and mirrored photographs [n, h, w, 6] and where they count [n, h, w, 1]."""
    pairs = []
    for _ in range(copies):
        turns, mirror = rng.integers(4), rng.integers(2)
        pairs.append([np.rot90(a[:, ::-1] if mirror else a, turns) for a in (image, seen)])
    return np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs])


def pair(images: jax.Array | sk.Padded, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(noisy and blurred, clean) intensities from uint8 [n, h, w, 6].

    A Padded becomes its logical value, still sharded; the noise of a pixel is the same on any mesh.
    """
    value = images.value if isinstance(images, sk.Padded) else images
    clean, blurred = jnp.split(value.astype(jnp.float32) / 255, 2, axis=-1)
    return blurred + NOISE * jax.random.normal(key, blurred.shape), clean


class Job(NamedTuple):
    """What training needs, on a mesh or plain on one device.

    Attributes:
      start: ``start(key)`` makes parameters and optimizer state, each where it goes.
      step: ``step(params, state, images, seen, key)`` gives new ones, and the loss.
      restore: ``restore(params, images, key)`` gives the noisy and the restored images.
    """

    start: Callable[[jax.Array], tuple[Any, Any]]
    step: Any
    restore: Any


def make_job(mesh: jax.sharding.Mesh | None, steps: int) -> Job:
    """The job on a mesh, or plain on one device."""
    model = Restorer()
    if mesh is not None:
        model = sk.parallelize(model, {"**": sk.ConvParallel("sp", dim="W")}, mesh)
    schedule = optax.cosine_decay_schedule(1.5e-2, max(steps, 1), alpha=0.1)
    tx = optax.adam(schedule)

    def start(key: jax.Array) -> tuple[Any, Any]:
        params = model.init(key, jnp.zeros((1, 16, 16, 3)))  # any image will do: shapes of kernels don't depend on it
        return params, tx.init(params)

    def loss_of(params: Any, images, seen, key) -> jax.Array:
        noisy, clean = pair(images, key)
        weight = (seen.value if isinstance(seen, sk.Padded) else seen).astype(jnp.float32)
        return ((model.apply(params, noisy) - clean) ** 2 * weight).sum() / (3 * weight.sum())

    @jax.jit
    def step(params: Any, state: Any, images, seen, key) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, images, seen, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def restore(params: Any, images, key) -> tuple[Any, Any]:
        noisy, _ = pair(images, key)
        restored = model.apply(params, noisy)
        if mesh is None:
            return noisy, restored
        # As Padded the results leave jit the way they are, still sharded: nothing is gathered.
        placed = {"dp": sk.Shard(0), "sp": sk.Shard(2)}
        return tuple(sk.shard_tensor(a, placed, mesh, uneven="pad") for a in (noisy, restored))

    return Job(start, step, restore)


def batch_for(step: int, image, seen, copies: int, seed: int, mesh):
    """The batch of one step: the same for every mesh, placed block by block on this one."""
    batch = augmented(image, seen, copies, np.random.default_rng([seed, step]))
    if mesh is None:
        return [jnp.asarray(a) for a in batch]
    placed = {"dp": sk.Shard(0), "sp": sk.Shard(2)}
    return [sk.shard_tensor(a, placed, mesh, uneven="pad") for a in batch]


def train(mesh, image, seen, copies: int, steps: int, seed: int, console: Console, title: str):
    """Train, and give back parameters, the compiled step, the restoring function and the loss curve."""
    job = make_job(mesh, steps)
    params, state = job.start(jax.random.key(seed))
    losses: list[float] = []
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, state="compiling")
        compiled = None
        for step in range(steps):
            batch = batch_for(step, image, seen, copies, seed, mesh)
            key = jax.random.fold_in(jax.random.key(seed), step)
            if compiled is None:  # ahead of time, so that the report can look at this very program
                compiled = job.step.lower(params, state, *batch, key).compile()
            params, state, loss = compiled(params, state, *batch, key)
            losses.append(float(loss))
            psnr = -10 * math.log10(losses[-1])
            progress.update(task, advance=1, state=f"loss {losses[-1]:.5f} ({psnr:.1f} dB)")
    return params, compiled, job.restore, losses


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal to noise ratio in dB, for intensities in [0, 1]."""
    return float(-10 * np.log10(np.mean((np.clip(a, 0, 1) - b) ** 2)))


def draw(path: Path, noisy, restored, clean, seam: int) -> None:
    """noisy / restored / clean side by side, and below the same zoomed across a shard seam."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height, width = clean.shape[:2]
    size = max(8, min(width, height) // 9)
    top = max(0, min(height - size, round(height * 0.5)))
    left = max(0, min(width - size, seam - size // 2))
    window = (slice(top, top + size), slice(left, left + size))
    figure, axes = plt.subplots(2, 3, figsize=(12, 8.4), constrained_layout=True)
    for column, (name, image) in enumerate((("noisy", noisy), ("restored", restored), ("clean", clean))):
        shown = np.clip(image, 0, 1)
        label = name if name == "clean" else f"{name}, {psnr(image, clean):.1f} dB"
        axes[0, column].imshow(shown)
        axes[0, column].set_title(label)
        box = plt.Rectangle((left, top), size, size, fill=False, color="white", linewidth=1.2)
        axes[0, column].add_patch(box)
        axes[1, column].imshow(shown[window], interpolation="nearest", extent=(left, left + size, top + size, top))
        axes[1, column].plot([seam, seam], [top, top + size * 0.04], color="white", linewidth=1.5)
        axes[1, column].plot([seam, seam], [top + size * 0.96, top + size], color="white", linewidth=1.5)
        axes[1, column].set_title(f"{name}: around column {seam}, where two devices meet", fontsize=10)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(console: Console, mesh, numbers, page: sk.Explanation) -> None:
    """What came out, and what it cost, as tables that explain themselves."""
    quality = Table(title="Restoration (PSNR in dB, higher is better; noise that training never saw)")
    for heading in ("where", "input", "restored", "gain"):
        quality.add_column(heading, justify="left" if heading == "where" else "right")
    for where, before, after in numbers:
        quality.add_row(where, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}")
    console.print(quality)

    wire = Table(title=f"Collectives of one training step on {dict(mesh.shape)} (from the compiled program)")
    for heading in ("kind", "mesh axes", "count", "largest result", "received per device", "for"):
        wire.add_column(heading, justify="left" if heading in ("kind", "mesh axes", "for") else "right")
    groups: dict[tuple, list] = {}
    for entry in page.collectives:
        groups.setdefault((entry.collective.kind, entry.collective.axes, entry.purpose), []).append(entry)
    for (kind, axes, purpose), entries in sorted(groups.items(), key=lambda item: str(item[0])):
        wire.add_row(
            kind,
            " x ".join(axes) if axes else "-",
            str(len(entries)),
            f"{max(e.collective.result_bytes for e in entries) / 1e3:,.1f} kB",
            f"{sum(e.bytes for e in entries) / 1e3:,.1f} kB",
            purpose,
        )
    console.print(wire)
    if page.unexplained:
        console.print(f"{len(page.unexplained)} collectives that nothing in the program asks for:\n{page}")

    memory = page.memory
    console.print(
        f"Memory of one training step on each device: {memory.arguments / 1e6:,.1f} MB of arguments, "
        f"{memory.temporaries / 1e6:,.1f} MB of temporaries"
    )


def read_mesh(text: str) -> dict[str, int]:
    """``dp=2,sp=4`` as a mapping."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise SystemExit(f"--mesh {text!r} is not of the form dp=2,sp=4") from None
    if set(sizes) - {"dp", "sp"}:
        raise SystemExit(f"--mesh {text!r} names axes {sorted(set(sizes) - {'dp', 'sp'})}; this job uses dp and sp")
    return {"dp": sizes.get("dp", 1), "sp": sizes.get("sp", 1)}


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the photograph, 1.0 = 1411 x 1411")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--mesh", default="dp=2,sp=4", help="sizes of the mesh axes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="train on one device as well and compare the loss curves")
    parser.add_argument("--out", type=Path, default=Path("fundus_linen.png"), help="where the picture goes")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or not 0.01 <= arguments.scale <= 1:
        raise SystemExit("--steps must be at least 1 and --scale between 0.01 and 1")
    return arguments


def main(argv: list[str] | None = None) -> dict:
    arguments = read_arguments(argv)
    sizes = read_mesh(arguments.mesh)
    needed = sizes["dp"] * sizes["sp"]
    # Simulated devices: has to be said before JAX is first used. Real accelerators are used as they are.
    if "jax_num_cpu_devices" in jax.config.values and jax.config.jax_num_cpu_devices < needed:
        jax.config.update("jax_num_cpu_devices", needed)
    console = Console()
    began = time.perf_counter()
    mesh = sk.make_mesh(sizes)
    image = load_photograph(arguments.scale)
    height, width = image.shape[:2]
    block = -(-width // sizes["sp"])
    console.print(
        f"Retina photograph {height} x {width}, {sizes['dp']} copies a step; "
        f"{sizes['sp']} shards of {block} columns ({block * sizes['sp'] - width} of them padding)"
    )
    region = held_out_region(height, width)
    seen = np.ones((height, width, 1), np.uint8)
    seen[region] = 0

    job = (image, seen, sizes["dp"], arguments.steps, arguments.seed, console)
    params, step_program, restore, losses = train(mesh, *job, title=f"training on {needed} devices")

    whole = image[None].repeat(sizes["dp"], axis=0)
    placed = sk.shard_tensor(whole, {"dp": sk.Shard(0), "sp": sk.Shard(2)}, mesh, uneven="pad")
    unseen_noise = jax.random.key(arguments.seed + 10_000)
    noisy, restored = (np.asarray(a)[0] for a in restore(params, placed, unseen_noise))
    target = image[..., :3].astype(np.float32) / 255
    numbers = [
        ("whole photograph", psnr(noisy, target), psnr(restored, target)),
        ("held-out region", psnr(noisy[region], target[region]), psnr(restored[region], target[region])),
    ]

    page = sk.explain(step_program, mesh=mesh)
    report(console, mesh, numbers, page)

    seams = [i * block for i in range(1, sizes["sp"]) if i * block < width]
    draw(arguments.out, noisy, restored, target, seams[(len(seams) - 1) // 2] if seams else width // 2)
    console.print(f"Picture: {arguments.out}   ({time.perf_counter() - began:.0f} s so far)")

    result = {"losses": losses, "psnr": numbers, "page": page}
    if arguments.check:
        *_, alone = train(None, *job, title="the same on one device")
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
        verdict = "equal" if worst <= 1e-4 else "DIFFERENT"
        console.print(f"Loss curves: {verdict}; largest relative difference {worst:.1e} over {len(losses)} steps")
        result["check"] = worst
        if worst > 1e-4:
            sys.exit(1)
    return result


if __name__ == "__main__":
    main()
