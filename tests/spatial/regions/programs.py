"""Random functions of images, layer by layer, and their checks against themselves on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.inspect.collectives import CollectiveReport, read_collectives
from shardkit.spatial.regions import region
from shardkit.spatial.regions.plan import Plan

LETTERS = {1: "W", 2: "HW", 3: "DHW"}


def conv(x: Any, kernel: Any, strides: Any = 1, padding: Any = "SAME", **more: Any) -> Any:
    """Channels-last convolution of any rank; numbers stand for all dims."""
    rank = x.ndim - 2
    letters = LETTERS[rank]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    strides = (strides,) * rank if isinstance(strides, int) else strides
    padding = [(padding, padding)] * rank if isinstance(padding, int) else padding
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers, **more)


def kernels_of(rng: np.random.Generator, *shapes: Sequence[int]) -> list[np.ndarray]:
    """Kernels that keep values of the same size."""
    return [rng.normal(size=s) / np.sqrt(np.prod(s[:-1])) for s in shapes]


def stack(x, kernels):
    """The benchmark's: convolutions and ReLUs."""
    for kernel in kernels:
        x = jax.nn.relu(conv(x, kernel))
    return x


@dataclasses.dataclass
class Program:
    """A function ``run(x, kernels)``, and how it is sharded."""

    layers: list[tuple[str, Callable[..., Any], list[tuple[int, ...]]]]
    shape: tuple[int, ...]
    mesh: dict[str, int]
    axes: dict[str, Any]
    every: int

    def __str__(self) -> str:
        return f"{[n for n, _, _ in self.layers]} of {self.shape} on {self.mesh} by {self.axes}, every {self.every}"

    def kernels(self, seed: int = 0) -> list[np.ndarray]:
        return kernels_of(np.random.default_rng(seed), *(s for _, _, shapes in self.layers for s in shapes))

    def run(self, x, kernels):
        kernels = list(kernels)
        for _, layer, shapes in self.layers:
            x = layer(x, *kernels[: len(shapes)])
            kernels = kernels[len(shapes) :]
        return x


def axis(rng: random.Random, rank: int) -> int:
    return rng.randrange(1, rank + 1)


def draw_conv(rng, shape):
    rank, features = len(shape) - 2, shape[-1]
    groups = rng.choice([1, 1, 2]) if features % 2 == 0 else 1
    taps = tuple(rng.choice([1, 2, 3, 3, 4, 5]) for _ in range(rank))
    strides = tuple(rng.choice([1, 1, 1, 2, 3]) for _ in range(rank))
    dilation = tuple(rng.choice([1, 1, 2]) for _ in range(rank))
    padding = rng.choice(["SAME", "SAME", "VALID", [(rng.randrange(-1, 4), rng.randrange(-1, 4)) for _ in range(rank)]])
    keywords = {"rhs_dilation": dilation, "feature_group_count": groups}
    name = f"conv{taps}s{strides}d{dilation}{padding}g{groups}"
    kernel = (*taps, features // groups, rng.choice([2, 4]))
    return name, lambda x, k: conv(x, k, strides, padding, **keywords), [kernel]


def draw_transposed(rng, shape):
    rank = len(shape) - 2
    taps = tuple(rng.choice([2, 3, 4]) for _ in range(rank))
    dilation = tuple(rng.choice([1, 2]) for _ in range(rank))
    padding = [(rng.randrange(0, t), rng.randrange(0, t)) for t in taps]
    name = f"transposed{taps}x{dilation}{padding}"
    return name, lambda x, k: conv(x, k, 1, padding, lhs_dilation=dilation), [(*taps, shape[-1], rng.choice([2, 4]))]


def draw_pointwise(rng, shape):
    name = rng.choice(["relu", "gelu", "silu", "softmax", "tanh", "softplus"])
    return name, getattr(jax.nn, name), []


def draw_pool(rng, shape):
    rank = len(shape) - 2
    kind = rng.choice(["max", "avg", "min"])
    taps, strides = (rng.choice([2, 3]),) * rank, (rng.choice([1, 2]),) * rank
    padding = rng.choice(["SAME", "VALID"])
    window = ((1, *taps, 1), (1, *strides, 1), padding)

    def pool(x):
        if kind == "avg":
            return lax.reduce_window(x, 0.0, lax.add, *window) / np.prod(taps)
        # Apart by their positions, so that no two are equal.
        x = jnp.tanh(x) + 1e-3 * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) / x.size
        return lax.reduce_window(x, *((-jnp.inf, lax.max) if kind == "max" else (jnp.inf, lax.min)), *window)

    return f"{kind}pool{taps[0]}s{strides[0]}{padding}", pool, []


