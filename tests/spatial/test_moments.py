"""moments against NumPy: values, gradients, where the results are, and how many sums travel."""

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

SP4, DPSP, HW = {"sp": 4}, {"dp": 2, "sp": 4}, {"sq": 2, "sp": 4}


def image(shape, seed=0, dtype=np.float64):
    """Numbers with a mean that differs along every dim, far from zero."""
    ramps = sum(np.arange(n).reshape([-1 if d == i else 1 for i in range(len(shape))]) for d, n in enumerate(shape))
    return (np.random.default_rng(seed).normal(size=shape) + ramps / 5 + 1).astype(dtype)


def entered(mesh, axis_types):
    return jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext()


CASES = {
    # mesh, spatial_axes, placements beside them, shape, axis
    "batch norm, 13 over 4": (SP4, {"sp": "W"}, {}, (2, 3, 13, 5), (0, 1, 2)),
    "instance norm, 5 over 4": (SP4, {"sp": "W"}, {}, (2, 3, 5, 4), (1, 2)),
    "sharded dim alone, even": (SP4, {"sp": 1}, {}, (2, 16, 3), 1),
    "sharded dim kept": (SP4, {"sp": "W"}, {}, (2, 3, 16, 5), (0, 1)),
    "features, sharded dim kept and uneven": (SP4, {"sp": "W"}, {}, (2, 13, 5), -1),
    "batch sharded too": (DPSP, {"sp": "W"}, {"dp": 0}, (4, 3, 13, 5), (0, 1, 2)),
    "batch kept sharded": (DPSP, {"sp": "W"}, {"dp": 0}, (4, 3, 13, 5), (1, 2)),
    "H and W": (HW, {"sq": "H", "sp": "W"}, {}, (2, 5, 13, 3), (0, 1, 2)),
    "H and W, one of them kept": (HW, {"sq": "H", "sp": "W"}, {}, (2, 5, 12, 3), (0, 1)),
    "two axes on one dim": (HW, {("sq", "sp"): "W"}, {}, (2, 19, 3), (0, 1)),
}


def dims_of(spatial_axes, ndim):
    """The same placements as numbers, by their meaning in a channels-last array."""
    found = {}
    for axes, where in spatial_axes.items():
        for axis in (axes,) if isinstance(axes, str) else axes:
            found[axis] = {"W": ndim - 2, "H": ndim - 3}.get(where, where)
    return found


@pytest.mark.parametrize("fast_variance", [True, False])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_equals_numpy(name, axis_types, fast_variance):
    shape_of_mesh, spatial, extra, shape, axis = CASES[name]
    mesh = sk.make_mesh(shape_of_mesh, axis_types=axis_types)
    x = image(shape)
    placed = {a: sk.Shard(d) for a, d in (dims_of(spatial, x.ndim) | extra).items()}
    padded = sk.shard_tensor(x, placed, mesh, uneven="pad")
    keepdims = fast_variance  # both, without twice the programs

    @jax.jit
    def run(x):
        return sk.moments(x, axis, spatial_axes=spatial, keepdims=keepdims, fast_variance=fast_variance, mesh=mesh)

    with entered(mesh, axis_types):
        mean, var = run(padded)
    assert mean.shape == var.shape == x.mean(axis, keepdims=keepdims).shape
    np.testing.assert_allclose(np.asarray(mean), x.mean(axis, keepdims=keepdims), rtol=1e-10)
    np.testing.assert_allclose(np.asarray(var), x.var(axis, keepdims=keepdims), rtol=1e-9)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_results_are_replicated_over_what_is_reduced_and_cut_where_it_is_kept(axis_types):
    mesh = sk.make_mesh(HW, axis_types=axis_types)
    x = sk.shard_tensor(image((2, 4, 8, 3)), {"sq": sk.Shard(1), "sp": sk.Shard(2)}, mesh)
    with entered(mesh, axis_types):
        both = jax.jit(lambda x: sk.moments(x, (0, 1), spatial_axes={"sq": "H", "sp": "W"}, mesh=mesh))(x)
        whole = jax.jit(lambda x: sk.moments(x, (0, 1, 2), spatial_axes={"sq": "H", "sp": "W"}, mesh=mesh))(x)
    for m in both:  # [W, C]
        assert sk.placements(m) == (sk.Replicate(), sk.Shard(0))
    for m in whole:
        assert m.sharding.is_fully_replicated


