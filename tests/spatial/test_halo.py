"""``halo_exchange`` against the extended dim it stands for, and what it communicates."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.spatial.windows import PADDING_MODES, block_size, extended_index


def values(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def oracle(x, shards, before, after, mode, dim=0):
    """All shards' results side by side, by the index of each element."""
    size = x.shape[dim]
    block = block_size(size, shards)
    index = [
        extended_index(p, size, mode) for i in range(shards) for p in range(i * block - before, (i + 1) * block + after)
    ]
    zero = np.zeros_like(np.take(x, [0], axis=dim))
    return np.concatenate([zero if e is None else np.take(x, [e], axis=dim) for e in index], axis=dim)


def exchanger(mesh, before, after, mode="zeros", *, size=None, dim=0, ndim=1, axis="sp"):
    """A function of the whole (padded) array: the exchange on every device."""
    spec = P(*[None] * (dim % ndim), axis)
    return jax.shard_map(
        lambda block: sk.halo_exchange(block, axis, dim, before, after, mode=mode, size=size),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )


def place(x, mesh, axis="sp", dim=0):
    return sk.shard_tensor(x, P(*[None] * (dim % x.ndim), axis), mesh, uneven="pad").array


def with_nan_tail(x, mesh):
    """``x`` as padded shards whose tail is NaN."""
    padded = sk.shard_tensor(x, P("sp"), mesh, uneven="pad").array
    tail = jnp.arange(padded.shape[0]) >= x.shape[0]
    return jax.jit(lambda p: jnp.where(tail, jnp.nan, p), out_shardings=padded.sharding)(padded)


def check(mesh_for, size, shards, before, after, mode, axis_types="auto"):
    x = values(size)
    mesh = mesh_for({"sp": shards}, axis_types)
    f = jax.jit(exchanger(mesh, before, after, mode, size=size))
    y = f(with_nan_tail(x, mesh))
    np.testing.assert_array_equal(y, oracle(x, shards, before, after, mode))
    assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("sp")), 1)


# --- values ---------------------------------------------------------------------------------------

CASES = [
    # size, shards, before, after
    (6, 1, 2, 3),
    (8, 2, 1, 1),
    (8, 2, 0, 3),
    (9, 2, 2, 2),  # a short last shard
    (16, 4, 2, 1),
    (5, 4, 1, 2),  # a short shard and an empty one
    (12, 4, 5, 7),  # several hops
    (16, 8, 1, 0),
    (9, 8, 2, 2),  # blocks of two, three shards empty, one short
    (8, 4, 0, 0),
]


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(("size", "shards", "before", "after"), CASES)
@pytest.mark.every(3)
def test_values(mesh_for, size, shards, before, after, mode):
    check(mesh_for, size, shards, before, after, mode)


@pytest.mark.parametrize("mode", PADDING_MODES)
def test_values_on_explicit_axes(mesh_for, mode):
    check(mesh_for, 13, 4, 2, 3, mode, "explicit")


ANY_SIZE = given(
    size=st.integers(1, 20),
    shards=st.sampled_from([2, 4, 8]),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
    mode=st.sampled_from(PADDING_MODES),
)


@ANY_SIZE
@settings(max_examples=8)
@pytest.mark.not_smoke
def test_values_of_any_size(mesh_for, size, shards, before, after, mode):
    assume(mode != "reflect" or size == 1 or max(before, after) < size)
    check(mesh_for, size, shards, before, after, mode)


@ANY_SIZE
@settings(max_examples=100)
@pytest.mark.slow
def test_values_of_more_sizes(mesh_for, size, shards, before, after, mode):
    assume(mode != "reflect" or size == 1 or max(before, after) < size)
    check(mesh_for, size, shards, before, after, mode)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8", "bool"])
def test_any_dtype(mesh_for, dtype):
    x = jnp.asarray(values(8) > 0 if dtype == "bool" else 10 * values(8), dtype)
    mesh = mesh_for({"sp": 4})
    y = jax.jit(exchanger(mesh, 1, 1, "reflect"))(place(x, mesh))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, oracle(np.asarray(x), 4, 1, 1, "reflect"))


@pytest.mark.parametrize("dim", [1, 2, -1, -2])
def test_any_dim(mesh_for, dim):
    x = values((3, 8, 12))
    mesh = mesh_for({"sp": 4})
    y = jax.jit(exchanger(mesh, 1, 2, "circular", dim=dim, ndim=3))(place(x, mesh, dim=dim))
    np.testing.assert_array_equal(y, oracle(x, 4, 1, 2, "circular", dim))


