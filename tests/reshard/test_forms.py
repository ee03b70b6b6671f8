"""Arrays, meshes and arguments of every form a user may come with."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

S, R, PARTIAL = sk.Shard, sk.Replicate(), sk.Partial()
VALUE = np.arange(32.0).reshape(8, 4)


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def test_random_keys(mesh_for):
    """Arrays of keys are placed as others are; they have no sum."""
    mesh = mesh_for({"x": 4})
    keys = jax.random.split(jax.random.key(0), 8)
    y = sk.reshard(keys, [S(0)], mesh)
    assert sk.placements(y) == (S(0),)
    np.testing.assert_array_equal(jax.random.key_data(sk.unshard(y)), jax.random.key_data(keys))
    with refuses("the placements are Partial"):
        sk.reshard(keys, [PARTIAL], mesh)


def test_axes_of_both_types(mesh_for):
    """A mesh with an Explicit and an Auto axis: eagerly, under jit, and its gradient."""
    mesh = mesh_for({"x": 4, "y": 2}, {"x": "explicit", "y": "auto"})
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.asarray(VALUE), NamedSharding(mesh, P("x", "y")))

        def move(a):
            return sk.reshard(a, {"x": S(1), "y": S(0)}, mesh)

        for f in (move, jax.jit(move)):
            y = f(x)
            assert sk.placements(y) == (S(1), S(0))
            np.testing.assert_array_equal(np.asarray(y), VALUE)
        g = jax.jit(jax.grad(lambda a: (move(a) ** 2).sum()))(x)
        np.testing.assert_array_equal(np.asarray(g), 2 * VALUE)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_vmap_over_a_dim_that_an_axis_cuts(axis, axis_types, mesh_for, ambient):
    """The batch is put together first: the axis has its part in every reshard."""
    if axis_types == "explicit" and axis == "x":
        pytest.skip("JAX's types let no axis cut both the batch and another dim")
    mesh = mesh_for({"x": 4, "y": 2}, axis_types)
    value = np.arange(256.0).reshape(8, 8, 4)
    x = jax.device_put(jnp.asarray(value), NamedSharding(mesh, P(axis)))
    with ambient(mesh):
        f = jax.vmap(lambda a: sk.reshard(a, {"x": S(0)}, mesh, src={} if axis_types == "auto" else None))
        np.testing.assert_array_equal(np.asarray(jax.jit(f)(x)), value)


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.not_smoke
def test_second_derivative_of_a_product(zeros, mesh_for):
    mesh = mesh_for({"x": 4})
    stack = np.random.default_rng(0).normal(size=(4, 3))
    stack[:zeros, 1] = 0
    layout = sk.Layout(mesh, [sk.Partial("prod")])

    def ours(s):
        return (sk.PartialArray(s, layout).reduce() ** 2).sum()

    def plain(s):
        return (jnp.prod(s, axis=0) ** 2).sum()

    placed = jax.device_put(jnp.asarray(stack), NamedSharding(mesh, P("x")))
    for derivative in (jax.grad, lambda f: jax.jacfwd(jax.grad(f)), jax.hessian):
        got, wanted = jax.jit(derivative(ours))(placed), derivative(plain)(jnp.asarray(stack))
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["max", "min", "prod"])
def test_derivative_where_nothing_is_reduced(kind, mesh_for):
    """Contributions that move, and stay contributions."""
    mesh = mesh_for({"x": 2, "y": 4})
    stack = np.random.default_rng(0).normal(size=(2, 8, 4))
    layout = sk.Layout(mesh, [sk.Partial(kind), R])
    placed = jax.device_put(jnp.asarray(stack), NamedSharding(mesh, P("x")))
    weight = np.random.default_rng(1).normal(size=stack.shape)

    def loss(s):
        return (sk.reshard(sk.PartialArray(s, layout), [sk.Partial(kind), S(0)]).stack * weight).sum()

    np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(loss))(placed)), weight)


def test_what_src_may_say(mesh_for):
    mesh = mesh_for({"x": 4, "y": 2})
    x = sk.shard_tensor(VALUE, [S(0), R], mesh)
    assert sk.placements(sk.reshard(x, [S(1), R], src=[S(0), R])) == (S(1), R)
    with refuses("which src=[Replicate(), Shard(dim=0)] contradicts; leave src out"):
        sk.reshard(x, [S(1), R], src=[R, S(0)])
    y = sk.reshard(VALUE, [S(1), R], src=sk.Layout(mesh, {}))
    assert sk.placements(y) == (S(1), R)


@pytest.mark.parametrize(
    ("call", "message", "kind"),
    [
        (lambda m: sk.reshard(VALUE, [R], {"x": 4}), "mesh must be a jax.sharding.Mesh", TypeError),
        (lambda m: sk.reshard({"a": VALUE}, [R], m), "one array, got a dict; for a pytree use jax.tree.map", TypeError),
        (lambda m: sk.reshard([VALUE, VALUE], [R], m), "one array, got a list", TypeError),
        (lambda m: sk.plan_reshard(8, "float32", [R], [S(0)], m), "shape is a tuple of sizes, got 8", TypeError),
        (
            lambda m: sk.plan_reshard((-1,), "float32", [R], [S(0)], m),
            "sizes are at least 0, got shape (-1,)",
            ValueError,
        ),
        (lambda m: sk.from_local([VALUE] * 4, [S(0)], m, global_shape=5), "global_shape is a tuple", TypeError),
    ],
    ids=["mesh", "tree", "list", "shape", "negative", "global_shape"],
)
def test_things_that_are_something_else(call, message, kind, mesh_for):
    with refuses(message, kind):
        call(mesh_for({"x": 4}))


def test_numbers_and_lists(mesh_for):
    mesh = mesh_for({"x": 4})
    np.testing.assert_array_equal(np.asarray(sk.reshard([1.0, 2, 3, 4], [S(0)], mesh)), [1, 2, 3, 4])
    assert sk.reshard(3.0, [R], mesh).shape == ()
    assert sk.unshard([1, 2]).tolist() == [1, 2]


def test_a_native_unreduced_array_enters_a_local_map(mesh_for):
    mesh = mesh_for({"x": 4}, "explicit")
    with jax.set_mesh(mesh):
        native = sk.to_unreduced(sk.reshard(VALUE, [PARTIAL], mesh))
        total = sk.local_map(lambda c: jax.lax.psum(c, "x"), [PARTIAL], [R], mesh)(native)
    np.testing.assert_array_equal(np.asarray(total), VALUE)