def test_never_a_mean_of_means():
    """5 over 4 is blocks of 2, 2, 1 and 0: averaging the blocks' averages gives another number, or none."""
    mesh = sk.make_mesh(SP4)
    x = np.array([1.0, 2.0, 3.0, 4.0, 50.0]).reshape(1, 5, 1)
    blocks = [x[:, :2], x[:, 2:4], x[:, 4:]]
    assert np.mean([b.mean() for b in blocks]) != x.mean()
    mean, var = sk.moments(sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad"), (0, 1), spatial_axes={"sp": 1})
    np.testing.assert_allclose([mean[0], var[0]], [12, x.var()])


@pytest.mark.parametrize("fast_variance", [True, False])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e9])
def test_garbage_in_padded_tails_never_shows(garbage, fast_variance):
    """Neither in the results nor, in any position, in the gradient."""
    mesh = sk.make_mesh(SP4)
    x = image((2, 3, 5, 4))
    clean = sk.shard_tensor(x, {"sp": sk.Shard(2)}, mesh, uneven="pad")
    tail = (np.arange(clean.array.shape[2]) >= 5)[:, None]
    dirty = sk.Padded(jnp.where(tail, garbage, clean.array), clean.logical_shape)

    def loss(x):
        mean, var = sk.moments(x, (0, 1, 2), spatial_axes={"sp": "W"}, fast_variance=fast_variance)
        return jnp.sum(mean * jnp.arange(4.0) + var**2), (mean, var)

    (_, (mean, var)), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(dirty)
    np.testing.assert_allclose(mean, x.mean((0, 1, 2)), rtol=1e-10)
    np.testing.assert_allclose(var, x.var((0, 1, 2)), rtol=1e-9)
    want = jax.grad(lambda x: jnp.sum(x.mean((0, 1, 2)) * jnp.arange(4.0) + x.var((0, 1, 2)) ** 2))(x)
    np.testing.assert_allclose(np.asarray(grad), want, atol=1e-10)
    assert not np.asarray(grad.array)[:, :, 5:].any()


@pytest.mark.parametrize("fast_variance", [True, False])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_a_padded_batch_counts_only_its_own_images(axis_types, fast_variance):
    """3 images over 2 devices: the fourth doesn't exist, whatever lies there."""
    mesh = sk.make_mesh(DPSP, axis_types=axis_types)
    x = image((3, 13, 2))
    padded = sk.shard_tensor(x, {"dp": sk.Shard(0), "sp": sk.Shard(1)}, mesh, uneven="pad")
    with entered(mesh, axis_types):
        dirty = jax.jit(lambda a: jnp.where((jnp.arange(4) >= 3)[:, None, None], 7.0, a))(padded.array)
        padded = sk.Padded(dirty, padded.logical_shape)
        mean, var = jax.jit(
            lambda x: sk.moments(x, (0, 1), spatial_axes={"sp": "W"}, fast_variance=fast_variance, mesh=mesh)
        )(padded)
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-10)
    np.testing.assert_allclose(var, x.var((0, 1)), rtol=1e-9)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_a_padded_batch_that_is_kept(axis_types):
    """Statistics of 3 images, not of 4; where the type can't say 3 over 2 devices, as Padded."""
    mesh = sk.make_mesh(DPSP, axis_types=axis_types)
    x = image((3, 13, 2))
    padded = sk.shard_tensor(x, {"dp": sk.Shard(0), "sp": sk.Shard(1)}, mesh, uneven="pad")
    with entered(mesh, axis_types):
        mean, var = jax.jit(lambda x: sk.moments(x, 1, spatial_axes={"sp": "W"}, mesh=mesh))(padded)
    assert isinstance(mean, sk.Padded) == (axis_types == "explicit")
    assert mean.shape == var.shape == (3, 2)
    np.testing.assert_allclose(np.asarray(mean), x.mean(1), rtol=1e-10)
    np.testing.assert_allclose(np.asarray(var), x.var(1), rtol=1e-9)


