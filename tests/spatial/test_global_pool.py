"""Global pooling against jnp: values, derivatives, where results are, and how many sums travel."""

from __future__ import annotations

import contextlib
import re

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.collectives import read_collectives
from shardkit.spatial.pooling.global_pool import ring_global_pool

SP4, DPSP, HW = {"sp": 4}, {"dp": 2, "sp": 4}, {"sq": 2, "sp": 4}
REDUCTIONS = ("mean", "sum", "max", "min")


def image(shape, seed=0):
    """Small negative integers: many ties, and a zero from anywhere would win a maximum."""
    return np.random.default_rng(seed).integers(-6, -1, shape).astype(np.float64)


def entered(mesh, axis_types):
    return jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext()


def dirty(x: sk.Padded) -> sk.Padded:
    """NaN in the padded tails."""
    inside = np.zeros(x.array.shape, bool)
    inside[tuple(slice(0, n) for n in x.shape)] = True
    return sk.Padded(jax.device_put(np.where(inside, np.asarray(x.array), np.nan), x.array.sharding), x.shape)


CASES = {
    # mesh, spatial_axes, placements, shape, axis
    "all of space": (SP4, {"sp": "W"}, {"sp": 2}, (2, 3, 13, 2), None),
    "5 over 4": (SP4, {"sp": 1}, {"sp": 1}, (2, 5, 2), None),
    "H and W, batch left to the compiler": (
        {"dp": 2, "sq": 2, "sp": 2},
        {"sq": "H", "sp": "W"},
        {"dp": 0, "sq": 1, "sp": 2},
        (4, 3, 5, 2),
        None,
    ),
    "one cut dim kept": (HW, {"sq": "H", "sp": "W"}, {"sq": 1, "sp": 2}, (2, 4, 13, 2), (2,)),
    "channels alone": (SP4, {"sp": "W"}, {"sp": 2}, (2, 3, 8, 2), -1),
    "two axes on one dim": (HW, {("sq", "sp"): "W"}, {"sq": 1, "sp": 1}, (2, 19, 3), None),
}


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_equals_jnp(name, reduce):
    mesh_shape, spatial, placed, shape, axis = CASES[name]
    # Half of them on Explicit meshes.
    axis_types = "explicit" if (list(CASES).index(name) + REDUCTIONS.index(reduce)) % 2 else "auto"
    mesh = sk.make_mesh(mesh_shape, axis_types=axis_types)
    x, dx = image(shape), np.random.default_rng(1).normal(size=shape)
    x_on, dx_on = (
        dirty(sk.shard_tensor(a, {k: sk.Shard(d) for k, d in placed.items()}, mesh, uneven="pad")) for a in (x, dx)
    )
    keepdims = reduce in ("mean", "max")
    dims = tuple(range(1, len(shape) - 1)) if axis is None else axis

    def run(function):
        def loss(x):
            out = function(x)
            return jnp.sum(jnp.sin(out)), out

        return lambda x, dx: (
            jax.grad(loss, has_aux=True)(x),
            jax.jvp(function, (x,), (dx,))[1],
        )

    pool = lambda x: ring_global_pool(x, reduce, axis, spatial_axes=spatial, keepdims=keepdims, mesh=mesh)  # noqa: E731
    with entered(mesh, axis_types):
        compiled = jax.jit(run(pool)).lower(x_on, dx_on).compile()
        (grad, out), tangent = compiled(x_on, dx_on)
    want = jax.jit(run(lambda x: getattr(jnp, reduce)(x, dims, keepdims=keepdims)))(x, dx)
    for got, expected in zip((grad, out, tangent), (*want[0], want[1]), strict=True):
        assert got.shape == expected.shape
        np.testing.assert_allclose(np.asarray(got), expected, atol=1e-10)
    assert sk.placements(grad) == sk.placements(x_on)
    assert not np.asarray(grad.array)[np.isnan(np.asarray(x_on.array))].any()
    small = 4 * 8 * np.asarray(out).size  # result, tangent and ties, which XLA may send together
    report = read_collectives(compiled.as_text(), mesh)
    assert set(report.by_kind()) <= {"all_reduce"}, str(report)
    assert all(e.result_bytes <= small for e in report), str(report)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_one_small_all_reduce(reduce):
    mesh = sk.make_mesh(HW)
    x = sk.shard_tensor(image((2, 4, 13, 5)), {"sq": sk.Shard(1), "sp": sk.Shard(2)}, mesh, uneven="pad")
    pool = lambda x: ring_global_pool(x, reduce, spatial_axes={"sq": "H", "sp": "W"})  # noqa: E731
    report = sk.collectives(pool, x, mesh=mesh)
    assert report.by_kind() == {"all_reduce": 1}
    flag = 2 if reduce in ("max", "min") else 1  # for NaNs, beside each extreme
    assert sum(e.result_bytes for e in report) == 2 * 5 * 8 * flag
    gradient = sk.collectives(jax.grad(lambda x: jnp.sin(pool(x)).sum()), x, mesh=mesh)
    assert gradient.count() == (2 if reduce in ("max", "min") else 1), str(gradient)  # the extreme, and its ties


