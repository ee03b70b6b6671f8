"""Regions wherever a function may be called: Auto and Explicit meshes, inside manual regions, beside other axes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.spatial.regions import region
from tests.spatial.regions.programs import check, conv, derivatives, kernels_of, same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 2, 16, 2))
K = kernels_of(RNG, (3, 3, 2, 2), (3, 3, 2, 2), (3, 3, 2, 2))
W = {"sp": "W"}


def net(x, ks):
    """With a function that has a derivative of its own, a roll, and sums."""
    x = jax.nn.softplus(conv(x, ks[0]))
    x = conv(x - x.mean((1, 2), keepdims=True), ks[1])
    return conv(x + 0.5 * jnp.roll(x, 1, 2), ks[2])


def loss(fun):
    return lambda ks, x: jnp.mean(jnp.sin(fun(x, ks)))


@pytest.fixture(scope="module")
def want():
    return jax.jit(derivatives(net))(X, K)


@pytest.fixture(scope="module")
def want_mean():
    return jax.jit(jax.value_and_grad(loss(net)))(K, X)


@pytest.mark.not_smoke
def test_beside_a_batch_axis(axis_types, want, mesh_for, ambient):
    """The batch is cut by another axis: left to the compiler, or in the types."""
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = sk.shard_tensor(X, {"dp": sk.Shard(0), "sp": sk.Shard(2)}, mesh)
    with ambient(mesh):
        found = check(net, x, K, mesh=mesh, axes=W, every=2, want=want)
    assert sk.placements(found.out) == (sk.Shard(0), sk.Shard(2))
    assert sk.placements(found.grads[0]) == (sk.Shard(0), sk.Shard(2))
    assert set(found.report.by_kind()) == {"collective_permute", "all_reduce"}


def test_in_a_step_with_a_manual_batch_axis(axis_types, want_mean, mesh_for, ambient):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    made = region(net, spatial_axes=W, mesh=mesh, exchange_every=2)
    x = sk.shard_tensor(X, {"dp": sk.Shard(0), "sp": sk.Shard(2)}, mesh)
    kernels = [sk.shard_tensor(k, {}, mesh) for k in K]

    with ambient(mesh):
        compiled = jax.jit(sk.value_and_grad(loss(made), batch_axes="dp")).lower(kernels, x).compile()
        value, grads = compiled(kernels, x)
        same((value, sk.reduce_gradients(grads, axis="dp")), want_mean)
    report = sk.collectives(compiled, mesh=mesh)
    # On Explicit axes what comes into the step is put together, as for any function in it.
    extra = {"all_gather"} if axis_types == "explicit" else set()
    assert set(report.by_kind()) - extra == {"collective_permute", "all_reduce"}


@pytest.mark.not_smoke
def test_in_a_manual_region_of_its_axis(axis_types, want, mesh_for, ambient):
    """Blocks in, blocks out: differentiated inside, and around it."""
    mesh = mesh_for({"sp": 4}, axis_types)
    made = region(net, spatial_axes=W, mesh=mesh, exchange_every=2)
    cut = P(None, None, "sp")

    def inside(x, ks):
        return jax.grad(lambda x: jnp.sum(jnp.sin(made(x, ks))))(x)

    def around(x, ks):
        return jax.shard_map(made, mesh=mesh, in_specs=(cut, P()), out_specs=cut)(x, ks)

    x = sk.shard_tensor(X, {"sp": sk.Shard(2)}, mesh)
    kernels = [sk.shard_tensor(k, {}, mesh) for k in K]
    with ambient(mesh):
        grad = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(cut, P()), out_specs=cut))(x, kernels)
        both = jax.jit(derivatives(around))(x, kernels)
    same(both, want)
    same(grad, want[1][0])


def test_the_mesh_of_the_arguments(want, mesh_for):
    x = sk.shard_tensor(X, {"sp": sk.Shard(2)}, mesh_for({"sp": 4}))
    same(region(net, spatial_axes=W, exchange_every=1)(x, K), want[0])


def test_called_again(want, mesh_for):
    made = region(net, spatial_axes=W, mesh=mesh_for({"sp": 4}), exchange_every=2)
    for _ in range(2):
        same(made(X, K), want[0])


def test_explicit_axes_of_several_dims(want, mesh_for, ambient):
    mesh = mesh_for({"a": 2, "b": 4}, "explicit")
    with ambient(mesh):
        found = check(net, X, K, mesh=mesh, axes={"a": "H", "b": "W"}, every=3, want=want)
    assert sk.placements(found.out) == (sk.Shard(1), sk.Shard(2))