@pytest.mark.parametrize(("fast_variance", "count"), [(True, 1), (False, 2)])
def test_how_many_sums_travel(fast_variance, count):
    mesh = sk.make_mesh(SP4)
    x = sk.shard_tensor(image((2, 3, 13, 5)), {"sp": sk.Shard(2)}, mesh, uneven="pad")
    report = sk.collectives(
        lambda x: sk.moments(x, (0, 1, 2), spatial_axes={"sp": "W"}, fast_variance=fast_variance), x, mesh=mesh
    )
    assert report.by_kind() == {"all_reduce": count}, str(report)
    assert {e.axes for e in report} == {("sp",)}
    assert sum(e.result_bytes for e in report) == 2 * 5 * 8


def test_kept_dims_need_no_communication():
    mesh = sk.make_mesh(SP4)
    x = sk.shard_tensor(image((2, 3, 16, 5)), {"sp": sk.Shard(2)}, mesh)
    assert sk.collectives(lambda x: sk.moments(x, (0, 1, 3), spatial_axes={"sp": "W"}), x, mesh=mesh).by_kind() == {}


def test_plain_arrays_of_any_size_and_numpy_arrays():
    mesh = sk.make_mesh(SP4)
    x = image((2, 13, 3))
    for run in (sk.moments, jax.jit(sk.moments, static_argnames=("axis", "spatial_axes", "mesh"))):
        spatial = Frozen({"sp": "W"})
        mean, var = run(x, axis=(0, 1), spatial_axes=spatial, mesh=mesh)
        np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-10)
        np.testing.assert_allclose(var, x.var((0, 1)), rtol=1e-9)


class Frozen(dict):
    """A mapping that may be a static argument."""

    def __hash__(self):
        return hash(tuple(self.items()))


# --- gradients and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("fast_variance", [True, False])
@pytest.mark.not_smoke
def test_gradient_equals_that_of_jnp_without_gathering(fast_variance):
    mesh = sk.make_mesh(DPSP)
    x = image((4, 3, 13, 2))
    padded = sk.shard_tensor(x, {"dp": sk.Shard(0), "sp": sk.Shard(2)}, mesh, uneven="pad")

    def combined(mean, var):
        return jnp.sum(jnp.sin(mean) + jnp.log(var))

    def loss(x):
        return combined(*sk.moments(x, (0, 1, 2), spatial_axes={"sp": "W"}, fast_variance=fast_variance, mesh=mesh))

    compiled = jax.jit(jax.grad(loss)).lower(padded).compile()
    grad = compiled(padded)
    want = jax.grad(lambda x: combined(x.mean((0, 1, 2)), x.var((0, 1, 2))))(x)
    np.testing.assert_allclose(np.asarray(grad), want, atol=1e-10)
    assert sk.placements(grad) == (sk.Shard(0), sk.Shard(2))
    report = read_collectives(compiled.as_text(), mesh)
    assert set(report.by_kind()) == {"all_reduce"}, str(report)


def test_low_precision_is_summed_in_float32():
    """512 times 1.01 + noise: a bfloat16 sum would stop growing at 256."""
    mesh = sk.make_mesh(SP4)
    x = jnp.asarray(1 + image((2, 512, 1), seed=3)[:, ::-1] / 1e3, jnp.bfloat16)
    mean, var = sk.moments(x, (0, 1), spatial_axes={"sp": "W"}, fast_variance=False, mesh=mesh)
    assert mean.dtype == var.dtype == jnp.float32
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, exact.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(var, exact.var((0, 1)), rtol=1e-4)


def test_dtype_is_the_least_precision():
    mesh = sk.make_mesh(SP4)
    x = image((2, 8, 1), dtype=np.float32)
    asked = {None: jnp.float32, jnp.bfloat16: jnp.float32, jnp.float64: jnp.float64}
    for dtype, got in asked.items():
        assert sk.moments(x, (0, 1), spatial_axes={"sp": "W"}, dtype=dtype, mesh=mesh)[0].dtype == got


