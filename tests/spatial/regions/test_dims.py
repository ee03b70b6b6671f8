"""Which dims are cut: signals, images, volumes, features first, uneven sizes, padded inputs."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.regions import region
from tests.spatial.regions.programs import check, conv, derivatives, kernels_of, same, stack

RNG = np.random.default_rng(0)
W = {"sp": "W"}


@pytest.mark.not_smoke
def test_signals(mesh_for):
    def net(x, ks):
        x = jax.nn.relu(conv(x, ks[0], 2))
        return conv(jnp.pad(x, ((0, 0), (1, 1), (0, 0)), "wrap"), ks[1], padding="VALID")

    ks = kernels_of(RNG, (4, 2, 3), (3, 3, 2))
    found = check(net, RNG.normal(size=(2, 32, 2)), ks, mesh=mesh_for({"sp": 4}), axes=W, every=2)
    # The first reads zeros beyond the ends, the second elements of the other end: two exchanges.
    assert found.report.by_kind() == {"collective_permute": 8, "all_reduce": 1}


@pytest.mark.not_smoke
def test_volumes(mesh_for):
    x = RNG.normal(size=(1, 4, 3, 8, 2))
    ks = kernels_of(RNG, (3, 3, 3, 2, 2), (1, 1, 3, 2, 2))
    found = check(stack, x, ks, mesh=mesh_for({"a": 2, "b": 4}), axes={"a": "D", "b": "W"}, every=2)
    assert sk.placements(found.out) == (sk.Shard(1), sk.Shard(3))
    assert found.report.by_kind() == {"collective_permute": 8, "all_reduce": 1}


@pytest.mark.not_smoke
def test_features_first_by_number(mesh_for):
    def net(x, ks):
        for k in ks:
            x = jax.nn.relu(lax.conv_general_dilated(x, k, (1, 1), "SAME"))  # NCHW, OIHW
        return x.transpose(0, 2, 3, 1)

    ks = [k.transpose(3, 2, 0, 1) for k in kernels_of(RNG, (3, 3, 2, 3), (3, 3, 3, 2))]
    found = check(net, RNG.normal(size=(2, 2, 4, 16)), ks, mesh=mesh_for({"sp": 4}), axes={"sp": 3}, every=2)
    assert sk.placements(found.out) == (sk.Shard(2),)
    assert found.report.by_kind() == {"collective_permute": 4, "all_reduce": 1}


@pytest.mark.parametrize("order", [("b", "a"), pytest.param(("a", "b"), marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_one_dim_cut_by_two_axes(order, mesh_for):
    x, ks = RNG.normal(size=(1, 3, 16, 2)), kernels_of(RNG, (3, 3, 2, 2), (3, 3, 2, 2))
    found = check(stack, x, ks, mesh=mesh_for({"a": 2, "b": 4}), axes={order: "W"}, every=2)
    assert found.report.by_kind() == {"collective_permute": 4, "all_reduce": 1}


@pytest.mark.parametrize(
    "devices", [8, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_devices(devices, mesh_for):
    x, ks = RNG.normal(size=(1, 3, 16, 2)), kernels_of(RNG, (3, 3, 2, 2), (3, 3, 2, 2))
    found = check(stack, x, ks, mesh=mesh_for({"sp": devices}), axes=W)
    assert found.report.count("collective_permute") == (8 if devices > 1 else 0)


@pytest.mark.not_smoke
def test_several_arguments(mesh_for):
    """The first argument's arrays are cut, as far as they have the dim; a sequence says it for each."""

    def net(state, x, scale):
        return conv(state["a"], x) * scale + state["t"], state["t"] + 1

    state = {"a": RNG.normal(size=(1, 3, 16, 2)), "t": np.float64(0.3)}
    check(net, state, kernels_of(RNG, (3, 3, 2, 2))[0], 2.0, mesh=mesh_for({"sp": 4}), axes=W)

    def add(x, k, y):
        return conv(x, k) + y

    x, k = RNG.normal(size=(1, 3, 16, 2)), kernels_of(RNG, (3, 3, 2, 2))[0]
    made = region(add, spatial_axes=(W, None, W), mesh=mesh_for({"sp": 4}))
    same(made(x, k, x), add(x, k, x))
    assert sk.placements(jax.jit(jax.grad(lambda y: made(x, k, y).sum()))(x)) == (sk.Shard(2),)


def uneven(x, ks):
    for k in ks:
        x = jnp.log(1.5 + jnp.tanh(conv(x, k)))
    return x, x.mean()


@pytest.mark.parametrize("size", [13, pytest.param(5, marks=pytest.mark.slow)])
def test_uneven_sizes(size, axis_types, mesh_for):
    """On Auto axes results are cropped, which is all that is gathered; on Explicit ones they're Padded."""
    x, ks = RNG.normal(size=(1, 3, size, 2)), kernels_of(RNG, (3, 3, 2, 2), (3, 3, 2, 2))
    found = check(uneven, x, ks, mesh=mesh_for({"sp": 4}, axis_types), axes=W, every=2)
    assert isinstance(found.out[0], sk.Padded) == (axis_types == "explicit")


@pytest.mark.not_smoke
def test_padded_inputs(axis_types, mesh_for, ambient):
    """What lies in their tails is nobody's business; results are Padded, and nothing is gathered."""
    mesh = mesh_for({"sp": 4}, axis_types)
    x, ks = RNG.normal(size=(1, 3, 13, 2)), kernels_of(RNG, (3, 3, 2, 2), (3, 3, 2, 2))
    filled = np.pad(x, ((0, 0), (0, 0), (0, 3), (0, 0)), constant_values=np.nan)
    given = sk.Padded(sk.shard_tensor(filled, {"sp": sk.Shard(2)}, mesh), x.shape)
    want = jax.jit(derivatives(uneven))(x, ks)
    with ambient(mesh):
        found = check(uneven, given, ks, mesh=mesh, axes=W, every=2, want=want)
    assert isinstance(found.out[0], sk.Padded) and sk.placements(found.out[0]) == (sk.Shard(2),)
    assert isinstance(found.grads[0], sk.Padded)
    assert {"all_to_all", "reduce_scatter"}.isdisjoint(found.report.by_kind())
    made = region(uneven, spatial_axes=W, mesh=mesh, exchange_every=2)
    with ambient(mesh):
        forward = sk.collectives(jax.jit(made), given, ks)
    assert forward.by_kind() == {"collective_permute": 2, "all_reduce": 1}
