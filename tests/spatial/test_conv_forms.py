"""The forms "overlap" and "blocks" of ring_conv: that they run, that they equal lax, and what they move and keep."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.collectives import read_collectives
from shardkit.spatial.convolution import region
from shardkit.spatial.convolution.local import input_gradient_conv
from tests.spatial.conv_cases import Case, draw_for
from tests.spatial.test_conv import check, compiled_report, padded

FORMS = ("overlap", "blocks")
CI_SLICE, FULL_SWEEP = 12, 120
SP1, SP4, SP8, DPSP, GRID = (("sp", 1),), (("sp", 4),), (("sp", 8),), (("dp", 2), ("sp", 4)), (("sq", 2), ("sp", 4))
W, HW = (("sp", "W"),), (("sq", "H"), ("sp", "W"))


@pytest.fixture
def chosen(monkeypatch):
    """The forms that calls of the test ran in, in order."""
    forms = []

    def spy(*arguments):
        conv = real(*arguments)
        forms.append(conv)
        return conv

    real = region.choose_form
    monkeypatch.setattr(region, "choose_form", spy)
    return forms


def sweep(method: str, count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [draw_for(rng, method) for _ in range(count)]


@pytest.mark.parametrize("number", range(CI_SLICE))
@pytest.mark.parametrize("method", FORMS)
@pytest.mark.every(3)
def test_random_configurations(method, number, chosen):
    """Values and all derivatives with NaN in every padded tail; every fourth on an Explicit mesh."""
    case = sweep(method, CI_SLICE, seed=2026)[number]
    check(case, "explicit" if number % 4 == 3 else "auto", method, tail=np.nan)
    assert chosen and {conv.method for conv in chosen} == {method}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FULL_SWEEP))
@pytest.mark.parametrize("method", FORMS)
def test_random_configurations_in_full(method, number, chosen):
    case = sweep(method, FULL_SWEEP, seed=11)[number]
    check(case, "explicit" if number % 4 == 3 else "auto", method, tail=np.nan)
    assert chosen and {conv.method for conv in chosen} == {method}
    if number % 32 == 31:
        jax.clear_caches()


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.not_smoke
def test_the_sweep_reaches_what_it_should(method):
    """What the drawn configurations have in common with no other: counted, so that none is lost in silence."""
    seen = collections.Counter()
    for case in sweep(method, FULL_SWEEP, seed=11):
        conv = case.in_form(method)
        assert conv.method == method
        gather = input_gradient_conv(conv)
        seen["gradient gathered in the same form"] += gather is not None and gather.method == method
        seen["gradient scattered"] += gather is None
        seen[f"{len(case.letters)}-D"] += 1
        seen[f"{sum(a is not None for a in conv.axes)} dims cut"] += 1
        seen["stride"] += any(s > 1 for s in case.strides)
        seen["lhs_dilation"] += any(d > 1 for d in case.lhs_dilation)
        seen["rhs_dilation"] += any(d > 1 for d in case.rhs_dilation)
        seen["feature groups"] += case.feature_groups > 1
        seen["circular"] += "circular" in case.modes
        seen["channels first"] += case.lhs[1] == "C"
        seen["mesh of one"] += case.mesh == SP1
        seen["batch axis left to the compiler"] += case.batch_axis is not None
        seen["batch axis named"] += ("dp", "N") in case.axes
        seen["uneven"] += any(w.exchange.size < w.exchange.block * w.exchange.shards for w in case.local_conv().windows)
        if method == "overlap":
            seen["batch groups"] += case.batch_groups > 1
        if conv.chunks is not None:
            seen[f"{conv.chunks.count} chunks"] += 1
            seen["chunks of a dim that isn't cut"] += conv.axes[conv.chunks.position] is None
            seen["chunks major"] += conv.chunks.major
    expected = 17 + (5 if method == "blocks" else 1)
    assert len(seen) == expected, sorted(seen)
    assert min(seen.values()) >= 5, seen


NAMED = {
    "blocks": {
        "eight chunks": (Case(SP4, W, "NHWC", "HWIO", (4, 64), (3, 3)), (1, 8, False)),
        "four, where eight don't fit": (Case(SP4, W, "NHWC", "HWIO", (4, 48), (3, 3)), (1, 4, False)),
        "two, the last one short": (Case(SP4, W, "NHWC", "HWIO", (3, 23), (3, 3)), (1, 2, False)),
        "many images, chunks major": (Case(SP4, W, "NCHW", "OIHW", (4, 48), (3, 3), batch=8), (1, 4, True)),
        "mesh of one": (Case(SP1, W, "NHWC", "HWIO", (4, 16), (3, 5)), (1, 8, False)),
        "mesh of one, circle": (
            Case(SP1, W, "NWC", "WIO", (16,), (3,), padding=((1, 1),), modes=("circular",)),
            (0, 8, False),
        ),
        "circle of two chunks": (
            Case(SP1, W, "NWC", "WIO", (6,), (3,), padding=((1, 1),), modes=("circular",)),
            (0, 2, False),
        ),
        "circle of four devices": (
            Case(SP4, W, "NCW", "OIW", (16,), (3,), padding=((2, 0),), modes=("circular",)),
            (0, 2, False),
        ),
        "a dim that isn't cut, the cut one is uneven": (
            Case(SP4, W, "NHWC", "HWIO", (16, 13), (3, 4), strides=(1, 3), padding=((1, 1), (1, 3))),
            (0, 8, False),
        ),
        "reflected in the cut dim": (
            Case(SP4, W, "NHWC", "HWIO", (8, 16), (3, 3), padding=((1, 1), (1, 1)), modes=("zeros", "reflect")),
            (0, 8, False),
        ),
        "two dims cut, corners": (Case(GRID, HW, "NHWC", "HWIO", (8, 32), (3, 3)), (1, 8, False)),
        "two dims cut, the first in chunks": (Case(GRID, HW, "NCHW", "HWIO", (16, 12), (3, 3)), (0, 8, False)),
        "volume": (Case(SP4, (("sp", "D"),), "NCDHW", "OIDHW", (16, 3, 4), (3, 2, 3)), (0, 4, False)),
        "stride and groups": (
            Case(SP4, W, "NHWC", "HWIO", (4, 64), (3, 4), strides=(1, 2), feature_groups=4, features=(4, 8)),
            (1, 8, False),
        ),
        "transposed": (
            Case(SP4, W, "NWC", "WIO", (32,), (4,), padding=((2, 2),), lhs_dilation=(2,)),
            (0, 8, False),
        ),
    },
    "overlap": {
        "3 taps": (Case(SP4, W, "NHWC", "HWIO", (4, 16), (3, 3)), None),
        "even kernel, one side wider": (Case(SP4, W, "NCW", "OIW", (23,), (4,)), None),
        "only from the right": (Case(SP4, W, "NWC", "WIO", (16,), (3,), strides=(2,)), None),
        "one output that reads the block alone": (Case(SP8, W, "NWC", "WIO", (24,), (3,)), None),
        "two dims cut, corners": (Case(GRID, HW, "NHWC", "HWIO", (8, 24), (3, 5)), None),
        "two dims cut, other order of dims": (Case(GRID, HW, "NWHC", "HWIO", (12, 16), (5, 3)), None),
        "volume cut in D and W": (
            Case(GRID, (("sq", "D"), ("sp", "W")), "NCDHW", "OIDHW", (6, 3, 12), (3, 3, 3)),
            None,
        ),
        "circle": (Case(SP4, W, "NWC", "WIO", (20,), (4,), padding=((1, 2),), modes=("circular",)), None),
        "mesh of one, circle": (Case(SP1, W, "NWC", "WIO", (9,), (3,), padding=((1, 1),), modes=("circular",)), None),
        "transposed": (Case(SP4, W, "NWC", "WIO", (32,), (4,), padding=((2, 2),), lhs_dilation=(2,)), None),
        "dilated taps": (Case(SP4, W, "NWC", "WIO", (32,), (3,), rhs_dilation=(3,)), None),
        "grouped, batch left to the compiler": (
            Case(DPSP, W, "NHWC", "HWIO", (4, 16), (3, 3), feature_groups=2, batch=4, batch_axis="dp"),
            None,
        ),
        "batch named": (Case(DPSP, (*W, ("dp", "N")), "NHWC", "HWIO", (4, 16), (3, 3), feature_groups=2), None),
        "two axes on one dim": (
            Case(GRID, ((("sq", "sp"), "W"),), "NCW", "OIW", (39,), (3,)),  # type: ignore[arg-type]
            None,
        ),
    },
}
QUICK = {
    "many images, chunks major",
    "circle of two chunks",
    "two dims cut, the first in chunks",
    "two dims cut, other order of dims",
    "grouped, batch left to the compiler",
    "one output that reads the block alone",
}
SLOW = pytest.mark.slow
EACH = [
    pytest.param(method, name, marks=() if name in QUICK else SLOW) for method, cases in NAMED.items() for name in cases
]


@pytest.mark.parametrize(("method", "name"), EACH)
def test_named_configurations(method, name, chosen):
    case, chunks = NAMED[method][name]
    check(case, "auto", method, tail=np.nan)
    assert {conv.method for conv in chosen} == {method}
    found = chosen[0].chunks
    assert (None if found is None else dataclasses.astuple(found)) == chunks


# --- what travels ------------------------------------------------------------------------------------------


def loss_of(case: Case, mesh, method: str):
    ring = case.ring(mesh, method=method)
    return lambda x, kernel: jnp.sum(jnp.tanh(ring(x, kernel).array))


def traffic(case: Case, method: str):
    """(bytes of halos, permutes), of the forward pass and of a step."""
    mesh = case.make_mesh()
    x, kernel = case.operands()
    x, loss = padded(case, x, mesh), loss_of(case, mesh, method)
    found = []
    for function in (loss, jax.grad(loss, (0, 1))):
        report = compiled_report(function, x, kernel, mesh=mesh)
        assert report.count("all_gather") == report.count("all_to_all") == 0, str(report)
        found.append((report.bytes(kind="collective_permute"), report.count("collective_permute")))
    return found


ALIKE = {
    "3 taps": (Case(SP4, W, "NHWC", "HWIO", (4, 32), (3, 3)), (2, 4)),
    "uneven": (Case(SP4, W, "NHWC", "HWIO", (4, 31), (3, 3)), (2, 4)),
    "even kernel": (Case(SP4, W, "NHWC", "HWIO", (4, 32), (3, 4)), (2, 4)),
    "two dims": (Case(GRID, HW, "NHWC", "HWIO", (16, 32), (3, 3)), (4, 8)),
    "circle": (Case(SP4, W, "NWC", "WIO", (32,), (3,), padding=((1, 1),), modes=("circular",)), (2, 4)),
    "stride": (Case(SP4, W, "NWC", "WIO", (64,), (3,), strides=(2,)), (1, 2)),
    "kernel is stride": (Case(SP4, W, "NWC", "WIO", (64,), (2,), strides=(2,)), (0, 0)),
    "transposed": (Case(SP4, W, "NWC", "WIO", (32,), (4,), padding=((2, 2),), lhs_dilation=(2,)), (2, 4)),
    "mesh of one": (Case(SP1, W, "NHWC", "HWIO", (4, 32), (3, 3)), (0, 0)),
    "mesh of one, circle": (Case(SP1, W, "NWC", "WIO", (32,), (3,), padding=((1, 1),), modes=("circular",)), (0, 0)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("two dims", "mesh of one, circle") else SLOW) for name in ALIKE],
)
@pytest.mark.not_smoke
def test_every_form_moves_what_concat_moves(name, chosen):
    case, permutes = ALIKE[name]
    want = traffic(case, "concat")
    assert tuple(count for _, count in want) == permutes
    for method in FORMS:
        chosen.clear()
        assert traffic(case, method) == want
        assert {conv.method for conv in chosen} == {method}


@pytest.mark.not_smoke
def test_chunks_of_a_dim_that_is_not_cut_move_nothing():
    case = Case(SP4, W, "NHWC", "HWIO", (16, 13), (3, 2), strides=(1, 3), padding=((1, 1), (0, 2)))
    assert case.in_form("blocks").axes[case.in_form("blocks").chunks.position] is None
    assert traffic(case, "blocks") == traffic(case, "concat")


# --- what is laid out and kept -----------------------------------------------------------------------------


def inner_shapes(jaxpr) -> list[tuple[int, ...]]:
    """Shapes of all values in a jaxpr and those inside it."""
    found = []
    for equation in jaxpr.eqns:
        found += [v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape")]
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += inner_shapes(inner)
    return found


def manual_part(jaxpr):
    """The body of the one shard_map in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            return equation.params["jaxpr"]
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns") and (body := manual_part(inner)) is not None:
                return body
    return None


