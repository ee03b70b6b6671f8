"""The same comparison on hardware that isn't here: its compilers judge the programs, nothing runs.

TPU programs carry the compiler's own estimate of cycles on each instruction; those of the entry computation
are summed (a program with a loop is marked, since a loop's body would hide work). Temporaries are the
compiler's figure for one device. Used by ``ring_conv.py --targets``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk

NUMBERS = ("NHWC", "HWIO", "NHWC")
TARGETS = ("tpu:v5e:2x4", "gpu:h100:8")
FEATURES, LAYERS = 128, 4
# Global images x height x width, over 8 devices along the width: 1, 2 and 8 images a device.
REGIMES = ((1, 1024, 4096), (2, 512, 4096), (8, 512, 2048))
ONE_CHIP = (1, 512, 1024)
MXU_FLOPS_PER_CYCLE = 4 * 128 * 128 * 2  # TPU v5e: four 128 x 128 matrix units, a multiply and an add each


@dataclasses.dataclass
class Figures:
    """What a compiler says of one program.

    Attributes:
      target, program, form: which hardware, program and way to run it.
      mega_cycles: sum of the TPU compiler's estimates, in millions; None elsewhere.
      temporaries_mb: per device.
      collectives: count by kind.
      received_kb: what one device receives.
      loops: while loops in the program, whose bodies the cycles don't count.
    """

    target: str
    program: str
    form: str
    mega_cycles: float | None
    temporaries_mb: float
    collectives: dict[str, int]
    received_kb: float
    loops: int


def estimated_cycles(text: str) -> float | None:
    """Millions of cycles: the estimates on the instructions of a TPU program's entry computation."""
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r'"estimated_cycles":"(\d+)"', entry[: entry.index("\n}")])
    return sum(map(int, found)) / 1e6 if found else None


def read(target: str, program: str, form: str, mesh: Any, function: Callable, arguments: tuple) -> Figures:
    compiled = jax.jit(function).lower(*arguments).compile()
    text = compiled.as_text() or ""
    report = sk.collectives(compiled, mesh=mesh)
    return Figures(
        target=target,
        program=program,
        form=form,
        mega_cycles=estimated_cycles(text) if target.startswith("tpu") else None,
        temporaries_mb=sk.memory(compiled).temporaries / 1e6,
        collectives=dict(report.by_kind()),
        received_kb=report.bytes() / 1e3,
        loops=len(re.findall(r" while\(", text)),
    )


def stack(mesh: Any, form: str, images: int, height: int, width: int) -> tuple[Callable, tuple]:
    """Four 3x3 convolutions with ReLU at bf16; the mean of squares, and gradients of input and kernels."""

    def conv(x, kernel):
        plain = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NUMBERS}
        if form == "XLA's partitioner":
            return jax.lax.conv_general_dilated(x, kernel, **plain)
        if form == "no halo at all":
            spec = PartitionSpec(None, None, "sp")
            body = jax.shard_map(
                lambda block, k: jax.lax.conv_general_dilated(block, k, **plain),
                mesh=mesh,
                in_specs=(spec, PartitionSpec()),
                out_specs=spec,
            )
            return body(x, kernel)
        return sk.ring_conv(x, kernel, **plain, spatial_axes={"sp": "W"}, method=form, mesh=mesh)

    def loss(x, kernels):
        for kernel in kernels:
            x = jax.nn.relu(conv(x, kernel))
        return jnp.mean(x**2)

    cut, whole = NamedSharding(mesh, PartitionSpec(None, None, "sp")), NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((images, height, width, FEATURES), jnp.bfloat16, sharding=cut)
    kernel = jax.ShapeDtypeStruct((3, 3, FEATURES, FEATURES), jnp.bfloat16, sharding=whole)
    return jax.value_and_grad(loss, (0, 1)), (x, [kernel] * LAYERS)


def windows(mesh: Any, ring: bool, pool: bool) -> tuple[Callable, tuple]:
    """A 3x3 max pooling of stride 2, or a bilinear resize to twice the size; mean of squares, input gradient."""
    space = {"spatial_axes": {"sp": "W"}, "mesh": mesh}

    def apply(x):
        shape = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
        if pool and ring:
            return sk.ring_max_pool(x, (3, 3), (2, 2), "SAME", **space)
        if pool:
            return nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        return sk.ring_resize(x, shape, "linear", **space) if ring else jax.image.resize(x, shape, "linear")

    cut = NamedSharding(mesh, PartitionSpec(None, None, "sp"))
    x = jax.ShapeDtypeStruct((2, 512, 1024, 16), jnp.float32, sharding=cut)
    return jax.value_and_grad(lambda x: jnp.mean(apply(x) ** 2)), (x,)


