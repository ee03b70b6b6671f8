"""ring_resize against jax.image on one device: values, derivatives, shardings and compiled collectives."""

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
from shardkit.spatial.resizing.resize import ring_resize, ring_scale_and_translate
from shardkit.spatial.resizing.weights import METHODS

CI_SLICE, FULL_SWEEP = 24, 180
MESHES = ({"sp": 1}, {"sp": 2}, {"sp": 4}, {"sp": 8}, {"dp": 2, "sp": 4}, {"sq": 2, "sp": 4})


@dataclasses.dataclass(frozen=True)
class Case:
    """One resize, or (with scales) one scale_and_translate of all dims but the first and last."""

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple[Any, int], ...]
    shape: tuple[int, ...]
    out: tuple[int, ...]
    method: str = "linear"
    antialias: bool = True
    scales: tuple[float, ...] = ()
    shifts: tuple[float, ...] = ()
    batch_axis: str | None = None

    def make_mesh(self, axis_types="auto"):
        return sk.make_mesh(dict(self.mesh), axis_types=axis_types)

    def placements(self):
        named = [((a,) if isinstance(a, str) else a, d) for a, d in self.axes]
        placed = {a: sk.Shard(d) for axes, d in named for a in axes}
        return placed | ({self.batch_axis: sk.Shard(0)} if self.batch_axis else {})

    def ring(self, mesh=None):
        common = {"antialias": self.antialias, "spatial_axes": dict(self.axes), "mesh": mesh}
        if not self.scales:
            return lambda x: ring_resize(x, self.out, self.method, **common)
        dims = range(1, len(self.shape) - 1)
        return lambda x: ring_scale_and_translate(x, self.out, dims, self.scales, self.shifts, self.method, **common)

    def reference(self, x):
        if self.scales:
            dims = tuple(range(1, len(self.shape) - 1))
            warp = jnp.asarray(self.scales), jnp.asarray(self.shifts)
            return jax.image.scale_and_translate(x, self.out, dims, *warp, self.method, self.antialias)
        if self.method != "nearest":
            return jax.image.resize(x, self.out, self.method, self.antialias)
        for d, (m, n) in enumerate(zip(self.shape, self.out, strict=True)):  # see test_resize_weights.py
            x = jnp.take(x, (2 * np.arange(n) + 1) * m // (2 * n), axis=d)
        return x


def draw(rng: random.Random) -> Case:
    """One random configuration."""
    mesh = rng.choice(MESHES)
    count = rng.choice((1, 2, 2))
    space = [a for a in mesh if a != "dp"]
    dims = rng.sample(range(1, count + 1), min(count, len(space)))
    axes: Any = tuple(zip(space, dims, strict=False))
    if len(space) == 2 and count == 1:
        axes = ((("sq", "sp"), 1),)
    sizes = [rng.choice((rng.randint(1, 30), 8, 16)) for _ in range(count)]
    outs = [rng.choice((rng.randint(1, 40), 2 * n, max(1, n // 2), n)) for n in sizes]
    case = Case(
        tuple(mesh.items()),
        axes,
        (2, *sizes, 3),
        (2, *outs, rng.choice((3, 3, 2))),
        rng.choice(METHODS),
        rng.random() < 0.7,
        batch_axis="dp" if "dp" in mesh and rng.random() < 0.7 else None,
    )
    if case.method != "nearest" and rng.random() < 0.25:
        case = dataclasses.replace(
            case,
            out=(2, *outs, 3),
            scales=tuple(rng.choice((n / m, rng.uniform(0.3, 3), -1.0)) for m, n in zip(sizes, outs, strict=True)),
            shifts=tuple(rng.choice((0.0, 1.0, rng.uniform(-5, 20))) for _ in sizes),
        )
    return case


def derivatives(function):
    def run(x, cotangent, dx):
        out, pull = jax.vjp(function, x)
        return out, pull(cotangent)[0], jax.jvp(function, (x,), (dx,))[1]

    return run


def entered(mesh, axis_types):
    return jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext()


def dirtied(x):
    """The same Padded, with NaN where nothing counts."""
    if not isinstance(x, sk.Padded):
        return sk.Padded(x, x.shape)
    inside = np.zeros(x.array.shape, bool)
    inside[tuple(slice(0, n) for n in x.shape)] = True
    return sk.Padded(jax.device_put(np.where(inside, np.asarray(x.array), np.nan), x.array.sharding), x.shape)


def check(case: Case, axis_types="auto"):
    mesh = case.make_mesh(axis_types)
    rng = np.random.default_rng(0)
    x, dx, cotangent = (rng.normal(size=s) for s in (case.shape, case.shape, case.out))
    want = jax.jit(derivatives(case.reference))(x, cotangent, dx)
    x, dx, cotangent = (sk.shard_tensor(a, case.placements(), mesh, uneven="pad") for a in (x, dx, cotangent))
    # Cotangents of a Padded's tail are zeros, or whatever the caller made of them: those of the input may not be.
    args = (dirtied(x), sk.Padded(getattr(cotangent, "array", cotangent), case.out), dirtied(dx))
    with entered(mesh, axis_types):
        compiled = jax.jit(derivatives(case.ring(mesh))).lower(*args).compile()
        got = compiled(*args)
    assert got[0].shape == case.out
    for a, b in zip(got, want, strict=True):
        assert sk.placements(a) == sk.Layout(mesh, case.placements()).placements
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-10 * max(1, np.abs(b).max()))
    report = read_collectives(compiled.as_text(), mesh)
    assert set(report.by_kind()) <= {"collective_permute"}, str(report)
    return report


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


SP4, HW = (("sp", 4),), (("sq", 2), ("sp", 4))
W = (("sp", 2),)


@pytest.mark.parametrize(
    ("case", "permutes", "elements"),
    [
        (Case(SP4, W, (2, 4, 16, 3), (2, 4, 32, 3)), 2, 2 * 2 * 4 * 3),
        # Rows that shrink do so first: the halos of W have half of them.
        (Case(SP4, W, (2, 4, 16, 3), (2, 2, 32, 3)), 2, 2 * 2 * 2 * 3),
        (Case(SP4, W, (2, 4, 16, 3), (2, 4, 8, 3), "area"), 0, 0),
        (Case(SP4, W, (2, 4, 16, 3), (2, 8, 16, 3), "cubic"), 0, 0),
        (Case(SP4, W, (2, 4, 16, 3), (2, 4, 48, 3), "nearest"), 0, 0),
        (Case(HW, (("sq", 1), ("sp", 2)), (1, 8, 16, 1), (1, 16, 32, 1)), 4, 2 * 4 + 2 * 6),
    ],
)
def test_forward_moves_thin_halos(case, permutes, elements):
    mesh = case.make_mesh()
    x = sk.shard_tensor(np.random.default_rng(0).normal(size=case.shape), case.placements(), mesh)
    report = read_collectives(jax.jit(case.ring(mesh)).lower(x).compile().as_text(), mesh)
    assert report.by_kind() == ({"collective_permute": permutes} if permutes else {})
    assert report.bytes() == 8 * elements


@pytest.mark.parametrize("shape", [(600, 300), (300, 601)])
def test_long_blocks_in_chunks(shape):
    check(Case((("sp", 2),), (("sp", 1),), (1, shape[0], 2), (1, shape[1], 2)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.not_smoke
@pytest.mark.every(2)
def test_dtypes(method):
    mesh = sk.make_mesh({"sp": 4})
    x = np.random.default_rng(0).normal(size=(2, 13, 3)) * 20
    for dtype in (np.float32, jnp.bfloat16, np.int32, np.uint8, np.complex64):
        image = jnp.asarray(abs(x), dtype)
        got = ring_resize(image, (2, 9, 3), method, spatial_axes={"sp": "W"}, mesh=mesh)
        want = jax.image.resize(image, (2, 9, 3), method)
        assert got.dtype == want.dtype
        tolerance = 0.05 if dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(got, complex), np.asarray(want, complex), atol=tolerance * float(abs(want).max())
        )


@pytest.mark.not_smoke
def test_matrices_made_on_the_device(monkeypatch):
    """What large dims do: weights laid out from their band."""
    from shardkit.spatial.resizing import plan

    monkeypatch.setattr(plan, "_STORED_ELEMENTS", 0)
    monkeypatch.setattr(plan, "_STORED_RATIO", 0)
    plan.plan_dim.cache_clear()
    check(Case(SP4, (("sp", 1),), (2, 37, 2), (2, 23, 2), "lanczos3"))
    plan.plan_dim.cache_clear()


@pytest.mark.not_smoke
def test_regions_and_transformations():
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    x = np.random.default_rng(0).normal(size=(2, 16, 3))
    ring = lambda x: ring_resize(x, (2, 24, 3), "cubic", spatial_axes={"sp": 1}, mesh=mesh)  # noqa: E731
    plain = lambda x: jax.image.resize(x, (2, 24, 3), "cubic")  # noqa: E731
    many = np.stack([x, 2 * x])
    np.testing.assert_allclose(jax.jit(jax.vmap(ring))(many), jax.vmap(plain)(many), atol=1e-10)
    np.testing.assert_allclose(ring(x), plain(x), atol=1e-10)
    twice = lambda f: jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x) ** 2))  # noqa: E731
    np.testing.assert_allclose(jax.jit(twice(ring))(x), twice(plain)(x), atol=1e-10)

    inside = lambda b: ring_resize(b, (2, 24, 3), "cubic", spatial_axes={"sp": 1})  # noqa: E731
    run = jax.shard_map(inside, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"), axis_names={"sp"})
    np.testing.assert_allclose(jax.jit(run)(x), plain(x), atol=1e-10)
    uneven = lambda b: ring_resize(b, (2, 9, 3), "linear", spatial_axes={"sp": 1}).array  # noqa: E731
    run = jax.shard_map(uneven, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"), axis_names={"sp"})
    np.testing.assert_allclose(jax.jit(run)(x)[:, :9], jax.image.resize(x, (2, 9, 3), "linear"), atol=1e-10)
    # Nested: in a region of another axis.
    nested = lambda b: jax.grad(  # noqa: E731
        lambda b: jnp.sum(jnp.sin(ring_resize(b, (1, 24, 3), "cubic", spatial_axes={"sp": 1})))
    )(b)
    run = jax.shard_map(nested, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    np.testing.assert_allclose(jax.jit(run)(x), jax.grad(lambda x: jnp.sum(jnp.sin(plain(x))))(x), atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "method", "message"),
    [
        ((2, 0, 3), "linear", "can't resize to zero elements"),
        ((2, 4), "linear", "has 2 entries for an image with 3 dims"),
        ((2, 4.5, 3), "linear", "one integer a dim"),
        (7, "linear", "one integer a dim"),
        ((2, 4, 3), "sinc", "method='sinc' is unknown; use one of .*lanczos3"),
    ],
)
def test_bad_input_is_named(shape, method, message):
    mesh = sk.make_mesh({"sp": 4})
    with pytest.raises(ValueError, match=message):
        ring_resize(np.ones((2, 8, 3)), shape, method, spatial_axes={"sp": "W"}, mesh=mesh)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "nearest"}, "method='nearest' has no meaning"),
        ({"spatial_dims": (1, 1)}, "names a dim twice"),
        ({"spatial_dims": (7,)}, "names dim 7"),
        ({"scale": [1.0, 2.0]}, "scale has shape .2,. for 1 spatial dims"),
        ({"scale": [0.0]}, "must not be 0"),
        ({"translation": [np.inf]}, "must be finite"),
        ({"shape": (1, 8, 3)}, "differs from the image's .* in dims .0."),
    ],
)
def test_bad_warps_are_named(changes, message):
    mesh = sk.make_mesh({"sp": 4})
    given = {"shape": (2, 8, 3), "spatial_dims": (1,), "scale": [1.0], "translation": [0.0], "method": "linear"}
    with pytest.raises(ValueError, match=message):
        ring_scale_and_translate(np.ones((2, 8, 3)), **(given | changes), spatial_axes={"sp": "W"}, mesh=mesh)


