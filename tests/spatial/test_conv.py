"""ring_conv against lax on one device: values, all derivatives, shardings and compiled collectives."""

from __future__ import annotations

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
from shardkit.spatial.convolution.args import read_conv
from tests.spatial.conv_cases import NAMED, Case, derivatives, draw

CI_SLICE, FULL_SWEEP = 48, 640


def padded(case: Case, value, mesh, tail=0.0):
    """An operand on the mesh, as Padded: it carries any size through jit without being gathered.

    ``tail`` lies in the padded tails of its dims.
    """
    shards = [1] * value.ndim
    for axis, placement in case.placements().items():
        shards[placement.dim] *= dict(case.mesh)[axis]
    beyond = [(0, -size % count) for size, count in zip(value.shape, shards, strict=True)]
    whole = sk.shard_tensor(np.pad(value, beyond, constant_values=tail), case.placements(), mesh)
    return sk.Padded(whole, value.shape)


def most_sums(case: Case, method: str, axis_types: str) -> int:
    """How often the kernel's gradient may be summed.

    Once over the mesh axes that cut space, and once over those left to the compiler. "overlap" makes that gradient
    of several parts (the block's and each edge's), and XLA's CPU backend doesn't add them up before it sums them
    over an axis left to it.
    """
    named = {name for axis, _ in case.axes for name in ((axis,) if isinstance(axis, str) else axis)}
    if axis_types == "explicit" or case.batch_axis is None or case.batch_axis in named:
        return 1
    return 2 + (2 * len(case.letters) if method == "overlap" else 0)


def check(case: Case, axis_types="auto", method="auto", tail=0.0):
    """One configuration, everything about it."""
    mesh = case.make_mesh(axis_types)
    x, kernel = case.operands()
    reference = jax.jit(derivatives(case.reference))
    shape = jax.eval_shape(case.reference, x, kernel).shape
    rng = np.random.default_rng(1)
    cotangent, dx, dkernel = (rng.normal(size=s) for s in (shape, x.shape, kernel.shape))
    want_out, (want_x, want_kernel), want_tangent = reference(x, kernel, cotangent, dx, dkernel)

    run = derivatives(case.ring(mesh, method=method))
    images = [padded(case, image, mesh, tail) for image in (x, cotangent, dx)]
    args = (images[0], kernel, *images[1:], dkernel)
    with jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext():
        compiled = jax.jit(run).lower(*args).compile()
        out, (grad_x, grad_kernel), tangent = compiled(*args)

    assert out.shape == shape
    assert sk.placements(out) == sk.Layout(mesh, case.placements()).placements
    assert sk.placements(grad_x) == sk.placements(args[0])
    for got, want in ((out, want_out), (grad_x, want_x), (grad_kernel, want_kernel), (tangent, want_tangent)):
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-10 * max(1, np.abs(want).max()))

    report = read_collectives(compiled.as_text(), mesh)
    assert report.count("all_gather") == 0, str(report)
    assert report.count("all_to_all") == 0, str(report)
    # The only sums are those of kernel gradients.
    sums = [e.result_bytes for e in report if e.kind == "all_reduce"]
    if method in ("overlap", "blocks"):
        assert sum(sums) <= kernel.nbytes * most_sums(case, method, axis_types), str(report)
    else:
        assert max(sums, default=0) <= kernel.nbytes, str(report)
    return report


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.every(2)
def test_named_configurations(name, axis_types):
    check(NAMED[name], axis_types)


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


# --- what travels ------------------------------------------------------------------------------------


def compiled_report(function, *args, mesh):
    return read_collectives(jax.jit(function).lower(*args).compile().as_text(), mesh)


