"""A model for one device, with activations of any kind, given images that the mesh doesn't divide: as ``sk.Padded``."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk

PLACE = {"dp": sk.Shard(0), "sp": sk.Shard(2)}
ACTIVATIONS = {"relu": nnx.relu, "relu6": nnx.relu6, "sigmoid": nnx.sigmoid, "silu": nnx.silu, "gelu": nnx.gelu}


class Restorer(nnx.Module):
    def __init__(self, rngs):
        self.enter = nnx.Conv(3, 4, (3, 3), param_dtype=np.float64, rngs=rngs)
        self.down = nnx.Conv(4, 8, (3, 3), strides=(2, 2), param_dtype=np.float64, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, param_dtype=np.float64, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2, 2), strides=(2, 2), param_dtype=np.float64, rngs=rngs)
        self.leave = nnx.Conv(4, 3, (3, 3), param_dtype=np.float64, rngs=rngs)

    def __call__(self, x, act):
        fine = act(self.enter(x))
        coarse = act(self.norm(self.down(fine)))
        return x + self.leave(act(self.up(coarse)) + fine)


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 8, 18, 3)), rng.normal(size=(2, 8, 18, 3))


def step(model, act):
    graphdef, params = nnx.split(model)
    loss = lambda params, x, y: jnp.mean((nnx.merge(graphdef, params)(x, act) - y) ** 2)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss)), params


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_one_device_and_nothing_is_gathered(mesh_for, activation):
    mesh = mesh_for({"dp": 2, "sp": 4})
    model = sk.parallelize(Restorer(nnx.Rngs(0)), {"**": sk.ConvParallel("sp", dim="W")}, mesh)
    fun, params = step(model, ACTIVATIONS[activation])
    x, y = (sk.shard_tensor(a, PLACE, mesh, uneven="pad") for a in batch())
    sk.assert_collectives(fun, params, x, y, all_gather=0, all_to_all=0)
    got = fun(params, x, y)
    plain, params = step(Restorer(nnx.Rngs(0)), ACTIVATIONS[activation])
    want = plain(params, *batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, want)
