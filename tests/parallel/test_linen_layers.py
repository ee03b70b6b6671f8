"""Every linen layer that a ConvParallel shards, on one device and sharded in space: the same in everything it does."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import shardkit as sk
from shardkit.parallel.linen.spatial import SPATIAL_LAYERS
from shardkit.parallel.plans import Applied
from tests.parallel.layer_cases import F64, LAYERS, LayerCase, assert_close, assert_little_travels, assert_placed

SP4 = {"sp": 4}
RNGS = {"dropout": jax.random.key(3)}


@contextlib.contextmanager
def replaced(layers: dict[str, Applied]):
    """The layers at these paths as their table has it."""

    def interceptor(next_fun, args, kwargs, context):
        module, applied = context.module, layers.get("/".join(context.module.path))
        replacement = SPATIAL_LAYERS.get(type(module))
        if applied is None or replacement is None or context.method_name != "__call__":
            return next_fun(*args, **kwargs)

        def run(*given, **named):
            return next_fun(*given, **named) if given or named else next_fun(*args, **kwargs)

        return replacement(module, applied, run, *args, **kwargs)

    with nn.intercept_methods(interceptor):
        yield


def everywhere(plan: sk.ConvParallel, mesh, *paths: str):
    return replaced({path: Applied(plan, mesh, path) for path in paths or ("",)})


def ambient(mesh):
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def initial(module: nn.Module, x, **arguments):
    return module.init({"params": jax.random.key(0), **RNGS}, x, **arguments)


def variables_for(module: nn.Module, x, **arguments):
    """Every parameter and statistic a random f64 number."""
    shapes = jax.eval_shape(lambda: initial(module, x, **arguments))
    rng = np.random.default_rng(7)
    parameters = jax.tree.map(lambda a: jnp.asarray(rng.normal(0.1, 0.3, a.shape), F64), shapes.get("params", {}))
    statistics = jax.tree.map(lambda a: jnp.asarray(rng.uniform(0.5, 1.5, a.shape), F64), shapes.get("batch_stats", {}))
    return parameters, statistics


def applied_to(module: nn.Module, parameters, statistics, x, **arguments):
    """(output, statistics afterwards)"""
    variables = {"params": parameters, "batch_stats": statistics}
    return module.apply(variables, x, **arguments, mutable=["batch_stats"], rngs=RNGS)


def outcome(module: nn.Module, parameters, statistics, x, cotangent):
    """(output, parameter gradients, input gradient, statistics afterwards) of one jitted pass, and its program."""

    @jax.jit
    def run(parameters, x, cotangent):
        forward = lambda p, x: applied_to(module, p, statistics, x)  # noqa: E731
        y, pull, after = jax.vjp(forward, parameters, x, has_aux=True)
        return y, *pull(cotangent), after

    compiled = run.lower(parameters, x, cotangent).compile()
    return compiled(parameters, x, cotangent), compiled.as_text()


def assert_trees_close(got, want, tolerance=1e-9):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, tolerance)


def check(case: LayerCase, axis_types="auto", module: Any = None):
    """Output, both gradients and running statistics; Padded in, Padded out; nothing gathered."""
    mesh = sk.make_mesh(dict(case.mesh), axis_types=axis_types)
    module, x = case.make.linen() if module is None else module, case.operand()
    variables = variables_for(module, x)
    shape = jax.eval_shape(lambda x: applied_to(module, *variables, x)[0], x).shape
    cotangent = np.random.default_rng(2).normal(size=shape)
    (want, want_params, want_x, want_stats), _ = outcome(module, *variables, x, cotangent)

    pad = lambda a: sk.shard_tensor(a, case.placements(), mesh, uneven="pad")  # noqa: E731
    with ambient(mesh), everywhere(case.plan(), mesh):
        (got, params, grad_x, stats), program = outcome(module, *variables, pad(x), pad(cotangent))

    assert_placed(case, mesh, got, grad_x)
    assert_close(got, want)
    assert_close(grad_x, want_x)
    assert_trees_close(params, want_params)
    assert_trees_close(stats, want_stats)
    assert_little_travels(case, program, mesh, want_params)


# What linen has and nnx doesn't, or spells in its own way.
OF_LINEN = {
    "conv, settings left out": (
        nn.Conv(3, [3, 2], strides=None, input_dilation=None, kernel_dilation=None, param_dtype=F64),
        LayerCase(LAYERS["conv SAME"].make, (2, 4, 13, 2)),
    ),
    "up, no strides, lists": (
        nn.ConvTranspose(3, [3, 3], padding=[1, (0, 2)], param_dtype=F64),
        LayerCase(LAYERS["up SAME"].make, (2, 3, 13, 2)),
    ),
    "batch norm, features by number": (
        nn.BatchNorm(False, axis=2, param_dtype=F64),
        LayerCase(LAYERS["batch norm"].make, (2, 13, 2)),
    ),
    "batch norm, statistics as wide as parameters": (
        nn.BatchNorm(False, param_dtype=F64, force_float32_reductions=False),
        LayerCase(LAYERS["batch norm"].make, (2, 13, 2)),
    ),
    "group norm over one spatial dim": (
        nn.GroupNorm(2, reduction_axes=(2, -1), param_dtype=F64),
        LayerCase(LAYERS["group norm"].make, (2, 3, 13, 4), statistics=3),
    ),
    "group norm over the batch too": (
        nn.GroupNorm(None, group_size=2, reduction_axes=(0, 1, 2, 3), use_fast_variance=False, param_dtype=F64),
        LayerCase(LAYERS["group norm"].make, (2, 3, 13, 4)),
    ),
    "group norm of what isn't cut": (
        nn.GroupNorm(2, reduction_axes=(1, 3), param_dtype=F64),
        LayerCase(LAYERS["group norm"].make, (2, 3, 13, 4)),
    ),
}

# One of each kind and of what differs between the two frameworks; nnx's tests have most of the rest every time.
OFTEN = [
    "conv CIRCULAR, even kernel",
    "conv mask, no bias",
    "conv groups",
    "up transposed kernel, mask",
    "batch norm",
    "batch norm, frozen",
    "group norm, group size, exact variance",
    "instance norm",
    "layer norm of the image",
    "rms norm of the image, H and W, no scale",
    "dropout of whole channels",
    "prelu",
]


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS])
def test_sharded_layer_equals_the_plain_one(name):
    check(LAYERS[name])


@pytest.mark.parametrize("name", OF_LINEN)
@pytest.mark.not_smoke
def test_what_linen_alone_has(name):
    module, case = OF_LINEN[name]
    check(case, module=module)


OFTEN_EXPLICIT = ["conv groups", "batch norm", "layer norm over features, scale over space"]


@pytest.mark.parametrize(
    "name", [n if n in OFTEN_EXPLICIT else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS]
)
@pytest.mark.not_smoke
def test_on_an_explicit_mesh(name):
    check(LAYERS[name], "explicit")


def test_the_table_covers_every_layer_there_is():
    assert {type(case.make.linen()) for case in LAYERS.values()} == set(SPATIAL_LAYERS)
    assert {type(LAYERS[name].make.linen()) for name in OFTEN} == set(SPATIAL_LAYERS)


# --- a model ------------------------------------------------------------------------------------------------


class Own(nn.Conv):
    """A subclass has code of its own."""


class Net(nn.Module):
    """Every kind of layer, one called twice, some in a scope of their own and under remat."""

    @nn.compact
    def __call__(self, x, train: bool):
        conv = nn.Conv(2, 3, padding="CIRCULAR", name="twice")
        x = nn.PReLU(name="prelu")(conv(conv(x)))
        x = nn.BatchNorm(use_running_average=None, name="batch")(x, not train)
        x = nn.remat(Block)(name="block")(x)
        x = nn.Dropout(0.5, name="drop")(x, deterministic=not train)
        return nn.ConvTranspose(2, (2,), strides=(2,), name="up")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.GroupNorm(2, name="group")(x)
        x = nn.InstanceNorm(name="instance")(nn.Conv(4, 3, bias_init=nn.initializers.normal(), name="conv")(x))
        x = nn.LayerNorm(name="layer", reduction_axes=(1, 2), scale_init=nn.initializers.normal())(x)
        return nn.RMSNorm(name="rms", reduction_axes=(1, 2))(x)


INNER = ("group", "conv", "instance", "layer", "rms")
OUTER = ("twice", "prelu", "batch", "drop", "up")
PATHS = (*OUTER, *(f"block/{name}" for name in INNER))


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.slow
def test_a_model_trains_as_the_plain_one(axis_types):
    check_model(axis_types, with_gradients=True)


@pytest.mark.not_smoke
def test_a_model_is_the_plain_one():
    check_model("auto", with_gradients=False)


def check_model(axis_types, with_gradients):
    """f32; the same parameters, whatever the input is, and the same first step."""
    mesh, module = sk.make_mesh(SP4, axis_types=axis_types), Net()
    x = np.random.default_rng(0).normal(size=(2, 13, 2)).astype(np.float32)
    plain = jax.jit(lambda x: initial(module, x, train=True))(x)

    def step(variables, x):
        def loss(params):
            y, after = applied_to(module, params, variables["batch_stats"], x, train=True)
            return jnp.mean(jnp.sin((y.value if isinstance(y, sk.Padded) else y) * 3)), (y, after)

        params = variables["params"]
        return jax.value_and_grad(loss, has_aux=True)(params) if with_gradients else (loss(params), ())

    (want_loss, (want, want_after)), want_grads = jax.jit(lambda v, x: step(v, x))(plain, x)
    with ambient(mesh), everywhere(sk.ConvParallel(), mesh, *PATHS):
        placed = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
        variables = jax.jit(lambda x: initial(module, x, train=True))(placed)
        (loss, (y, after)), grads = jax.jit(step)(variables, placed)
    assert jax.tree.structure(variables) == jax.tree.structure(plain)
    for got, expected in zip(jax.tree.leaves(variables), jax.tree.leaves(plain), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-6)  # another program may round a scaled number otherwise
    assert sk.placements(y) == (sk.Shard(1),)
    assert_close(y, want, 1e-5)
    assert_close(loss, want_loss, 1e-5)
    assert_trees_close(grads, want_grads, 1e-4)
    assert_trees_close(after, want_after, 1e-5)


@pytest.mark.not_smoke
def test_parameters_of_single_layers_are_those_of_flax():
    """Names, shapes, dtypes and values, of a plain array too; boxes and their names stay where they are."""
    mesh = sk.make_mesh(SP4)
    cases = [
        LAYERS[name]
        for name in ("conv groups", "up transposed kernel, mask", "group norm", "layer norm of H, W is cut")
    ]
    fresh = lambda: [initial(case.make.linen(), jnp.asarray(case.operand())) for case in cases]  # noqa: E731
    want = jax.jit(lambda: fresh())()
    with everywhere(sk.ConvParallel(), mesh):
        got = jax.jit(lambda: fresh())()
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    boxed = nn.Conv(3, 3, kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, None, "tp")))
    x = jnp.ones((2, 13, 2))
    with everywhere(sk.ConvParallel(), mesh):
        variables = jax.eval_shape(lambda: initial(boxed, x))
        assert jax.eval_shape(boxed.apply, variables, x).shape == (2, 13, 3)
    assert nn.get_partition_spec(variables)["params"]["kernel"] == PartitionSpec(None, None, "tp")


def test_initialising_leaves_statistics_as_they_are():
    module, x = nn.BatchNorm(use_running_average=False), np.random.default_rng(0).normal(size=(2, 13, 3)) + 5
    with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)):
        statistics = jax.jit(lambda: initial(module, x))()["batch_stats"]
    np.testing.assert_array_equal(statistics["mean"], np.zeros(3, np.float32))
    np.testing.assert_array_equal(statistics["var"], np.ones(3, np.float32))


def test_statistics_that_may_not_change_are_refused_as_flax_does():
    module, x = nn.BatchNorm(use_running_average=False), np.ones((2, 8, 3), np.float32)
    variables = jax.eval_shape(lambda: initial(module, x))
    with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)), pytest.raises(Exception, match="immutable"):
        jax.eval_shape(module.apply, variables, x)


def test_a_parameter_of_another_shape_is_refused_as_flax_does():
    module, x = nn.Conv(3, 3), np.ones((2, 8, 2), np.float32)
    variables = jax.eval_shape(lambda: initial(module, x))
    with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)), pytest.raises(Exception, match="expected to generate shape"):
        jax.eval_shape(module.apply, variables, np.ones((2, 8, 4), np.float32))


def test_other_types_are_left_alone():
    x, travels = np.ones((2, 8, 2), np.float32), {}
    for make in (nn.Conv, nn.ConvLocal, Own):
        call = functools.partial(make(3, (3,)).init_with_output, jax.random.key(0))
        with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)):
            travels[make] = "collective_permute" in jax.jit(call).lower(x).as_text()
    assert travels == {nn.Conv: True, nn.ConvLocal: False, Own: False}


@pytest.mark.not_smoke
def test_layers_may_be_called_by_keyword_and_report_intermediates():
    module, x = nn.Conv(3, 3), np.ones((2, 13, 2), np.float32)
    variables, mesh = initial(module, x), sk.make_mesh(SP4)
    with everywhere(sk.ConvParallel(), mesh):
        placed = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
        y, state = module.apply(variables, inputs=placed, capture_intermediates=True, mutable=["intermediates"])
    (kept,) = state["intermediates"]["__call__"]
    assert isinstance(kept, sk.Padded)
    assert_close(kept, y)
    assert_close(y, module.apply(variables, x), 1e-6)


# --- dtypes, switches, random numbers ---------------------------------------------------------------------------


def both_ways(modules, x, **arguments):
    """Outputs and statistics of layers, plain and of a Padded: one program each."""
    mesh = sk.make_mesh(SP4)
    initials = jax.jit(lambda: [initial(m, x, **arguments) for m in modules])()

    def outputs(variables, x):
        pairs = zip(modules, variables, strict=True)
        return [m.apply(v, x, **arguments, mutable=["batch_stats"], rngs=RNGS) for m, v in pairs]

    want = jax.jit(lambda v, x: outputs(v, x))(initials, x)
    with everywhere(sk.ConvParallel(), mesh):
        got = jax.jit(outputs)(initials, sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad"))
    assert all(isinstance(y, sk.Padded) for y, _ in got)
    return [(y.value, after) for y, after in got], want


def assert_alike(got, want, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert_close(np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32), tolerance)


@pytest.mark.parametrize(
    ("given", "dtype", "wide", "tolerance"),
    [
        (jnp.bfloat16, None, True, 2e-2),
        (jnp.bfloat16, None, False, 5e-2),
        (jnp.float32, jnp.bfloat16, True, 2e-2),
        (jnp.int32, None, False, 1e-5),
    ],
)
@pytest.mark.not_smoke
@pytest.mark.slow
def test_norms_of_low_precision_have_the_dtypes_of_flax(given, dtype, wide, tolerance):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 13, 3)) * 3, given)
    keywords, space = {"dtype": dtype, "force_float32_reductions": wide}, {"reduction_axes": (1, 2)}
    modules = [
        nn.BatchNorm(False, **keywords),
        nn.BatchNorm(False, use_scale=False, use_bias=False, param_dtype=jnp.bfloat16, **keywords),
        nn.BatchNorm(True, **keywords),
        nn.GroupNorm(1, **keywords),
        nn.LayerNorm(**space, **keywords),
        nn.RMSNorm(use_scale=False, **space, **keywords),
    ]
    assert_alike(*both_ways(modules, x), tolerance)


@pytest.mark.not_smoke
@pytest.mark.not_smoke
def test_convolutions_of_low_precision_have_the_dtypes_of_flax():
    x = np.random.default_rng(0).normal(size=(2, 13, 2)) * 3
    for given, keywords in (
        (jnp.bfloat16, ({}, {"dtype": jnp.float32}, {"param_dtype": jnp.bfloat16})),
        (jnp.int32, ({}, {"dtype": jnp.bfloat16})),
    ):
        modules = [make(3, (3,), **k) for make in (nn.Conv, nn.ConvTranspose) for k in keywords]
        assert_alike(*both_ways(modules, jnp.asarray(x, given)), 2e-2)


def test_batch_norm_is_told_once_whether_it_trains():
    x = np.ones((2, 8, 2), np.float32)
    variables = jax.eval_shape(lambda: initial(nn.BatchNorm(False), x))
    call = lambda module, **told: jax.eval_shape(lambda v: module.apply(v, x, **told), variables)  # noqa: E731
    with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)):
        with pytest.raises(ValueError, match="use_running_average"):
            call(nn.BatchNorm())
        with pytest.raises(ValueError, match="use_running_average"):
            call(nn.BatchNorm(True), use_running_average=True)
        assert call(nn.BatchNorm(), use_running_average=True).shape == x.shape


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.not_smoke
def test_dropout_draws_what_it_draws_of_the_whole(axis_types):
    """Of a Padded, and of an array (which on Explicit axes Flax's own code refuses)."""
    mesh, x = sk.make_mesh(SP4, axis_types=axis_types), np.random.default_rng(0).normal(size=(2, 13, 2))

    def draw(whole, part):
        def each(x):
            rates = [nn.Dropout(rate).apply({}, x, deterministic=False, rngs=RNGS) for rate in (0.0, 0.5, 1.0)]
            return [*rates, nn.Dropout(0.5).apply({}, x, False, jax.random.key(9)), nn.Dropout(0.5).apply({}, x, True)]

        return each(whole) + each(part)

    want = jax.jit(lambda *a: draw(*a))(x, x[:, :12])
    with ambient(mesh), everywhere(sk.ConvParallel(), mesh):
        place = lambda a: sk.shard_tensor(a, {"sp": sk.Shard(1)}, mesh, uneven="pad")  # noqa: E731
        got = jax.jit(draw)(place(x), place(x[:, :12]).array)
    assert [isinstance(y, sk.Padded) for y in got] == [True] * 5 + [False] * 5
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 0)