def test_cut_dims_that_are_kept_stay_cut():
    mesh = sk.make_mesh(HW)
    x = sk.shard_tensor(image((2, 4, 8, 3)), {"sq": sk.Shard(1), "sp": sk.Shard(2)}, mesh)
    keep = jax.jit(lambda x: ring_global_pool(x, "max", 1, spatial_axes={"sq": "H", "sp": "W"}))(x)
    assert sk.placements(keep) == (sk.Replicate(), sk.Shard(1))
    whole = jax.jit(lambda x: ring_global_pool(x, "max", spatial_axes={"sq": "H", "sp": "W"}))(x)
    assert whole.sharding.is_fully_replicated


@pytest.mark.not_smoke
def test_dtypes_are_those_of_jnp():
    mesh = sk.make_mesh(SP4)
    for dtype in (np.int8, np.int32, np.bool_, jnp.bfloat16, np.float32):
        x = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 13, 3)), dtype)
        for reduce in REDUCTIONS:
            got = ring_global_pool(x, reduce, spatial_axes={"sp": "W"}, mesh=mesh)
            want = getattr(jnp, reduce)(x, 1)
            assert got.dtype == want.dtype, (dtype, reduce)
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-2)


@pytest.mark.not_smoke
def test_second_derivatives_and_vmap():
    mesh = sk.make_mesh(SP4)
    x = image((2, 13, 1))
    pool = lambda x: ring_global_pool(x, "max", spatial_axes={"sp": "W"}, mesh=mesh)  # noqa: E731
    want = lambda x: jnp.max(x, 1)  # noqa: E731
    product = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x) ** 3))(x) ** 2)))  # noqa: E731
    np.testing.assert_allclose(product(pool)(x), product(want)(x), rtol=1e-10)
    many = np.stack([x, -x])
    np.testing.assert_array_equal(jax.jit(jax.vmap(pool))(many), jax.vmap(want)(many))


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_inside_manual_regions(reduce):
    """Blocks in, the whole's result out; nested in a region of another axis, differentiated through both."""
    mesh = sk.make_mesh(DPSP)
    x = image((4, 13, 2))
    padded = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
    inside = jax.shard_map(
        lambda block: ring_global_pool(sk.Padded(block, x.shape), reduce, spatial_axes={"sp": 1}),
        mesh=mesh,
        in_specs=P(None, "sp"),
        out_specs=P(),
    )
    np.testing.assert_allclose(jax.jit(inside)(padded.array), getattr(jnp, reduce)(x, 1))
    loss = lambda f: lambda h: jnp.sum(f(h) ** 2)  # noqa: E731
    nested = jax.shard_map(
        jax.grad(loss(lambda h: ring_global_pool(h, reduce, spatial_axes={"sp": 1}))),
        mesh=mesh,
        in_specs=P("dp"),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    np.testing.assert_allclose(jax.jit(nested)(x), jax.grad(loss(lambda h: getattr(jnp, reduce)(h, 1)))(x), atol=1e-12)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_nan_on_any_device_wins(reduce, axis_types, dtype):
    """An all-reduce of maxima drops NaNs on some platforms; jnp.max never does. Infinities are no NaNs."""
    x = np.random.default_rng(0).normal(size=(3, 13, 3))
    x[0, 7, 1], x[1, 12, 0], x[2, 0, 2], x[2, 5, 0] = np.nan, np.nan, np.inf, -np.inf
    x, mesh = jnp.asarray(x, dtype), sk.make_mesh(SP4, axis_types=axis_types)
    placed = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
    pool = jax.jit(lambda x: ring_global_pool(x, reduce, spatial_axes={"sp": 1}, mesh=mesh))
    want = getattr(jnp, reduce)(x, 1)
    np.testing.assert_array_equal(np.asarray(pool(placed), np.float32), np.asarray(want, np.float32))
    assert sk.collectives(pool, placed, mesh=mesh).by_kind() == {"all_reduce": 1}


def test_numpy_integers_and_every_letter_name_dims():
    mesh, x = sk.make_mesh(SP4), np.random.default_rng(0).normal(size=(8, 3, 5))
    for axis in (np.int64(0), np.array([0, 1])):
        for dim in (np.int64(0), np.int32(-3), "N"):
            got = ring_global_pool(x, axis=axis, spatial_axes={"sp": dim}, mesh=mesh)
            np.testing.assert_allclose(got, x.mean(tuple(np.atleast_1d(axis))), atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"reduce": "median"}, ValueError, "reduce='median' is unknown; use one of ('mean', 'sum', 'max', 'min')"),
        ({"axis": 4}, ValueError, "axis=4 is out of range for 4 dims"),
        ({"axis": (1, -3)}, ValueError, "names a dim twice"),
        ({"x": np.ones((8, 3)), "spatial_axes": {"sp": 0}}, ValueError, "say which to reduce with axis="),
        ({"x": np.ones((0, 3, 8, 2)), "axis": 0}, ValueError, "no elements to reduce over dims (0,)"),
        ({"x": np.ones((2, 3, 8, 2)) * 1j, "reduce": "max"}, TypeError, "no order to pool by"),
        ({"spatial_axes": {"tp": "W"}}, ValueError, "names mesh axis 'tp', but the mesh has ('sp',)"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    arguments = {"x": np.ones((2, 3, 8, 2)), "spatial_axes": {"sp": "W"}} | changes
    with pytest.raises(error, match=re.escape(message)):
        ring_global_pool(**arguments, mesh=sk.make_mesh(SP4))
