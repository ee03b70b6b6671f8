"""Random programs for ``sk.partition``: text that a person can read and run, from a seed.

A program is a list of lines of Python over small arrays. Each line is drawn to fit the values that there are, its
result's type found with ``jax.eval_shape``. Lines may call functions made of lines themselves (a scan's body, what is
differentiated). Values are kept moderate and smooth enough that another order of summation doesn't show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.spmd import constrain

MESHES = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})
EVEN, UNEVEN = (2, 4, 8), (1, 3, 5, 6, 7)
LARGEST = 512  # elements of a value


def by_spec(x: jax.Array, spec: P) -> jax.Array:
    """JAX's own mark; nothing where no mesh is known."""
    return x if jax.sharding.get_abstract_mesh().empty else lax.with_sharding_constraint(x, spec)


SPACE = {
    "by_spec": by_spec,
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "np": np,
    "constrain": constrain,
    "Shard": sk.Shard,
    "Replicate": sk.Replicate,
    "Partial": sk.Partial,
    "P": P,
    "PartitionSpec": P,
}
_NAME = re.compile(r"\b[vxf]\d+\b")
_JUNK = 77  # in padded tails of integers; floats have nan there


class Skip(Exception):  # noqa: N818 - no error: this line can't be drawn here, another one can
    """Nothing fits."""


@dataclasses.dataclass(frozen=True)
class Input:
    """One argument.

    Attributes:
      name, shape, dtype: of it.
      placements: where it comes; None: nothing is said, it comes whole.
      kind: "array", "padded", "partial".
      seed: of its elements.
      high: of integers, below which they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: Any
    kind: str
    seed: int
    high: int = 4

    def value(self, noise: int = 0) -> np.ndarray:
        """Its elements; with ``noise`` (a seed), floats are off by a little."""
        rng = np.random.default_rng(self.seed)
        dtype = np.dtype(self.dtype)
        if dtype.kind == "b":
            return rng.random(self.shape) < 0.6
        if dtype.kind == "i":
            return rng.integers(0, self.high, self.shape).astype(dtype)
        found = rng.normal(size=self.shape).astype(dtype)
        if noise:
            found = found * (1 + 1e-12 * np.random.default_rng(noise).normal(size=self.shape)).astype(dtype)
        return found

    def placed(self, mesh: Any) -> Any:
        """As ``sk.partition`` gets it. Padded tails are anything, contributions differ."""
        value = self.value()
        if self.placements is None:
            return value
        layout = sk.Layout(mesh, self.placements).resolved(value.ndim)
        if self.kind == "partial":
            stack = _contributions(value, layout.reduce, [mesh.shape[a] for a in layout.partial_axes], self.seed)
        else:
            stack = value
        padded = layout.padded_shape(self.shape)
        tails = [(0, 0)] * (stack.ndim - value.ndim) + [(0, p - s) for p, s in zip(padded, self.shape, strict=True)]
        junk = {"b": True, "i": _JUNK}.get(value.dtype.kind, np.nan)
        stack = np.pad(stack, tails, constant_values=junk) if padded != self.shape else stack
        array = jax.device_put(stack, NamedSharding(mesh, layout.stack_spec(value.ndim)))
        if self.kind == "partial":
            return sk.PartialArray(array, layout, self.shape if padded != self.shape else None)
        return sk.Padded(array, self.shape) if self.kind == "padded" else array


def _contributions(value: np.ndarray, kind: str, sizes: Sequence[int], seed: int) -> np.ndarray:
    """What devices hold, so that the reduction is ``value``; ``[*sizes, *value.shape]``."""
    rng, count = np.random.default_rng(seed + 1), math.prod(sizes)
    holder = np.arange(count).reshape(-1, *[1] * value.ndim) == rng.integers(0, count, value.shape)
    whole = np.broadcast_to(value, (count, *value.shape))
    if kind in ("sum", "mean"):
        integers = value.dtype.kind == "i"
        parts = rng.integers(-3, 4, whole.shape) if integers else rng.normal(size=whole.shape)
        parts[-1] = value - parts[:-1].sum(0)
        stack = parts * (count if kind == "mean" else 1)
    elif kind in ("max", "min"):
        less = rng.integers(0, 4, whole.shape) if value.dtype.kind == "i" else rng.random(whole.shape)
        stack = np.where(holder, whole, whole - less if kind == "max" else whole + less)
    elif kind == "prod":
        stack = np.where(holder, whole, 1)
        if value.dtype.kind == "f":
            factors = rng.uniform(0.5, 2, whole.shape)
            stack = stack * factors / factors.prod(0) ** (1 / count)
    elif kind == "any":
        stack = whole & (holder | (rng.random(whole.shape) < 0.3))
    else:
        stack = whole | ~(holder | (rng.random(whole.shape) < 0.3))
    return np.asarray(stack, value.dtype).reshape(*sizes, *value.shape)


@dataclasses.dataclass(frozen=True)
class Line:
    """``targets = expression``, where the expression may call the functions ``blocks``."""

    targets: tuple[str, ...]
    expression: str
    blocks: tuple[Block, ...] = ()

    @property
    def uses(self) -> set[str]:
        """Names that it needs."""
        inner = set().union(*(b.uses for b in self.blocks)) if self.blocks else set()
        return (set(_NAME.findall(self.expression)) | inner) - {b.name for b in self.blocks}

    def text(self, indent: str = "") -> Iterator[str]:
        """Lines of Python."""
        for block in self.blocks:
            yield from block.text(indent)
        yield f"{indent}{', '.join(self.targets)} = {self.expression}"


@dataclasses.dataclass(frozen=True)
class Block:
    """A function: of its parameters and, closed over, of what was before it."""

    name: str
    parameters: tuple[str, ...]
    lines: tuple[Line, ...]
    result: str

    @property
    def uses(self) -> set[str]:
        """Names from outside."""
        inner = {n for line in self.lines for n in line.uses} | set(_NAME.findall(self.result))
        made = {t for line in self.lines for t in line.targets}
        return inner - made - set(self.parameters)

    def text(self, indent: str = "") -> Iterator[str]:
        """Lines of Python."""
        yield f"{indent}def {self.name}({', '.join(self.parameters)}):"
        for line in self.lines:
            yield from line.text(indent + "    ")
        yield f"{indent}    return {self.result}"


def live(lines: Sequence[Line], wanted: set[str]) -> tuple[Line, ...]:
    """The lines that these names need."""
    kept, needed = [], set(wanted)
    for line in reversed(lines):
        if needed & set(line.targets):
            kept.append(line)
            needed |= line.uses
    return tuple(reversed(kept))


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, where its inputs come from and where its results shall go.

    Attributes:
      seed: that it was drawn from.
      sizes: of the mesh axes.
      inputs, lines, outputs: the function.
      goals: of each output the ``out_placements``.
      exact: whether it stays in float64 throughout.
    """

    seed: int
    sizes: dict[str, int]
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    goals: tuple[Any, ...]

    @property
    def exact(self) -> bool:
        """No values are narrowed."""
        return "float32" not in self.text

    @property
    def text(self) -> str:
        """The function."""
        block = Block("fun", tuple(i.name for i in self.inputs), self.lines, f"({', '.join(self.outputs)},)")
        return "\n".join(block.text())

    def function(self, marks: bool = True) -> Callable:
        """The function; for one device without marks."""
        space = SPACE if marks else SPACE | {"constrain": lambda x, placements: x}
        space = dict(space)
        exec(compile(self.text, f"random program {self.seed}", "exec"), space)
        return space["fun"]

    def __str__(self) -> str:
        given = [
            f"# {i.name}: {i.dtype}{list(i.shape)} {i.kind} {i.placements} seed={i.seed} high={i.high}"
            for i in self.inputs
        ]
        goals = [f"# {name} -> {goal}" for name, goal in zip(self.outputs, self.goals, strict=True)]
        return "\n".join([f"# random program {self.seed} on {self.sizes}", *given, self.text, *goals])


