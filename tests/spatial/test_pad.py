"""ring_pad and ring_roll against jnp on one device: values, derivatives, shardings and compiled collectives."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.collectives import read_collectives
from shardkit.spatial.pad import ring_pad, ring_roll

CI_SLICE, FULL_SWEEP = 20, 120
JNP = {"zeros": "constant", "circular": "wrap", "replicate": "edge"}
MESHES = ({"sp": 1}, {"sp": 2}, {"sp": 4}, {"sp": 8}, {"dp": 2, "sp": 4}, {"sq": 2, "sp": 4})


@dataclasses.dataclass(frozen=True)
class Case:
    """One pad (widths and a mode) or roll (shifts) of dims 1, 2, ... of an array."""

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple[Any, int], ...]
    shape: tuple[int, ...]
    widths: tuple[tuple[int, int], ...] = ()
    mode: str = "zeros"
    values: Any = 0
    shifts: tuple[int, ...] = ()

    def make_mesh(self, axis_types="auto"):
        return sk.make_mesh(dict(self.mesh), axis_types=axis_types)

    def placements(self):
        named = [((a,) if isinstance(a, str) else a, d) for a, d in self.axes]
        return {a: sk.Shard(d) for axes, d in named for a in axes}

    def ring(self, mesh=None):
        keywords = {"spatial_axes": dict(self.axes), "mesh": mesh}
        if self.shifts:
            return lambda x: ring_roll(x, self.shifts, tuple(range(len(self.shape))), **keywords)
        return lambda x: ring_pad(x, self.widths, self.mode, constant_values=self.values, **keywords)

    def reference(self, x):
        """jnp on one device; crops by slicing the array padded on the other sides."""
        if self.shifts:
            return jnp.roll(x, self.shifts, tuple(range(len(self.shape))))
        mode = JNP.get(self.mode, self.mode)
        extra = {"constant_values": self.values} if mode == "constant" else {}
        grown = jnp.pad(x, [(max(lo, 0), max(hi, 0)) for lo, hi in self.widths], mode, **extra)
        return grown[tuple(slice(max(-lo, 0), n - max(-hi, 0)) for n, (lo, hi) in zip(grown.shape, self.widths))]  # noqa: B905


def draw(rng: random.Random) -> Case:
    """One random configuration."""
    while True:
        mesh = rng.choice(MESHES)
        count = rng.choice((1, 2, 3))
        space = [a for a in mesh if a != "dp"]
        dims = rng.sample(range(count), min(count, len(space)))
        axes = tuple(zip(space, dims, strict=False))
        if len(space) == 2 and count == 1:
            axes = ((("sq", "sp"), 0),)
        shape = tuple(rng.choice((rng.randint(1, 20), 8, 16)) for _ in range(count))
        case = Case(tuple(mesh.items()), axes, shape)
        if rng.random() < 0.4:
            return dataclasses.replace(case, shifts=tuple(rng.randint(-30, 30) for _ in shape))
        mode = rng.choice(("zeros", "circular", "reflect", "replicate", "symmetric", "constant", "wrap", "edge"))
        widths = tuple((rng.randint(-2, 6), rng.randint(-2, 6)) for _ in shape)
        if mode == "constant":
            case = dataclasses.replace(
                case, values=rng.choice((2.5, (1.0, -3.0), tuple((i, i + 0.5) for i in range(count))))
            )
        if mode == "reflect" and any(max(w) >= n > 1 for w, n in zip(widths, shape, strict=True)):
            continue
        if any(n + sum(w) < 1 or n + min(w) < 1 for w, n in zip(widths, shape, strict=True)):
            continue
        if mode not in ("zeros", "constant") and any(max(w) > 0 and min(w) < 0 for w in widths) and 1 in shape:
            continue
        return dataclasses.replace(case, widths=widths, mode=mode)


def derivatives(function):
    def run(x, cotangent, dx):
        out, pull = jax.vjp(function, x)
        return out, pull(cotangent)[0], jax.jvp(function, (x,), (dx,))[1]

    return run


def entered(mesh, axis_types):
    return jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext()


def check(case: Case, axis_types="auto"):
    mesh = case.make_mesh(axis_types)
    rng = np.random.default_rng(0)
    shape = jax.eval_shape(case.reference, jax.ShapeDtypeStruct(case.shape, np.float64)).shape
    x, dx, cotangent = (rng.normal(size=s) for s in (case.shape, case.shape, shape))
    want = jax.jit(derivatives(case.reference))(x, cotangent, dx)

    def put(a):
        return sk.shard_tensor(a, case.placements(), mesh, uneven="pad")

    # Padded whatever the size: it carries any size through jit without being gathered.
    args = [as_padded(put(a)) for a in (x, cotangent, dx)]
    with entered(mesh, axis_types):
        compiled = jax.jit(derivatives(case.ring(mesh))).lower(*args).compile()
        got = compiled(*args)
    assert got[0].shape == shape
    for a, b in zip(got, want, strict=True):
        assert sk.placements(a) == sk.Layout(mesh, case.placements()).placements
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-10)
    report = read_collectives(compiled.as_text(), mesh)
    assert set(report.by_kind()) <= {"collective_permute"}, str(report)
    return report


def as_padded(x):
    return x if isinstance(x, sk.Padded) else sk.Padded(x, x.shape)


def sweep(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize("number", range(CI_SLICE))
@pytest.mark.every(3)
def test_random_configurations(number):
    check(sweep(CI_SLICE, seed=2026)[number], "explicit" if number % 4 == 3 else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FULL_SWEEP))
def test_random_configurations_in_full(number):
    check(sweep(FULL_SWEEP, seed=5)[number], "explicit" if number % 4 == 3 else "auto")


SP4, SP8 = (("sp", 4),), (("sp", 8),)


@pytest.mark.parametrize(
    ("mesh", "size", "shift", "permutes", "elements"),
    [
        (SP4, 16, 1, 1, 1),
        (SP4, 16, -3, 1, 3),
        (SP4, 16, 4, 1, 4),
        (SP4, 16, -8, 1, 4),
        (SP4, 16, 6, 2, 4),
        (SP4, 16, 16, 0, 0),
        (SP4, 16, -48, 0, 0),
        (SP4, 16, 33, 1, 1),
        (SP8, 8, 3, 1, 1),
        ((("sp", 2),), 8, 3, 1, 3),
    ],
)
def test_rolls_move_what_they_must(mesh, size, shift, permutes, elements):
    case = Case(mesh, (("sp", 0),), (size,), shifts=(shift,))
    m = case.make_mesh()
    x = sk.shard_tensor(np.arange(float(size)), case.placements(), m)
    compiled = jax.jit(case.ring(m)).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), np.roll(np.arange(float(size)), shift))
    report = read_collectives(compiled.as_text(), m)
    assert report.count("collective_permute") == report.count() == permutes
    assert report.bytes() == 8 * elements


@pytest.mark.not_smoke
def test_named_pads():
    """One element on each side of blocks of 4; four times around a circle; wider than a block."""
    check(Case(SP4, (("sp", 1),), (2, 14), ((0, 0), (1, 1)), "circular"))
    check(Case(SP4, (("sp", 0),), (8,), ((19, 13),), "circular"))
    check(Case(SP4, (("sp", 0),), (5,), ((9, 7),), "symmetric"), "explicit")
    check(Case(SP8, (("sp", 0),), (16,), ((-7, 0),)))
    report = check(Case(SP4, (("sp", 0),), (16,), ((2, 2),)))
    assert report.count("collective_permute") <= 6  # two each way, and for the tangent


@pytest.mark.not_smoke
def test_forms_of_pad_width_and_dtypes():
    mesh = sk.make_mesh({"sp": 4})
    x = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    by_dim = [({1: (1, 2)}, ((0, 0), (1, 2), (0, 0))), ({-2: 3}, ((0, 0), (3, 3), (0, 0)))]
    alike = [1, (1, 2), ((1, 2),), ((0, 1), (2, 0), (1, 1)), np.array([[0, 0], [2, 2], [0, 0]])]
    for given, meant in [*by_dim, *((g, g) for g in alike)]:
        np.testing.assert_array_equal(ring_pad(x, given, spatial_axes={"sp": "W"}, mesh=mesh), np.pad(x, meant))
    flags = x % 2 == 0
    out = ring_pad(flags, 1, "constant", constant_values=True, spatial_axes={"sp": 1}, mesh=mesh)
    assert out.dtype == bool
    np.testing.assert_array_equal(out, np.pad(flags, 1, constant_values=True))


@pytest.mark.not_smoke
def test_inside_a_manual_region_and_transformations():
    mesh = sk.make_mesh({"sp": 4})
    x = np.random.default_rng(0).normal(size=(3, 16))
    run = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))  # noqa: E731
    rolled = run(lambda b: ring_roll(b, 5, 1, spatial_axes={"sp": 1}))
    np.testing.assert_array_equal(jax.jit(rolled)(x), np.roll(x, 5, 1))
    padded = run(lambda b: ring_pad(b, ((0, 0), (3, 5)), "reflect", spatial_axes={"sp": 1}))
    np.testing.assert_array_equal(jax.jit(padded)(x), np.pad(x, ((0, 0), (3, 5)), "reflect"))
    uneven = run(lambda b: ring_pad(b, ((0, 0), (1, 1)), "edge", spatial_axes={"sp": 1}).array)
    np.testing.assert_array_equal(jax.jit(uneven)(x)[:, :18], np.pad(x, ((0, 0), (1, 1)), "edge"))
    many = np.stack([x, 2 * x])
    common = {"spatial_axes": {"sp": 1}, "mesh": mesh}
    ring = lambda x: ring_roll(ring_pad(x, 2, "wrap", **common), 3, 1, **common)  # noqa: E731
    plain = lambda x: jnp.roll(jnp.pad(x, 2, "wrap"), 3, 1)  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.vmap(ring))(many), jax.vmap(plain)(many), atol=1e-10)
    second = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x) ** 2)))(x)  # noqa: E731
    np.testing.assert_allclose(second(ring), second(plain), atol=1e-10)


@pytest.mark.parametrize(
    ("width", "keywords", "message"),
    [
        (1, {"mode": "mirror"}, "mode='mirror' is unknown; use one of"),
        (8, {"mode": "reflect"}, r"reflects more than the 8 elements of dim 0 hold; pad at most 7"),
        ((-5, -3), {}, r"leaves nothing of the 8 elements of dim 0"),
        (((1, 1), (1, 1)), {}, "has 2 pairs for 1 dims"),
        (1.5, {}, "must be an integer, a .before, after. pair"),
        ((1, 2, 3), {}, "must be an integer, a .before, after. pair"),
        ({3: 1}, {}, "names dim 3, but the array has 1 dims"),
        (1, {"constant_values": (1, 2, 3)}, "must be a number, a .before, after. pair"),
        (1, {"mode": "edge", "constant_values": 1}, "has no meaning with mode='edge'"),
    ],
)
def test_bad_pads_are_named(width, keywords, message):
    mesh = sk.make_mesh({"sp": 4})
    with pytest.raises(ValueError, match=message):
        ring_pad(np.ones(8), width, **keywords, spatial_axes={"sp": 0}, mesh=mesh)


def test_bad_rolls_are_named():
    mesh = sk.make_mesh({"sp": 4})
    for shift, axis, message in [
        (1, None, "axis=None rolls the flattened array"),
        (1, 2, "axis=2 is out of range"),
        ((1, 2), (0, 0, 0), "must be integers, or one shift for each"),
        (0.5, 0, "must be integers"),
    ]:
        with pytest.raises(ValueError, match=message):
            ring_roll(np.ones(8), shift, axis, spatial_axes={"sp": 0}, mesh=mesh)
    with pytest.raises(TypeError, match="can't be traced"):
        jax.jit(lambda s: ring_roll(np.ones(8), s, 0, spatial_axes={"sp": 0}, mesh=mesh))(1)
    with pytest.raises(TypeError, match="constant_values is traced"):
        jax.jit(lambda v: ring_pad(np.ones(8), 1, constant_values=v, spatial_axes={"sp": 0}, mesh=mesh))(1.0)