def test_traced_warps_and_unnamed_explicit_axes():
    mesh = sk.make_mesh({"sp": 4})
    warp = lambda s: ring_scale_and_translate(  # noqa: E731
        np.ones((2, 8, 3)), (2, 8, 3), (1,), s, np.zeros(1), "linear", spatial_axes={"sp": "W"}, mesh=mesh
    )
    with pytest.raises(TypeError, match="scale is traced"):
        jax.jit(warp)(np.ones(1))
    mesh = sk.make_mesh({"sq": 2, "sp": 4}, axis_types="explicit")
    x = sk.shard_tensor(np.ones((2, 8, 8, 1)), {"sq": sk.Shard(1), "sp": sk.Shard(2)}, mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"dim 1 is sharded over Explicit mesh axes .* add them"):
        ring_resize(x, (2, 4, 8, 1), "linear", spatial_axes={"sp": "W"})


@pytest.mark.parametrize("method", ["nearest", "linear"])
@pytest.mark.parametrize("shape", [(0, 13, 3), (2, 13, 0)])
def test_a_dim_that_stays_may_be_empty(shape, method):
    """An empty batch, as jax.image.resize takes it."""
    mesh, new = sk.make_mesh({"sp": 4}), (shape[0], 29, shape[2])
    x = np.ones(shape, np.float32)
    got = ring_resize(x, new, method, spatial_axes={"sp": "W"}, mesh=mesh)
    want = jax.image.resize(x, new, method)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    with pytest.raises(ValueError, match="is empty; give at least one element a dim"):
        ring_resize(x, tuple(s or 2 for s in new), method, spatial_axes={"sp": "W"}, mesh=mesh)
