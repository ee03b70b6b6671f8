"""Pooling and windowed reductions against lax and Flax on one device, with what they send."""

from __future__ import annotations

import contextlib
import random
import re

import jax
import numpy as np
import pytest
from flax.linen import pooling as linen
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.collectives import read_collectives
from shardkit.spatial.pooling.pool import ring_avg_pool, ring_max_pool, ring_min_pool, ring_reduce_window
from tests.spatial.pool_cases import NAMED, Case, draw

CI_SLICE, FULL_SWEEP = 30, 200


def entered(mesh, axis_types):
    return jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext()


def padded(case: Case, value, mesh):
    return sk.shard_tensor(value, case.placements(), mesh, uneven="pad")


def dirty(x: sk.Padded) -> sk.Padded:
    """NaN in the padded tails, which mean nothing."""
    if x.array.shape == x.shape:
        return x
    inside = np.zeros(x.array.shape, bool)
    inside[tuple(slice(0, n) for n in x.shape)] = True
    array = jax.device_put(np.where(inside, np.asarray(x.array), np.nan), x.array.sharding)
    return sk.Padded(array, x.shape)


def close(got, want):
    finite = np.abs(np.where(np.isfinite(want), want, 0))  # a window in padding alone holds an infinity
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-10, atol=1e-10 * max(1, finite.max()))


def derivatives(function):
    def run(x, cotangent, dx):
        out, pull = jax.vjp(function, x)
        return out, pull(cotangent)[0], jax.jvp(function, (x,), (dx,))[1]

    return run


def check(case: Case, axis_types="auto"):
    """One configuration: values, gradient, tangent, where they are, and what was sent."""
    mesh = case.make_mesh(axis_types)
    x = case.operand()
    rng = np.random.default_rng(1)
    shape = jax.eval_shape(case.reference, x).shape
    cotangent, dx = rng.normal(size=shape), rng.normal(size=x.shape)
    want_out, want_grad, want_tangent = jax.jit(derivatives(case.reference))(x, cotangent, dx)
    if all(m == "zeros" for m in case.modes):
        close(case.by_lax(x), want_out)  # the definition is lax's

    args = (dirty(padded(case, x, mesh)), dirty(padded(case, cotangent, mesh)), dirty(padded(case, dx, mesh)))
    with entered(mesh, axis_types):
        compiled = jax.jit(derivatives(case.ring(mesh))).lower(*args).compile()
        out, grad, tangent = compiled(*args)

    assert out.shape == shape
    assert sk.placements(out) == sk.Layout(mesh, case.placements()).placements
    assert sk.placements(grad) == sk.placements(args[0])
    close(out, want_out)
    close(grad, want_grad)
    close(tangent, want_tangent)
    beyond = np.isnan(np.asarray(args[0].array))
    assert not np.asarray(grad.array)[beyond].any()

    report = read_collectives(compiled.as_text(), mesh)
    assert set(report.by_kind()) <= {"collective_permute"}, str(report)
    return report


# Windows on a line like those of ring_conv, which are run in each of these ways.
ALIKE = {
    *("k=s=2 on shards of 5", "VALID, output not divisible", "stride beyond the window", "dilated window, min"),
    "base dilation, unit stride",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in NAMED])