def program(seed: int, sizes: dict[str, int]) -> Program:
    """The program of a seed, on a mesh of these sizes."""
    draw = _Drawing(np.random.default_rng(seed), sizes)
    scope = Scope(draw, {})
    for _ in range(draw.between(1, 3)):
        scope.input(draw.shape(draw.between(1, 3)))
    if draw.chance(0.3):
        scope.input(draw.shape(draw.between(1, 2)), "bool")
    target = draw.between(4, 18)
    if draw.chance(0.35):
        with contextlib.suppress(Skip):
            scope.add(scope.differentiated(draw.between(4, 12)))
        target = draw.between(1, 5)
    scope.fill(target)
    straight = _of_contributions(scope)
    used = {n for line in scope.lines for n in line.uses}
    outputs = [t for line in scope.lines for t in line.targets if t not in used]
    outputs = outputs[-6:] or [list(scope.env)[-1]]
    if draw.chance(0.1):
        outputs.append(draw.one(list(scope.env)))
    outputs = list(dict.fromkeys((*outputs, *straight)))
    lines = live(scope.lines, set(outputs))
    needed = {n for line in lines for n in line.uses} | set(outputs)
    inputs = tuple(i for i in draw.inputs if i.name in needed)
    goals = tuple("inferred" if o in straight else draw.goal(scope.env[o]) for o in outputs)
    return Program(seed, dict(sizes), inputs, lines, tuple(outputs), goals)


def _of_contributions(scope: Scope) -> list[str]:
    """Lines of inputs that are Partial, whose results leave as they are: what passes contributions on must be right."""
    given = [i.name for i in scope.draw.inputs if i.kind == "partial" and i.name in scope.env]
    near = Scope(scope.draw, {name: scope.env[name] for name in given})
    if given:
        near.fill(scope.draw.between(1, 3))
    scope.env = {**near.env, **scope.env}
    scope.lines += near.lines
    return [t for line in near.lines for t in line.targets if t in near.env]