BLOCK = 37  # of a dim that no other number in the program resembles
LAYER = Case((("sp", 2),), W, "NHWC", "HWIO", (7, 2 * BLOCK), (3, 5), padding=((1, 1), (2, 2)))


def longest(function, *arguments) -> int:
    """The longest dim of any value inside the manual region."""
    body = manual_part(jax.make_jaxpr(function)(*arguments).jaxpr)
    assert body is not None
    return max(max(shape, default=0) for shape in inner_shapes(body))


def test_overlap_lays_nothing_out_that_is_longer_than_the_block():
    mesh = LAYER.make_mesh()
    x, kernel = LAYER.operands()
    x = padded(LAYER, x, mesh)
    assert longest(LAYER.ring(mesh, method="concat"), x, kernel) == BLOCK + 4
    assert longest(LAYER.ring(mesh, method="overlap"), x, kernel) == BLOCK
    # Nor on the way back.
    gradient = lambda method: jax.grad(loss_of(LAYER, mesh, method), (0, 1))  # noqa: E731
    bodies = [longest(gradient(m), x, kernel) for m in ("concat", "overlap")]
    assert bodies == [BLOCK + 4, BLOCK]


def test_blocks_lay_out_chunks_with_halos():
    case = dataclasses.replace(LAYER, sizes=(7, 64))
    mesh = case.make_mesh()
    x, kernel = case.operands()
    body = manual_part(jax.make_jaxpr(case.ring(mesh, method="blocks"))(padded(case, x, mesh), kernel).jaxpr)
    convolved = [e for e in equations(body) if e.primitive.name == "conv_general_dilated"]
    assert [e.invars[0].aval.shape for e in convolved] == [(16, 7, 4 + 4, 4)]


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("method", ["concat", *FORMS])
@pytest.mark.parametrize("dims", ["W", "HW"])
def test_the_backward_pass_keeps_the_input_and_thin_halos(method, dims):
    """One array of the input's size a layer, whatever the form: nothing is laid out again, no masks."""
    mesh_of, axes = ((("sp", 2),), W) if dims == "W" else (GRID, HW)
    case = Case(mesh_of, axes, "NHWC", "HWIO", (64, 1024), (3, 3))
    mesh = case.make_mesh()
    shape, taps = case.shapes()
    x = sk.Padded(jax.ShapeDtypeStruct(shape, np.float64), shape)
    kernel = jax.ShapeDtypeStruct(taps, np.float64)
    ring = case.ring(mesh, method=method)

    def two_layers(x, first, second):
        return ring(ring(x, first), second).array

    kept = jax.eval_shape(lambda *args: jax.vjp(two_layers, *args)[1], x, kernel, kernel)
    sizes = sorted((a.size for a in jax.tree.leaves(kept)), reverse=True)
    assert sizes[:2] == [x.size, x.size]
    assert sum(sizes[2:]) < x.size, sizes