def test_named_configurations(name):
    # Every third on an Explicit mesh.
    check(NAMED[name], "explicit" if list(NAMED).index(name) % 3 == 1 else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_named_configurations_explicit(name):
    check(NAMED[name], "explicit")


def sweep(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize("number", range(CI_SLICE))
@pytest.mark.every(3)
def test_random_configurations(number):
    # Every fourth on an Explicit mesh.
    check(sweep(CI_SLICE, seed=2026)[number], "explicit" if number % 4 == 3 else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FULL_SWEEP))
def test_random_configurations_in_full(number):
    check(sweep(FULL_SWEEP, seed=11)[number], "explicit" if number % 4 == 3 else "auto")
    if number % 32 == 31:
        jax.clear_caches()


# --- Flax and lax --------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (2, 1))])
@pytest.mark.parametrize(
    ("ring", "flax"),
    [
        (ring_max_pool, linen.max_pool),
        (ring_min_pool, linen.min_pool),
        (ring_avg_pool, linen.avg_pool),
        (
            lambda x, *a, **k: ring_avg_pool(x, *a, count_include_pad=False, **k),
            lambda x, *a, **k: linen.avg_pool(x, *a, count_include_pad=False, **k),
        ),
    ],
    ids=["max", "min", "avg", "avg of real ones"],
)
@pytest.mark.every(2)
def test_equals_flax(ring, flax, padding):
    """Values and gradients, on plain arrays of a size the mesh doesn't divide."""
    mesh = sk.make_mesh({"sp": 4})
    x = np.random.default_rng(0).normal(size=(2, 5, 13, 3)) - 3
    loss = lambda f, **k: lambda x: jnp.sum(jnp.sin(f(x, (2, 3), (1, 2), padding, **k)))  # noqa: E731
    out = ring(x, (2, 3), (1, 2), padding, spatial_axes={"sp": "W"}, mesh=mesh)
    close(out, flax(x, (2, 3), (1, 2), padding))
    close(jax.jit(jax.grad(loss(ring, spatial_axes={"sp": "W"}, mesh=mesh)))(x), jax.grad(loss(flax))(x))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_number_of_batch_dims_and_strides_of_one(batch):
    mesh = sk.make_mesh({"sp": 2})
    x = np.random.default_rng(0).normal(size=(*batch, 6, 7, 2))
    got = ring_avg_pool(x, (3, 2), padding="SAME", count_include_pad=False, spatial_axes={"sp": "H"}, mesh=mesh)
    close(got, linen.avg_pool(x, (3, 2), padding="SAME", count_include_pad=False))


def test_repeated_elements_count():
    """On a circle every window is full."""
    mesh = sk.make_mesh({"sp": 4})
    x = np.random.default_rng(0).normal(size=(1, 13, 1))
    pool = lambda count: ring_avg_pool(  # noqa: E731
        x, (3,), None, "SAME", count, spatial_axes={"sp": "W"}, padding_mode={"W": "circular"}, mesh=mesh
    )
    close(pool(False), (x + np.roll(x, 1, 1) + np.roll(x, -1, 1)) / 3)
    close(pool(True), pool(False))


INITIAL = {
    "add from 1": (lax.add, 1.0),
    "max from 0": (lax.max, 0.0),
    "mul from 2": (lax.mul, 2.0),
    "own function": (lambda a, b: a + b + a * b, 0.5),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", INITIAL)
def test_initial_values_are_folded_in_once(name, traced):
    """Also where a window lies in padding, on holes and across shards: as lax does, whose padding is no element."""
    computation, init = INITIAL[name]
    mesh = sk.make_mesh({"sp": 4})
    x = np.random.default_rng(0).normal(size=(3, 11))
    arguments = ((2, 3), (1, 2), ((1, 0), (5, 4)), (1, 2), (1, 2))
    run = lambda x, init: ring_reduce_window(  # noqa: E731
        x, init, computation, *arguments, spatial_axes={"sp": 1}, mesh=mesh
    )
    got = jax.jit(run)(x, init) if traced else jax.jit(run, static_argnums=1)(x, init)
    close(got, lax.reduce_window(x, init, computation, *arguments))


def test_a_traced_initial_value_has_a_gradient():
    mesh = sk.make_mesh({"sp": 4})
    x = np.arange(13.0)
    run = lambda init: ring_reduce_window(  # noqa: E731
        x, init, lax.mul, (3,), spatial_axes={"sp": 0}, mesh=mesh
    ).sum()
    close(jax.jit(jax.grad(run))(2.0), (x[:-2] * x[1:-1] * x[2:]).sum())
    mesh = sk.make_mesh({"sp": 4}, axis_types="explicit")
    with jax.set_mesh(mesh):
        close(jax.jit(run)(2.0), 2 * (x[:-2] * x[1:-1] * x[2:]).sum())


@pytest.mark.not_smoke
def test_integers_booleans_and_low_precision():
    mesh = sk.make_mesh({"sp": 4})
    x = np.random.default_rng(0).integers(-9, -1, (2, 13, 3))
    keywords = {"spatial_axes": {"sp": "W"}, "mesh": mesh}
    ones, window = (1, 1, 1), (1, 3, 1)
    for dtype in (np.int32, np.uint8, jnp.bfloat16):
        a = jnp.asarray(x).astype(dtype)
        got = ring_max_pool(a, (3,), padding="SAME", **keywords)
        low = jnp.finfo(dtype).min if dtype == jnp.bfloat16 else np.iinfo(dtype).min
        want = lax.reduce_window(a, jnp.asarray(low, dtype), lax.max, window, ones, "SAME")
        assert got.dtype == want.dtype == dtype
        np.testing.assert_array_equal(got, want)
    got = ring_avg_pool(x, (3,), padding="SAME", **keywords)
    close(got, linen.avg_pool(x.astype(float), (3,), padding="SAME"))
    assert ring_avg_pool(jnp.asarray(x, jnp.bfloat16), (3,), count_include_pad=False, **keywords).dtype == jnp.bfloat16
    either = ring_reduce_window(x > -3, False, lax.bitwise_or, window, **keywords)
    np.testing.assert_array_equal(either, lax.reduce_window(x > -3, False, lax.bitwise_or, window, ones, "VALID"))


# --- ties, tails, edges --------------------------------------------------------------------------------


@pytest.mark.parametrize("dilation", [1, 2])
def test_ties_across_a_border_go_to_the_first(dilation):
    """Equal maxima on both sides of a shard's border: one of them gets the gradient, the earlier one."""
    mesh = sk.make_mesh({"sp": 4})
    run = lambda x: ring_max_pool(  # noqa: E731
        x, (2,), window_dilation=(dilation,), spatial_axes={"sp": "W"}, mesh=mesh
    ).sum()
    x = np.zeros((1, 8, 1))
    want = np.zeros(8)
    want[: 8 - dilation] = 1
    for grad in (jax.jit(jax.grad(run))(x), jax.jit(jax.jacfwd(run))(x)):
        np.testing.assert_array_equal(grad[0, :, 0], want)


def test_a_nan_wins():
    mesh = sk.make_mesh({"sp": 4})
    x = np.zeros((1, 8, 1))
    x[0, 3] = np.nan
    for dilation in (1, 2):
        out = ring_max_pool(x, (2,), window_dilation=(dilation,), spatial_axes={"sp": "W"}, mesh=mesh)
        assert set(np.flatnonzero(np.isnan(out[0, :, 0]))) == {3 - dilation, 3}


@pytest.mark.parametrize(("kind", "dim"), [("max pool", 0), ("mul", 0), ("max pool", 1)])
@pytest.mark.not_smoke
def test_other_padded_dims_count_as_they_should(kind, dim):
    """A batch of 3 over 2 devices, or rows of 5: padded, not named, and full of NaN beyond."""
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    x = np.random.default_rng(0).normal(size=(3, 5, 13, 2))
    case = Case((("dp", 2), ("sp", 4)), (("sp", "W"),), "HW", (5, 13), (3, 3), batch=(3,), features=2, kind=kind)
    given = dirty(sk.shard_tensor(x, {"dp": sk.Shard(dim), "sp": sk.Shard(2)}, mesh, uneven="pad"))
    loss = lambda x: jnp.sum(case.ring(mesh)(x).value)  # noqa: E731
    total, grad = jax.jit(jax.value_and_grad(loss))(given)
    want, want_grad = jax.jit(jax.value_and_grad(lambda x: case.reference(x).sum()))(x)
    close(total, want)
    close(grad, want_grad)
    assert not np.asarray(grad.array)[np.isnan(np.asarray(given.array))].any()


# --- what travels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "axes", "window", "strides", "forward", "both"),
    [
        ("max pool", (("sp", "W"),), (3, 3), (1, 1), 2, 4),
        ("max pool", (("sq", "H"), ("sp", "W")), (3, 3), (1, 1), 4, 8),
        ("avg pool", (("sq", "H"), ("sp", "W")), (3, 3), (1, 1), 4, 8),
        ("mul", (("sp", "W"),), (3, 3), (1, 1), 2, 4),
        ("max pool", (("sp", "W"),), (3, 3), (1, 2), 1, 2),  # aligned blocks: only from the right
        ("max pool", (("sp", "W"),), (2, 2), (2, 2), 0, 0),  # window = stride: nothing
    ],
)
def test_two_permutes_a_dim_each_way(kind, axes, window, strides, forward, both):
    case = Case((("sq", 2), ("sp", 4)), axes, "HW", (8, 16), window, strides, kind=kind)
    mesh = case.make_mesh()
    x = padded(case, case.operand(), mesh)
    loss = lambda x: jnp.sum(jnp.tanh(case.ring(mesh)(x).array))  # noqa: E731
    assert sk.collectives(case.ring(mesh), x, mesh=mesh).by_kind() == (
        {"collective_permute": forward} if forward else {}
    )
    kinds = sk.collectives(jax.grad(loss), x, mesh=mesh).by_kind()
    assert kinds == ({"collective_permute": both} if both else {})


# --- types and transformations --------------------------------------------------------------------------


SIMPLE = Case((("sp", 4),), (("sp", "W"),), "HW", (5, 13), (2, 3), (1, 2), features=2)


@pytest.mark.parametrize("kind", ["numpy", "eager", "jit"])
@pytest.mark.not_smoke
def test_plain_arrays_give_plain_arrays(kind):
    mesh = SIMPLE.make_mesh()
    x, ring = SIMPLE.operand(), SIMPLE.ring(mesh)
    out = {"numpy": ring, "eager": lambda x: ring(jnp.asarray(x)), "jit": jax.jit(ring)}[kind](x)
    assert isinstance(out, jax.Array)
    close(out, SIMPLE.reference(x))


def test_result_stays_sharded_and_uneven_explicit_ones_are_padded():
    case = Case((("dp", 2), ("sp", 4)), (("sp", "W"),), "W", (16,), (3,), batch_axis="dp")
    mesh = case.make_mesh()
    x = case.operand()
    out = jax.jit(case.ring(mesh))(sk.shard_tensor(x, case.placements(), mesh))
    assert isinstance(out, jax.Array)
    assert sk.placements(out) == (sk.Shard(0), sk.Shard(1))
    mesh = case.make_mesh("explicit")
    with jax.set_mesh(mesh):
        out = jax.jit(case.ring(padding="VALID"))(sk.shard_tensor(x, case.placements(), mesh))
    assert isinstance(out, sk.Padded)
    assert out.shape == (2, 14, 3)
    close(out, linen.max_pool(x, (3,)))


@pytest.mark.parametrize("kind", ["max pool", "avg pool", "mul", "logaddexp"])
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_second_derivatives(kind):
    case = Case((("sp", 4),), (("sp", "W"),), "W", (13,), (3,), (2,), features=1, kind=kind, window_dilation=(2,))
    mesh = case.make_mesh()
    x = case.operand()

    def hessian_products(function):
        loss = lambda x: jnp.sum(jnp.sin(function(x)) ** 2)  # noqa: E731
        inner = lambda x: jnp.sum(jax.grad(loss)(x) ** 2)  # noqa: E731
        return jax.jit(lambda x: (jax.grad(inner)(x), jax.jvp(jax.grad(loss), (x,), (x,))[1]))

    for got, want in zip(hessian_products(case.ring(mesh))(x), hessian_products(case.reference)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * np.abs(want).max())


@pytest.mark.not_smoke
def test_vmap_remat_and_scan():
    mesh = SIMPLE.make_mesh()
    x = SIMPLE.operand()
    many = np.stack([x, 2 * x, x**2])
    ring = SIMPLE.ring(mesh)
    want = jax.vmap(SIMPLE.reference)(many)
    close(jax.jit(jax.vmap(ring))(many), want)
    scanned = jax.jit(lambda xs: lax.scan(lambda c, x: (c, jax.checkpoint(ring)(x)), 0, xs)[1])(many)
    close(scanned, want)
    loss = lambda f: lambda xs: jnp.sum(jax.vmap(f)(xs) ** 2)  # noqa: E731
    close(jax.jit(jax.grad(loss(ring)))(many), jax.grad(loss(SIMPLE.reference))(many))


# --- inside manual regions ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max pool", "avg pool", "mul"])
@pytest.mark.every(2)
def test_inside_a_manual_region(kind):
    """Blocks in, blocks out, a Padded where they are uneven; differentiated inside."""
    case = Case((("sp", 4),), (("sp", "W"),), "W", (13,), (3,), (2,), kind=kind)
    mesh = case.make_mesh()
    x = case.operand()

    def local(block):
        def loss(block):
            out = case.ring()(sk.Padded(block, x.shape))
            assert isinstance(out, sk.Padded)
            return jnp.sum(out.array), out.array

        return jax.grad(loss, has_aux=True)(block)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "sp"), out_specs=(P(None, "sp"),) * 2))
    grad, out = run(padded(case, x, mesh).array)
    close(out[:, :7], case.reference(x))
    close(grad[:, :13], jax.grad(lambda x: case.reference(x).sum())(x))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["max pool", "avg pool", "logaddexp"])
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_nested_in_a_region_of_another_axis(kind, check_vma):
    case = Case((("dp", 2), ("sp", 4)), (("sp", "W"),), "W", (13,), (3,), (2,), batch=(4,), kind=kind)
    mesh = case.make_mesh()
    x = case.operand()

    def local(half):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(case.ring()(x))))(half)

    run = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}, check_vma=check_vma)
    close(jax.jit(run)(x), jax.grad(lambda x: jnp.sum(jnp.tanh(case.reference(x))))(x))


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spatial_axes": {"tp": "W"}}, "names mesh axis 'tp', but the mesh has ('sp', 'sq')"),
        ({"spatial_axes": {"sp": "D"}}, "names dim 'D', but the dims are ['C', 'H', 'N', 'W']"),
        ({"spatial_axes": {}}, "spatial_axes maps mesh axes to array dims"),
        ({"window_shape": (3,) * 4}, "has 4 entries, but an array of shape (2, 8, 8, 4)"),
        ({"window_shape": 3}, "window_shape takes one integer a spatial dim, got 3"),
        ({"window_shape": (0, 3)}, "window_shape=(0, 3) must be at least 1"),
        ({"window_shape": (9, 3)}, "no output in dim 1: 8 elements with padding (0, 0) are fewer than the 9"),
        ({"strides": (1,)}, "strides=(1,) has 1 entries for 2 dims"),
        ({"strides": (0, 1)}, "strides=(0, 1) must be at least 1"),
        ({"window_dilation": (1, -2)}, "window_dilation=(1, -2) must be at least 1"),
        ({"window_dilation": (1, 2, 3)}, "has 3 entries for 2 dims"),
        ({"padding": "FULL"}, "padding='FULL' is unknown"),
        ({"padding": [(1, 1)]}, "has 1 pairs for 2 spatial dims"),
        ({"padding": 2}, "padding takes a name or one (low, high) pair a spatial dim, got 2"),
        ({"padding_mode": "mirror"}, "padding_mode='mirror' is unknown"),
        ({"padding_mode": {"C": "circular"}}, "names dim 'C', but windows move along dims (1, 2)"),
        ({"padding_mode": ("zeros",)}, "has 1 entries for 2 dims"),
        ({"padding_mode": "reflect", "padding": [(8, 0), (1, 1)]}, "reflects more than the 8 elements of dim 1"),
        ({"x": np.ones((2, 8, 0, 4))}, "dim 2 of shape (2, 8, 0, 4) is empty"),
        ({"x": np.ones((2, 0, 8, 4))}, "dim 1 is empty"),
    ],
)
def test_bad_input_is_named(changes, message):
    mesh = sk.make_mesh({"sp": 4, "sq": 2})
    arguments = {"x": np.ones((2, 8, 8, 4)), "window_shape": (3, 3), "spatial_axes": {"sp": "W"}} | changes
    for pool in (ring_max_pool, ring_avg_pool):
        with pytest.raises(ValueError, match=re.escape(message)):
            pool(**arguments, mesh=mesh)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": (np.ones(8), np.ones(8))}, TypeError, "reduces one array, got a tuple of operands"),
        ({"init_value": np.zeros(3)}, TypeError, "init_value must be a scalar, got shape (3,)"),
        ({"init_value": np.float32(0)}, TypeError, "init_value is float32, x is float64; give both one dtype"),
        ({"init_value": 1j}, TypeError, "init_value is complex128, x is float64; give both one dtype"),
        ({"computation": lambda a, b: a < b}, TypeError, "must map two float64 scalars to one"),
        ({"x": np.ones(8, np.int32), "init_value": -np.inf}, TypeError, "init_value=-inf is not a value of int32"),
        ({"window_dimensions": (2, 2)}, ValueError, "window_dimensions=(2, 2) has 2 entries for 1 dims"),
        ({"window_strides": (0,)}, ValueError, "window_strides=(0,) must be at least 1"),
        ({"base_dilation": (0,)}, ValueError, "base_dilation=(0,) must be at least 1"),
        ({"window_dimensions": (4,), "base_dilation": (1,), "padding": [(-3, -3)]}, ValueError, "no output in dim 0"),
    ],
)
def test_bad_reduction_input_is_named(changes, error, message):
    arguments = {"x": np.ones(8), "init_value": 0.0, "computation": lax.add, "window_dimensions": (2,)} | changes
    with pytest.raises(error, match=re.escape(message)):
        ring_reduce_window(**arguments, spatial_axes={"sp": 0}, mesh=sk.make_mesh({"sp": 4}))