@dataclasses.dataclass(frozen=True)
class Var:
    """What is known of a value. ``size``: roughly, how large its elements may be."""

    shape: tuple[int, ...]
    dtype: Any
    size: float = 4.0

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """For tracing."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class _Drawing:
    """What all scopes of one program share: the numbers, the names, the inputs."""

    def __init__(self, rng: np.random.Generator, sizes: dict[str, int]):
        self.rng = rng
        self.sizes = sizes
        self.inputs: list[Input] = []
        self.counter = itertools.count()

    def new(self, letter: str = "v") -> str:
        return f"{letter}{next(self.counter)}"

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def one(self, options: Sequence[Any]) -> Any:
        if not options:
            raise Skip
        return options[int(self.rng.integers(len(options)))]

    def some(self, options: Sequence[Any], least: int = 1) -> list[Any]:
        count = self.between(min(least, len(options)), len(options))
        return sorted(self.rng.permutation(len(options))[:count].tolist()) if options else []

    def number(self) -> float:
        return round(float(self.rng.uniform(-2, 2)), 2)

    def shape(self, ndim: int) -> tuple[int, ...]:
        odd = self.chance(0.2)
        return tuple(self.one(UNEVEN) if odd and self.chance(0.5) else self.one(EVEN) for _ in range(ndim))

    def placements(self, shape: tuple[int, ...], dtype: Any, *, partial: float, uneven: bool) -> Any:
        """Random ones, in one of the forms."""
        kinds = {
            "b": ("any", "all"),
            "f": ("sum", "sum", "mean", "max", "min", "prod"),
            "i": ("sum", "max", "min"),
            "c": ("sum",),
        }
        kind = self.one(kinds[np.dtype(dtype).kind])
        cut: dict[int, list[str]] = {}
        found: dict[str, sk.Placement] = {}
        for axis, size in self.sizes.items():
            if self.chance(partial):
                found[axis] = sk.Partial(kind)
            elif self.chance(0.7) and shape:
                dim = self.between(0, len(shape) - 1)
                parts = size * math.prod(self.sizes[a] for a in cut.get(dim, ()))
                if shape[dim] % parts and not uneven:
                    continue
                cut.setdefault(dim, []).append(axis)
                found[axis] = sk.Shard(dim)
        if cut and self.chance(0.3) and not any(isinstance(p, sk.Partial) for p in found.values()):
            return P(*[tuple(reversed(cut[d])) if d in cut else None for d in range(max(cut) + 1)])
        return found or {next(iter(self.sizes)): sk.Replicate()}

    def goal(self, var: Var) -> Any:
        how = self.rng.random()
        if how < 0.3:
            return None
        if how < 0.65:
            return "inferred"  # the only ones that leave Partial unasked: here what passes Partial on is chosen
        if not jnp.issubdtype(var.dtype, jnp.number) and var.dtype != bool:
            return None
        return self.placements(var.shape, var.dtype, partial=0.1, uneven=self.chance(0.2))


class Scope:
    """Lines of one function, and the values that they may use."""

    def __init__(self, draw: _Drawing, env: dict[str, Var], inner: bool = False):
        self.draw = draw
        self.env = dict(env)
        self.inner = inner
        self.lines: list[Line] = []

    # --- what there is ----------------------------------------------------------------------------

    def pick(self, kinds: str = "f", low: int = 0, high: int = 4, where: Callable[[Var], bool] = lambda v: True) -> str:
        """A value, rather one made lately."""
        names = [
            n
            for n, v in self.env.items()
            if np.dtype(v.dtype).kind in kinds and low <= len(v.shape) <= high and where(v)
        ]
        if not names:
            raise Skip
        weights = 0.85 ** np.arange(len(names))[::-1]
        return names[int(self.draw.rng.choice(len(names), p=weights / weights.sum()))]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.env[name].shape

    def input(self, shape: tuple[int, ...], dtype: str = "float64", high: int = 4) -> str:
        """A new argument of the program."""
        d = self.draw
        pad = d.chance(0.3)
        partial = 0.4 if d.chance(0.4) else 0.0
        placements = d.placements(shape, np.dtype(dtype), partial=partial, uneven=pad)
        layout = sk.Layout(jax.sharding.AbstractMesh(tuple(d.sizes.values()), tuple(d.sizes)), placements)
        kind = "partial" if layout.partial_axes else "padded" if pad else "array"
        if kind == "array" and d.chance(0.5) and not layout.shard_axes:
            placements = None
        name = d.new("x")
        d.inputs.append(Input(name, tuple(shape), dtype, placements, kind, int(d.rng.integers(1 << 30)), high))
        self.env = {name: Var(tuple(shape), np.dtype(dtype)), **self.env}
        return name

    def like(self, shape: tuple[int, ...], kinds: str = "f") -> str:
        """A value of this shape: one that is there, else a new argument."""
        if self.draw.chance(0.7):
            try:
                return self.pick(kinds, where=lambda v: v.shape == tuple(shape))
            except Skip:
                pass
        return self.input(tuple(shape), {"f": "float64", "i": "int32", "b": "bool"}[kinds[0]])

    def indices(self, shape: tuple[int, ...], size: int) -> str:
        """Integers, most of them in range."""
        high = size if self.draw.chance(0.8) else size + 2
        return self.input(shape, self.draw.one(("int32", "int64")), high)

    # --- lines ------------------------------------------------------------------------------------

    def types(self, line: Line) -> list[jax.ShapeDtypeStruct]:
        """Of the line's targets."""
        needed = [n for n in line.uses if n in self.env]

        def run(values: list[Any]) -> Any:
            space = SPACE | dict(zip(needed, values, strict=True))
            exec("\n".join(line.text()), space)
            return [space[t] for t in line.targets]

        try:
            return jax.eval_shape(run, [self.env[n].struct for n in needed])
        except (NotImplementedError, TypeError, ValueError) as err:
            raise Skip from err  # JAX itself can't do or differentiate it

    def add(self, line: Line, growth: float = 1.0) -> None:
        """A line that was drawn, if its results are of use."""
        found = self.types(line)
        if any(math.prod(t.shape) > LARGEST or len(t.shape) > 5 or 0 in t.shape for t in found):
            raise Skip
        size = max([self.env[n].size for n in line.uses if n in self.env], default=1.0) * growth
        self.lines.append(line)
        for name, t in zip(line.targets, found, strict=True):
            self.env[name] = Var(tuple(t.shape), t.dtype, size)
        for name, t in zip(line.targets, found, strict=True):
            if size > 100 and jnp.issubdtype(t.dtype, jnp.inexact):
                calm = self.draw.new()
                self.lines.append(Line((calm,), f"jnp.sin({name} * {1 / size:.3g})"))
                self.env[calm] = Var(tuple(t.shape), t.dtype, 1.0)
                del self.env[name]

    def expression(self, text: str, growth: float = 1.0) -> str:
        """A line of one target; the name under which the value is then known."""
        self.add(Line((self.draw.new(),), text), growth)
        return self.lines[-1].targets[0]

    def fill(self, count: int) -> None:
        """So many lines more."""
        table = INNER if self.inner else OUTER
        weights = np.array([w for _, w in table], float)
        tries = 0
        goal = len(self.lines) + count
        while len(self.lines) < goal and tries < 20 * count:
            tries += 1
            rule, _ = table[int(self.draw.rng.choice(len(table), p=weights / weights.sum()))]
            kept = len(self.draw.inputs), dict(self.env)
            try:
                rule(self)
            except Skip:
                del self.draw.inputs[kept[0] :]
                self.env = kept[1]

    # --- functions --------------------------------------------------------------------------------

    def child(self, parameters: dict[str, Var] | None = None) -> Scope:
        """The scope of a function in this one."""
        return Scope(self.draw, {**self.env, **(parameters or {})}, inner=True)

    def scalar(self, of: Scope, count: int) -> str:
        """A number made of a function's last values."""
        made = [t for line in of.lines for t in line.targets if of.env.get(t) and of.env[t].dtype == np.float64]
        if not made:
            raise Skip
        chosen = made[-count:]
        how = ("jnp.sum({0} * {0})", "jnp.mean(jnp.sin({0}))", "jnp.sum(jnp.tanh({0}))", "jnp.mean({0} ** 2)")
        return " + ".join(self.draw.one(how).format(n) for n in chosen)

    def free(self, block: Block) -> list[str]:
        """Floats from outside that a function uses."""
        return sorted(n for n in block.uses if n in self.env and self.env[n].dtype == np.float64)

    def differentiated(self, count: int) -> Line:
        """A function's value, and its gradients."""
        d, inner = self.draw, self.child()
        inner.fill(count)
        self.env = {**{n: v for n, v in inner.env.items() if n.startswith("x")}, **self.env}
        result = self.scalar(inner, d.between(1, 2))
        block = Block(d.new("f"), (), live(inner.lines, set(_NAME.findall(result))), result)
        free = self.free(block)
        wrt = [free[i] for i in d.some(free)][:4]
        if not wrt:
            raise Skip
        block = dataclasses.replace(block, parameters=tuple(wrt))
        value, grads = d.new(), [d.new() for _ in wrt]
        call = f"({', '.join(wrt)})"
        if len(wrt) == 1:
            return Line((value, grads[0]), f"jax.value_and_grad({block.name}){call}", (block,))
        numbers = tuple(range(len(wrt)))
        text = f"(lambda f0: (f0[0], *f0[1]))(jax.value_and_grad({block.name}, {numbers}){call})"
        return Line((value, *grads), text.replace("f0", "both"), (block,))


# --- lines of each kind ---------------------------------------------------------------------------