def fundus(mesh: Any, ring: bool, side: int) -> tuple[Callable, tuple]:
    """One training step of examples/train_fundus.py: two images a batch, the width over "sp", copies over "dp"."""
    path = Path(__file__).parent.parent / "examples" / "train_fundus.py"
    spec = importlib.util.spec_from_file_location("train_fundus", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    model = example.Restorer(nnx.Rngs(0))
    if ring:
        # The abstract mesh: parameters can't be placed on devices that aren't there.
        model = sk.parallelize(model, {"**": sk.ConvParallel("sp", dim="W")}, mesh.abstract_mesh)
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)))
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), state)
    width = -(-side // mesh.shape["sp"]) * mesh.shape["sp"]
    cut = NamedSharding(mesh, PartitionSpec("dp", None, "sp"))

    def images(channels, dtype):
        held = jax.ShapeDtypeStruct((2, side, width, channels), dtype, sharding=cut)
        return sk.Padded(held, (2, side, side, channels))

    def step(state, pair, seen, key):
        model, optimizer = nnx.merge(graph, state)

        def loss(model):
            noisy, clean = example.pair(pair, key)
            weight = seen.value.astype(jnp.float32)
            return ((model(noisy) - clean) ** 2 * weight).sum() / (3 * weight.sum())

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole)
    return step, (state, images(6, jnp.uint8), images(1, jnp.bool_), key)


def mesh_for(target: str, axes: dict[str, int]) -> Any:
    if target == "cpu":
        return sk.make_mesh(axes)
    alone = target.startswith("tpu:v5e") and math.prod(axes.values()) == 1
    return sk.target_mesh("tpu:v5e:1x1" if alone else target, axes)


def jobs(targets: list[str]) -> list[tuple[str, str, str, Callable[[], Figures]]]:
    """(target, program, form, what measures it)."""
    found = []

    def add(target, program, form, axes, build):
        def run():
            mesh = mesh_for(target, axes)
            return read(target, program, form, mesh, *build(mesh))

        found.append((target, program, form, run))

    for target in targets:
        forms = ("XLA's partitioner", "auto", "concat", "overlap", "blocks", "no halo at all")
        for regime in REGIMES if target != "cpu" else ():
            for form in forms:
                if form == "blocks" and target.startswith("tpu"):
                    continue  # what "auto" runs there
                add(target, name(regime), form, {"sp": 8}, lambda m, f=form, r=regime: stack(m, f, *r))
        if target.startswith("tpu"):
            for form in ("XLA's partitioner", "auto"):
                add(target, f"one chip, {name(ONE_CHIP)}", form, {"sp": 1}, lambda m, f=form: stack(m, f, *ONE_CHIP))
        for pool in (True, False):
            for ring in (False, True):
                form = "ring" if ring else "XLA's partitioner"
                program = "max pool 3 x 3 / 2" if pool else "resize x 2"
                add(target, program, form, {"sp": 8}, lambda m, r=ring, p=pool: windows(m, r, p))
        for side in (1411, 1408):
            for ring in (False, True):
                form = "auto" if ring else "XLA's partitioner"
                program = f"fundus step, {side} x {side}"
                add(target, program, form, {"dp": 2, "sp": 4}, lambda m, r=ring, s=side: fundus(m, r, s))
    return found


def name(regime: tuple[int, int, int]) -> str:
    return f"stack, {' x '.join(map(str, regime))}"


def peak_mega_cycles(regime: tuple[int, int, int], chips: int) -> float:
    """Cycles (M) that the flops alone take on TPU v5e: forward, input and kernel gradients."""
    images, height, width = regime
    flops = 3 * LAYERS * 2 * 9 * FEATURES**2 * images * height * width / chips
    return flops / MXU_FLOPS_PER_CYCLE / 1e6


HEADINGS = (
    "target",
    "program",
    "form",
    "cycles, M (of XLA's)",
    "temporaries, MB (of XLA's)",
    "collectives, kB received",
)


def cells(row: Figures, rows: list[Figures], short: Callable[[dict[str, int]], str]) -> list[str]:
    base = next(r for r in rows if (r.target, r.program) == (row.target, row.program) and r.form.startswith("XLA"))

    def against(value: float | None, whole: float | None, digits: int) -> str:
        if value is None or whole is None:
            return "-"
        shown = f"{value:,.{digits}f}"
        return shown if row is base else f"{shown} = **{value / whole:.2f}**"

    cycles = against(row.mega_cycles, base.mega_cycles, 1)
    if row.mega_cycles is not None and row.loops:
        cycles += " (+ loops)"
    return [
        row.target,
        row.program,
        row.form,
        cycles,
        against(row.temporaries_mb, base.temporaries_mb, 0),
        f"{short(row.collectives)}; {row.received_kb:,.0f}",
    ]