def test_explicit_axes_that_are_not_named():
    mesh = sk.make_mesh({"sp": 4, "sq": 2}, axis_types="explicit")
    x = sk.shard_tensor(np.ones((2, 8, 8, 4)), {"sp": sk.Shard(2), "sq": sk.Shard(1)}, mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"dim 1 is sharded over Explicit mesh axes \['sq'\]"):
        ring_max_pool(x, (3, 3), spatial_axes={"sp": "W"})
    with pytest.raises(ValueError, match="no mesh"):
        ring_max_pool(np.ones((2, 8, 8, 4)), (3, 3), spatial_axes={"sp": "W"})


def test_eagerly_on_explicit_axes_with_another_dim_padded():
    """No jit and no jax.set_mesh: only the array says on which devices it lies. Garbage in the other dim's tail."""
    mesh = sk.make_mesh({"dp": 2, "sp": 4}, axis_types="explicit")
    x = np.random.default_rng(0).normal(size=(3, 13, 2))
    placed = sk.shard_tensor(x, {"dp": sk.Shard(0), "sp": sk.Shard(1)}, mesh, uneven="pad")
    got = ring_max_pool(placed, (3,), (2,), "SAME", spatial_axes={"sp": 1}, mesh=mesh)
    np.testing.assert_array_equal(np.asarray(got), linen.max_pool(x, (3,), (2,), "SAME"))