UNARY = (
    ("jnp.tanh({0})", 1),
    ("jnp.sin({0})", 1),
    ("jnp.cos({0}) + {0}", 2),
    ("jnp.exp(-jnp.abs({0}))", 1),
    ("jax.nn.relu({0})", 1),
    ("jax.nn.gelu({0})", 1),
    ("jax.nn.silu({0})", 1),
    ("jax.nn.sigmoid({0})", 1),
    ("jax.nn.softplus({0})", 1.5),
    ("jnp.sqrt(jnp.abs({0}) + 1)", 1),
    ("{0} * {0}", 4),
    ("{0} ** 3 / 4", 8),
    ("-{0}", 1),
    ("{0} * 0.5", 1),
    ("2.0 - {0}", 1.5),
    ("1 / (1 + {0} ** 2)", 1),
    ("jnp.log1p(jnp.abs({0}))", 1),
    ("jnp.clip({0}, -0.7, 0.9)", 1),
    ("lax.stop_gradient({0}) * {0}", 4),
    ("jnp.abs({0})", 1),
    ("lax.rsqrt({0} ** 2 + 0.5)", 2),
    ("jnp.expm1(jnp.tanh({0}))", 1),
    ("lax.erf({0})", 1),
    ("jnp.arctan2({0}, 1.5)", 1),
    ("{0} + 1", 1.3),
    ("{0} / 3", 1),
    ("jnp.zeros_like({0}) + {0}", 1),
    ("jnp.where({0} > 0.3, {0}, 0.1)", 1),
    ("jnp.logaddexp({0}, 0.0)", 1.3),
    ("jax.nn.relu6({0})", 1),
    ("jax.nn.elu({0})", 1),
    ("jax.numpy.sinc({0})", 1),
)
BINARY = (
    ("{0} + {1}", 2),
    ("{0} - {1}", 2),
    ("{0} * {1}", 4),
    ("{0} / (1 + jnp.abs({1}))", 1),
    ("jnp.maximum({0}, {1})", 1),
    ("jnp.minimum({0}, {1})", 1),
    ("jnp.where({0} > {1}, {0}, 2 * {1})", 2),
    ("jnp.logaddexp({0}, {1})", 1.5),
    ("jnp.power(jnp.abs({0}) + 0.5, jnp.tanh({1}))", 1.5),
    ("lax.select({0} < 0.2, {0}, {1} + 0 * {0})", 1),
    ("2 * {0} - 3 * {1}", 5),
)


def unary(s: Scope) -> None:
    """Of one array."""
    text, growth = s.draw.one(UNARY)
    s.expression(text.format(s.pick()), growth)


def binary(s: Scope) -> None:
    """Of two arrays, one of which may be broadcast."""
    x = s.pick()
    shape = s.shape(x)
    how = s.draw.rng.random()
    try:
        if how < 0.6:
            y = s.pick(where=lambda v: v.shape == shape)
        else:
            y = s.pick(where=lambda v: _fits(v.shape, shape))
    except Skip:
        y = s.input(tuple(1 if s.draw.chance(0.15) else n for n in shape[s.draw.between(0, len(shape)) :]))
    text, growth = s.draw.one(BINARY)
    if text.startswith("lax.select") and s.shape(y) != shape:
        raise Skip
    x, y = (x, y) if s.draw.chance(0.5) else (y, x)
    if text.startswith("lax.select") and s.shape(x) != shape:
        raise Skip
    s.expression(text.format(x, y), growth)