@pytest.mark.parametrize(
    ("case", "permutes", "elements"),
    [
        # 3-tap SAME: one element from each side; two images of 6 rows and 4 features of f64.
        (Case((("sp", 4),), (("sp", "W"),), "NHWC", "HWIO", (6, 16), (3, 3)), 2, 2),
        # Even kernel: 1 from the left, 2 from the right.
        (Case((("sp", 4),), (("sp", "W"),), "NHWC", "HWIO", (6, 16), (3, 4)), 2, 3),
        # Stride 2, 3 taps, aligned blocks: only from the right.
        (Case((("sp", 4),), (("sp", "W"),), "NHWC", "HWIO", (6, 16), (3, 3), strides=(1, 2)), 1, 1),
        # Kernel = stride, aligned: nothing.
        (Case((("sp", 4),), (("sp", "W"),), "NHWC", "HWIO", (6, 16), (3, 2), strides=(1, 2)), 0, 0),
        # Dilated kernel wider than a block of 2: reach 4 = two hops on each side.
        (Case((("sp", 8),), (("sp", "W"),), "NHWC", "HWIO", (6, 16), (3, 3), rhs_dilation=(1, 4)), 4, 8),
    ],
)
def test_forward_moves_the_lower_bound(case, permutes, elements):
    mesh = case.make_mesh()
    x, kernel = case.operands()
    x = padded(case, x, mesh)
    report = compiled_report(case.ring(mesh), x, kernel, mesh=mesh)
    assert report.by_kind() == ({"collective_permute": permutes} if permutes else {})
    assert report.bytes() == elements * 2 * 6 * 4 * 8


@pytest.mark.parametrize("dims", [(("sp", "W"),), (("sq", "H"), ("sp", "W"))])
def test_two_permutes_a_dim_each_way(dims):
    """Forward 2 a sharded dim, input gradient 2, kernel gradient none beyond its sum."""
    case = Case((("sq", 2), ("sp", 4)), dims, "NHWC", "HWIO", (8, 16), (3, 3))
    mesh = case.make_mesh()
    x, kernel = case.operands()
    x = padded(case, x, mesh)
    ring = case.ring(mesh)

    def loss(x, kernel):
        return jnp.sum(jnp.tanh(ring(x, kernel).array))

    count = len(dims)
    assert compiled_report(loss, x, kernel, mesh=mesh).count("collective_permute") == 2 * count
    both = compiled_report(jax.grad(loss, (0, 1)), x, kernel, mesh=mesh)
    assert both.count("collective_permute") == 4 * count
    only_kernel = compiled_report(jax.grad(loss, 1), x, kernel, mesh=mesh)
    assert only_kernel.count("collective_permute") == 2 * count
    assert only_kernel.count("all_gather") == both.count("all_gather") == 0


@pytest.mark.parametrize("number", range(10))
def test_bytes_on_the_wire_are_those_of_the_plan(number):
    """What windows computes, and what the compiled program moves, on random configurations."""
    case = sweep(10, seed=7)[number]
    mesh = case.make_mesh()
    x, kernel = case.operands()
    space = {k: v for k, v in case.placements().items() if k != "dp"}
    x = sk.shard_tensor(x, space, mesh, uneven="pad")
    keywords = case.keywords | {"padding_mode": case.per_dim(case.modes, "zeros"), "spatial_axes": dict(case.axes)}
    planned = read_conv(x, kernel, **keywords)
    report = compiled_report(case.ring(mesh), x, kernel, mesh=mesh)
    assert set(report.by_kind()) <= {"collective_permute"}
    assert report.bytes() == planned.halo_bytes
    assert report.count() == planned.conv.permutes


def test_corners_travel_with_the_second_dim():
    case = Case((("sq", 2), ("sp", 4)), (("sq", "H"), ("sp", "W")), "NHWC", "HWIO", (8, 16), (3, 3))
    mesh = case.make_mesh()
    x, kernel = case.operands()
    report = compiled_report(case.ring(mesh), padded(case, x, mesh), kernel, mesh=mesh)
    rows, columns = 2 * (2 * 4 * 4), 2 * (2 * (4 + 2) * 4)  # [2, 1, 4, 4] and [2, 4 + 2, 1, 4]
    assert report.bytes(axis="sq") == rows * 8
    assert report.bytes(axis="sp") == columns * 8


def test_kernel_gradient_is_reduced_once_at_top_level():
    case = Case((("sp", 8),), (("sp", "W"),), "NHWC", "HWIO", (4, 16), (3, 3))
    mesh = case.make_mesh()
    x, kernel = case.operands()
    report = compiled_report(jax.grad(lambda k: jnp.sum(case.ring(mesh)(x, k) ** 2)), kernel, mesh=mesh)
    assert report.count("all_reduce") == 1


# --- types, dtypes, transformations ----------------------------------------------------------------------


SIMPLE = Case((("sp", 4),), (("sp", "W"),), "NHWC", "HWIO", (5, 13), (3, 3), strides=(1, 2))


