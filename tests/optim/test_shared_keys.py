"""Random layers of a loss over a spread batch: the masks of the whole batch, however it's spread."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import PartitionSpec

import shardkit as sk
from shardkit.optim.examples import current_examples, examples_here
from shardkit.parallel.layers.dropout import dropout, linen_dropout, nnx_dropout

S, R = sk.Shard, sk.Replicate()
KEY = jax.random.key(3)
X = np.random.default_rng(0).normal(size=(16, 6))
Y = np.random.default_rng(1).normal(size=(16, 4))
W = np.random.default_rng(2).normal(size=(3, 6, 6))


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


class Dropout(nnx.Dropout):
    def __call__(self, x, **kwargs):
        return nnx_dropout(self, x, **kwargs)


def nnx_model(layer):
    rngs = nnx.Rngs(0, dropout=1)
    dense = [nnx.Linear(a, b, param_dtype=jnp.float64, rngs=rngs) for a, b in ((6, 12), (12, 4))]
    return nnx.Sequential(layer(0.2, rngs=rngs), dense[0], nnx.gelu, layer(0.5, rngs=rngs), dense[1])


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.gelu(linen.Dense(12, param_dtype=jnp.float64)(x))
        x = linen.Dropout(0.4, deterministic=False)(x)
        return linen.Dense(4, param_dtype=jnp.float64)(linen.Dropout(0.3, (1,), False)(x))


def replaced(next_fun, args, kwargs, context):
    if isinstance(context.module, linen.Dropout) and context.method_name == "__call__":
        return linen_dropout(context.module, *args, **kwargs)
    return next_fun(*args, **kwargs)


def both(ours):
    """Parameters and a loss of an nnx model and a linen one; the models' state, keys among it, is an argument."""
    graph, params, state = nnx.split(nnx_model(Dropout if ours else nnx.Dropout), nnx.Param, ...)
    model = LinenModel()
    variables = model.init({"params": KEY, "dropout": KEY}, X)

    def loss(params, x, y, state, key):
        got = nnx.merge(graph, params[0], state, copy=True)(x)
        if ours:
            with linen.intercept_methods(replaced):
                other = model.apply(params[1], x, rngs={"dropout": key})
        else:
            other = model.apply(params[1], x, rngs={"dropout": key})
        return jnp.mean((got - y) ** 2) + jnp.mean(jnp.tanh(other - y))

    return (params, variables), state, loss


@pytest.fixture(scope="module")
def wanted():
    params, state, loss = both(ours=False)
    return jax.jit(jax.value_and_grad(loss))(params, X, Y, state, KEY)


def close(got, wanted):
    got = jax.tree.leaves(got, is_leaf=lambda x: isinstance(x, sk.PartialArray))
    for ours, theirs in zip(got, jax.tree.leaves(wanted), strict=True):
        ours = ours.reduce() if isinstance(ours, sk.PartialArray) else ours
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-10, atol=1e-12)


FAST = [(4, 2), (1, 1), (8, 1)]
EVERY = [(n, m) for n in (1, 2, 4, 8) for m in (1, 2) if (n, m) not in FAST]


@pytest.mark.parametrize(("count", "microbatches"), FAST + [pytest.param(*c, marks=pytest.mark.slow) for c in EVERY])
@pytest.mark.not_smoke
def test_models_of_flax(count, microbatches, wanted, mesh_for):
    """What Flax's own layers give on one device; nothing but the value is communicated."""
    mesh = mesh_for({"dp": count})
    params, state, loss = both(ours=True)
    step = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, microbatches=microbatches, keys="shared")
    step = jax.jit(step)
    value, grads = step(params, X, Y, state, KEY)
    close((value, grads), wanted)
    leaves = jax.tree.leaves(grads, is_leaf=lambda x: isinstance(x, sk.PartialArray))
    assert all(g.layout.partial_axes == ("dp",) for g in leaves)
    sk.assert_collectives(step, params, X, Y, state, KEY, in_loop=0, all_gather=0, all_reduce=(0, 1), max_bytes=16)


def test_a_model_that_carries_its_keys(mesh_for):
    """An nnx model as the argument that's differentiated: its keys are the same everywhere, too."""

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    step = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh_for({"dp": 4}), keys="shared")
    with pytest.warns(UserWarning, match="whose counts are lost, so that the next call draws the same"):
        value, grads = jax.jit(step)(nnx_model(Dropout), X, Y)
    plain = jax.jit(jax.value_and_grad(loss, allow_int=True))(nnx_model(nnx.Dropout), X, Y)
    close((value, nnx.state(grads, nnx.Param)), (plain[0], nnx.state(plain[1], nnx.Param)))


def stacked(w, x, key):
    """Layers in a loop, each run again in the backward pass, with keys of their own."""

    @jax.checkpoint
    def layer(x, w, key):
        return dropout(jnp.tanh(x @ w), 0.3, key)

    return lax.scan(lambda x, each: (layer(x, *each), None), x, (w, jax.random.split(key, len(w))))[0]


@jax.jit
def compiled_once(w, x, key):
    return dropout(jnp.sin(x @ w[0]), 0.25, key, (-1,))


@jax.custom_vjp
def with_rule(x, key):
    return dropout(x, 0.5, key)


with_rule.defvjp(lambda x, key: (with_rule(x, key), key), lambda key, g: (dropout(g, 0.5, key), None))


def chosen(x, key):
    return lax.cond(jnp.sum(x[0, 0]) > -1e9, lambda: dropout(x, 0.5, key), lambda: x)


def loops(w, x, key):
    keys = jax.random.split(key, 5)
    x = jax.checkpoint(compiled_once)(w, stacked(w, x, keys[0]), keys[1])
    x = chosen(with_rule(x, keys[2]), keys[3])
    return jnp.mean(compiled_once(w, x, keys[4]) ** 2)