def _fits(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    pairs = zip(reversed(small), reversed(large), strict=False)
    return len(small) <= len(large) and all(a in (1, b) for a, b in pairs)


def boolean(s: Scope) -> None:
    """Comparisons, and what is done with them."""
    d = s.draw
    how = d.between(0, 7)
    if how == 0:
        s.expression(f"{s.pick()} {d.one(('>', '<', '>=', '<='))} {d.number()}")
    elif how == 1:
        x = s.pick("b")
        y = s.like(s.shape(x), "b")
        s.expression(f"{x} {d.one(('&', '|', '^'))} {y}")
    elif how == 2:
        s.expression(f"~{s.pick('b')}")
    elif how == 3:
        x = s.pick("b", 1)
        s.expression(f"jnp.{d.one(('any', 'all', 'sum', 'mean', 'max', 'min'))}({x}, axis={_axes(s, x)})", 8)
    elif how in (4, 5):
        x = s.pick("b")
        y = s.like(s.shape(x))
        s.expression(f"jnp.where({x}, {y}, {d.one((s.like(s.shape(x)), d.number()))})")
    elif how == 6:
        s.expression(f"{s.pick('b')}.astype({d.one(('float', 'int', 'jnp.int32'))})")
    else:
        s.expression(f"{s.pick('b')} * {s.pick('f', 0, 0)}")


def cast(s: Scope) -> None:
    """Other element types, and back."""
    d = s.draw
    how = d.between(0, 6)
    if how == 0:
        s.expression(f"jnp.floor({s.pick()} * 3).astype({d.one(('int', 'jnp.int32'))})", 3)
    elif how == 1:
        s.expression(f"{s.pick('i')}.astype(float) / 4", 1)
    elif how == 2 and d.chance(0.3):
        s.expression(f"{s.pick()}.astype('float32').astype('float64')")
    elif how == 3:
        x = s.pick()
        s.expression(f"jnp.{d.one(('real', 'imag', 'abs'))}(({x} + 1j * jnp.cos({x})) * (0.5 - 2j))", 4)
    elif how == 4:
        x = s.pick("i")
        s.expression(f"{x} * 2 + {d.one((x, '1'))}", 3)
    elif how == 5:
        x = s.pick("i")
        s.expression(f"{x} {d.one(('%', '//', '+', '-', '&', '|'))} 3")
    else:
        x = s.pick("i", 1)
        s.expression(f"jnp.{d.one(('sum', 'max', 'min', 'prod', 'cumsum'))}({x} % 4, axis={_axis(s, x)})", 8)


def dot(s: Scope) -> None:
    """Products of any letters: batch, contracted and free."""
    d = s.draw
    x = s.pick(low=1)
    left = list("abcd"[: len(s.shape(x))])
    sizes = dict(zip(left, s.shape(x), strict=True))
    if d.chance(0.5):
        y = s.pick(low=1)
        right = []
        for i, n in enumerate(s.shape(y)):
            same = [c for c in left if sizes[c] == n and c not in right]
            letter = d.one(same) if same and d.chance(0.8) else "wxyz"[i]
            sizes[letter] = n
            right.append(letter)
    else:
        right = [left[i] for i in d.some(left)]
        if d.chance(0.6):
            right.insert(d.between(0, len(right)), "w")
            sizes["w"] = d.one(EVEN)
        right = [right[i] for i in d.rng.permutation(len(right))]
        y = s.input(tuple(sizes[c] for c in right))
    both = [c for c in left if c in right]
    if not both:
        raise Skip
    summed = {c for c in both if d.chance(0.7)}
    out = [c for c in dict.fromkeys((*left, *right)) if c not in summed]
    out = [out[i] for i in d.rng.permutation(len(out))] if d.chance(0.5) else out
    growth = 2 * math.prod(sizes[c] for c in summed)
    s.expression(f'jnp.einsum("{"".join(left)},{"".join(right)}->{"".join(out)}", {x}, {y})', growth)


def matmul(s: Scope) -> None:
    """A layer."""
    d = s.draw
    x = s.pick(low=1, high=3)
    k, n = s.shape(x)[-1], d.one(EVEN)
    w = s.like((k, n))
    if d.chance(0.5):
        s.expression(f"{x} @ {w}", 2 * k)
    else:
        s.expression(f"{x} @ {w} + {s.input((n,))}", 2 * k)


def _axis(s: Scope, x: str) -> int:
    return s.draw.between(-len(s.shape(x)), len(s.shape(x)) - 1)


def _axes(s: Scope, x: str) -> Any:
    ndim = len(s.shape(x))
    how = s.draw.rng.random()
    if how < 0.2:
        return None
    return _axis(s, x) if how < 0.7 else tuple(s.draw.some(range(ndim)))


def reduction(s: Scope) -> None:
    """Of some dims."""
    d = s.draw
    x = s.pick(low=1)
    axes, keep = _axes(s, x), d.chance(0.5)
    text = d.one(
        (
            "jnp.sum({0}, axis={1}, keepdims={2})",
            "jnp.mean({0}, axis={1}, keepdims={2})",
            "jnp.max({0}, axis={1}, keepdims={2})",
            "jnp.min({0}, axis={1}, keepdims={2})",
            "jnp.prod(jnp.tanh({0}) + 0.5, axis={1}, keepdims={2})",
            "jnp.var({0}, axis={1}, keepdims={2})",
            "jax.nn.logsumexp({0}, axis={1}, keepdims={2})",
            "jnp.sum({0} ** 2, axis={1}, keepdims={2})",
            "jnp.sum({0}, axis={1}, keepdims={2}, where={0} > 0.1)",
        )
    )
    s.expression(text.format(x, axes, keep), 8 if "sum" in text or "var" in text or "prod" in text else 1)


def extreme(s: Scope) -> None:
    """Positions."""
    x = s.pick("fi", 1)
    s.expression(f"jnp.{s.draw.one(('argmax', 'argmin'))}({x}, axis={_axis(s, x)}, keepdims={s.draw.chance(0.3)})")


def cumulative(s: Scope) -> None:
    """Along a dim."""
    x = s.pick(low=1)
    axis = s.draw.between(0, len(s.shape(x)) - 1)
    name = s.draw.one(("cumsum", "cummax", "cummin", "cumlogsumexp", "cumprod"))
    inner = f"jnp.tanh({x})" if name == "cumprod" else x
    s.expression(f"lax.{name}({inner}, axis={axis}, reverse={s.draw.chance(0.3)})", 8 if name == "cumsum" else 1)


def expand(s: Scope) -> None:
    """New dims."""
    d = s.draw
    x = s.pick("fib", 0, 3)
    shape = s.shape(x)
    how = d.between(0, 3)
    if how == 0:
        s.expression(f"jnp.broadcast_to({x}, {(d.one(EVEN), *shape)})")
    elif how == 1:
        s.expression(f"jnp.expand_dims({x}, {d.between(0, len(shape))})")
    elif how == 2 and shape:
        s.expression(f"jnp.repeat({x}, 2, axis={_axis(s, x)})")
    elif shape:
        s.expression(f"jnp.tile({x}, {tuple(d.one((1, 2)) for _ in shape)})")


def reshape(s: Scope) -> None:
    """Dims merged and split."""
    d = s.draw
    x = s.pick("fib", 1)
    shape = list(s.shape(x))
    how = d.between(0, 3)
    if how == 0 and len(shape) > 1:
        at = d.between(0, len(shape) - 2)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    elif how == 1:
        at = d.between(0, len(shape) - 1)
        part = d.one([k for k in (1, 2, 3, 4) if shape[at] % k == 0])
        shape[at : at + 1] = [part, shape[at] // part]
    elif how == 2:
        shape = [-1]
    else:
        left, shape = math.prod(shape), []
        while left > 1 and len(shape) < 3:
            shape.append(d.one([k for k in range(1, left + 1) if left % k == 0]))
            left //= shape[-1]
        shape.append(left)
    s.expression(f"{x}.reshape({tuple(shape)})")


def arrange(s: Scope) -> None:
    """Dims exchanged and reversed."""
    d = s.draw
    x = s.pick("fib", 1)
    ndim = len(s.shape(x))
    how = d.between(0, 3)
    if how <= 1:
        s.expression(f"{x}.transpose({tuple(d.rng.permutation(ndim).tolist())})")
    elif how == 2:
        s.expression(f"jnp.flip({x}, {_axis(s, x)})")
    else:
        s.expression(f"jnp.squeeze({x})")


def _differ_along(one: tuple[int, ...], two: tuple[int, ...], axis: int) -> bool:
    axis %= len(two)
    return len(one) == len(two) and (*one[:axis], *one[axis + 1 :]) == (*two[:axis], *two[axis + 1 :])


def together(s: Scope) -> None:
    """Arrays put together."""
    d = s.draw
    x = s.pick(low=1)
    axis = _axis(s, x)
    y = x if d.chance(0.2) else s.like(s.shape(x))
    if d.chance(0.5):
        with contextlib.suppress(Skip):
            y = s.pick(where=lambda v: _differ_along(v.shape, s.shape(x), axis))
    if s.shape(x) == s.shape(y) and d.chance(0.4):
        s.expression(f"jnp.stack([{x}, {y}], axis={axis})")
    else:
        s.expression(f"jnp.concatenate([{x}, {y}], axis={axis})")


def part(s: Scope) -> None:
    """Padding, slices at fixed places."""
    d = s.draw
    x = s.pick(low=1, high=3)
    shape = s.shape(x)
    how = d.between(0, 6)
    if how == 0:
        config = tuple(
            (d.between(-1, 2), d.between(-1, 2), d.one((0, 0, 1))) if d.chance(0.6) else (0, 0, 0) for _ in shape
        )
        s.expression(f"lax.pad({x}, {d.one((0.0, 1.5))}, {config})")
    elif how == 1:
        mode = d.one(("edge", "reflect", "wrap", "constant"))
        widths = tuple((d.between(0, 1), d.between(0, 1)) for _ in shape)
        s.expression(f"jnp.pad({x}, {widths}, mode={mode!r})")
    elif how == 2:
        cuts = [f"{d.between(0, n - 1)}::{d.one((1, 1, 2, -1))}" if d.chance(0.6) else ":" for n in shape]
        s.expression(f"{x}[{', '.join(cuts)}]")
    elif how == 3:
        cuts = [f":{d.between(1, n)}" for n in shape]
        s.expression(f"{x}[{', '.join(cuts)}]")
    elif how == 4:
        s.expression(f"jnp.roll({x}, {d.between(-2, 2)}, axis={_axis(s, x)})")
    elif how == 5:
        axis = d.one([a for a, n in enumerate(shape) if n % 2 == 0])
        one, two = d.new(), d.new()
        s.add(Line((one, two), f"jnp.split({x}, 2, axis={axis})"))
    else:
        s.expression(f"{x}[{d.between(-shape[0], shape[0] - 1)}]")


def dynamic(s: Scope) -> None:
    """Slices at places that are data."""
    d = s.draw
    x = s.pick("fi", 1, 3)
    shape = s.shape(x)
    sizes = tuple(d.between(1, n) if d.chance(0.6) else n for n in shape)
    starts = []
    for n, k in zip(shape, sizes, strict=True):
        data = d.chance(0.4)
        starts.append(s.indices((), n) if data else str(d.between(0, n - k + d.one((0, 0, 1)))))
    at = f"({', '.join(starts)},)"
    how = d.between(0, 3)
    if how <= 1:
        s.expression(f"lax.dynamic_slice({x}, [jnp.asarray(i, 'int32') for i in {at}], {sizes})")
    elif how == 2:
        kind = np.dtype(s.env[x].dtype).kind
        y = s.like(sizes, kind)
        s.expression(f"lax.dynamic_update_slice({x}, {y}.astype({x}.dtype), [jnp.asarray(i, 'int32') for i in {at}])")
    else:
        axis = d.between(0, len(shape) - 1)
        s.expression(f"lax.dynamic_index_in_dim({x}, {s.indices((), shape[axis])}, {axis}, keepdims={d.chance(0.5)})")


def indexing(s: Scope) -> None:
    """Reading and writing by index."""
    d = s.draw
    x = s.pick(low=1, high=3)
    shape = s.shape(x)
    axis = d.between(0, len(shape) - 1)
    how = d.between(0, 6)
    if how == 0:
        index = s.indices(d.shape(d.between(0, 2)), shape[axis])
        mode, fill = d.one(("clip", "wrap", "fill")), d.one((0, 0.5))
        s.expression(f"jnp.take({x}, {index}, axis={axis}, mode={mode!r}, fill_value={fill})")
    elif how == 1:
        picked = list(shape)
        picked[axis] = d.one((1, 2, shape[axis]))
        index = s.indices(tuple(picked), shape[axis])
        s.expression(f"jnp.take_along_axis({x}, {index}, axis={axis}, mode='clip')")
    elif how in (2, 3):
        index = s.indices((d.one(EVEN),), shape[0])
        change = d.one(("add", "set", "max", "min", "multiply", "add", "add"))
        count = s.shape(index)[0]
        if change == "set":  # which of several comes last is nobody's promise
            count = min(count, shape[0])
            update = s.like((count, *shape[1:]))
            s.expression(
                f"{x}.at[jnp.argsort(jnp.arange({shape[0]}) * 3 % 7)[:{count}]].set({update}, unique_indices=True)"
            )
            return
        update = s.like((count, *shape[1:])) if d.chance(0.8) else str(d.number())
        mode = d.one(("drop", "clip", "promise_in_bounds"))
        if mode == "promise_in_bounds":
            index = f"({index} % {shape[0]})"
        s.expression(f"{x}.at[{index}].{change}({update}, mode={mode!r})", 4)
    elif how == 4:
        index = s.pick("i", 0, 2)
        n = d.one(EVEN)
        s.expression(f"jax.nn.one_hot({index}, {n}, axis={d.one((-1, 0))}, dtype=float)")
    elif how == 5 and len(shape) > 1:
        one, two = s.indices((d.one(EVEN),), shape[0]), None
        two = s.indices(s.shape(one), shape[1])
        text = d.one((f"{x}[{one}, {two}]", f"{x}.at[{one}, {two}].add(0.5)", f"{x}[:, {two}]"))
        s.expression(text)
    else:
        n = s.indices(d.shape(d.between(1, 2)), shape[0])
        s.expression(f"{x}[{n}]")


def normal_form(s: Scope) -> None:
    """Softmaxes and normalizations, as models have them."""
    d = s.draw
    x = s.pick(low=1)
    axis = _axis(s, x)
    how = d.between(0, 4)
    if how == 0:
        s.expression(f"jax.nn.softmax({x}, axis={axis})")
    elif how == 1:
        s.expression(f"jax.nn.log_softmax({x}, axis={axis})", 2)
    elif how == 2:
        y = s.expression(f"{x} - {x}.mean({axis}, keepdims=True)", 2)
        s.expression(f"{y} * lax.rsqrt(jnp.mean({y} ** 2, {axis}, keepdims=True) + 0.3)")
    elif how == 3:
        s.expression(f"jax.nn.standardize({x}, axis={axis}, epsilon=0.3)", 2)
    else:
        labels = s.pick("i", 0, len(s.shape(x)) - 1)
        if s.shape(labels) != s.shape(x)[:-1]:
            raise Skip
        n = s.shape(x)[-1]
        s.expression(
            f"-jnp.take_along_axis(jax.nn.log_softmax({x}), ({labels} % {n})[..., None], axis=-1)[..., 0].mean()"
        )


def attention(s: Scope) -> None:
    """Queries, keys, values, a causal mask."""
    q = s.pick(low=2, high=3, where=lambda v: math.prod(v.shape) <= 128)
    k, v = s.like(s.shape(q)), s.like(s.shape(q))
    n = s.shape(q)[-2]
    scores = s.expression(f"jnp.einsum('...qd,...kd->...qk', {q}, {k}) / {4 * s.shape(q)[-1]}", 2)
    masked = s.expression(f"jnp.where(jnp.tril(jnp.ones(({n}, {n}), bool)), {scores}, -30.0)")
    s.expression(f"jax.nn.softmax({masked}, -1) @ {v}")


def ordering(s: Scope) -> None:
    """Sorts and the largest."""
    d = s.draw
    x = s.pick(low=1, high=3)
    axis = _axis(s, x)
    how = d.between(0, 3)
    if how == 0:
        s.expression(f"jnp.sort({x}, axis={axis})")
    elif how == 1:
        s.expression(f"jnp.argsort({x}, axis={axis})")
    elif how == 2:
        one, two = d.new(), d.new()
        s.add(Line((one, two), f"lax.top_k({x}, {d.between(1, min(3, s.shape(x)[-1]))})"))
    else:
        one, two = d.new(), d.new()
        y = s.like(s.shape(x))
        s.add(Line((one, two), f"lax.sort_key_val({x}, {y}, dimension={axis % len(s.shape(x))})"))


def made(s: Scope) -> None:
    """Values from nothing."""
    d = s.draw
    how = d.between(0, 4)
    if how == 0:
        x = s.pick(low=2, high=3)
        n, m = s.shape(x)[-2:]
        s.expression(f"jnp.where(jnp.arange({n})[:, None] >= jnp.arange({m}), {x}, {d.number()})")
    elif how == 1:
        x = s.pick(low=2, high=3)
        s.expression(f"jnp.{d.one(('tril', 'triu'))}({x})")
    elif how == 2:
        n = d.shape(1)[0]
        constant = f"asarray(np.arange({2 * n}.0).reshape(2, {n}) / 7)"
        ways = (f"eye({n})", f"linspace(0.0, 1.0, {n})", f"arange({n}) * 0.5", f"ones(({n}, 2))", constant)
        s.expression(f"jnp.{d.one(ways)}")
    elif how == 3:
        shape = d.shape(d.between(1, 2))
        many = f"jax.random.split(jax.random.key(3), {shape[0]})"
        text = d.one(
            (
                f"jax.random.normal(jax.random.key({d.between(0, 9)}), {shape})",
                f"jax.random.uniform(jax.random.PRNGKey({d.between(0, 9)}), {shape})",
                f"jax.vmap(lambda key: jax.random.normal(key, {shape[1:]}))({many})",
                f"jax.random.bernoulli(jax.random.fold_in(jax.random.key(1), 5), 0.7, {shape})",
                f"jax.random.permutation(jax.random.key(2), {shape[0]})",
            )
        )
        s.expression(text)
    else:
        x = s.pick(low=1, high=3)
        s.expression(f"{x} * jax.random.bernoulli(jax.random.key({d.between(0, 9)}), 0.5, {s.shape(x)}) * 2", 2)


def convolution(s: Scope) -> None:
    """Over one or two dims."""
    d = s.draw
    ndim = d.one((3, 4))
    sizes = d.shape(ndim)
    x = s.pick(low=3, high=4) if d.chance(0.4) else s.input(sizes)
    shape = s.shape(x)
    space = len(shape) - 2
    channels = shape[-1]
    groups = channels if d.chance(0.25) else 1
    kernel = tuple(d.between(1, min(3, n)) for n in shape[1:-1])
    out = d.one((1, 2)) * groups if groups > 1 else d.one((2, 4))
    w = s.input((*kernel, channels // groups, out))
    numbers = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[space]
    padding = d.one(("'SAME'", "'VALID'", str(tuple((d.between(0, 1), d.between(0, 1)) for _ in kernel))))
    strides = tuple(d.one((1, 1, 2)) for _ in kernel)
    dilation = f", rhs_dilation={tuple(d.one((1, 2)) for _ in kernel)}" if padding == "'SAME'" and d.chance(0.3) else ""
    dilation += f", lhs_dilation={tuple(d.one((1, 2)) for _ in kernel)}" if padding[0] == "(" and d.chance(0.3) else ""
    s.expression(
        f"lax.conv_general_dilated({x}, {w}, {strides}, {padding}, dimension_numbers={numbers}, "
        f"feature_group_count={groups}{dilation})",
        2 * math.prod(kernel) * channels // groups,
    )


def pooling(s: Scope) -> None:
    """Windows."""
    d = s.draw
    x = s.pick(low=1, high=4)
    shape = s.shape(x)
    window = tuple(d.between(1, min(3, n)) for n in shape)
    strides = tuple(d.one((1, 1, 2)) for _ in shape)
    padding = d.one(("SAME", "VALID"))
    kind = d.one(("-jnp.inf, lax.max", "0.0, lax.add", "jnp.inf, lax.min"))
    s.expression(f"lax.reduce_window({x}, {kind}, {window}, {strides}, {padding!r})", 4)


def placing(s: Scope) -> None:
    """A mark of the user's."""
    d = s.draw
    x = s.pick("fib")
    var = s.env[x]
    if d.chance(0.3):
        placements = d.placements(var.shape, var.dtype, partial=0, uneven=False)
        if isinstance(placements, P):
            s.expression(f"by_spec({x}, {P(*placements, *[None] * (len(var.shape) - len(placements)))!r})")
            return
    partial = 0.15 if np.dtype(var.dtype).kind == "f" else 0
    placements = d.placements(var.shape, var.dtype, partial=partial, uneven=d.chance(0.2))
    s.expression(f"constrain({x}, {placements!r})")


def linear_algebra(s: Scope) -> None:
    """Of matrices."""
    d = s.draw
    x = s.pick(low=2, high=3, where=lambda v: math.prod(v.shape) <= 128)
    n = s.shape(x)[-2]
    how = d.between(0, 2)
    spd = f"jnp.einsum('...ij,...kj->...ik', jnp.tanh({x}), jnp.tanh({x})) + 2 * jnp.eye({n})"
    if how == 0:
        s.expression(f"jnp.linalg.cholesky({spd})")
    elif how == 1:
        s.expression(f"jax.scipy.linalg.solve_triangular(jnp.tril({spd}), {x}, lower=True)")
    else:
        s.expression(f"jnp.fft.{d.one(('fft', 'rfft'))}({x}, axis={_axis(s, x)}).real", 8)


# --- lines that call functions --------------------------------------------------------------------


def gradient(s: Scope) -> None:
    """Of a function of what there is."""
    s.add(s.differentiated(s.draw.between(2, 6)), 20)


def curvature(s: Scope) -> None:
    """Second derivatives, and forward mode."""
    d, inner = s.draw, s.child()
    inner.fill(d.between(1, 4))
    s.env = {**{n: v for n, v in inner.env.items() if n.startswith("x")}, **s.env}
    result = s.scalar(inner, 1)
    block = Block(d.new("f"), (), live(inner.lines, set(_NAME.findall(result))), result)
    at = d.one(s.free(block))
    block = dataclasses.replace(block, parameters=(at,))
    text = d.one(("jax.jvp(jax.grad({0}), ({1},), (jnp.cos({1}),))[1]", "jax.jvp({0}, ({1},), ({1},))[1]"))
    s.add(Line((d.new(),), text.format(block.name, at), (block,)), 50)


def called(s: Scope) -> None:
    """Checkpointed, jitted, mapped."""
    d = s.draw
    inner = s.child()
    inner.fill(d.between(2, 4))
    s.env = {**{n: v for n, v in inner.env.items() if n.startswith("x")}, **s.env}
    made = [t for line in inner.lines for t in line.targets if t in inner.env]
    if not made:
        raise Skip
    result = made[-1]
    block = Block(d.new("f"), (), live(inner.lines, {result}), result)
    free = s.free(block)
    how = d.one(
        ("jax.checkpoint({0})", "jax.jit({0})", "jax.checkpoint({0}, policy=jax.checkpoint_policies.dots_saveable)")
    )
    block = dataclasses.replace(block, parameters=tuple(free))
    s.add(
        Line((d.new(),), f"{how.format(block.name)}({', '.join(free)})", (block,)), max(1.0, inner.env[result].size / 4)
    )


def mapped(s: Scope) -> None:
    """``vmap`` over a dim."""
    d = s.draw
    x = s.pick(low=2)
    axis = d.between(0, len(s.shape(x)) - 1)
    shape = list(s.shape(x))
    del shape[axis]
    row = d.new()
    inner = s.child({row: Var(tuple(shape), np.dtype("float64"), s.env[x].size)})
    inner.expression(d.one(UNARY)[0].format(row), 4)
    inner.fill(d.between(1, 3))
    s.env = {**{n: v for n, v in inner.env.items() if n.startswith("x")}, **s.env}
    result = inner.lines[-1].targets[-1]
    block = Block(d.new("f"), (row,), live(inner.lines, {result}), result)
    s.add(Line((d.new(),), f"jax.vmap({block.name}, in_axes={axis})({x})", (block,)), 8)


def _ending(s: Scope, inner: Scope, shape: tuple[int, ...], carry: str) -> str:
    """A float of the carry's shape."""
    made = [t for line in inner.lines for t in line.targets if t in inner.env and inner.env[t].dtype == np.float64]
    fit = [t for t in made if inner.env[t].shape == shape]
    if fit:
        return f"jnp.tanh({fit[-1]}) + 0.5 * {carry}" if s.draw.chance(0.5) else f"jnp.sin({fit[-1]})"
    if not made:
        raise Skip
    return f"jnp.sin({carry} + jnp.mean({made[-1]}))"


def scan(s: Scope) -> None:
    """A loop with a carry, over the first dim of something."""
    d = s.draw
    init = s.pick(high=3, where=lambda v: v.dtype == np.float64)
    over = s.pick(low=1, high=3)
    carry, x = d.new(), d.new()
    shape = s.shape(init)
    parameters = {carry: Var(shape, np.dtype("float64"), 2.0), x: Var(s.shape(over)[1:], s.env[over].dtype, 2.0)}
    inner = s.child(parameters)
    inner.fill(d.between(1, 4))
    s.env = {**{n: v for n, v in inner.env.items() if n.startswith("x")}, **s.env}
    end = _ending(s, inner, shape, carry)
    made = [t for line in inner.lines for t in line.targets if t in inner.env]
    out = d.one([*made, x])
    text = f"({end} + 0 * jnp.sum({x}), {out})"
    block = Block(d.new("f"), (carry, x), live(inner.lines, set(_NAME.findall(text))), text)
    more = d.one(("", "", ", reverse=True", ", unroll=2"))
    s.add(Line((d.new(), d.new()), f"lax.scan({block.name}, {init}, {over}{more})", (block,)))


def loop(s: Scope) -> None:
    """``while`` and ``fori``, a few times."""
    d = s.draw
    init = s.pick(high=3, where=lambda v: v.dtype == np.float64)
    carry, i = d.new(), d.new()
    shape = s.shape(init)
    inner = s.child({carry: Var(shape, np.dtype("float64"), 2.0)})
    inner.fill(d.between(1, 3))
    s.env = {**{n: v for n, v in inner.env.items() if n.startswith("x")}, **s.env}
    end = _ending(s, inner, shape, carry)
    name = d.new("f")
    if d.chance(0.4):
        block = Block(name, (i, carry), live(inner.lines, set(_NAME.findall(end))), end)
        s.add(Line((d.new(),), f"lax.fori_loop(0, {d.between(1, 4)}, {name}, {init})", (block,)))
        return
    block = Block(name, (carry,), live(inner.lines, set(_NAME.findall(end))), end)
    test = d.one(("", f" & (jnp.max(jnp.abs(c[1])) < {d.one((0.9, 5))})"))
    goes_on, step = f"lambda c: (c[0] < {d.between(1, 4)}){test}", f"lambda c: (c[0] + 1, {name}(c[1]))"
    s.add(Line((d.new(),), f"lax.while_loop({goes_on}, {step}, (0, {init}))[1]", (block,)))


def branches(s: Scope) -> None:
    """``cond`` and ``switch``."""
    d = s.draw
    x = s.pick(high=3, where=lambda v: v.dtype == np.float64)
    shape, blocks = s.shape(x), []
    for _ in range(d.one((2, 2, 3))):
        mine = d.new()
        inner = s.child({mine: Var(shape, np.dtype("float64"), 2.0)})
        inner.fill(d.between(1, 3))
        s.env = {**{n: v for n, v in inner.env.items() if n.startswith("x")}, **s.env}
        end = _ending(s, inner, shape, mine)
        blocks.append(Block(d.new("f"), (mine,), live(inner.lines, set(_NAME.findall(end))), end))
    if len(blocks) == 2:
        test = d.one((f"jnp.sum({x}) > 0.1", f"{s.input((), 'bool')}"))
        text = f"lax.cond({test}, {blocks[0].name}, {blocks[1].name}, {x})"
    else:
        text = f"lax.switch({s.indices((), 3)}, [{', '.join(b.name for b in blocks)}], {x})"
    s.add(Line((d.new(),), text, tuple(blocks)))


INNER = (
    (unary, 6),
    (binary, 6),
    (boolean, 2),
    (cast, 1.5),
    (dot, 3),
    (matmul, 3),
    (reduction, 4),
    (extreme, 0.7),
    (cumulative, 1),
    (expand, 1.5),
    (reshape, 3),
    (arrange, 2),
    (together, 1.5),
    (part, 2),
    (dynamic, 1.5),
    (indexing, 2.5),
    (normal_form, 2),
    (attention, 0.5),
    (ordering, 1),
    (made, 1.5),
    (convolution, 0.7),
    (pooling, 0.7),
    (placing, 1.5),
    (linear_algebra, 0.3),
    (gradient, 0.2),
    (called, 0.3),
    (scan, 0.3),
    (loop, 0.15),
    (branches, 0.15),
)
OUTER = (
    *[(rule, weight) for rule, weight in INNER if rule not in (gradient, called, scan, loop, branches)],
    (gradient, 1.5),
    (curvature, 0.4),
    (called, 1.5),
    (mapped, 0.8),
    (scan, 1.5),
    (loop, 1),
    (branches, 1),
)