@pytest.mark.parametrize("kind", ["numpy", "eager", "jit"])
def test_plain_arrays_give_plain_arrays(kind):
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()
    ring = SIMPLE.ring(mesh)
    out = {"numpy": lambda: ring(x, kernel), "eager": lambda: ring(jnp.asarray(x), kernel)}.get(
        kind, lambda: jax.jit(ring)(x, kernel)
    )()
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(out, SIMPLE.reference(x, kernel), atol=1e-10)


def test_result_stays_sharded():
    case = Case((("dp", 2), ("sp", 4)), (("sp", "W"),), "NHWC", "HWIO", (4, 16), (3, 3), batch_axis="dp")
    mesh = case.make_mesh()
    x, kernel = case.operands()
    out = jax.jit(case.ring(mesh))(sk.shard_tensor(x, case.placements(), mesh), kernel)
    assert out.sharding.spec == P("dp", None, "sp", None) or out.sharding.spec == P("dp", None, "sp")


def test_uneven_explicit_result_is_padded():
    case = NAMED["VALID, output not divisible"]
    mesh = case.make_mesh("explicit")
    x, kernel = case.operands()
    with jax.set_mesh(mesh):
        out = jax.jit(case.ring())(sk.shard_tensor(x, case.placements(), mesh), kernel)
    assert isinstance(out, sk.Padded)
    assert out.array.shape == (2, 4, 16, 4)
    np.testing.assert_allclose(np.asarray(out), case.reference(x, kernel), atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (jnp.bfloat16, 5e-2), (np.complex128, 1e-10)])
def test_dtypes(dtype, tolerance):
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()
    if dtype == np.complex128:
        x, kernel = x + 1j * x[::-1], kernel * (1 - 2j)
    x, kernel = jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)
    out = jax.jit(SIMPLE.ring(mesh))(x, kernel)
    assert out.dtype == dtype
    want = SIMPLE.reference(x, kernel)
    np.testing.assert_allclose(np.asarray(out, np.complex128), np.asarray(want, np.complex128), atol=30 * tolerance)
    if dtype != np.complex128:
        grads = jax.jit(jax.grad(lambda x, k: SIMPLE.ring(mesh)(x, k).astype("float32").sum(), (0, 1)))(x, kernel)
        assert [g.dtype for g in grads] == [dtype, dtype]


@pytest.mark.not_smoke
def test_bfloat16_kernel_gradient_beside_an_axis_left_to_the_compiler():
    """Summed in float32: XLA's CPU backend aborts the process on the 16-bit sum."""
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    x, kernel = (jnp.asarray(a, jnp.bfloat16) for a in SIMPLE.operands())
    loss = lambda f: lambda k: (f(x, k).astype(jnp.float32) ** 2).sum()  # noqa: E731
    got = jax.jit(jax.grad(loss(SIMPLE.ring(mesh))))(kernel)
    want = jax.grad(loss(SIMPLE.reference))(kernel)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=0.02 * float(jnp.abs(want).max()))


def test_integers_and_preferred_element_type():
    mesh = SIMPLE.make_mesh()
    x, kernel = (np.round(a * 3).astype(np.int32) for a in SIMPLE.operands())
    np.testing.assert_array_equal(SIMPLE.ring(mesh)(x, kernel), SIMPLE.reference(x, kernel))
    x, kernel = (jnp.asarray(a, jnp.bfloat16) for a in (x, kernel))
    out = SIMPLE.ring(mesh, preferred_element_type=jnp.float32)(x, kernel)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize(
    "case",
    [
        SIMPLE,
        NAMED["transposed, lhs dilation 2"],
        NAMED["globe: circular W, replicated H"],
        NAMED["grouped, sharded in W"],
    ],
)
def test_second_derivatives(case):
    mesh = case.make_mesh()
    x, kernel = case.operands()

    def hessian_product(function):
        loss = lambda x, k: jnp.sum(jnp.sin(function(x, k)) ** 2)  # noqa: E731
        inner = lambda x, k: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, k))  # noqa: E731
        return jax.jit(lambda x, k: (jax.grad(inner, (0, 1))(x, k), jax.jvp(jax.grad(loss, 1), (x, k), (x, k))[1]))

    got, want = hessian_product(case.ring(mesh))(x, kernel), hessian_product(case.reference)(x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())