@pytest.mark.parametrize("fast_variance", [True, False])
def test_complex_numbers_have_a_real_variance(fast_variance):
    mesh = sk.make_mesh(SP4)
    x = image((2, 13, 3)) + 1j * image((2, 13, 3), seed=1)
    padded = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")
    mean, var = sk.moments(padded, (0, 1), spatial_axes={"sp": "W"}, fast_variance=fast_variance)
    assert var.dtype == np.float64
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-10)
    np.testing.assert_allclose(var, x.var((0, 1)), rtol=1e-9)


def test_equal_numbers_have_no_negative_variance():
    mesh = sk.make_mesh(SP4)
    _, var = sk.moments(np.full((1, 13, 1), 1e4 / 3, np.float32), (0, 1), spatial_axes={"sp": "W"}, mesh=mesh)
    assert float(var[0]) >= 0


# --- inside manual regions ------------------------------------------------------------------------------


def test_inside_a_manual_region():
    """Blocks in, whole statistics out; an uneven image says its size by being Padded."""
    mesh = sk.make_mesh(SP4)
    x = image((2, 13, 3))
    padded = sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad")

    def local(block):
        return sk.moments(sk.Padded(block, x.shape), (0, 1), spatial_axes={"sp": 1})

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "sp"), out_specs=P()))
    mean, var = run(padded.array)
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-10)
    np.testing.assert_allclose(var, x.var((0, 1)), rtol=1e-9)
    assert sk.collectives(run, padded.array, mesh=mesh).by_kind() == {"all_reduce": 1}


@pytest.mark.not_smoke
def test_nested_in_a_region_of_another_axis():
    """Statistics of each half of the batch, differentiated through both regions."""
    mesh = sk.make_mesh(DPSP)
    x = image((4, 13, 2))

    def local(half):
        return jax.grad(lambda h: jnp.sum(sk.moments(h, (0, 1), spatial_axes={"sp": 1})[1] ** 2))(half)

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}))(x)
    alone = jax.grad(lambda h: jnp.sum(h.var((0, 1)) ** 2))
    np.testing.assert_allclose(got, np.concatenate([alone(x[:2]), alone(x[2:])]), atol=1e-10)


def test_a_block_that_counts_as_the_whole_batch_is_refused():
    """In a region over dp a Padded claims 4 images, but only 2 are here and nothing says where the rest is."""
    mesh = sk.make_mesh(DPSP)

    def local(block):
        return sk.moments(sk.Padded(block, (4, 8, 2)), (0, 1), spatial_axes={"sp": 1})

    with pytest.raises(ValueError, match=r"dim 0 .*2 of .*4 .*spatial_axes"):
        jax.shard_map(local, mesh=mesh, in_specs=P("dp", "sp"), out_specs=P())(np.ones((4, 8, 2)))


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": (0, 4)}, "axis=(0, 4) is out of range for 4 dims"),
        ({"axis": -5}, "axis=-5 is out of range for 4 dims"),
        ({"axis": (2, -2)}, "axis=(2, -2) names a dim twice"),
        ({"x": np.ones((0, 3, 8, 2))}, "no elements to average over dims (0, 1, 2) of shape (0, 3, 8, 2)"),
        ({"x": np.ones((2, 3, 0, 2))}, "dim 2 of shape (2, 3, 0, 2) is empty"),
        ({"spatial_axes": {"tp": "W"}}, "names mesh axis 'tp', but the mesh has ('sp',)"),
        ({"spatial_axes": {"sp": "D"}}, "names dim 'D', but the dims are ['C', 'H', 'N', 'W']"),
        ({"spatial_axes": {}}, "spatial_axes maps mesh axes to array dims"),
    ],
)
def test_bad_input_is_named(changes, message):
    good = {"x": np.ones((2, 3, 8, 2)), "axis": (0, 1, 2), "spatial_axes": {"sp": "W"}}
    arguments = good | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        sk.moments(arguments.pop("x"), arguments.pop("axis"), **arguments, mesh=sk.make_mesh(SP4))


def test_no_mesh_is_said():
    with pytest.raises(ValueError, match="no mesh"):
        sk.moments(np.ones((2, 8, 2)), (0, 1), spatial_axes={"sp": "W"})