# --- layers that can't run sharded --------------------------------------------------------------------------


def own_function(*arguments, **keywords):
    return jax.lax.conv_general_dilated(*arguments, **keywords)


MASK = np.arange(5)[:, None] < 3
CANNOT = {
    "own convolution": (
        nn.Conv(3, 3, conv_general_dilated=own_function),
        {},
        r"\(Conv\) runs unsharded: it has its own conv_general_dilated function, which knows nothing of halos",
    ),
    "own convolution, as a class": (
        nn.Conv(3, 3, conv_general_dilated_cls=lambda: own_function),
        {},
        r"\(Conv\) runs unsharded: it has its own conv_general_dilated function",
    ),
    "REFLECT wider than the image": (
        nn.Conv(3, 11, padding="REFLECT"),
        {},
        r"\(Conv\) runs unsharded: REFLECT padding for a kernel covering \[11\] repeats more than the \(5,\)",
    ),
    "batch norm with a mask": (nn.BatchNorm(False), {"mask": MASK}, r"\(BatchNorm\) .* it was called with a mask"),
    "batch norm of another dim": (nn.BatchNorm(False, axis=0), {}, r"\(BatchNorm\) .* its features are in dim 0"),
    "group norm with a mask": (nn.GroupNorm(1), {"mask": MASK}, r"\(GroupNorm\) .* it was called with a mask"),
    "instance norm with a mask": (nn.InstanceNorm(), {"mask": MASK}, r"\(InstanceNorm\) .* it was called with a mask"),
    "instance norm of other dims": (
        nn.InstanceNorm(feature_axes=(1,)),
        {},
        r"\(InstanceNorm\) .* its features are in dims \(1,\), not the last",
    ),
    "layer norm of the image with a mask": (
        nn.LayerNorm(reduction_axes=(1, 2)),
        {"mask": MASK},
        r"\(LayerNorm\) .* it was called with a mask",
    ),
    "rms norm of the image with a mask": (
        nn.RMSNorm(reduction_axes=(1, 2)),
        {"mask": MASK},
        r"\(RMSNorm\) .* it was called with a mask",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_run_sharded_runs_whole_and_says_why(name):
    module, arguments, message = CANNOT[name]
    if "mask" in arguments:
        arguments = {"mask": jnp.broadcast_to(MASK, (2, 5, 2))}
    mesh, x = sk.make_mesh(SP4), np.random.default_rng(0).normal(size=(2, 5, 2)).astype(np.float32)
    variables = jax.jit(lambda: initial(module, x, **arguments))()
    call = lambda v, x: module.apply(v, x, **arguments, mutable=["batch_stats"])  # noqa: E731
    want = jax.jit(lambda *a: call(*a))(variables, x)
    with everywhere(sk.ConvParallel(), mesh), pytest.warns(UserWarning, match=r"layer '' " + message):
        got = jax.jit(call)(variables, sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad"))
    assert_alike(got, want, 1e-5)
    with everywhere(sk.ConvParallel(), mesh), pytest.warns(UserWarning, match=r"layer '' " + message):
        jax.eval_shape(lambda *a: call(*a), variables, x)


@pytest.mark.not_smoke
def test_a_batch_norm_reduces_over_its_own_axis_too():
    module, x = nn.BatchNorm(False, axis_name="batch"), np.random.default_rng(0).normal(size=(3, 2, 8, 2))
    x *= np.arange(1, 4)[:, None, None, None]  # means of parts differ
    variables = initial(module, x[0])
    call = jax.vmap(lambda x: module.apply(variables, x, mutable=["batch_stats"])[0], axis_name="batch")
    want = jax.jit(lambda x: call(x))(x)
    with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)):
        assert_close(jax.jit(call)(x), want, 1e-6)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.GroupNorm(3), "does not divide"),
        (nn.GroupNorm(None), "should be specified"),
        (nn.GroupNorm(None, group_size=3), "is not multiple of"),
        (nn.GroupNorm(1, reduction_axes=(1,)), "must include the final dimension"),
        (nn.Conv(3, (3, 3), padding="CAUSAL"), "only implemented for 1D"),
        (nn.Conv(3, (3, 3), mask=jnp.ones((3, 2))), "mask of shape"),
        (nn.ConvTranspose(3, (3, 3), mask=jnp.ones((3, 2))), "mask of shape"),
    ],
)
def test_what_flax_refuses_is_refused(module, message):
    with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)), pytest.raises(ValueError, match=message):
        initial(module, np.ones((2, 8, 8, 2), np.float32))


@pytest.mark.not_smoke
def test_layer_norm_of_features_runs_flax_itself_on_arrays():
    """With a mask, too, and of an array that has no spatial dims: nothing to say, nothing to do."""
    x, mask = np.random.default_rng(0).normal(size=(5, 3)), jnp.asarray(np.arange(15).reshape(5, 3) % 4 > 0)
    for module in (nn.LayerNorm(), nn.RMSNorm()):
        variables = initial(module, x)
        want = module.apply(variables, x, mask=mask)
        with everywhere(sk.ConvParallel(), sk.make_mesh(SP4)), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_close(module.apply(variables, x, mask=mask), want, 0)
