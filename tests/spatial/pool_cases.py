"""Random windowed reductions, and the same ones on one device: the oracle of the pooling tests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.pooling.pool import ring_avg_pool, ring_max_pool, ring_min_pool, ring_reduce_window
from shardkit.spatial.windows import Window, extended_index
from tests.spatial.conv_cases import MESHES


def first_largest(patches):
    """The maximum over the last dim, whose gradient goes to the first that attains it."""
    return jnp.take_along_axis(patches, jnp.argmax(patches, -1, keepdims=True), -1)[..., 0]


def safe_logsumexp(patches):
    """jax.nn.logsumexp, whose gradient where everything is minus infinity is a NaN: a zero here."""
    empty = jnp.isneginf(patches).all(-1, keepdims=True)
    total = jax.nn.logsumexp(jnp.where(empty, 0, patches), -1)
    return jnp.where(empty[..., 0], -jnp.inf, total)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A reduction: lax's form, its identity, and its definition over patches ``[..., taps]``."""

    computation: Callable
    init: float
    over_patches: Callable
    pool: Callable | None = None  # the function under test where it isn't ring_reduce_window


KINDS = {
    "max pool": Kind(lax.max, -np.inf, first_largest, ring_max_pool),
    "min pool": Kind(lax.min, np.inf, lambda p: -first_largest(-p), ring_min_pool),
    "avg pool": Kind(lax.add, 0.0, lambda p: p.mean(-1), ring_avg_pool),
    "add": Kind(lax.add, 0.0, lambda p: p.sum(-1)),
    "max": Kind(lax.max, -np.inf, first_largest),
    "mul": Kind(lax.mul, 1.0, lambda p: p.prod(-1)),
    "logaddexp": Kind(jnp.logaddexp, -np.inf, safe_logsumexp),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that defines one sharded reduction of a channels-last array."""

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple, ...]  # mesh axis (or axes) -> letter
    letters: str  # spatial dims, e.g. "HW"
    sizes: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] | str = "SAME"
    base_dilation: tuple[int, ...] = ()
    window_dilation: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    kind: str = "max pool"
    batch: tuple[int, ...] = (2,)
    features: int = 3
    batch_axis: str | None = None
    ties: bool = False

    def per_dim(self, values, default=1):
        return tuple(values) or (default,) * len(self.letters)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, *self.sizes, self.features)

    def dim(self, letter: str) -> int:
        return len(self.batch) + self.letters.index(letter)

    def operand(self, seed: int = 0):
        """Mostly negative numbers, so that a zero from anywhere would win a maximum; with ties, small integers."""
        x = np.random.default_rng(seed).normal(size=self.shape) * 2 - 2
        return np.round(x) if self.ties else x

    def placements(self) -> dict:
        placed = {}
        for axis, letter in self.axes:
            for name in (axis,) if isinstance(axis, str) else axis:
                placed[name] = sk.Shard(self.dim(letter))
        if self.batch_axis:
            placed[self.batch_axis] = sk.Shard(0)
        return placed

    def make_mesh(self, axis_types="auto"):
        return sk.make_mesh(dict(self.mesh), axis_types=axis_types)

    def windows(self) -> list[Window]:
        """One a spatial dim."""
        pads, strides, dilation = self.padding, self.per_dim(self.strides), self.per_dim(self.window_dilation)
        if isinstance(pads, str):
            reach = [(k - 1) * d + 1 for k, d in zip(self.window, dilation, strict=True)]
            pads = lax.padtype_to_pads(self.sizes, reach, strides, pads)
        base = self.per_dim(self.base_dilation)
        return [
            Window(n, k, s, lo, hi, a, b)
            for n, k, s, (lo, hi), a, b in zip(self.sizes, self.window, strides, pads, base, dilation, strict=True)
        ]

    def reference(self, x):
        """By definition: every window laid out tap by tap from an index table, then reduced."""
        kind, lead = KINDS[self.kind], len(self.batch)
        # The table is made by the same moves on the numbers of the elements; the last one stands for none.
        numbers = np.arange(x.size).reshape(x.shape)
        for i, (w, mode) in enumerate(zip(self.windows(), self.per_dim(self.modes, "zeros"), strict=True)):
            position = np.arange(w.output_size)[:, None] * w.stride - w.pad_lo + np.arange(w.kernel) * w.rhs_dilation
            index = np.array([[_element(p, w, mode) for p in row] for row in position])
            with_none = np.concatenate([numbers, np.full_like(numbers.take([0], lead + i), x.size)], lead + i)
            numbers = np.moveaxis(with_none.take(index, lead + i), lead + i + 1, -1)
        elements = jnp.append(jnp.ravel(x), kind.init)
        return kind.over_patches(elements[numbers.reshape(*numbers.shape[: x.ndim], -1)])

    def by_lax(self, x):
        """lax.reduce_window itself, where edges are lax's."""
        ones = (1,) * len(self.batch)

        def full(values):
            return (*ones, *self.per_dim(values), 1)

        pads = [(0, 0)] * len(self.batch) + [(w.pad_lo, w.pad_hi) for w in self.windows()] + [(0, 0)]
        kind = KINDS[self.kind]
        out = lax.reduce_window(
            x,
            kind.init,
            kind.computation,
            full(self.window),
            full(self.strides),
            pads,
            full(self.base_dilation),
            full(self.window_dilation),
        )
        return out / np.prod(self.window) if self.kind == "avg pool" else out

    def ring(self, mesh=None, **changes):
        """The function under test."""
        kind, modes = KINDS[self.kind], self.per_dim(self.modes, "zeros")
        shared = {"spatial_axes": dict(self.axes), "mesh": mesh, "window_dilation": self.per_dim(self.window_dilation)}
        if kind.pool is not None:
            shared |= {"strides": self.per_dim(self.strides), "padding": self.padding, "padding_mode": modes}
            keywords = shared | changes
            return lambda x: kind.pool(x, self.window, **keywords)
        lead = len(self.batch)

        def full(values, outer=1):
            return (*(outer,) * lead, *self.per_dim(values, outer), outer)

        # By number: without batch dims letters would mean other dims here.
        shared["spatial_axes"] = {axis: self.dim(letter) for axis, letter in self.axes}
        shared |= {"window_strides": full(self.strides), "base_dilation": full(self.base_dilation)}
        shared |= {"window_dilation": full(self.window_dilation), "padding_mode": full(self.modes, "zeros")}
        padding = self.padding if isinstance(self.padding, str) else full(self.padding, (0, 0))
        keywords = shared | {"padding": padding} | changes
        return lambda x: ring_reduce_window(x, kind.init, kind.computation, full(self.window), **keywords)


def _element(position: int, window: Window, mode: str) -> int:
    """The element at a dilated position, -1 for none."""
    if position % window.lhs_dilation:
        return -1
    element = extended_index(position // window.lhs_dilation, window.size, mode)
    return -1 if element is None else element


def draw(rng: random.Random) -> Case:
    """One random configuration that has an output."""
    while True:
        count = rng.choice((1, 1, 2, 2, 3))
        mesh = rng.choice(MESHES)
        letters = "DHW"[-count:]
        space = [a for a, _ in mesh if a != "dp"]
        cut = rng.sample(letters, min(len(space), count))
        kind = rng.choice(tuple(KINDS))
        pooling = KINDS[kind].pool is not None
        modes = tuple(rng.choice(("zeros", "zeros", "zeros", "circular", "reflect", "replicate")) for _ in letters)
        lowest = 0 if any(m != "zeros" for m in modes) else -1
        largest = 7 if count == 3 else 12 if count == 2 else 30
        case = Case(
            mesh=mesh,
            axes=tuple(zip(space, cut, strict=False)),
            letters=letters,
            sizes=tuple(rng.randint(1, largest) for _ in letters),
            window=tuple(rng.randint(1, 3) for _ in letters),
            strides=tuple(rng.randint(1, 3) for _ in letters),
            padding=tuple((rng.randint(lowest, 3), rng.randint(lowest, 3)) for _ in letters),
            base_dilation=() if pooling else tuple(rng.choice((1, 1, 2, 3)) for _ in letters),
            window_dilation=tuple(rng.choice((1, 1, 1, 2, 3)) for _ in letters),
            modes=modes,
            kind=kind,
            batch=rng.choice(((), (2,), (2,), (2, 3))),
            features=rng.choice((1, 2)),
            ties=rng.random() < 0.5,
        )
        if mesh[0][0] == "dp" and case.batch and rng.random() < 0.7:
            case = dataclasses.replace(case, batch_axis="dp")
        if any(w.output_size < 1 for w in case.windows()):
            continue
        if any(m == "reflect" and max(p) >= s for m, p, s in zip(modes, case.padding, case.sizes, strict=True)):
            continue
        return case


SP2, SP4, SP8 = (("sp", 2),), (("sp", 4),), (("sp", 8),)
W = (("sp", "W"),)
NAMED = {
    "k=3 s=2 on two shards of 4": Case(SP2, W, "W", (8,), (3,), (2,)),
    "k=s=2 on shards of 5": Case(SP2, W, "W", (10,), (2,), (2,), "VALID"),
    "VALID, output not divisible": Case(SP4, W, "HW", (6, 16), (3, 3), (2, 1), "VALID"),
    "5 over 4: a short and an empty shard": Case(SP4, W, "W", (5,), (3,)),
    "halo wider than a block": Case(SP8, W, "W", (16,), (9,)),
    "dilated window, ties": Case(SP4, W, "HW", (7, 13), (3, 3), window_dilation=(1, 2), ties=True),
    "dilated window, min": Case(SP4, W, "HW", (7, 13), (2, 3), (1, 2), window_dilation=(2, 2), kind="min pool"),
    "window is stride, nothing to send": Case(SP4, W, "HW", (6, 16), (2, 2), (2, 2), "VALID"),
    "stride beyond the window": Case(SP4, W, "W", (17,), (1,), (3,), "VALID"),
    "cropping padding": Case(SP4, W, "W", (17,), (3,), padding=((-2, -1),), kind="add"),
    "wide padding": Case(SP4, W, "W", (6,), (2,), padding=((4, 5),)),
    "base dilation, phases differ": Case(
        SP4, W, "W", (10,), (2,), (3,), ((1, 2),), base_dilation=(2,), window_dilation=(2,), kind="max", ties=True
    ),
    "base dilation, unit stride": Case(SP4, W, "W", (7,), (4,), (1,), ((2, 2),), base_dilation=(3,), kind="add"),
    "globe: circular W, replicated H": Case(
        (("sq", 2), ("sp", 4)),
        (("sq", "H"), ("sp", "W")),
        "HW",
        (9, 18),
        (3, 5),
        padding=((1, 1), (2, 2)),
        modes=("replicate", "circular"),
        ties=True,
    ),
    "two axes on one dim": Case((("sq", 2), ("sp", 4)), ((("sq", "sp"), "W"),), "W", (19,), (3,), kind="avg pool"),
    "volume sharded in D and W": Case(
        (("sq", 2), ("sp", 4)), (("sq", "D"), ("sp", "W")), "DHW", (6, 3, 12), (3, 2, 3), (2, 1, 1), ties=True
    ),
    "no batch, batch axis unused": Case((("dp", 2), ("sp", 4)), W, "HW", (4, 9), (2, 3), batch=(), kind="mul"),
    "batch sharded too": Case((("dp", 2), ("sp", 4)), W, "HW", (5, 13), (3, 3), batch=(4,), batch_axis="dp"),
}