def draw_norm(rng, shape):
    kind = rng.choice(["batch", "layer", "group", "mean"])
    dims = {"batch": tuple(range(len(shape) - 1)), "layer": (-1,), "mean": None}.get(kind)

    def norm(x):
        y = x
        if kind == "group":
            y = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
        over = (*range(1, y.ndim - 2), y.ndim - 1) if kind == "group" else dims
        y = (y - y.mean(over, keepdims=True)) * lax.rsqrt(y.var(over, keepdims=True) + 1e-2)
        return y.reshape(x.shape)

    return f"{kind}norm", norm, []


def draw_pad(rng, shape):
    dim = axis(rng, len(shape) - 2)
    mode = rng.choice(["constant", "wrap", "reflect", "edge"])
    widths = [(rng.randrange(3), rng.randrange(3)) if d == dim else (0, 0) for d in range(len(shape))]
    if mode == "wrap" and rng.random() < 0.6:  # and the convolution that it's for
        widths[dim] = (1, 1)
        taps = tuple(3 if d == dim else 1 for d in range(1, len(shape) - 1))
        run = lambda x, k: conv(jnp.pad(x, widths, mode), k, 1, "VALID")  # noqa: E731
        return f"wrapconv{dim}", run, [(*taps, shape[-1], shape[-1])]
    return f"pad{mode}{dim}{widths[dim]}", lambda x: jnp.pad(x, widths, mode), []


def draw_view(rng, shape):
    dim = axis(rng, len(shape) - 2)
    kind = rng.choice(["roll", "stencil", "diff", "crop", "step", "repeat", "flip", "rollcrop"])

    def cut(x, begin, end, step=1):
        return lax.slice_in_dim(x, begin, x.shape[dim] + end, step, dim)

    shift = rng.choice([-3, -1, 1, 2])
    run = {
        "roll": lambda x: x + 0.5 * jnp.roll(x, shift, dim),
        "stencil": lambda x: x + 0.1 * (jnp.roll(x, 1, dim) + jnp.roll(x, -1, dim) - 2 * x),
        "diff": lambda x: cut(x, 1, 0) - cut(x, 0, -1),
        "crop": lambda x: cut(x, abs(shift), -1),
        "step": lambda x: cut(x, 0, 0, 2),
        "repeat": lambda x: jnp.repeat(x, 2, dim),
        "flip": lambda x: x + jnp.flip(x, dim),
        "rollcrop": lambda x: cut(jnp.roll(x, shift, dim), 0, -1),
    }[kind]
    return f"{kind}{dim}" + (str(shift) if "roll" in kind else ""), run, []