@pytest.mark.not_smoke
def test_eager(mesh_for, axis_types, ambient):
    x, mesh = values(9), mesh_for({"sp": 2}, axis_types)
    with ambient(mesh):
        y = exchanger(mesh, 2, 1, "replicate", size=9)(place(x, mesh))
    np.testing.assert_array_equal(y, oracle(x, 2, 2, 1, "replicate"))


def test_two_mesh_axes_on_one_dim(mesh_for):
    x, mesh = values(16), mesh_for({"a": 2, "b": 4})
    for axis in (("a", "b"), ("b", "a")):
        f, placed = jax.jit(exchanger(mesh, 1, 2, "circular", axis=axis)), place(x, mesh, axis)
        np.testing.assert_array_equal(f(placed), oracle(x, 8, 1, 2, "circular"))
        assert sk.collectives(f, placed).by_kind() == {"collective_permute": 2}


def test_two_dims_get_their_corners(mesh_for):
    x, mesh = values((6, 8)), mesh_for({"h": 2, "w": 4})

    def body(block):
        block = sk.halo_exchange(block, "h", 0, 1, 1, mode="reflect")
        return sk.halo_exchange(block, "w", 1, 2, 0, mode="circular")

    y = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("h", "w"), out_specs=P("h", "w")))(x)
    expected = oracle(oracle(x, 2, 1, 1, "reflect"), 4, 2, 0, "circular", dim=1)
    np.testing.assert_array_equal(y, expected)


def test_other_axes_stay_with_the_compiler(mesh_for, axis_types):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = sk.shard_tensor(values((2, 8)), P("dp", "sp"), mesh)
    f = jax.jit(
        jax.shard_map(
            lambda block: sk.halo_exchange(block, "sp", 1, 1, 1),
            mesh=mesh,
            in_specs=P(None, "sp"),
            out_specs=P(None, "sp"),
            axis_names={"sp"},
        )
    )
    y = f(x)
    np.testing.assert_array_equal(y, oracle(np.asarray(x), 4, 1, 1, "zeros", dim=1))
    assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("dp", "sp")), 2)
    if axis_types == "auto":  # JAX itself gathers over the free axes of an Explicit, partly manual region
        assert sk.collectives(f, x).by_kind() == {"collective_permute": 2}


# --- derivatives ----------------------------------------------------------------------------------

LINEAR = [(8, 2, 1, 2), (9, 4, 2, 1), (12, 4, 5, 4), (5, 4, 2, 2), (4, 1, 2, 3)]


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(("size", "shards", "before", "after"), LINEAR)
@pytest.mark.every(3)
def test_the_gradient_is_the_adjoint(mesh_for, size, shards, before, after, mode):
    """<F x, y> = <x, F* y>; NaN in the padded tail reaches neither F x nor F* y."""
    mesh = mesh_for({"sp": shards})
    f = exchanger(mesh, before, after, mode, size=size)
    x = values(size)
    padded = with_nan_tail(x, mesh)
    y = values(len(padded) + shards * (before + after), seed=1)
    out, back = jax.jit(lambda p, y: (f(p), jax.vjp(f, p)[1](y)[0]))(padded, y)
    assert not np.asarray(back)[size:].any()
    np.testing.assert_allclose(np.vdot(out, y), np.vdot(x, back[:size]), rtol=1e-12)
    assert back.sharding.is_equivalent_to(padded.sharding, 1)


def test_gradient_on_explicit_axes(mesh_for):
    mesh = mesh_for({"sp": 4}, "explicit")
    x, weights = place(values(8), mesh), values(16, seed=1)
    f = exchanger(mesh, 1, 1, "circular")
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda p: (f(p) * sk.shard_tensor(weights, P("sp"))).sum())(x)
    # Each element goes to its own shard and, at an edge, to the neighbour's halo: the weights it met there.
    expected = np.zeros(8)
    for shard, row in enumerate(weights.reshape(4, 4)):
        for offset, weight in enumerate(row):
            expected[(2 * shard - 1 + offset) % 8] += weight
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@pytest.mark.not_smoke
def test_forward_mode_and_second_order(mesh_for):
    mesh = mesh_for({"sp": 4})
    f = exchanger(mesh, 2, 1, "reflect", size=10)
    x, t = (place(values(10, seed), mesh) for seed in (0, 1))
    y, tangent = jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(x, t)
    np.testing.assert_array_equal(tangent, f(t))

    def energy(p):
        return (f(p) ** 3).sum()

    hessian_t = jax.jit(lambda x, t: jax.jvp(jax.grad(energy), (x,), (t,))[1])(x, t)
    expected = jax.jit(lambda y, ft: jax.vjp(f, x)[1](6 * y * ft)[0])(y, tangent)
    np.testing.assert_allclose(hessian_t, expected, rtol=1e-12)