# --- transformations and regions ---------------------------------------------------------------------------

SIMPLE = Case(SP4, W, "NHWC", "HWIO", (3, 23), (3, 3))
BESIDE = dataclasses.replace(SIMPLE, mesh=DPSP, sizes=(3, 24))


def scalar(function):
    return lambda x, kernel: jnp.sum(jnp.tanh(function(x, kernel)))


def assert_close(got, want, tolerance=1e-10):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.not_smoke
def test_second_derivatives(method, chosen):
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()

    def hessian_product(function):
        first = jax.grad(scalar(function), (0, 1))
        return jax.jit(jax.grad(lambda x, k: sum(jnp.sum(g**2) for g in first(x, k)), (0, 1)))

    got = hessian_product(SIMPLE.ring(mesh, method=method))(x, kernel)
    assert_close(got, hessian_product(SIMPLE.reference)(x, kernel))
    assert {conv.method for conv in chosen} == {method}


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.not_smoke
def test_vmap_remat_and_scan(method):
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()
    many = np.stack([x, 2 * x, x**2])

    def outcome(function):
        def scanned(xs, kernel):
            return jax.lax.scan(lambda c, x: (c, jax.checkpoint(function)(x, kernel)), 0, xs)[1]

        mapped = jax.vmap(function, (0, None))
        both = lambda xs, k: jnp.sum(jnp.tanh(mapped(xs, k) + scanned(xs, k)))  # noqa: E731
        return jax.jit(jax.value_and_grad(both, (0, 1)))(many, kernel)

    assert_close(outcome(SIMPLE.ring(mesh, method=method)), outcome(SIMPLE.reference))


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.not_smoke
def test_a_kernel_for_every_image_by_vmap(method):
    """A batch of kernels: the form's own batch dim isn't the one that vmap adds."""
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()
    args = (np.stack([x, x[::-1]]), np.stack([kernel, kernel**2]))
    got = jax.jit(jax.grad(lambda *a: jnp.sum(jax.vmap(scalar(SIMPLE.ring(mesh, method=method)))(*a)), (0, 1)))(*args)
    assert_close(got, jax.grad(lambda *a: jnp.sum(jax.vmap(scalar(SIMPLE.reference))(*a)), (0, 1))(*args))


