"""Train a small GPT on Python's own documentation, batch over "dp" and tensor parallel over "tp".

The model is plain Flax and sees one device. Its weights are cut over "tp" by a table of path patterns,
the batch over "dp", and AdamW keeps its state cut over both. Each device adds the gradients of its
microbatches up by itself; one collective reduces all of them, once a step. The text is in Python's
standard library, so nothing is downloaded.

    python examples/train_charlm.py                      # 8 simulated devices, dp=4 x tp=2
    python examples/train_charlm.py --mesh dp=8,tp=1 --batch 32
    python examples/train_charlm.py --check              # also on one device: same loss curve?
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import math
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
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import shardkit as sk

# Which dim of a parameter the mesh axis "tp" cuts; the first match wins, all else is on every device. What a
# layer cut along its outputs makes, the next one, cut along its inputs, takes: each device has whole heads and its own
# features of the MLP, and one sum after the second layer is all that travels.
TENSOR_PARALLEL = {
    "*/attention/qkv/kernel": 2,  # [features, 3, heads, features of a head]
    "*/attention/qkv/bias": 1,
    "*/attention/out/kernel": 0,  # [heads, features of a head, features]
    "*/mlp/widen/kernel": 1,
    "*/mlp/widen/bias": 0,
    "*/mlp/narrow/kernel": 0,
    "head/kernel": 1,  # each device has its own symbols
    "head/bias": 0,
}

PROMPT = "The following "


class Attention(nnx.Module):
    """Causal self-attention over several heads."""

    def __init__(self, features: int, heads: int, rngs: nnx.Rngs):
        each = features // heads
        # Heads are a dim of their own, so that they can be cut: a plain 3 * features would be cut between the queries
        # and the values. One layer, not three, so that one sum over "tp" serves their gradients.
        self.qkv = nnx.LinearGeneral(features, (3, heads, each), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, each), features, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, positions, features] to the same."""
        query, key, value = jnp.moveaxis(self.qkv(x), -3, 0)
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class Mlp(nnx.Module):
    """Two layers, the one between them four times as wide."""

    def __init__(self, features: int, rngs: nnx.Rngs):
        self.widen = nnx.Linear(features, 4 * features, rngs=rngs)
        self.narrow = nnx.Linear(4 * features, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, positions, features] to the same."""
        return self.narrow(nnx.gelu(self.widen(x)))


class Block(nnx.Module):
    """Attention and MLP, each on a normalized copy and added to what came in."""

    def __init__(self, features: int, heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(features, rngs=rngs)
        self.attention = Attention(features, heads, rngs)
        self.norm2 = nnx.LayerNorm(features, rngs=rngs)
        self.mlp = Mlp(features, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[n, positions, features] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nnx.Module):
    """A decoder-only transformer over characters, with learned positions."""

    def __init__(self, symbols: int, context: int, layers: int, features: int, heads: int, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.symbols = nnx.Embed(symbols, features, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(context, features, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(features, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, symbols, kernel_init=small, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[n, positions] of symbols to the logits of each next one [n, positions, symbols]."""
        x = self.symbols(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as numbers.

    Attributes:
      alphabet: its characters; the number of one is its place.
      train, held_out: int32, one number a character.
    """

    alphabet: str
    train: np.ndarray
    held_out: np.ndarray

    @property
    def symbols(self) -> int:
        """Size of the model's vocabulary: a multiple of 16, so that "tp" divides it; the last ones never occur."""
        return -(-len(self.alphabet) // 16) * 16


def read_documents() -> tuple[str, list[str]]:
    """What the text is, and its parts in an order that doesn't change."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some builds of Python leave it out
        licence = Path(__file__).parents[1] / "LICENSE"
        return "the licence of shardkit", licence.read_text().split("\n\n")
    return "Python's documentation", [topics[name] for name in sorted(topics)]


def read_corpus(documents: Sequence[str]) -> Corpus:
    """Every tenth part of the text is held out, whole."""
    alphabet = "".join(sorted(set("".join(documents))))
    number = {character: i for i, character in enumerate(alphabet)}

    def numbers(parts: Sequence[str]) -> np.ndarray:
        return np.array([number[c] for c in "\n".join(parts)], np.int32)

    train = [part for i, part in enumerate(documents) if i % 10 != 5]
    return Corpus(alphabet, numbers(train), numbers(documents[5::10]))


def batch_for(step: int, text: np.ndarray, size: int, context: int, seed: int, mesh: jax.sharding.Mesh | None):
    """Windows of one step [size, context + 1]: the same for every mesh, cut over "dp" on this one."""
    starts = np.random.default_rng([seed, step]).integers(len(text) - context, size=size)
    return on_mesh(text[starts[:, None] + np.arange(context + 1)], 0, "dp", mesh)


def on_mesh(x: Any, dim: int | None, axis: str, mesh: jax.sharding.Mesh | None) -> Any:
    """An array with a dim cut over a mesh axis (None: whole on every device)."""
    if mesh is None:
        return jnp.asarray(x)
    return sk.shard_tensor(x, {} if dim is None else {axis: sk.Shard(dim)}, mesh)


def place(params: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """The parameters where ``TENSOR_PARALLEL`` says."""

    def put(path: Any, x: jax.Array) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        dims = (dim for pattern, dim in TENSOR_PARALLEL.items() if fnmatch.fnmatch(name, pattern))
        return on_mesh(x, next(dims, None), "tp", mesh)

    return jax.tree_util.tree_map_with_path(put, params)


def make_loss(graphdef: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """The mean cross-entropy, in nats a character, as a function of parameters and windows."""

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_of


def make_step(loss_of: Callable, mesh: jax.sharding.Mesh | None, microbatches: int, steps: int):
    """(optimizer, training step) on a mesh, or plain JAX and optax on one device, the whole batch at once."""
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, warmup, max(steps, warmup + 1), end_value=2e-4)
    tx: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
    if mesh is None:
        value_and_grad = jax.value_and_grad(loss_of)
    else:
        value_and_grad = sk.value_and_grad(loss_of, batch_axes="dp", mesh=mesh, microbatches=microbatches)
        tx = sk.shard_optimizer(tx, sk.ShardingStage2("dp"))

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = value_and_grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return tx, jax.jit(step, donate_argnums=(0, 1))


@dataclasses.dataclass
class Trained:
    """What came out of a training, and what went in."""

    params: Any
    state: Any
    program: Any  # the compiled step
    losses: list[float]
    seconds: list[float]


def train(graphdef: Any, params: Any, mesh: jax.sharding.Mesh | None, text: np.ndarray, arguments, console, title):
    """Train on a mesh, or on one device."""
    # A copy: the step donates its arguments, and these parameters may be wanted again.
    params = place(jax.tree.map(jnp.copy, params), mesh)
    tx, step = make_step(make_loss(graphdef), mesh, arguments.microbatches, arguments.steps)
    state = tx.init(params)
    done = Trained(params, state, None, [], [])
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=arguments.steps, state="compiling")
        for number in range(arguments.steps):
            tokens = batch_for(number, text, arguments.batch, arguments.context, arguments.seed, mesh)
            if done.program is None:  # ahead of time, so that the report can look at this very program
                done.program = step.lower(done.params, done.state, tokens).compile()
            began = time.perf_counter()
            # Simulated devices share few threads: wait for each step, lest those of the next one block them.
            done.params, done.state, loss = jax.block_until_ready(done.program(done.params, done.state, tokens))
            done.seconds.append(time.perf_counter() - began)
            done.losses.append(float(loss))
            progress.update(task, advance=1, state=f"loss {done.losses[-1]:.3f}")
    return done


def held_out_bits(graphdef: Any, params: Any, mesh, text: np.ndarray, batch: int, context: int) -> float:
    """Bits a character on windows that lie side by side in a text (at most 256 of them)."""
    loss_of = jax.jit(make_loss(graphdef))
    width = context + 1
    count = min(len(text) // width, max(256, batch)) // batch * batch  # whole batches
    windows = text[: count * width].reshape(-1, batch, width)
    return float(np.mean([float(loss_of(params, on_mesh(part, 0, "dp", mesh))) for part in windows])) / math.log(2)


def unigram_bits(train_text: np.ndarray, text: np.ndarray, symbols: int) -> float:
    """Bits a character of a model that knows only how frequent each character is."""
    counts = np.bincount(train_text, minlength=symbols) + 1
    return float(-np.log2(counts / counts.sum())[text].mean())


def write_text(graphdef: Any, params: Any, corpus: Corpus, length: int, context: int, seed: int) -> str:
    """``length`` characters after the prompt, drawn from the model at temperature 0.7."""
    start = [corpus.alphabet.index(c) for c in PROMPT if c in corpus.alphabet][-context:] or [0]
    # Room for everything from the start, so that one compiled program does it all.
    buffer = np.zeros(max(len(start) + length, context), np.int32)
    buffer[: len(start)] = start

    @jax.jit
    def write(params: Any, buffer: jax.Array, key: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)

        def one(end: jax.Array, buffer: jax.Array) -> jax.Array:
            first = jnp.maximum(end - context, 0)
            # What lies behind ``end`` isn't written yet, and causal attention doesn't look there.
            window = jax.lax.dynamic_slice(buffer, (first,), (context,))
            logits = model(window[None])[0, end - 1 - first, : len(corpus.alphabet)]
            drawn = jax.random.categorical(jax.random.fold_in(key, end), logits / 0.7)
            return buffer.at[end].set(drawn.astype(buffer.dtype))

        return jax.lax.fori_loop(len(start), len(start) + length, one, buffer)

    written = np.asarray(write(params, buffer, jax.random.key(seed)))
    return "".join(corpus.alphabet[i] for i in written[: len(start) + length])


def bytes_of(tree: Any) -> tuple[int, int]:
    """(whole, most on one device) of the arrays of a tree."""
    held: dict[Any, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return sum(x.nbytes for x in jax.tree.leaves(tree)), max(held.values())


def report(console: Console, mesh: jax.sharding.Mesh, done: Trained, bits: Sequence[tuple[str, float]]) -> None:
    """What came out, and what it cost, as tables that explain themselves."""
    quality = Table(title="Bits per character (lower is better)")
    quality.add_column("model, text")
    quality.add_column("bits", justify="right")
    for name, value in bits:
        quality.add_row(name, f"{value:.2f}")
    console.print(quality)

    held = Table(title=f"Kept between steps on {dict(mesh.shape)}")
    for heading in ("what", "whole", "per device", "part"):
        held.add_column(heading, justify="left" if heading == "what" else "right")
    for name, tree in (("parameters", done.params), ("optimizer state", done.state)):
        whole, one = bytes_of(tree)
        held.add_row(name, f"{whole / 1e6:,.2f} MB", f"{one / 1e6:,.2f} MB", f"{100 * one / whole:.1f} %")
    console.print(held)

    page = sk.explain(done.program, mesh=mesh)
    found = page.report
    wire = Table(title="Collectives of one training step on each device (from the compiled program)")
    for heading in ("kind", "over", "runs", "count", "largest", "received", "for"):
        right = heading in ("count", "largest", "received")
        wire.add_column(heading, justify="right" if right else "left", no_wrap=True)
    groups: dict[tuple, list[sk.Explained]] = {}
    for entry in page.collectives:
        one = entry.collective
        groups.setdefault((one.in_loop, entry.runs, one.axes or ("?",), one.kind, entry.purpose), []).append(entry)
    for (in_loop, trips, axes, kind, purpose), entries in sorted(groups.items()):
        wire.add_row(
            kind,
            ",".join(axes),
            f"{trips}x in the loop" if in_loop else "once",
            str(len(entries)),
            f"{max(e.collective.result_bytes for e in entries) / 1e3:,.1f} kB",
            f"{sum(e.bytes for e in entries) / 1e3:,.1f} kB",
            purpose,
        )
    console.print(wire)
    if any(entry.axes is None for entry in found):
        console.print("?: its groups of devices are those of no mesh axes")
    if page.unexplained:
        console.print(f"{len(page.unexplained)} collectives that nothing in the program asks for:\n{page}")
    if found.count(in_loop=True):
        over = {axis: found.count(axis=axis, in_loop=True) for axis in mesh.axis_names}
        console.print(
            f'The loop over microbatches has {over["dp"]} collectives over "dp" and {over["tp"]} over "tp", which add '
            "up activations and their gradients."
        )


def draw(path: Path, losses: Sequence[float], unigram: float, held_out: float) -> None:
    """The loss curve in bits a character, with what a unigram model reaches and the held-out text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    axis.plot(np.arange(1, len(losses) + 1), np.array(losses) / math.log(2), label="training batch")
    axis.axhline(unigram, color="gray", linestyle=":", label=f"unigram model, held-out text: {unigram:.2f}")
    axis.axhline(held_out, color="C1", linestyle="--", label=f"at the end, held-out text: {held_out:.2f}")
    axis.set_xlabel("step")
    axis.set_ylabel("bits per character")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read_mesh(text: str) -> dict[str, int]:
    """``dp=4,tp=2`` as a mapping."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise SystemExit(f"--mesh {text!r} is not of the form dp=4,tp=2") from None
    if set(sizes) - {"dp", "tp"}:
        raise SystemExit(f"--mesh {text!r} names axes {sorted(set(sizes) - {'dp', 'tp'})}; this job uses dp and tp")
    return {"dp": sizes.get("dp", 1), "tp": sizes.get("tp", 1)}


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mesh", default="dp=4,tp=2", help="sizes of the mesh axes")
    parser.add_argument("--batch", type=int, default=32, help="windows of text a step, on all devices together")
    parser.add_argument("--microbatches", type=int, default=4, help="slices in which a device takes its part of them")
    parser.add_argument("--context", type=int, default=64, help="characters in a window")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end")
    parser.add_argument("--check", action="store_true", help="train on one device as well and compare the loss curves")
    parser.add_argument("--out", type=Path, default=None, help="a folder for a picture of the loss curve")
    arguments = parser.parse_args(argv)
    counts = ("steps", "batch", "microbatches", "context", "layers", "features", "heads")
    small = [f"--{name}" for name in counts if getattr(arguments, name) < 1]
    if small:
        raise SystemExit(f"{', '.join(small)} must be at least 1")
    return arguments


def check_sizes(arguments: argparse.Namespace, sizes: dict[str, int], corpus: Corpus) -> None:
    """Everything that is cut divides."""
    dp, tp = sizes["dp"], sizes["tp"]
    parts = dp * arguments.microbatches
    if arguments.batch % parts:
        raise SystemExit(f"--batch {arguments.batch} does not divide into {dp} x {arguments.microbatches} microbatches")
    if arguments.features % arguments.heads or arguments.heads % tp or corpus.symbols % tp:
        raise SystemExit(
            f"--features {arguments.features} must be a multiple of --heads {arguments.heads}, and both "
            f"--heads {arguments.heads} and the {corpus.symbols} symbols of the text multiples of tp={tp}"
        )
    shortest = min(len(corpus.train), len(corpus.held_out))
    if shortest < (arguments.context + 1) * arguments.batch:
        raise SystemExit(
            f"--batch {arguments.batch} windows of --context {arguments.context} need more text than there is"
        )


def main(argv: list[str] | None = None) -> dict:
    arguments = read_arguments(argv)
    sizes = read_mesh(arguments.mesh)
    needed = sizes["dp"] * sizes["tp"]
    # Simulated devices: has to be said before JAX is first used. Real accelerators are used as they are.
    if jax.config.values.get("jax_num_cpu_devices", needed) < needed:
        jax.config.update("jax_num_cpu_devices", needed)
    console = Console()
    name, documents = read_documents()
    corpus = read_corpus(documents)
    check_sizes(arguments, sizes, corpus)
    mesh = sk.make_mesh(sizes)
    shape = (arguments.context, arguments.layers, arguments.features, arguments.heads)
    graphdef, params = nnx.split(Gpt(corpus.symbols, *shape, nnx.Rngs(arguments.seed)))
    count = sum(x.size for x in jax.tree.leaves(params))
    console.print(
        f"Text: {name}, {len(corpus.train):,} characters and {len(corpus.held_out):,} held out, "
        f"{len(corpus.alphabet)} different ones"
    )
    each = arguments.batch // (sizes["dp"] * arguments.microbatches)
    console.print(
        f"Model: {count:,} parameters; {arguments.batch} windows of {arguments.context} characters a step: "
        f"{sizes['dp']} parts, each {arguments.microbatches} microbatches of {each}"
    )

    job = (corpus.train, arguments, console)
    done = train(graphdef, params, mesh, *job, title=f"training on {needed} devices")
    console.print(f"{statistics.median(done.seconds):.2f} s a step (median)")

    held_out = held_out_bits(graphdef, done.params, mesh, corpus.held_out, arguments.batch, arguments.context)
    unigram = unigram_bits(corpus.train, corpus.held_out, len(corpus.alphabet))
    last = done.losses[-10:]
    bits = [
        ("unigram, held-out text", unigram),
        ("GPT, held-out text", held_out),
        (f"GPT, last {len(last)} training batches", float(np.mean(last)) / math.log(2)),
    ]
    report(console, mesh, done, bits)
    result = {"losses": done.losses, "bits": bits, "program": done.program}
    if arguments.sample > 0:
        written = write_text(graphdef, done.params, corpus, arguments.sample, arguments.context, arguments.seed)
        # Text, not str: brackets in it are no markup.
        console.print(Panel(Text(written), title=f"{arguments.sample} characters after {PROMPT!r}"))
        result["sample"] = written
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(arguments.out / "charlm.png", done.losses, unigram, held_out)
        console.print(f"Picture: {arguments.out / 'charlm.png'}")
    if arguments.check:
        alone = train(graphdef, params, None, *job, title="the same on one device")
        worst = max(abs(a - b) / abs(b) for a, b in zip(done.losses, alone.losses, strict=True))
        verdict = "equal" if worst <= 1e-3 else "DIFFERENT"
        console.print(f"Loss curves: {verdict}; largest relative difference {worst:.1e} over {len(done.losses)} steps")
        result["check"] = worst
        if worst > 1e-3:
            sys.exit(1)
    return result


if __name__ == "__main__":
    main()
