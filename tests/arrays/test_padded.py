"""``Padded``: an array of any size on a mesh, and ``to_local``."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.arrays import pad_to

pytestmark = pytest.mark.smoke

X = np.random.default_rng(0).normal(size=(3, 5))


@pytest.fixture
def mesh(mesh_for, axis_types):
    return mesh_for({"sp": 4}, axis_types)


@pytest.fixture
def padded(mesh, ambient):
    """X with its five columns over four devices; the tail is NaN, so nothing may ever read it."""
    with ambient(mesh):
        array = sk.shard_tensor(np.pad(X, ((0, 0), (0, 3)), constant_values=np.nan), P(None, "sp"), mesh)
        yield sk.Padded(array, (3, 5))


def repad(x, mesh):
    return sk.shard_tensor(x, P(None, "sp"), mesh, uneven="pad")


# --- what it says of itself -----------------------------------------------------------------------


def test_attributes(padded, mesh):
    assert (padded.shape, padded.ndim, padded.size, padded.dtype) == ((3, 5), 2, 15, jnp.float64)
    assert padded.array.shape == (3, 8)
    assert padded.sharding == NamedSharding(mesh, P(None, "sp"))
    assert len(padded) == 3
    assert sk.placements(padded) == (sk.Shard(1),)


def test_the_value_eagerly_is_replicated_where_it_does_not_divide(padded):
    np.testing.assert_array_equal(padded.value, X)
    assert padded.value.sharding.is_fully_replicated


def test_dims_that_divide_keep_their_place(mesh_for, axis_types, ambient):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = np.arange(20.0).reshape(4, 5)
    with ambient(mesh):
        padded = sk.shard_tensor(x, P("dp", "sp"), mesh, uneven="pad")
        value = padded.value
    np.testing.assert_array_equal(value, x)
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, P("dp")), 2)


def test_an_even_size_is_its_array(mesh):
    padded = repad(np.ones((3, 8)), mesh)
    assert padded.value is padded.array


def test_under_jit_the_value_costs_nothing(mesh_for):
    """On Auto axes the shards stay where they are: pad -> value -> elementwise -> pad."""
    mesh = mesh_for({"sp": 4})
    padded = repad(X, mesh)

    @jax.jit
    def step(p):
        return repad(jnp.sin(p.value) * 2 + 1, mesh)

    assert len(sk.collectives(step, padded)) == 0
    out = step(padded)
    assert out.array.sharding == padded.array.sharding
    np.testing.assert_allclose(out.value, np.sin(X) * 2 + 1, rtol=1e-15)
    assert not np.asarray(out.array)[:, 5:].any()


def test_under_jit_a_sum_is_one_all_reduce(mesh_for):
    padded = repad(X, mesh_for({"sp": 4}))
    total = jax.jit(lambda p: p.value.sum())
    np.testing.assert_allclose(total(padded), X.sum(), rtol=1e-14)
    assert sk.collectives(total, padded).by_kind() == {"all_reduce": 1}


# --- as a pytree ----------------------------------------------------------------------------------


def test_through_jit(padded, mesh):
    out = jax.jit(lambda p: jax.tree.map(lambda a: 2 * a, p))(padded)
    assert isinstance(out, sk.Padded)
    assert out.shape == (3, 5)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "sp")), 2)
    np.testing.assert_array_equal(out.value, 2 * X)


def test_through_grad(padded):
    gradient = jax.jit(jax.grad(lambda p: (p.value**3).sum()))(padded)
    assert gradient.shape == (3, 5)
    np.testing.assert_allclose(gradient.value, 3 * X**2, rtol=1e-14)
    # The NaN of the tail stays out of the gradient.
    np.testing.assert_array_equal(np.asarray(gradient.array)[:, 5:], 0)


def test_eager_grad_and_jvp(padded):
    np.testing.assert_allclose(jax.grad(lambda p: (p.value**2).sum())(padded).value, 2 * X, rtol=1e-14)
    _, tangent = jax.jvp(lambda p: p.value**2, (padded,), (padded,))
    np.testing.assert_allclose(tangent, 2 * X**2, rtol=1e-14)


def test_logical_shapes_are_part_of_the_structure(mesh):
    five, six = repad(X, mesh), repad(np.ones((3, 6)), mesh)
    assert jax.tree.structure(five) == jax.tree.structure(repad(2 * X, mesh))
    assert jax.tree.structure(five) != jax.tree.structure(six)
    shapes = []
    count = jax.jit(lambda p: shapes.append(p.shape))
    for p in (five, six, five):
        count(p)
    assert shapes == [(3, 5), (3, 6)]  # one trace each


# --- as an array ----------------------------------------------------------------------------------

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.every(2)
def test_operators(mesh_for, name):
    fun = getattr(operator, name)
    x = np.abs(X) + 0.5
    padded = repad(x, mesh_for({"sp": 4}))
    other = np.where(np.arange(5) % 2, x, 2.0)
    for left, right, expected in [
        (padded, 2.0, fun(x, 2.0)),
        (2.0, padded, fun(2.0, x)),
        (padded, other, fun(x, other)),
        (other, padded, fun(other, x)),
        (padded, jnp.asarray(other), fun(x, other)),
        (jnp.asarray(other), padded, fun(other, x)),
        (padded, padded, fun(x, x)),
    ]:
        result = fun(left, right)
        assert isinstance(result, jax.Array)
        np.testing.assert_allclose(result, expected, rtol=1e-14)
        np.testing.assert_allclose(jax.jit(fun)(left, right), expected, rtol=1e-14)


def test_operators_on_explicit_axes_under_jit(mesh_for):
    mesh = mesh_for({"sp": 4}, "explicit")
    with jax.set_mesh(mesh):
        out = jax.jit(lambda p: 1 - p * p)(repad(X, mesh))
    np.testing.assert_allclose(out, 1 - X * X, rtol=1e-14)


def test_unary_and_logical_operators(mesh_for):
    mesh = mesh_for({"sp": 4})
    padded, mask = repad(X, mesh), repad(X > 0, mesh)
    np.testing.assert_array_equal(-padded, -X)
    np.testing.assert_array_equal(abs(padded), abs(X))
    np.testing.assert_array_equal(~mask, X <= 0)
    np.testing.assert_array_equal(mask & True, X > 0)
    np.testing.assert_array_equal((X < 0) | mask, X != 0)
    np.testing.assert_array_equal(mask ^ mask, np.zeros_like(X, bool))
    np.testing.assert_allclose(padded @ X.T, X @ X.T, rtol=1e-13)
    np.testing.assert_allclose(X.T @ padded, X.T @ X, rtol=1e-13)


def test_array_methods_and_functions(padded):
    np.testing.assert_allclose(padded.sum(), X.sum(), rtol=1e-14)
    np.testing.assert_allclose(padded.mean(axis=1), X.mean(axis=1), rtol=1e-14)
    np.testing.assert_array_equal(padded.T, X.T)
    np.testing.assert_array_equal(padded.reshape(15), X.reshape(15))
    np.testing.assert_array_equal(padded.at[0, 4].set(7.0)[0], [*X[0, :4], 7.0])
    assert padded.astype("float32").dtype == jnp.float32
    np.testing.assert_allclose(jnp.max(padded), X.max(), rtol=0)
    np.testing.assert_allclose(jnp.sin(padded), np.sin(X), rtol=1e-15)
    with pytest.raises(AttributeError, match="'Padded' object has no attribute 'quack'"):
        padded.quack()


def test_indexing_and_iteration(padded):
    np.testing.assert_array_equal(padded[1], X[1])
    np.testing.assert_array_equal(padded[:, -1], X[:, -1])
    rows = list(padded)
    assert len(rows) == 3
    np.testing.assert_array_equal(rows, X)


def test_numpy(padded):
    np.testing.assert_array_equal(np.asarray(padded), X)
    assert np.asarray(padded, dtype=np.float32).dtype == np.float32
    copy = np.array(padded)
    copy[0, 0] = 7  # a copy is the caller's to write
    assert np.asarray(padded)[0, 0] == X[0, 0]


def test_it_is_neither_true_nor_a_key(padded):
    with pytest.raises(ValueError, match="truth value of an array with more than one element is ambiguous"):
        bool(padded)
    with pytest.raises(TypeError, match="unhashable"):
        hash(padded)


# --- in jax.lax, which asks no __jax_array__ ------------------------------------------------------


@jax.custom_jvp
def own(x):
    return jnp.maximum(x, 0)


@own.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return own(x), jax.lax.select(x > 0, dx, jax.lax.full_like(dx, 0))


# Written in jax.lax, or with derivatives that are.
FUNCTIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "softmax": jax.nn.softmax,
    "sinc": jnp.sinc,
    "lax.logistic": jax.lax.logistic,
    "lax.clamp": lambda x: jax.lax.clamp(-0.5, x, 0.5),
    "lax.select": lambda x: jax.lax.select(x > 0, x, jax.lax.full_like(x, 0)),
    "lax.reduce_max": lambda x: jax.lax.reduce_max(x, (1,)),
    "own": own,
}
WAYS = {
    "eagerly": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,))[1],
    "grad": lambda f, x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(x),
    "grad of jit": lambda f, x: jax.grad(jax.jit(lambda x: jnp.sum(f(x) ** 2)))(x),
    "of a checkpoint": lambda f, x: jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sum(f(x) ** 2))))(x),
    "twice": lambda f, x: jax.jvp(jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2))), (x,), (x,))[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.every(2)
def test_functions_of_jax_lax_and_their_derivatives(padded, name, way):
    expected = WAYS[way](FUNCTIONS[name], jnp.asarray(X))
    np.testing.assert_allclose(WAYS[way](FUNCTIONS[name], padded), expected, rtol=1e-12, atol=1e-12)


def test_a_derivative_moves_no_elements(mesh_for):
    padded = repad(X, mesh_for({"sp": 4}))
    gradient = jax.jit(jax.grad(lambda p: jax.nn.relu(p).sum()))
    assert len(sk.collectives(gradient, padded)) == 0
    np.testing.assert_array_equal(gradient(padded).value, X > 0)


def test_a_block_has_no_value_in_jax_lax_either(padded, mesh):
    with pytest.raises(ValueError, match=re.escape("use .array there, and .value outside")):
        jax.shard_map(jax.nn.sigmoid, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))(padded)


# --- inside a manual region -----------------------------------------------------------------------


def test_in_a_manual_region_it_is_a_block(padded, mesh):
    def body(p):
        assert p.array.shape == (3, 2)
        assert p.shape == (3, 5)
        return sk.Padded(-p.array, p.logical_shape)

    out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp")))(padded)
    np.testing.assert_array_equal(out.value, -X)


def test_a_block_has_no_value(padded, mesh):
    message = "a Padded holds this device's block (3, 2) of the logical (3, 5); use .array there, and .value outside"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.shard_map(lambda p: p.value, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))(padded)


# --- to_local -------------------------------------------------------------------------------------


def test_to_local_is_in_mesh_order(axis_types):
    turned = jax.devices()[::-1]  # not in the order of their ids
    types = (getattr(jax.sharding.AxisType, axis_types.capitalize()),) * 2
    mesh = jax.sharding.Mesh(np.reshape(turned, (2, 4)), ("dp", "sp"), axis_types=types)
    x = np.arange(32).reshape(4, 8)
    blocks = sk.to_local(sk.shard_tensor(x, P("dp", "sp"), mesh))
    expected = [x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] for i in range(2) for j in range(4)]
    np.testing.assert_array_equal(blocks, expected)
    assert [next(iter(b.devices())) for b in blocks] == turned


def test_to_local_follows_the_order_of_the_axes(mesh_for):
    mesh = mesh_for({"dp": 2, "sp": 4})
    blocks = sk.to_local(sk.shard_tensor(np.arange(8), P(("sp", "dp")), mesh))
    assert [int(b[0]) for b in blocks] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_to_local_of_a_padded_array(padded):
    assert [b.shape for b in sk.to_local(padded)] == [(3, 2)] * 4


def test_to_local_of_one_device():
    np.testing.assert_array_equal(sk.to_local(jnp.arange(3)), [[0, 1, 2]])


def test_to_local_of_a_replicated_array(mesh):
    np.testing.assert_array_equal(sk.to_local(sk.shard_tensor(X, {}, mesh)), [X] * 4)


def test_to_local_refuses():
    with pytest.raises(ValueError, match=r"to_local needs a concrete array; inside jit use jax\.shard_map"):
        jax.jit(sk.to_local)(jnp.ones(3))
    with pytest.raises(
        TypeError, match=re.escape("to_local takes a jax.Array, sk.Padded or sk.PartialArray, got ndarray")
    ):
        sk.to_local(np.ones(3))


# --- padding --------------------------------------------------------------------------------------


def test_pad_to():
    np.testing.assert_array_equal(pad_to(jnp.ones((2, 2)), (2, 3)), [[1, 1, 0], [1, 1, 0]])
    x = jnp.ones(3)
    assert pad_to(x, (3,)) is x