@pytest.mark.parametrize("method", FORMS)
def test_inside_a_manual_region(method, chosen):
    """The kernel's gradient stays Partial."""
    case = dataclasses.replace(SIMPLE, sizes=(3, 24))
    mesh = case.make_mesh()
    x, kernel = case.operands()
    ring = case.ring(method=method)

    def local(x, kernel):
        kernel = jax.lax.pcast(kernel, "sp", to="varying")
        grads = jax.grad(scalar(ring), (0, 1))(x, kernel)
        return ring(x, kernel), grads[0], grads[1][None]

    space = P(None, None, "sp")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(space, P()), out_specs=(space, space, P("sp"))))
    compiled = run.lower(x, kernel).compile()
    out, grad_x, parts = compiled(x, kernel)
    assert {conv.method for conv in chosen} == {method}
    want = jax.grad(scalar(case.reference), (0, 1))(x, kernel)
    assert_close((out, grad_x, parts.sum(0)), (case.reference(x, kernel), *want))
    report = read_collectives(compiled.as_text(), mesh)
    assert set(report.by_kind()) == {"collective_permute"}, str(report)


@pytest.mark.parametrize("method", FORMS)
def test_nested_in_a_region_of_another_axis(method, chosen):
    mesh = BESIDE.make_mesh()
    x, kernel = BESIDE.operands()
    grads = jax.grad(scalar(BESIDE.ring(method=method)), (0, 1))
    run = jax.shard_map(grads, mesh=mesh, in_specs=(P("dp"), P()), out_specs=(P("dp"), P()), axis_names={"dp"})
    assert_close(jax.jit(run)(x, kernel), jax.grad(scalar(BESIDE.reference), (0, 1))(x, kernel))
    assert {conv.method for conv in chosen} == {method}


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.every(2)
def test_bfloat16(method, axis_types):
    """Types and shapes, gradients beside an axis left to the compiler too; near to concat in float32."""
    mesh = BESIDE.make_mesh(axis_types)
    x, kernel = (jnp.asarray(a, jnp.bfloat16) for a in BESIDE.operands())
    with jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext():
        x = sk.shard_tensor(x, {"sp": sk.Shard(2)}, mesh)

        def outcome(form, dtype):
            run = BESIDE.ring(mesh, method=form)

            def loss(x, kernel):
                out = run(x, kernel)
                return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

            return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x.astype(dtype), kernel.astype(dtype))

        (got, got_out), (want, want_out) = outcome(method, jnp.bfloat16), outcome("concat", jnp.float32)
    for a, b in zip((*got, got_out), (*want, want_out), strict=True):
        assert (a.dtype, a.shape) == (jnp.bfloat16, b.shape)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=0, atol=0.05 * float(np.abs(b).max()))


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.not_smoke
def test_input_features_cut_over_an_explicit_axis(method):
    """Every part of a form sums its own contributions: values as ever, no kernel or image gathered."""
    case = Case((("tp", 2), ("sp", 4)), W, "NHWC", "HWIO", (3, 24), (3, 3), features=(4, 8))
    mesh = case.make_mesh("explicit")
    x, kernel = case.operands()
    args = (sk.shard_tensor(x, {"tp": sk.Shard(3), "sp": sk.Shard(2)}, mesh), sk.shard_tensor(kernel, {}, mesh))
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(scalar(case.ring(method=method)), (0, 1))).lower(*args).compile()
        got = compiled(*args)
    assert_close(got, jax.value_and_grad(scalar(case.reference), (0, 1))(x, kernel))
    assert read_collectives(compiled.as_text(), mesh).count("all_to_all") == 0