SHAPES: list[Any] = [({"dp": 4}, "dp", 2), ({"dp": 2, "fsdp": 2, "tp": 2}, ("fsdp", "dp"), 1)]
REGIONS = [
    pytest.param(*shape, types, marks=pytest.mark.not_smoke if (i, types) == (0, "auto") else pytest.mark.slow)
    for i, shape in enumerate(SHAPES)
    for types in ("auto", "explicit")
]


@pytest.mark.parametrize(("shape", "axes", "slices", "axis_types"), REGIONS, ids=str)
def test_loops_and_functions_traced_before(shape, axes, slices, axis_types, mesh_for, ambient):
    """What was traced for one region, on another mesh or outside of any, isn't used in the next."""
    key = jax.random.key(9)
    value = jax.jit(jax.value_and_grad(loops))(W, X, key)
    mesh = mesh_for(shape, axis_types)
    with ambient(mesh):
        placed = [sk.shard_tensor(jnp.asarray(x), [R] * len(shape), mesh) for x in (W, X)]
        step = sk.value_and_grad(loops, batch_axes=axes, mesh=mesh, microbatches=slices, keys="shared")
        close(jax.jit(step)(*placed, key), value)
    close(jax.jit(jax.value_and_grad(loops))(W, X, key), value)


def image_loss(w, x, key, mean=jnp.mean):
    first, second, third = jax.random.split(key, 3)
    x = jnp.tanh(dropout(x, 0.3, first) * w)
    x = dropout(x[:, :, ::2], 0.3, second, (1,))  # a stride
    pooled = mean(x, axis=2)
    return jnp.mean(dropout(pooled, 0.5, third) ** 2)


@pytest.mark.parametrize("reduce", ["sum", pytest.param("mean", marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_several_dims(reduce, mesh_for):
    """Rows over one axis, and slices; columns over another, until they're averaged over it."""
    mesh = mesh_for({"sp": 2, "dp": 4})
    x = np.random.default_rng(4).normal(size=(16, 2, 8))
    w = np.random.default_rng(5).normal(size=(2, 1))
    wanted = jax.jit(jax.value_and_grad(image_loss))(w, x, KEY)

    def everywhere(x, axis):
        return lax.pmean(jnp.mean(x, axis=axis), "sp")

    step = sk.value_and_grad(
        lambda w, x, key: image_loss(w, x, key, everywhere),
        batch_axes={"dp": 0, "sp": 2},
        mesh=mesh,
        microbatches=2,
        keys="shared",
        reduce=reduce,
    )
    scale = 1 if reduce == "mean" else 8  # of the rows' parts: a draw for what is averaged doesn't vary along columns
    close(jax.jit(step)(w, x, KEY), jax.tree.map(lambda t: t * scale, wanted))


@pytest.mark.not_smoke
def test_keys_of_examples_and_draws_for_none(mesh_for):
    """A key of each example draws for it alone; weights and single examples are drawn for where none are."""

    def loss(w, x, keys, key):
        rows = jax.vmap(lambda x, key: dropout(x, 0.5, key))(x, keys)
        with examples_here(None):
            w = dropout(w, 0.2, key)
            rows = jax.vmap(lambda x: dropout(x, 0.1, key))(rows)
        return jnp.mean(dropout((rows @ w).T, 0.3, key, dims={0: 1}) ** 2)

    args = W[0], X, jax.random.split(KEY, 16), KEY
    step = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh_for({"dp": 4}), microbatches=2, keys="shared")
    close(jax.jit(step)(*args), jax.jit(jax.value_and_grad(loss))(*args))


@pytest.mark.not_smoke
def test_split_keys(mesh_for):
    """The default: each device and slice draws with its own key, for what it holds."""

    def loss(w, x, key):
        assert current_examples() is None
        return jnp.mean(dropout(x @ w, 0.5, key) ** 2)

    def by_parts(w, x, key):
        parts = x.reshape(8, 2, 6)
        return jnp.mean(jnp.stack([loss(w, parts[i], jax.random.fold_in(key, i)) for i in range(8)]))

    mesh = mesh_for({"a": 2, "b": 2})
    step = sk.value_and_grad(loss, batch_axes=("b", "a"), mesh=mesh, microbatches=2)
    close(jax.jit(step)(W[0], X, KEY), jax.jit(jax.value_and_grad(by_parts))(W[0], X, KEY))


def test_what_is_refused(mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 2})
    with refuses("keys='same' is unknown"):
        sk.value_and_grad(jnp.sum, batch_axes="dp", mesh=mesh, keys="same")

    def inner(w, x, key):
        return sk.value_and_grad(lambda w, x: jnp.mean(x @ w), batch_axes="tp", mesh=mesh, keys="shared")(w, x)[0]

    with refuses("within the loss of another"):
        sk.value_and_grad(inner, batch_axes="dp", mesh=mesh, keys="shared")(W[0], X, KEY)

    def nested(w, x, key):
        spec = PartitionSpec()
        inner = jax.shard_map(lambda x: dropout(x, 0.5, KEY), in_specs=spec, out_specs=spec, axis_names={"tp"})
        return jnp.mean(inner(x @ w))

    with refuses("in a region of its own (jax.shard_map over mesh axes ['tp'])"):
        sk.value_and_grad(nested, batch_axes="dp", mesh=mesh, keys="shared")(W[0], X, KEY)
    with refuses("dim 0 of an array of shape (6, 6) is taken for dim 0 of the batch, of which 8 rows are here"):
        sk.value_and_grad(
            lambda w, x, key: jnp.mean(x @ dropout(w, 0.5, key)), batch_axes="dp", mesh=mesh, keys="shared"
        )(W[0], X, KEY)
    assert current_examples() is None
