"""Every nnx layer that parallelize knows, on one device and sharded in space: the same in everything it does."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk
from shardkit.parallel.layers.convs import circular_transpose_padding
from tests.parallel.layer_cases import (
    F64,
    LAYERS,
    LayerCase,
    assert_close,
    assert_little_travels,
    assert_placed,
    conv,
    outcome,
    randomized,
)

SP4 = {"sp": 4}


def assert_states_close(got, want, tolerance=1e-9):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), (_, b) in zip(nnx.to_flat_state(got), nnx.to_flat_state(want), strict=True):
        assert a[...].dtype == b[...].dtype, path
        assert_close(a[...], b[...], tolerance)


def check(case: LayerCase, axis_types="auto", tolerance=1e-9):
    """Output, both gradients and running statistics; Padded in, Padded out; nothing gathered."""
    mesh = sk.make_mesh(dict(case.mesh), axis_types=axis_types)
    x = case.operand()
    cotangent = np.random.default_rng(2).normal(size=jax.eval_shape(lambda x: case.build()(x), x).shape)
    (want, want_params, want_x, want_stats), _ = outcome(case.build(), x, cotangent)

    pad = lambda a: sk.shard_tensor(a, case.placements(), mesh, uneven="pad")  # noqa: E731
    with jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext():
        layer = sk.parallelize(case.build(), {"": case.plan()}, mesh)
        (got, params, grad_x, stats), program = outcome(layer, pad(x), pad(cotangent))

    assert_placed(case, mesh, got, grad_x)
    assert_close(got, want, tolerance)
    assert_close(grad_x, want_x, tolerance)
    assert_states_close(params, want_params, tolerance)
    assert_states_close(stats, want_stats, tolerance)
    assert_little_travels(case, program, mesh, want_params)


# Each a word away from another that stays.
ALIKE = {
    *("conv CIRCULAR, dilated", "conv REFLECT", "conv int padding", "conv padding, an int a dim", "conv pairs"),
    *("conv one stride for all", "conv several batch dims", "conv no batch dim"),
    *("up VALID", "up int padding", "up pairs", "up CIRCULAR, odd kernel", "up CIRCULAR, transposed even kernel"),
    *("up several batch dims", "up dilated, no bias", "batch norm, exact variance", "batch norm, H and W"),
    *("batch norm, neither scale nor bias", "group norm, padded batch"),
    *("instance norm, exact variance", "layer norm, no epsilon", "layer norm of the image, exact variance, H and W"),
    *("layer norm of H, W is cut", "layer norm, exact variance, padded batch", "rms norm, no epsilon, padded batch"),
    *("rms norm of the image, H and W, no scale", "dropout of whole channels"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in LAYERS])
def test_sharded_layer_equals_the_plain_one(name):
    check(LAYERS[name])


@pytest.mark.not_smoke
def test_the_table_covers_every_layer_there_is():
    from shardkit.parallel.nnx.spatial import SPATIAL_LAYERS

    assert {type(case.make(nnx.Rngs(0))) for case in LAYERS.values()} == set(SPATIAL_LAYERS)


@pytest.mark.parametrize(
    "name",
    [
        "conv strides",
        "up CIRCULAR, even kernel",
        "batch norm",
        "group norm",
        "instance norm",
        "layer norm",
        "layer norm of the image",
        "rms norm of the image",
        "dropout",
        "prelu",
    ],
)
@pytest.mark.parametrize("kind", ["eager", "jit"])
@pytest.mark.every(2)
def test_plain_arrays_of_uneven_size_give_plain_arrays(name, kind):
    case = LAYERS[name]
    layer = sk.parallelize(case.build(), {"**": case.plan()}, sk.make_mesh(dict(case.mesh)))
    got = layer(case.operand()) if kind == "eager" else nnx.jit(lambda m, x: m(x))(layer, case.operand())
    assert isinstance(got, jax.Array)
    assert_close(got, case.build()(case.operand()))


def test_a_plain_even_array_stays_sharded():
    mesh = sk.make_mesh(SP4)
    layer = sk.parallelize(LAYERS["conv SAME"].build(), {"": sk.ConvParallel()}, mesh)
    out = nnx.jit(lambda m, x: m(x))(layer, sk.shard_tensor(np.ones((2, 4, 16, 2)), {"sp": sk.Shard(2)}, mesh))
    assert sk.placements(out) == (sk.Shard(2),)


GARBAGE = [
    "batch norm, exact variance",
    pytest.param("batch norm", marks=pytest.mark.slow),
    "group norm",
    "instance norm",
    "layer norm",
    pytest.param("layer norm, no epsilon", marks=pytest.mark.slow),
    "layer norm of the image",
    pytest.param("layer norm over features, scale over space", marks=pytest.mark.slow),
    "rms norm, no epsilon, padded batch",
    pytest.param("rms norm of the image", marks=pytest.mark.slow),
    "dropout",
    "prelu",
]


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_in_padded_tails_never_shows(name):
    case = LAYERS[name]
    mesh = sk.make_mesh(dict(case.mesh))
    layer = sk.parallelize(case.build(), {"": case.plan()}, mesh)
    clean = sk.shard_tensor(case.operand(), case.placements(), mesh, uneven="pad")
    tail = (np.arange(clean.array.shape[-2]) >= clean.shape[-2])[:, None]
    dirty = sk.Padded(jnp.where(tail, jnp.nan, clean.array), clean.logical_shape)
    cotangent = sk.shard_tensor(np.ones(case.shape), case.placements(), mesh, uneven="pad")
    (want, want_params, want_x, _), _ = outcome(layer, clean, cotangent)
    (got, params, grad_x, _), _ = outcome(layer, dirty, cotangent)
    assert_close(got, want)
    assert_close(grad_x, want_x)
    assert_states_close(params, want_params)


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.not_smoke
def test_batch_norm_of_low_precision_has_the_dtypes_of_flax(dtype, affine):
    make = lambda: nnx.BatchNorm(3, dtype=dtype, use_scale=affine, use_bias=affine, rngs=nnx.Rngs(0))  # noqa: E731
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 13, 3)), jnp.bfloat16)
    plain, sharded = make(), sk.parallelize(make(), {"": sk.ConvParallel()}, sk.make_mesh(SP4))
    want, got = plain(x), sharded(x)
    assert got.dtype == want.dtype
    assert sharded.mean[...].dtype == plain.mean[...].dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-2)
    np.testing.assert_allclose(sharded.var[...], plain.var[...], rtol=1e-5)


@pytest.mark.not_smoke
def test_batch_norm_switches_between_training_and_evaluation():
    case = LAYERS["batch norm"]
    mesh = sk.make_mesh(dict(case.mesh))
    plain, sharded = case.build(), sk.parallelize(case.build(), {"": case.plan()}, mesh)
    x = case.operand()
    for model in (plain, sharded):
        model(x)
        model.eval()
    assert_close(sharded(x), plain(x))
    assert_states_close(nnx.state(sharded), nnx.state(plain))
    assert_close(sharded(x, use_running_average=False), plain(x, use_running_average=False))
    assert_states_close(nnx.state(sharded), nnx.state(plain))


def test_batch_norm_that_was_never_told_says_so_as_flax_does():
    layer = nnx.BatchNorm(2, use_running_average=None, rngs=nnx.Rngs(0))
    layer = sk.parallelize(layer, {"": sk.ConvParallel()}, sk.make_mesh(SP4))
    with pytest.raises(ValueError, match="No `use_running_average` argument was provided"):
        layer(np.ones((2, 8, 2), np.float32))


def test_frozen_batch_norm_communicates_nothing():
    case = LAYERS["batch norm, frozen"]
    mesh = sk.make_mesh(dict(case.mesh))
    layer = sk.parallelize(case.build(), {"": case.plan()}, mesh)
    x = sk.shard_tensor(case.operand(), case.placements(), mesh, uneven="pad")
    assert sk.collectives(lambda x: layer(x), x, mesh=mesh).by_kind() == {}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("batch norm, neither scale nor bias", 1),
        ("group norm", 1),
        ("instance norm, exact variance", 2),
        ("layer norm of the image", 1),
        ("layer norm of the image, exact variance, H and W", 2),
        ("rms norm of the image", 1),
    ],
)
def test_norms_sum_as_little_as_possible(name, count):
    case = LAYERS[name]
    mesh = sk.make_mesh(dict(case.mesh))
    layer = sk.parallelize(case.build(), {"": case.plan()}, mesh)
    x = sk.shard_tensor(case.operand(), case.placements(), mesh, uneven="pad")
    graph, state = nnx.split(layer)
    report = sk.collectives(lambda state, x: nnx.merge(graph, state)(x), state, x, mesh=mesh)
    assert report.by_kind() == {"all_reduce": count}, str(report)


@pytest.mark.parametrize(
    "name",
    [
        "layer norm",
        "layer norm, exact variance, padded batch",
        "layer norm over features, scale over space",
        "rms norm",
        "dropout",
        "dropout of whole channels",
        "prelu",
    ],
)
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.every(2)
def test_layers_that_are_local_communicate_nothing(name, axis_types):
    case = LAYERS[name]
    mesh = sk.make_mesh(dict(case.mesh), axis_types=axis_types)
    with jax.set_mesh(mesh):
        layer = sk.parallelize(case.build(), {"": case.plan()}, mesh)
        x = sk.shard_tensor(case.operand(), case.placements(), mesh, uneven="pad")
        graph, state = nnx.split(layer)
        assert sk.collectives(lambda state, x: nnx.merge(graph, state)(x), state, x, mesh=mesh).by_kind() == {}


@pytest.mark.parametrize("make", [nnx.LayerNorm, nnx.RMSNorm])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.not_smoke
@pytest.mark.every(3)
def test_layer_norms_of_low_precision_have_the_dtypes_of_flax(make, dtype, given):
    if given == jnp.complex64 and dtype is not None:
        pytest.skip("Flax refuses to make reals of complex numbers")
    rng = np.random.default_rng(0)
    imaginary = 1j * rng.normal(size=(2, 13, 3)) if given == jnp.complex64 else 0
    x = jnp.asarray(rng.normal(size=(2, 13, 3)) + imaginary, given)
    mesh = sk.make_mesh(SP4)
    for axes, features in ((-1, 3), ((1, 2), 39)):
        keywords = {"dtype": dtype, "reduction_axes": axes, "feature_axes": axes}
        plain = make(features, **keywords, rngs=nnx.Rngs(0))
        sharded = sk.parallelize(make(features, **keywords, rngs=nnx.Rngs(0)), {"": sk.ConvParallel()}, mesh)
        want, got = plain(x), sharded(sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad"))
        assert isinstance(got, sk.Padded) and got.dtype == want.dtype
        wide = np.complex64 if given == jnp.complex64 else np.float32
        tolerance = 3e-2 if want.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(got).astype(wide), np.asarray(want).astype(wide), atol=tolerance)


@pytest.mark.not_smoke
def test_layer_norm_of_features_runs_flax_itself_on_arrays():
    """With a mask, too, and of an array that has no spatial dims: nothing to say, nothing to do."""
    x, mask = np.random.default_rng(0).normal(size=(5, 3)), np.arange(15).reshape(5, 3) % 4 > 0
    for make in (nnx.LayerNorm, nnx.RMSNorm):
        layer = sk.parallelize(make(3, rngs=nnx.Rngs(0)), {"": sk.ConvParallel()}, sk.make_mesh(SP4))
        assert_close(layer(x, mask=mask), make(3, rngs=nnx.Rngs(0))(x, mask=mask), 0)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["eager", "jit"])
def test_dropout_draws_what_it_draws_of_the_whole_and_goes_on_drawing(rate, kind):
    mesh, x = sk.make_mesh(SP4), np.random.default_rng(0).normal(size=(2, 13, 2))
    plain = nnx.Dropout(rate, rngs=nnx.Rngs(0))
    layer = sk.parallelize(nnx.Dropout(rate, rngs=nnx.Rngs(0)), {"": sk.ConvParallel()}, mesh)
    placed = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
    call = (lambda m, x: m(x)) if kind == "eager" else nnx.jit(lambda m, x: m(x))
    for _ in range(2):
        got = call(layer, placed)
        assert isinstance(got, sk.Padded)
        assert_close(got, call(plain, x), 0)
    assert_close(layer(placed, deterministic=True), x, 0)
    assert_close(layer(placed, rngs=nnx.Rngs(dropout=3)), plain(x, rngs=nnx.Rngs(dropout=3)), 0)
    layer.eval()
    assert_close(layer(placed), x, 0)


@pytest.mark.parametrize(
    "name",
    [
        "layer norm",
        pytest.param("layer norm of the image, scale over features, padded batch", marks=pytest.mark.slow),
        pytest.param("rms norm", marks=pytest.mark.slow),
        "prelu",
        "group norm",
        pytest.param("instance norm, exact variance", marks=pytest.mark.slow),
    ],
)
@pytest.mark.not_smoke
def test_inside_a_manual_region(name):
    """Blocks of a Padded, garbage in the tail; the gradient of scale and input as on one device."""
    case, mesh = LAYERS[name], sk.make_mesh(SP4)
    shape = (2, *case.shape[1:])
    x = np.random.default_rng(1).normal(size=shape)
    dim, spec = len(shape) - 2, jax.sharding.PartitionSpec(*[None] * (len(shape) - 2), "sp")
    clean = sk.shard_tensor(x, {"sp": sk.Shard(dim)}, mesh, uneven="pad")
    tail = (np.arange(clean.array.shape[dim]) >= shape[dim])[:, None]
    layer = sk.parallelize(case.build(), {"": case.plan()}, mesh)
    graph, params = nnx.split(layer)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec)
    def blocks(params, block):
        return nnx.merge(graph, params)(sk.Padded(block, shape)).array

    def loss(params, array):
        return jnp.sum(jnp.sin(blocks(params, array)[tuple(slice(s) for s in shape)]))

    got = jax.value_and_grad(loss, (0, 1))(params, jnp.where(tail, jnp.nan, clean.array))
    plain_graph, plain_params = nnx.split(case.build())
    want = jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(nnx.merge(plain_graph, p)(x))), (0, 1))(plain_params, x)
    assert_close(got[0], want[0])
    assert_states_close(got[1][0], want[1][0])
    assert_close(got[1][1][tuple(slice(s) for s in shape)], want[1][1])


@pytest.mark.not_smoke
def test_a_scale_with_a_place_in_the_image_is_refused_in_a_manual_region():
    mesh, spec = sk.make_mesh(SP4), jax.sharding.PartitionSpec(None, "sp")
    layer = sk.parallelize(LAYERS["layer norm over features, scale over space"].build(), {"": sk.ConvParallel()}, mesh)
    run = jax.shard_map(
        lambda b: layer(sk.Padded(b, (2, 13, 4))).array, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with pytest.raises(ValueError, match="call this layer outside it"):
        run(np.ones((2, 16, 4)))


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_a_wrapped_convolution_is_sharded_inside_its_wrapper(wrapper, axis_types):
    """The wrapper stays Flax's own: it changes the kernel in place, then calls the twin."""
    case, mesh = LAYERS["conv strides"], sk.make_mesh(SP4, axis_types=axis_types)
    make = lambda: randomized(wrapper(case.make(nnx.Rngs(0)), rngs=nnx.Rngs(1)))  # noqa: E731
    with jax.set_mesh(mesh):
        layer, plain = sk.parallelize(make(), {"**": case.plan()}, mesh), make()
        assert type(layer) is wrapper and type(layer.layer_instance) is not nnx.Conv
        x = sk.shard_tensor(case.operand(), case.placements(), mesh, uneven="pad")
        for call in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
            got, want = call(layer, x), call(plain, case.operand())
            assert isinstance(got, sk.Padded)
            assert_close(got, want)
            assert_states_close(nnx.state(layer), nnx.state(plain))


