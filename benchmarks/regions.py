"""Regions against XLA's own partitioner and against ring convolutions layer by layer, forward and backward.

    python benchmarks/regions.py                          # everything that isn't stored yet
    python benchmarks/regions.py --targets tpu:v5e:2x4    # these targets only, measured again
    python benchmarks/regions.py --only stack --forms region
    python benchmarks/regions.py --curve                  # where wide margins pay, by the library's cost model
    python benchmarks/regions.py --rewrite                # the tables of README.md from the stored results

A TPU's compiler gives cycles and temporaries, a GPU's temporaries; CPU programs are timed in turns. Programs: the four
layers of described.py in its regimes; three 3 x 3 x 3 layers on a volume cut in D and W; one step of a U-Net (group
norm, max pooling, transposed convolutions, skips) on images cut in W. Described targets need the extras tpu-target and
gpu-target; XLA's own U-Net takes the TPU's compiler ten minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import described  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from tables import HERE, between, counts, in_turns, markdown, options, versions  # noqa: E402

import shardkit as sk  # noqa: E402

STORED = HERE / "results" / "regions.json"
XLA, RINGS, REGION = "XLA's partitioner", "layer by layer", "region"
TARGETS = ("tpu:v5e:2x4", "tpu:v5p:2x2x2", "tpu:v6e:2x4", "gpu:h100:8", "cpu")
FORMS = (XLA, RINGS, REGION, "region, every 2", "region, every 4")
CHIPS = 8
Program = tuple[Callable, tuple]


@dataclasses.dataclass
class Row:
    """One program in one form on one target; ``None`` where a compiler doesn't say, or nothing ran."""

    target: str
    program: str
    form: str
    mega_cycles: float | None
    temporaries_mb: float
    received_kb: float | None
    collectives: dict[str, int]
    wall_ms: float | None
    versions: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.target, self.program, self.form


def every(form: str) -> int | str:
    return int(form.split()[-1]) if "every" in form else "auto"