@pytest.mark.not_smoke
def test_vmap_remat_and_scan():
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()
    many = np.stack([x, 2 * x, x**2])
    ring = SIMPLE.ring(mesh)
    want = jax.vmap(SIMPLE.reference, (0, None))(many, kernel)
    np.testing.assert_allclose(jax.jit(jax.vmap(ring, (0, None)))(many, kernel), want, atol=1e-10)
    scanned = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, jax.checkpoint(ring)(x, kernel)), 0, xs)[1])(many)
    np.testing.assert_allclose(scanned, want, atol=1e-10)
    grads = jax.jit(jax.grad(lambda k: jnp.sum(jax.vmap(jax.checkpoint(ring), (0, None))(many, k) ** 2)))(kernel)
    want_grads = jax.grad(lambda k: jnp.sum(jax.vmap(SIMPLE.reference, (0, None))(many, k) ** 2))(kernel)
    np.testing.assert_allclose(grads, want_grads, rtol=1e-10)


@pytest.mark.not_smoke
def test_garbage_in_padded_tails_never_shows():
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()
    clean = padded(SIMPLE, x, mesh)
    tail = np.arange(clean.array.shape[2]) >= x.shape[2]
    dirty = sk.Padded(jnp.where(tail[:, None], jnp.nan, clean.array), clean.logical_shape)

    def loss(x, k):
        return jnp.sum(SIMPLE.ring(mesh)(x, k).value ** 2)

    for got, want in zip(jax.grad(loss, (0, 1))(dirty, kernel), jax.grad(loss, (0, 1))(clean, kernel), strict=True):
        got, want = (getattr(a, "array", a) for a in (got, want))
        np.testing.assert_array_equal(got, want)
    grad = jax.grad(loss)(dirty, kernel).array
    assert not np.asarray(grad)[:, :, tail].any()


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.not_smoke
def test_other_padded_dims_count_as_they_should(axis_types):
    """A batch of 3 over 2 devices and rows of 5 over 2: padded, not named, and full of NaN beyond."""
    mesh = sk.make_mesh({"dp": 2, "sp": 4}, axis_types=axis_types)
    case = Case((("dp", 2), ("sp", 4)), (("sp", "W"),), "NHWC", "HWIO", (5, 13), (3, 3), batch=3)
    x, kernel = case.operands()
    for placed in ({"dp": sk.Shard(0), "sp": sk.Shard(2)}, {"dp": sk.Shard(1), "sp": sk.Shard(2)}):
        if axis_types == "explicit" and placed["dp"] == sk.Shard(1):
            continue  # there an axis that cuts a spatial dim has to be named
        clean = sk.shard_tensor(x, placed, mesh, uneven="pad")
        inside = np.zeros(clean.array.shape, bool)
        inside[tuple(slice(0, n) for n in x.shape)] = True
        dirty = sk.Padded(jnp.where(sk.shard_tensor(inside, placed, mesh), clean.array, jnp.nan), x.shape)

        def loss(x, kernel):
            return jnp.sum(jnp.tanh(case.ring(mesh)(x, kernel).value))

        with jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext():
            out = jax.jit(case.ring(mesh))(dirty, kernel)
            grad_x, grad_kernel = jax.jit(jax.grad(loss, (0, 1)))(dirty, kernel)
        want = jax.grad(lambda x, k: jnp.sum(jnp.tanh(case.reference(x, k))), (0, 1))(x, kernel)
        np.testing.assert_allclose(np.asarray(out), case.reference(x, kernel), atol=1e-10)
        np.testing.assert_allclose(np.asarray(grad_x), want[0], atol=1e-10)
        np.testing.assert_allclose(grad_kernel, want[1], atol=1e-10)
        assert not np.asarray(grad_x.array)[~inside].any()


# --- inside manual regions ----------------------------------------------------------------------------------


