"""A mesh axis that cuts the batch where a plan says that it cuts space: refused, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import shardkit as sk


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)

    def __call__(self, x):
        return self.conv(x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(4, (3, 3), name="conv")(x)


def loss_and_params(framework, mesh, path):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6, 16, 2)), jnp.float32)
    plan = {path: sk.ConvParallel("sp", dim="W")}
    if framework == "linen":
        params = LinenNet().init(jax.random.key(0), x)
        model = sk.parallelize(LinenNet(), plan, mesh)
        return (lambda p, x: jnp.mean(model.apply(p, x) ** 2)), params, x
    model = sk.parallelize(Net(nnx.Rngs(0)), plan, mesh)
    graphdef, params = nnx.split(model)
    return (lambda p, x: jnp.mean(nnx.merge(graphdef, p)(x) ** 2)), params, x


@pytest.mark.parametrize(("framework", "path"), [("nnx", "conv"), ("nnx", ""), ("linen", "conv")])
def test_an_axis_of_space_is_none_of_the_batch(framework, path):
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    loss, params, x = loss_and_params(framework, mesh, path)
    for axes in ("sp", ("dp", "sp")):
        with pytest.raises(ValueError, match=r"cut dim 0 over it. Leave 'sp' out of batch_axes"):
            sk.value_and_grad(loss, batch_axes=axes, mesh=mesh)(params, x)
    expected = jax.value_and_grad(loss)(params, x)
    for axes in ("dp", {"dp": 0, "sp": 2}):  # the dim that the plan cuts, too, is one
        value, grads = jax.jit(sk.value_and_grad(loss, batch_axes=axes, mesh=mesh))(params, x)
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        for g, wanted in zip(
            jax.tree.leaves(grads, is_leaf=lambda g: isinstance(g, sk.PartialArray)),
            jax.tree.leaves(expected[1]),
            strict=True,
        ):
            np.testing.assert_allclose(np.asarray(sk.unshard(g)), wanted, rtol=1e-4, atol=1e-6)