def test_a_pattern_for_the_wrapper_itself_is_refused_by_name():
    model = nnx.Sequential(nnx.WeightNorm(nnx.Conv(2, 3, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"a WeightNorm, which ConvParallel doesn't know.*layers/0/layer_instance"):
        sk.parallelize(model, {"layers/0": sk.ConvParallel()}, sk.make_mesh(SP4))


# --- layers that can't run sharded --------------------------------------------------------------------------


def own_function(*arguments, **keywords):
    return jax.lax.conv_general_dilated(*arguments, **keywords)


CANNOT = {
    "own convolution": (
        conv(2, 3, 3, conv_general_dilated=own_function),
        {},
        r"layer '' \(Conv\) runs unsharded: it has its own conv_general_dilated function, which knows nothing of halos",
    ),
    "REFLECT wider than the image": (
        conv(2, 3, 11, padding="REFLECT"),
        {},
        r"layer '' \(Conv\) runs unsharded: REFLECT padding for a kernel covering \[11\] repeats more than the \(5,\)",
    ),
    "batch norm with a mask": (
        lambda rngs: nnx.BatchNorm(2, param_dtype=F64, rngs=rngs),
        {"mask": np.arange(5)[:, None] < 3},
        r"layer '' \(BatchNorm\) runs unsharded: it was called with a mask",
    ),
    "instance norm with a mask": (
        lambda rngs: nnx.InstanceNorm(2, param_dtype=F64, rngs=rngs),
        {"mask": np.arange(5)[:, None] < 3},
        r"layer '' \(InstanceNorm\) runs unsharded: it was called with a mask",
    ),
    "batch norm of another dim": (
        lambda rngs: nnx.BatchNorm(2, axis=0, param_dtype=F64, rngs=rngs),
        {},
        r"layer '' \(BatchNorm\) runs unsharded: its features are in dim 0, not the last",
    ),
    "group norm over its own axes": (
        lambda rngs: nnx.GroupNorm(2, num_groups=1, reduction_axes=(1, 2), param_dtype=F64, rngs=rngs),
        {},
        r"layer '' \(GroupNorm\) runs unsharded: it has its own reduction_axes=\(1, 2\)",
    ),
    "layer norm of the image with a mask": (
        lambda rngs: nnx.LayerNorm(2, reduction_axes=(1, 2), param_dtype=F64, rngs=rngs),
        {"mask": np.arange(5)[:, None] < 3},
        r"layer '' \(LayerNorm\) runs unsharded: it was called with a mask",
    ),
    "rms norm of the image with a mask": (
        lambda rngs: nnx.RMSNorm(2, reduction_axes=(1, 2), param_dtype=F64, rngs=rngs),
        {"mask": np.arange(5)[:, None] < 3},
        r"layer '' \(RMSNorm\) runs unsharded: it was called with a mask",
    ),
    "instance norm of other dims": (
        lambda rngs: nnx.InstanceNorm(5, feature_axes=1, param_dtype=F64, rngs=rngs),
        {},
        r"layer '' \(InstanceNorm\) runs unsharded: its features are in dim 1, not the last",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.every(2)
def test_what_cannot_run_sharded_runs_whole_and_says_why(name, padded):
    make, arguments, message = CANNOT[name]
    case = LayerCase(make, (2, 5, 2))
    mesh = sk.make_mesh(SP4)
    layer = sk.parallelize(case.build(), {"": case.plan()}, mesh)
    x = case.operand()
    given = sk.shard_tensor(x, case.placements(), mesh, uneven="pad") if padded else x
    with pytest.warns(UserWarning, match=message):
        got = layer(given, **arguments)
    assert_close(got, case.build()(x, **arguments))


def test_out_sharding_is_left_to_flax():
    mesh = sk.make_mesh(SP4)
    layer = sk.parallelize(LAYERS["conv VALID"].build(), {"": sk.ConvParallel()}, mesh)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="it was called with out_sharding="):
        got = jax.eval_shape(lambda x: layer(x, out_sharding=jax.sharding.PartitionSpec()), np.ones((2, 13, 2)))
    assert got.shape == (2, 11, 3)


@pytest.mark.not_smoke
@pytest.mark.parametrize("fast", [True, False])
def test_a_batch_norm_reduces_over_its_own_axis_too(fast):
    layer = nnx.BatchNorm(2, axis_name="batch", use_fast_variance=fast, rngs=nnx.Rngs(0))
    ring = sk.parallelize(nnx.clone(layer), {"": sk.ConvParallel()}, sk.make_mesh(SP4))
    x = (3 + np.random.default_rng(0).normal(size=(3, 2, 8, 2))) * np.arange(1, 4)[:, None, None, None]
    x = x.astype(np.float32)

    def run(layer):
        def one(x):
            mine = nnx.clone(layer)
            return mine(x), mine.mean[...], mine.var[...]

        return jax.vmap(one, axis_name="batch")(x)

    for got, wanted in zip(run(ring), run(layer), strict=True):
        assert_close(got, wanted, 1e-5)


@pytest.mark.not_smoke
def test_norms_that_reduce_over_their_own_groups_say_so():
    layer = nnx.BatchNorm(2, axis_name="batch", axis_index_groups=[[0], [1]], rngs=nnx.Rngs(0))
    layer = sk.parallelize(layer, {"": sk.ConvParallel()}, sk.make_mesh(SP4))
    with pytest.warns(UserWarning, match="it reduces over axis_index_groups="), pytest.raises(NotImplementedError):
        jax.vmap(lambda x: nnx.clone(layer)(x), axis_name="batch")(np.ones((2, 2, 8, 2), np.float32))
    layer = nnx.GroupNorm(2, num_groups=1, axis_name="batch", rngs=nnx.Rngs(0))
    layer = sk.parallelize(layer, {"": sk.ConvParallel()}, sk.make_mesh(SP4))
    with pytest.warns(UserWarning, match="it reduces over axis_name='batch' itself"):
        jax.vmap(lambda x: nnx.clone(layer)(x), axis_name="batch")(np.ones((2, 2, 8, 2), np.float32))


def test_masks_of_the_wrong_shape_are_refused():
    for make in (nnx.Conv, nnx.ConvTranspose):
        layer = make(2, 3, 3, mask=jnp.ones((3, 2)), rngs=nnx.Rngs(0))
        layer = sk.parallelize(layer, {"": sk.ConvParallel()}, sk.make_mesh(SP4))
        with pytest.raises(ValueError, match=r"mask of shape \(3, 2\) for a kernel of shape \(3, 2, 3\)"):
            layer(np.ones((2, 8, 2), np.float32))


def test_causal_padding_of_images_is_refused_as_flax_does():
    layer = sk.parallelize(
        nnx.Conv(2, 3, (3, 3), padding="CAUSAL", rngs=nnx.Rngs(0)), {"": sk.ConvParallel()}, sk.make_mesh(SP4)
    )
    with pytest.raises(ValueError, match="only implemented for 1D"):
        layer(np.ones((2, 8, 8, 2), np.float32))


# --- arithmetic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_circular_transpose_padding(size, kernel, stride, transposed):
    """size * stride outputs, each tap of each element where Flax adds it up (an integer table, no arrays)."""
    period = size * stride
    low, high = circular_transpose_padding(size, kernel, stride, transposed)
    assert (size - 1) * stride + 1 + low + high - kernel + 1 == period
    assert min(low, high) > -period
    # Flax: the VALID outputs, tap t of element i at i * stride + (kernel - 1) - t, padded to whole periods.
    valid = period + max(kernel - stride, 0)
    left = (-(valid - period) % (2 * period) + (0 if transposed else 1)) // 2
    for tap in range(kernel):
        assert (low - tap - (kernel - 1 - tap + left)) % period == 0


def test_the_helper_makes_numbers_that_matter():
    """Biases that are zero or scales that are one would hide mistakes."""
    for leaf in jax.tree.leaves(nnx.state(randomized(nnx.BatchNorm(3, rngs=nnx.Rngs(0))))):
        assert leaf.dtype == np.float64
        assert len(np.unique(leaf)) == leaf.size and not np.isin(leaf, (0, 1)).any()


EXPLICIT = [
    "conv strides",
    pytest.param("conv several batch dims", marks=pytest.mark.slow),
    "up SAME",
    "batch norm",
    pytest.param("batch norm, frozen", marks=pytest.mark.slow),
    "group norm",
    "instance norm",
    pytest.param("layer norm", marks=pytest.mark.slow),
    "layer norm of the image",
    pytest.param("layer norm of the image, scale over features, padded batch", marks=pytest.mark.slow),
    pytest.param("layer norm over features, scale over space", marks=pytest.mark.slow),
    "rms norm of the image",
    "dropout",
    "prelu",
]


@pytest.mark.parametrize("name", EXPLICIT)
def test_on_an_explicit_mesh(name):
    case = LAYERS[name]
    mesh = sk.make_mesh(dict(case.mesh), axis_types="explicit")
    want = case.build()(case.operand())
    with jax.set_mesh(mesh):
        layer = sk.parallelize(case.build(), {"": case.plan()})
        x = sk.shard_tensor(case.operand(), case.placements(), mesh, uneven="pad")
        got = nnx.jit(lambda m, x: m(x))(layer, x)
    assert sk.placements(got) == sk.placements(x)
    assert_close(got, want)