def test_inside_a_manual_region():
    """Blocks in, blocks out, and the kernel gradient stays Partial until the caller reduces it."""
    case = Case((("sp", 4),), (("sp", "W"),), "NHWC", "HWIO", (4, 16), (3, 3))
    mesh = case.make_mesh()
    x, kernel = case.operands()

    def local(x, kernel):
        kernel = jax.lax.pcast(kernel, "sp", to="varying")

        def loss(kernel):
            return jnp.sum(case.ring()(x, kernel) ** 2)

        return case.ring()(x, kernel), jax.grad(loss)(kernel)[None]

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(None, None, "sp"), P()), out_specs=(P(None, None, "sp"), P("sp")))
    )
    out, parts = run(x, kernel)
    np.testing.assert_allclose(out, case.reference(x, kernel), atol=1e-10)
    want = jax.grad(lambda k: jnp.sum(case.reference(x, k) ** 2))(kernel)
    assert parts.shape[0] == 4
    assert not np.allclose(parts[0], want)
    np.testing.assert_allclose(parts.sum(0), want, rtol=1e-10)
    report = read_collectives(run.lower(x, kernel).compile().as_text(), mesh)
    assert report.count("all_reduce") == 0


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.not_smoke
def test_nested_in_a_region_of_another_axis(check_vma):
    """Reverse mode through a shard_map inside another partly manual one, which plain JAX can't compile."""
    case = Case((("dp", 2), ("sp", 4)), (("sp", "W"),), "NHWC", "HWIO", (4, 13), (3, 3))
    mesh = case.make_mesh()
    x, kernel = case.operands()

    def local(x, kernel):
        loss = lambda x, k: jnp.sum(jnp.tanh(case.ring()(x, k)))  # noqa: E731
        grads = jax.grad(loss, (0, 1))(x, kernel)
        return grads[0], grads[1] if check_vma else jax.lax.psum(grads[1], "dp")

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("dp"), P()),
            out_specs=(P("dp"), P()),
            axis_names={"dp"},
            check_vma=check_vma,
        )
    )
    want = jax.grad(lambda x, k: jnp.sum(jnp.tanh(case.reference(x, k))), (0, 1))(x, kernel)
    for got, expected in zip(run(x, kernel), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-10)


FEATURES = Case((("tp", 2), ("sp", 4)), (("sp", "W"),), "NHWC", "HWIO", (4, 16), (3, 3), features=(4, 8))


@pytest.mark.parametrize(
    ("image", "kernel", "groups", "feature_axis", "kinds"),
    [
        ({}, {"tp": sk.Shard(3)}, 1, "tp", {"collective_permute": 2}),  # columns: output features stay cut
        ({"tp": sk.Shard(3)}, {"tp": sk.Shard(2)}, 1, None, {"collective_permute": 2, "all_reduce": 1}),
        ({"tp": sk.Shard(3)}, {}, 1, None, {"collective_permute": 2, "all_reduce": 1}),
        ({"tp": sk.Shard(3)}, {}, 2, "tp", {"collective_permute": 2}),  # each device has its own groups
    ],
)
def test_explicit_feature_axes_stay_as_they_are(image, kernel, groups, feature_axis, kinds):
    case = dataclasses.replace(FEATURES, feature_groups=groups)
    mesh = case.make_mesh("explicit")
    x, k = case.operands()
    args = (sk.shard_tensor(x, image | {"sp": sk.Shard(2)}, mesh), sk.shard_tensor(k, kernel, mesh))
    with jax.set_mesh(mesh):
        run = jax.jit(case.ring())
        out = run(*args)
        grads = jax.jit(jax.grad(lambda x, k: jnp.sum(jnp.tanh(case.ring()(x, k))), (0, 1)))(*args)
        report = sk.collectives(run, *args)
    assert out.sharding.spec == P(None, None, "sp", feature_axis)
    np.testing.assert_allclose(out, case.reference(x, k), atol=1e-10)
    want = jax.grad(lambda x, k: jnp.sum(jnp.tanh(case.reference(x, k))), (0, 1))(x, k)
    for got, expected in zip(grads, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-10)
    assert report.by_kind() == kinds


def test_batch_axis_may_be_named():
    case = NAMED["grouped, batch sharded too"]
    mesh = case.make_mesh()
    x, kernel = case.operands()
    both = lambda x, k: sk.ring_conv(x, k, **case.keywords, spatial_axes={"sp": "W", "dp": "N"}, mesh=mesh)  # noqa: E731
    args = (sk.shard_tensor(x, case.placements(), mesh), kernel)
    np.testing.assert_allclose(jax.jit(both)(*args), case.reference(x, kernel), atol=1e-10)
    report = compiled_report(jax.grad(lambda x, k: jnp.sum(both(x, k) ** 2), (0, 1)), *args, mesh=mesh)
    assert report.count("all_gather") == 0