@pytest.mark.not_smoke
def test_integers(chosen):
    mesh = SIMPLE.make_mesh()
    x, kernel = (np.round(a * 3).astype(np.int32) for a in SIMPLE.operands())
    for method in FORMS:
        np.testing.assert_array_equal(SIMPLE.ring(mesh, method=method)(x, kernel), SIMPLE.reference(x, kernel))
    assert [conv.method for conv in chosen] == list(FORMS)


# --- bad input ---------------------------------------------------------------------------------------------

LINE = Case(SP4, W, "NWC", "WIO", (16,), (3,))
REFUSED = [
    ("overlap", {"modes": ("reflect",), "padding": ((1, 1),)}, "padding_mode='reflect' lays its edges out"),
    ("overlap", {"modes": ("circular",), "padding": ((1, 1),), "sizes": (15,)}, "padding_mode='circular' lays"),
    ("overlap", {"padding": "VALID", "kernels": (6,)}, "windows begin at another place in each block of spatial dim 0"),
    ("overlap", {"kernels": (9,)}, "no output of a block of 4 elements in spatial dim 0 reads the block alone"),
    ("overlap", {"kernels": (11,)}, "halos in spatial dim 0 are wider than a block of 4"),
    ("blocks", {"modes": ("reflect",), "padding": ((1, 1),)}, "padding_mode='reflect' lays its edges out"),
    ("blocks", {"sizes": (12,)}, "blocks of 3 inputs and 3 outputs in spatial dim 0 don't divide into 8 chunks"),
    ("blocks", {"padding": ((0, 1),), "strides": (2,), "sizes": (24,)}, "blocks of 6 inputs and 3 outputs in spatial"),
    ("blocks", {"sizes": (64,), "padding": "VALID", "kernels": (33,)}, "windows begin at another place in each chunk"),
    ("blocks", {"sizes": (32,), "kernels": (11,)}, "8 chunks of 1 elements in spatial dim 0 are narrower than"),
    ("blocks", {"batch_groups": 2}, "batch_group_count > 1 gives the batch dim another meaning"),
]


@pytest.mark.parametrize(("method", "changes", "reason"), REFUSED)
def test_a_form_that_cannot_run_says_why_and_what_can(method, changes, reason):
    case = dataclasses.replace(LINE, **changes)
    mesh = case.make_mesh()
    x, kernel = case.operands()
    with pytest.raises(ValueError, match=f"ring_conv: method='{method}' can't run .*: {reason}.*; method='concat' can"):
        case.ring(mesh, method=method)(x, kernel)
    want = case.reference(x, kernel)
    np.testing.assert_allclose(case.ring(mesh, method="concat")(x, kernel), want, atol=1e-10)


def test_an_unknown_method_lists_those_there_are():
    x, kernel = LINE.operands()
    with pytest.raises(ValueError, match=r"method='nonsense' is unknown; use one of .*auto.*concat.*overlap.*blocks"):
        LINE.ring(LINE.make_mesh(), method="nonsense")(x, kernel)
