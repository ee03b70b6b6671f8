"""Regions in partitioned programs: they run as they are written."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import shardkit as sk

NUMBERS = ("NHWC", "HWIO", "NHWC")


def test_a_region_runs_as_written():
    mesh, rng = sk.make_mesh({"sp": 4}), np.random.default_rng(0)
    x, kernels = jnp.asarray(rng.normal(size=(1, 4, 16, 3))), jnp.asarray(rng.normal(size=(2, 3, 3, 3, 3)) / 5)

    def net(x, kernels):
        for kernel in kernels:
            x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS))
        return x

    region = sk.spatial.region(net, spatial_axes={"sp": "W"}, mesh=mesh, exchange_every=2)
    step = sk.partition(
        jax.value_and_grad(lambda x, k: (region(x, k) ** 2).mean(), (0, 1)), [{"sp": sk.Shard(2)}, {}], mesh=mesh
    )
    value, grads = step(x, kernels)
    want, wanted = jax.value_and_grad(lambda x, k: (net(x, k) ** 2).mean(), (0, 1))(x, kernels)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for a, b in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    assert sk.placements(grads[0])[0] == sk.Shard(2)
    kinds = sk.collectives(jax.jit(step), x, kernels).by_kind()
    assert kinds["collective_permute"] == 4 and "all_gather" not in kinds