def shaped(mesh: Any, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def layers(numbers: tuple[str, str, str], conv: Callable) -> Callable:
    """Convolutions of stride 1 with ReLU; the mean of squares."""
    stride = (1,) * (len(numbers[0]) - 2)

    def net(x: Any, kernels: Any) -> Any:
        for kernel in kernels:
            x = jax.nn.relu(conv(x, kernel, stride, "SAME", dimension_numbers=numbers))
        return jnp.mean(x**2)

    return net


def convolutions(mesh: Any, form: str, numbers: tuple[str, str, str], axes: dict[str, str]) -> Callable:
    if form == RINGS:

        def ring(x: Any, kernel: Any, stride: Any, padding: str, dimension_numbers: Any) -> Any:
            return sk.ring_conv(
                x, kernel, stride, padding, dimension_numbers=dimension_numbers, spatial_axes=axes, mesh=mesh
            )

        return layers(numbers, ring)
    net = layers(numbers, jax.lax.conv_general_dilated)
    return net if form == XLA else sk.spatial.region(net, spatial_axes=axes, mesh=mesh, exchange_every=every(form))


def stack(mesh: Any, form: str, regime: tuple[int, int, int], features: int, depth: int, dtype: Any) -> Program:
    images, height, width = regime
    x = shaped(mesh, (images, height, width, features), dtype, None, None, "sp")
    kernel = shaped(mesh, (3, 3, features, features), dtype)
    loss = convolutions(mesh, form, described.NUMBERS, {"sp": "W"})
    return jax.value_and_grad(loss, (0, 1)), (x, [kernel] * depth)


def volume(mesh: Any, form: str, shape: tuple[int, int, int], features: int, depth: int, dtype: Any) -> Program:
    x = shaped(mesh, (1, *shape, features), dtype, None, "sd", None, "sw")
    kernel = shaped(mesh, (3, 3, 3, features, features), dtype)
    loss = convolutions(mesh, form, ("NDHWC", "DHWIO", "NDHWC"), {"sd": "D", "sw": "W"})
    return jax.value_and_grad(loss, (0, 1)), (x, [kernel] * depth)


class Block(nnx.Module):
    """Twice convolution, group norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs, dtype=dtype)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), rngs=rngs, dtype=dtype)
        self.norm1 = nnx.GroupNorm(outputs, num_groups=8, rngs=rngs, dtype=dtype)
        self.norm2 = nnx.GroupNorm(outputs, num_groups=8, rngs=rngs, dtype=dtype)

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x))))))


class UNet(nnx.Module):
    """Twice down by pooling, twice up by transposed convolutions, with skips."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs):
        def grow(inputs: int, outputs: int) -> nnx.ConvTranspose:
            return nnx.ConvTranspose(inputs, outputs, (2, 2), (2, 2), rngs=rngs, dtype=dtype)

        one, two, four = width, 2 * width, 4 * width
        self.down1, self.down2 = Block(3, one, dtype, rngs), Block(one, two, dtype, rngs)
        self.middle = Block(two, four, dtype, rngs)
        self.grow2, self.up2 = grow(four, two), Block(four, two, dtype, rngs)
        self.grow1, self.up1 = grow(two, one), Block(two, one, dtype, rngs)
        self.out = nnx.Conv(one, 3, (1, 1), rngs=rngs, dtype=dtype)

    def __call__(self, x: Any) -> Any:
        fine = self.down1(x)
        middle = self.down2(nnx.max_pool(fine, (2, 2), (2, 2)))
        coarse = self.middle(nnx.max_pool(middle, (2, 2), (2, 2)))
        middle = self.up2(jnp.concatenate([middle, self.grow2(coarse)], -1))
        return self.out(self.up1(jnp.concatenate([fine, self.grow1(middle)], -1)))


def unet(mesh: Any, form: str, images: int, side: tuple[int, int], width: int, dtype: Any) -> Program:
    """One step of gradient descent on the mean squared error."""
    model = nnx.eval_shape(lambda: UNet(width, dtype, nnx.Rngs(0)))
    if form == RINGS:
        model = sk.parallelize(model, {"**": sk.ConvParallel("sp", "W")}, mesh.abstract_mesh)
    graph, state = nnx.split(model)

    def forward(x: Any, state: Any) -> Any:
        return nnx.merge(graph, state)(x)

    if form not in (XLA, RINGS):
        forward = sk.spatial.region(forward, spatial_axes={"sp": "W"}, mesh=mesh, exchange_every=every(form))

    def step(state: Any, x: Any, y: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean((forward(x, state).astype(jnp.float32) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g.astype(p.dtype), state, grads)

    state = jax.tree.map(lambda a: shaped(mesh, a.shape, a.dtype), state)
    x = shaped(mesh, (images, *side, 3), dtype, None, None, "sp")
    y = shaped(mesh, (images, *side, 3), jnp.float32, None, None, "sp")
    return step, (state, x, y)


def programs(target: str) -> dict[str, tuple[dict[str, int], Callable[[Any, str], Program]]]:
    """Name -> (axes of the mesh, what builds it in a form)."""
    line, two = {"sp": CHIPS}, {"sd": 2, "sw": CHIPS // 2}
    if target == "cpu":
        f32 = jnp.float32
        return {
            "stack, 2 x 64 x 512 x 16": (line, lambda m, f: stack(m, f, (2, 64, 512), 16, 4, f32)),
            "volume, 16 x 16 x 64 x 8": (two, lambda m, f: volume(m, f, (16, 16, 64), 8, 3, f32)),
            "U-Net step, 2 x 64 x 128, 8 features": (line, lambda m, f: unet(m, f, 2, (64, 128), 8, f32)),
        }
    found: dict[str, Any] = {}
    for regime in described.REGIMES:
        name = described.name(regime)
        found[name] = (line, lambda m, f, r=regime: stack(m, f, r, 128, 4, jnp.bfloat16))
    found["volume, 32 x 128 x 256 x 64"] = (two, lambda m, f: volume(m, f, (32, 128, 256), 64, 3, jnp.bfloat16))
    found["U-Net step, 2 x 512 x 1024, 64 features"] = (line, lambda m, f: unet(m, f, 2, (512, 1024), 64, jnp.bfloat16))
    return found


def compiled_row(target: str, program: str, form: str, mesh: Any, built: Program) -> Row:
    figures = described.read(target, program, form, mesh, *built)
    return Row(
        target,
        program,
        form,
        figures.mega_cycles,
        figures.temporaries_mb,
        figures.received_kb,
        figures.collectives,
        None,
        versions(),
    )


def filled(tree: Any) -> Any:
    rng = np.random.default_rng(0)

    def one(a: Any) -> Any:
        return jax.device_put((rng.normal(size=a.shape) * 0.05).astype(a.dtype), a.sharding)

    return jax.tree.map(one, tree)


def timed(program: str, forms: list[str], axes: dict[str, int], build: Callable, rounds: int) -> list[Row]:
    mesh = sk.make_mesh(axes)
    built = {form: build(mesh, form) for form in forms}
    rows = {form: compiled_row("cpu", program, form, mesh, b) for form, b in built.items()}
    arguments = filled(built[forms[0]][1])
    run = {form: functools.partial(jax.jit(b[0]), *arguments) for form, b in built.items()}
    for form, wall in in_turns(run, rounds).items():
        rows[form].wall_ms = wall
    return list(rows.values())


# --- where wide margins pay -----------------------------------------------------------------------------------


def curve() -> list[list[str]]:
    """The cost model's seconds over ``exchange_every``, of eight 3 x 3 layers on ever smaller blocks of 256 chips."""
    from shardkit.spatial.regions.block import CutDim
    from shardkit.spatial.regions.choose import seconds
    from shardkit.spatial.regions.graph import graph_of
    from shardkit.spatial.regions.plan import Setting, plan_graph
    from shardkit.spatial.regions.platforms import platform_figures

    rows = []
    for target in ("tpu:v5e:16x16", "tpu:v5p:4x8x8"):
        mesh = sk.target_mesh(target, {"sp": 256})
        for block, features in ((4, 8), (8, 8), (16, 8), (8, 64), (32, 64), (128, 64)):
            net = layers(described.NUMBERS, jax.lax.conv_general_dilated)
            x = jax.ShapeDtypeStruct((1, 64, 256 * block, features), jnp.bfloat16)
            kernel = jax.ShapeDtypeStruct((3, 3, features, features), jnp.bfloat16)
            graph = graph_of(jax.make_jaxpr(net)(x, [kernel] * 8))
            lies = [{}] * len(graph.consts) + [{2: CutDim(("sp",), 256, x.shape[2])}, *[{}] * 8]
            figures = platform_figures(mesh, "tpu")
            costs = {k: seconds(plan_graph(graph, lies, Setting(k, "tpu")), figures) for k in (1, 2, 4, 8)}
            best = min(costs, key=costs.__getitem__)
            cells = [f"**{1e6 * c:.1f}**" if k == best else f"{1e6 * c:.1f}" for k, c in costs.items()]
            rows.append([target, f"64 x {block} x {features}", *cells])
    return rows


# --- the tables -------------------------------------------------------------------------------------------------


def load() -> dict[tuple[str, str, str], Row]:
    if not STORED.exists():
        return {}
    return {r.key: r for r in (Row(**d) for d in json.loads(STORED.read_text())["rows"])}


def save(rows: dict[tuple[str, str, str], Row]) -> None:
    order = sorted(rows.values(), key=lambda r: (TARGETS.index(r.target), r.program, FORMS.index(r.form)))
    data = {"versions": versions(), "rows": [dataclasses.asdict(r) for r in order]}
    STORED.write_text(json.dumps(data, indent=1) + "\n")


def cells(row: Row, base: Row | None) -> list[str]:
    def against(value: float | None, whole: float | None, digits: int) -> str:
        if value is None:
            return "-"
        shown = f"{value:,.{digits}f}"
        return shown if row is base or not whole else f"{shown} = **{value / whole:.2f}**"

    b = base or row
    return [
        row.target,
        row.program,
        row.form,
        against(row.mega_cycles, b.mega_cycles, 1),
        against(row.wall_ms, b.wall_ms, 1),
        against(row.temporaries_mb, b.temporaries_mb, 1 if row.target == "cpu" else 0),
        f"{counts(row.collectives)}; {'-' if row.received_kb is None else format(row.received_kb, ',.0f')}",
    ]


HEADINGS = (
    "target",
    "program",
    "form",
    "cycles, M (of XLA's)",
    "wall, ms (of XLA's)",
    "temporaries, MB (of XLA's)",
    "collectives; kB received",
)


def rewrite(rows: dict[tuple[str, str, str], Row]) -> None:
    order = sorted(rows.values(), key=lambda r: (TARGETS.index(r.target), r.program, FORMS.index(r.form)))
    table = markdown(HEADINGS, [cells(r, rows.get((r.target, r.program, XLA))) for r in order])
    between(HERE / "README.md", "regions", table)
    lines = markdown(("target", "block: height x width x features", *(f"every {k}, us" for k in (1, 2, 4, 8))), curve())
    between(HERE / "README.md", "regions curve", lines)


def main() -> None:
    parser = options(__doc__, rounds=11)
    parser.add_argument("--targets", default="", help="comma-separated; measured again even if stored")
    parser.add_argument("--only", default="", help="programs whose name begins so")
    parser.add_argument("--forms", default="; ".join((XLA, RINGS, REGION)), help="with '; ' between them")
    parser.add_argument("--curve", action="store_true", help="print the cost model's curve and stop")
    given = parser.parse_args()
    rows = load()
    if given.curve:
        for line in curve():
            Console().print(*line)
        return
    if not given.rewrite:
        forms = [f for f in FORMS if f in given.forms.split("; ")]
        todo = []
        for target in given.targets.split(",") if given.targets else TARGETS:
            for program, (axes, build) in programs(target).items():
                wanted = [f for f in forms if given.targets or (target, program, f) not in rows]
                if program.startswith(given.only) and wanted:
                    todo.append((target, program, axes, build, wanted))
        for target, program, axes, build, wanted in track(todo, description="programs"):
            if target == "cpu":
                found = timed(program, wanted, axes, build, given.rounds)
            else:
                mesh = described.mesh_for(target, axes)
                found = [compiled_row(target, program, f, mesh, build(mesh, f)) for f in wanted]
            rows = load() | {row.key: row for row in found}  # another of these may be running
            for row in found:
                Console().print(*cells(row, rows.get((row.target, row.program, XLA))))
            if not given.dry:
                save(rows)
    if not given.dry:
        rewrite(rows)


if __name__ == "__main__":
    main()