def draw_resize(rng, shape):
    method = rng.choice(["linear", "nearest", "cubic"])
    factor = rng.choice([(2, 1), (3, 2), (1, 2)])

    def resize(x):
        sizes = [max(2, n * factor[0] // factor[1]) for n in x.shape[1:-1]]
        return jax.image.resize(x, (x.shape[0], *sizes, x.shape[-1]), method)

    return f"{method}{factor}", resize, []


def draw_skip(rng, shape):
    taps, features = (3,) * (len(shape) - 2), shape[-1]
    if rng.random() < 0.5:
        return "residual", lambda x, k: x + jax.nn.relu(conv(x, k)), [(*taps, features, features)]
    return "skip", lambda x, k: jnp.concatenate([x, conv(x, k)], -1), [(*taps, features, 2)]


def draw_position(rng, shape):
    return "position", lambda x: x + jnp.sin(jnp.arange(x.shape[-2], dtype=x.dtype))[:, None], []


DRAWS = [
    (draw_conv, 6),
    (draw_transposed, 2),
    (draw_pointwise, 4),
    (draw_pool, 2),
    (draw_norm, 2),
    (draw_pad, 2),
    (draw_view, 4),
    (draw_resize, 1),
    (draw_skip, 2),
    (draw_position, 1),
]


def draw(seed: int, rank: int | None = None) -> Program:
    """A program of 1-6 layers."""
    rng = random.Random(seed)
    rank = rank or rng.choice([1, 2, 2, 2, 3])
    every, devices = rng.choice([1, 2, 3, 6]), rng.choice([1, 2, 4, 8])
    mesh, axes = {"sp": devices}, {"sp": rng.choice(LETTERS[rank])}
    if rank > 1 and rng.random() < 0.4:
        first, second = rng.choice([("H", "W")] if rank == 2 else [("D", "W"), ("H", "W"), ("D", "H")])
        mesh, axes = rng.choice([{"a": 2, "b": 2}, {"a": 2, "b": 4}]), {"a": first, "b": second}
    sizes = tuple(rng.choice([8, 12, 16, 16, 24, 13, 9]) if rank < 3 else rng.choice([6, 8, 5]) for _ in range(rank))
    shape = (2, *sizes, 4)
    program = Program([], shape, mesh, axes, every)
    for _ in range(rng.randrange(1, 7)):
        for _ in range(20):
            make = rng.choices([d for d, _ in DRAWS], [w for _, w in DRAWS])[0]
            name, layer, kernels = make(rng, shape)
            if name == "groupnorm" and shape[-1] % 2:
                continue
            with contextlib.suppress(ValueError):  # a padding wider than what it reflects
                structs = [jax.ShapeDtypeStruct(k, np.float64) for k in kernels]
                after = jax.eval_shape(layer, jax.ShapeDtypeStruct(shape, np.float64), *structs).shape
                if all(3 <= n <= 40 for n in after[1:-1]) and after[-1] <= 8 and np.prod(after) < 6000:
                    program.layers.append((name, layer, kernels))
                    shape = after
                    break
    return program


# --- checks ---------------------------------------------------------------------------------------------------


def derivatives(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradients by all arguments, of the sum of sines: one program."""

    def loss(*args):
        out = fun(*args)
        # Padded tails hold zeros, and what comes back to them is lost.
        return sum(jnp.sum(jnp.sin(o.value if isinstance(o, sk.Padded) else o)) for o in leaves(out)), out

    def both(*args):
        (_, out), grads = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)(*args)
        return out, grads

    return both


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, sk.Padded))


def same(got: Any, want: Any, what: str = "", tolerance: float = 1e-10) -> None:
    """Equal trees of arrays, relative to the largest element."""
    for g, w in zip(leaves(got), leaves(want), strict=True):
        w = np.asarray(w)
        assert g.shape == w.shape, (what, g.shape, w.shape)
        largest = max(1.0, float(np.abs(w).max(initial=0)))
        np.testing.assert_allclose(np.asarray(g), w, rtol=0, atol=tolerance * largest, err_msg=what)


@dataclasses.dataclass
class Checked:
    """What a check saw."""

    out: Any
    grads: Any
    report: CollectiveReport
    plan: Plan


def plan_of(made: Any, *args: Any) -> Plan:
    """The plan of a call."""
    call, _ = made._read(args, {})
    return made._plan(call, made._trace(call)[0])


def check(fun, *args, mesh, axes, every=1, want=None, what="", tolerance=1e-10) -> Checked:
    """Values and gradients of a region, compiled once, against ``fun`` itself."""
    made = region(fun, spatial_axes=axes, mesh=mesh, exchange_every=every)
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        compiled = jax.jit(derivatives(made)).lower(*args).compile()
        out, grads = compiled(*args)
        plan = plan_of(made, *args)
    want = want or jax.jit(derivatives(fun))(*args)
    same((out, grads), want, what, tolerance)
    return Checked(out, grads, read_collectives(compiled.as_text() or "", mesh), plan)


def check_program(program: Program, axis_types: str = "auto") -> Checked:
    """One drawn program; nothing is gathered where nothing left the layout."""
    mesh = sk.make_mesh(program.mesh, axis_types=axis_types)
    x = np.random.default_rng(1).normal(size=program.shape)
    found = check(
        program.run, x, program.kernels(), mesh=mesh, axes=program.axes, every=program.every, what=str(program)
    )
    if not found.plan.left and axis_types == "auto":
        for kind in ("all_to_all", "reduce_scatter"):
            assert found.report.count(kind) == 0, (str(program), str(found.report))
    return found
