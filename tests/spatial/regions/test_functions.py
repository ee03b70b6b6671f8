"""Functions with derivatives of their own, checkpoints, and what JAX's transformations make of a region."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.regions import region
from tests.spatial.regions.programs import check, conv, derivatives, kernels_of, same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 2, 16, 2))
K = kernels_of(RNG, (3, 3, 2, 2), (3, 3, 2, 2))
W = {"sp": "W"}


@jax.custom_jvp
def squared(x, scale):
    return x * x * scale


@squared.defjvp
def _squared(primals, dots):
    x, scale = primals  # the rule calls the function again, as JAX's own do
    return squared(x, scale), 3 * x * scale * dots[0] + x * x * dots[1]


@jax.custom_jvp
def blurred(x, k):
    return conv(x, k)


@blurred.defjvp
def _blurred(primals, dots):
    (x, k), (dx, dk) = primals, dots
    return blurred(x, k), 2 * conv(dx, k) + conv(x, dk)


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def test_derivatives_of_their_own(mesh_for):
    def net(x, ks, scale):
        x = jax.nn.softplus(conv(x, ks[0]))
        return conv(squared(x, scale), ks[1])

    found = check(net, X, K, 1.3, mesh=mesh_for({"sp": 4}), axes=W, every=2)
    assert found.report.by_kind() == {"collective_permute": 4, "all_reduce": 1}


@pytest.mark.not_smoke
def test_a_derivative_that_exchanges(mesh_for):
    found = check(lambda x, ks: conv(blurred(x, ks[0]), ks[1]), X, K, mesh=mesh_for({"sp": 4}), axes=W, every=2)
    assert not found.plan.left


@pytest.mark.not_smoke
def test_custom_vjp_leaves_the_layout(mesh_for):
    found = check(lambda x, ks: conv(doubled(conv(x, ks[0])), ks[1]), X, K, mesh=mesh_for({"sp": 4}), axes=W)
    assert [s.node.name for s in found.plan.left] == ["custom_vjp_call"]


@pytest.mark.parametrize("policy", ["dots_saveable", pytest.param(None, marks=pytest.mark.slow)])
def test_checkpoints(policy, mesh_for):
    chosen = policy and getattr(jax.checkpoint_policies, policy)
    block = jax.checkpoint(lambda x, k: jax.nn.silu(conv(x, k)), policy=chosen)

    def net(x, ks):
        return block(block(x, ks[0]), ks[1])

    found = check(net, X, K, mesh=mesh_for({"sp": 4}), axes=W)
    assert set(found.report.by_kind()) == {"collective_permute", "all_reduce"}


def net(x, ks):
    return conv(jnp.tanh(conv(x, ks[0])), ks[1])


@pytest.fixture(scope="module")
def made():
    return region(net, spatial_axes=W, mesh=sk.make_mesh({"sp": 4}), exchange_every=2)


@pytest.mark.not_smoke
def test_forward_over_reverse_over_reverse(made):
    def products(fun):
        def loss(x, ks):
            return jnp.sum(jnp.sin(fun(x, ks)))

        def run(x, ks, v):
            hessian = jax.jvp(lambda x: jax.grad(loss)(x, ks), (x,), (v,))
            again = jax.grad(lambda ks: jnp.sum(jax.grad(loss)(x, ks) ** 2))(ks)
            return hessian, again

        return run

    same(jax.jit(products(made))(X, K, X[::-1]), jax.jit(products(net))(X, K, X[::-1]))


def test_vmap(made):
    def batched(fun):
        return lambda xs, ks: jax.vmap(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(fun(x, ks)))))(xs)

    xs = np.stack([X, 2 * X, X - 1])
    same(jax.jit(batched(made))(xs, K), jax.jit(batched(net))(xs, K))


def test_eager_is_as_jitted(made):
    same(made(X, K), jax.jit(net)(X, K))
    assert sk.placements(made(X, K)) == (sk.Shard(2),)


@pytest.mark.not_smoke
def test_dtypes(mesh_for):
    """What comes out is of the types that the plain function gives; integers, too."""
    images, kernels = X.astype(jnp.bfloat16), [k.astype(jnp.bfloat16) for k in K]

    def mixed(x, ks):
        y = jax.nn.relu(conv(x, ks[0]))
        return conv(y, ks[1]), y.mean(), y.astype(jnp.float32) * 2

    made = region(mixed, spatial_axes=W, mesh=mesh_for({"sp": 4}), exchange_every=2)
    got, want = (jax.jit(derivatives(f))(images, kernels) for f in (made, mixed))
    assert [a.dtype for a in jax.tree.leaves(got)] == [a.dtype for a in jax.tree.leaves(want)]
    same(*(jax.tree.map(lambda a: a.astype(np.float64), t) for t in (got, want)), tolerance=0.05)


@pytest.mark.parametrize("size", [13, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_integers(size, mesh_for):
    numbers = np.arange(1 * 2 * 16 * 2).reshape(1, 2, 16, 2)[:, :, :size] % 17

    def count(x):
        y = jnp.roll(x, 1, 2) - x
        return y, y * 3 % 5, y // jnp.where(x > 3, x, 1), y.sum(), y.max(), (y > 0).any(), (y > -99).all((1, 2))

    made = jax.jit(region(count, spatial_axes=W, mesh=mesh_for({"sp": 4})))(numbers)
    want = count(numbers)
    assert [a.dtype for a in made] == [a.dtype for a in want]
    same(made, want, tolerance=0)


@pytest.mark.not_smoke
def test_keys_and_dropout(mesh_for):
    """The mask is that of the whole image, whatever the mesh; keys are arguments and results."""

    def net(x, k, key):
        first, second = jax.random.split(key)
        y = conv(x, k)
        kept = jax.random.bernoulli(first, 0.7, y.shape)
        return conv(jnp.where(kept, y / 0.7, 0), k), second

    key = jax.random.key(3)
    got = jax.jit(region(net, spatial_axes=W, mesh=mesh_for({"sp": 4}), exchange_every=2))(X, K[0], key)
    want = net(X, K[0], key)
    same(got[0], want[0])
    assert (jax.random.key_data(got[1]) == jax.random.key_data(want[1])).all()


def test_what_it_closes_over_may_change():
    """A second eager call sees new weights, and compiles nothing anew."""
    mesh, held = sk.make_mesh({"sp": 2}), {"scale": jnp.float32(2.0)}
    made = sk.spatial.region(lambda x: x * held["scale"], spatial_axes={"sp": 0}, mesh=mesh)
    x = jnp.arange(4.0)
    same(made(x), 2 * x)
    held["scale"] = jnp.float32(3.0)
    same(made(x), 3 * x)
    assert len(made._programs) == 1
    same(jax.grad(lambda x: made(x).sum())(x), jnp.full(4, 3.0))


def test_a_rule_that_closes_over_a_number():
    """A derivative's rule isn't shown by the program's text: such programs aren't kept."""
    mesh, held = sk.make_mesh({"sp": 2}), {"weight": 1.0}

    def reversal(x):
        weight = held["weight"]

        @jax.custom_vjp
        def g(x):
            return x * 1.0

        g.defvjp(lambda x: (x * 1.0, None), lambda _, t: (-weight * t,))
        return g(x)

    made = sk.spatial.region(reversal, spatial_axes={"sp": 0}, mesh=mesh)
    for weight in (1.0, 3.0):
        held["weight"] = weight
        same(jax.grad(lambda x: made(x).sum())(jnp.arange(4.0)), jnp.full(4, -weight))