def test_mesh_from_the_array_or_the_context():
    mesh = SIMPLE.make_mesh()
    x, kernel = SIMPLE.operands()
    want = SIMPLE.reference(x, kernel)
    np.testing.assert_allclose(SIMPLE.ring()(padded(SIMPLE, x, mesh), kernel), want, atol=1e-10)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(SIMPLE.ring()(x, kernel), want, atol=1e-10)
    with pytest.raises(ValueError, match=r"no mesh: not in mesh=, not on its array arguments .* none is ambient"):
        SIMPLE.ring()(x, kernel)


# --- bad input -----------------------------------------------------------------------------------------------


BASE = {
    "window_strides": (1, 1),
    "padding": "SAME",
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    "spatial_axes": {"sp": "W"},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spatial_axes": {"tp": "W"}}, r"names mesh axis 'tp', but the mesh has \('sp', 'sq'\)"),
        ({"spatial_axes": {"sp": "D"}}, r"names dim 'D', but the dims are \['C', 'H', 'N', 'W'\]"),
        ({"spatial_axes": {"sp": 7}}, "names dim 7, but the array has 4 dims"),
        ({"spatial_axes": {"sp": "C"}}, "holds features"),
        ({"spatial_axes": {"sp": "W", ("sp", "sq"): "H"}}, "'sp' is used twice"),
        ({"spatial_axes": {}}, "spatial_axes maps mesh axes to array dims"),
        ({"padding": [(1, 1)]}, "has 1 pairs for 2 spatial dims"),
        ({"padding": "FULL"}, "padding='FULL' is unknown"),
        ({"padding": [(1, 1), 3]}, "one .low, high. pair a spatial dim"),
        ({"window_strides": (1,)}, "has 1 entries for 2 spatial dims"),
        ({"window_strides": (0, 1)}, "must be at least 1"),
        ({"rhs_dilation": (1, 2, 3)}, "has 3 entries for 2"),
        ({"lhs_dilation": (2, 2)}, "no meaning with lhs_dilation"),
        ({"padding": [(-4, -4), (0, 0)]}, "no output in spatial dim 0"),
        ({"padding_mode": "mirror"}, "padding_mode='mirror' is unknown"),
        ({"padding_mode": {"C": "circular"}}, "no spatial dim of lhs"),
        ({"padding_mode": "reflect", "padding": [(8, 0), (1, 1)]}, "reflects more than the 8 elements"),
        ({"method": "magic"}, "method='magic' is unknown; use one of"),
        ({"feature_group_count": 3}, "lhs has 4 features, but the kernel"),
        ({"feature_group_count": 0}, "must be a positive integer"),
        ({"batch_group_count": 4}, "output features can't be split|does not divide"),
        ({"dimension_numbers": ("NHWC", "HWI", "NHWC")}, "dimension_numbers=.* don't fit rank 4"),
    ],
)
def test_bad_input_is_named(changes, message):
    mesh = sk.make_mesh({"sp": 4, "sq": 2})
    with pytest.raises(ValueError, match=message):
        sk.ring_conv(np.ones((2, 8, 8, 4)), np.ones((3, 3, 4, 6)), **(BASE | changes), mesh=mesh)


def test_empty_batches_and_other_shapes():
    mesh = sk.make_mesh({"sp": 4})
    with pytest.raises(ValueError, match="the batch is empty"):
        sk.ring_conv(np.ones((0, 8, 8, 4)), np.ones((3, 3, 4, 6)), **BASE, mesh=mesh)
    with pytest.raises(ValueError, match="need equal rank"):
        sk.ring_conv(np.ones((8, 8, 4)), np.ones((3, 3, 4, 6)), **BASE, mesh=mesh)
    with pytest.raises(ValueError, match="is empty"):
        sk.ring_conv(np.ones((1, 8, 0, 4)), np.ones((3, 3, 4, 6)), **BASE, mesh=mesh)


def test_a_block_of_the_wrong_size_in_a_region():
    mesh = sk.make_mesh({"sp": 4})

    def local(x):
        return sk.ring_conv(sk.Padded(x, (1, 2, 13, 1)), jnp.ones((3, 3, 1, 1)), **BASE).array

    with pytest.raises(ValueError, match="makes blocks of 4, but this block has 3"):
        jax.shard_map(local, mesh=mesh, in_specs=P(None, None, "sp"), out_specs=P(None, None, "sp"))(
            np.ones((1, 2, 12, 1))
        )