def test_vmap(mesh_for):
    mesh = mesh_for({"sp": 4})
    x = values((3, 8))
    y = jax.jit(jax.vmap(exchanger(mesh, 1, 2, "circular")))(x)
    np.testing.assert_array_equal(y, oracle(x, 4, 1, 2, "circular", dim=1))


# --- communication --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(
    ("shards", "before", "after", "permutes", "received"),
    [
        (8, 2, 3, 2, 5),
        (4, 4, 4, 2, 8),
        (4, 0, 2, 1, 2),
        (4, 1, 0, 1, 1),
        (4, 0, 0, 0, 0),
        (1, 2, 2, 0, 0),
    ],
)
@pytest.mark.every(3)
def test_permutes(mesh_for, shards, before, after, permutes, received, mode):
    """Halos within a block: one permute a direction, of exactly the halo, and nothing else."""
    if mode in ("reflect", "replicate"):
        before, after = min(before, 3), min(after, 3)  # reflected, the fourth would come from another hop
        received = (before + after) * (shards > 1)
    mesh = mesh_for({"sp": shards})
    x = place(values((4 * shards, 3)), mesh)
    f = jax.jit(exchanger(mesh, before, after, mode, ndim=2))
    expected = {"collective_permute": permutes} if permutes else {}
    report = sk.collectives(f, x)
    assert report.by_kind() == expected
    assert report.bytes() == received * 3 * 8
    backward = sk.collectives(jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())), x)
    assert backward.count("collective_permute") == 2 * permutes  # forward, and back with addition
    assert set(backward.by_kind()) <= {"collective_permute"}


def test_two_hops_send_only_what_is_missing(mesh_for):
    mesh = mesh_for({"sp": 4})
    x = place(values(8), mesh)
    report = sk.collectives(jax.jit(exchanger(mesh, 3, 0)), x)
    assert sorted(entry.bytes for entry in report) == [1 * 8, 2 * 8]


# --- bad input ------------------------------------------------------------------------------------


def run(mesh, *args, shape=(8, 2), **options):
    f = jax.shard_map(lambda b: sk.halo_exchange(b, *args, **options), mesh=mesh, in_specs=P("sp"), out_specs=P("sp"))
    return jax.eval_shape(f, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("xx", 0, 1, 1), {}, "mesh axis ['xx'] is not manual here (manual axes: ['sp'])"),
        ((("sp", "xx"), 0, 1, 1), {}, "mesh axis ['xx'] is not manual here"),
        (("sp", 2, 1, 1), {}, "dim=2 is out of range for a block with 2 dims"),
        (("sp", -3, 1, 1), {}, "dim=-3 is out of range for a block with 2 dims"),
        (("sp", 0, -1, 1), {}, "before=-1 and after=1 must not be negative; slice instead"),
        (("sp", 0, 0, -2), {}, "before=0 and after=-2 must not be negative"),
        (("sp", 0, 1, 1), {"mode": "mirror"}, "mode='mirror' is unknown; use one of ('zeros', 'circular', "),
        (("sp", 0, 1, 1), {"size": 9}, "size=9 over 4 shards makes blocks of 3 elements, but the block has 2 in dim 0"),
        (("sp", 0, 1, 1), {"size": 4}, "makes blocks of 1 elements, but the block has 2 in dim 0; pad each block"),
        (("sp", 0, 1, 1), {"size": 0}, "size=0 over 4 shards"),
        (("sp", 0, 1, 8), {"mode": "reflect"}, "reflect needs halos (1, 8) narrower than the size 8"),
    ],
)
def test_bad_arguments(mesh_for, args, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(mesh_for({"sp": 4}), *args, **options)


def test_fractional_halos(mesh_for):
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        run(mesh_for({"sp": 4}), "sp", 0, 1.5, 1)


def test_outside_shard_map(mesh_for):
    with pytest.raises(ValueError, match=r"works on blocks inside jax\.shard_map") as error:
        sk.halo_exchange(jnp.ones(8), "sp", 0, 1, 1)
    assert "axis_names={'sp'}), or use sk.ring_conv, which does that itself" in str(error.value)
    with jax.set_mesh(mesh_for({"sp": 4})), pytest.raises(ValueError, match=r"manual axes: \[\]"):
        sk.halo_exchange(jnp.ones(8), "sp", 0, 1, 1)
