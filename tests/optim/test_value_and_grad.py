"""Gradients of a loss over a batch that is spread over devices, against jax.value_and_grad on one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import shardkit as sk

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()
X = np.random.default_rng(0).normal(size=(16, 3))
Y = np.random.default_rng(1).normal(size=(16, 4))


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def plain():
    rng = np.random.default_rng(2)
    params = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}
    return params, lambda p, x: jnp.tanh(x @ p["w"] + p["b"])


def with_nnx():
    model = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
    graph, params = nnx.split(model)
    return params, lambda p, x: nnx.merge(graph, p)(x)


def with_linen():
    model = linen.Sequential([linen.Dense(8), linen.gelu, linen.LayerNorm(), linen.Dense(4)])
    return model.init(jax.random.key(0), X), model.apply


@jax.tree_util.register_pytree_node_class
class Layered:
    """A model that is a pytree of itself, functions and sizes aside, as equinox has them."""

    def __init__(self, weights, biases, activation):
        self.weights, self.biases, self.activation = weights, biases, activation

    def __call__(self, x):
        for w, b in zip(self.weights, self.biases, strict=True):
            x = self.activation(x @ w + b)
        return x

    def tree_flatten(self):
        return (self.weights, self.biases), self.activation

    @classmethod
    def tree_unflatten(cls, activation, children):
        return cls(*children, activation)


def with_modules():
    rng = np.random.default_rng(3)
    sizes = [(3, 8), (8, 4)]
    model = Layered([rng.normal(size=s) for s in sizes], [rng.normal(size=s[1]) for s in sizes], jnp.tanh)
    return model, lambda model, x: model(x)


def with_nnx_itself():
    return nnx.Linear(3, 4, rngs=nnx.Rngs(0)), lambda model, x: model(x)


MODELS = {"plain": plain, "nnx": with_nnx, "linen": with_linen, "pytree": with_modules, "nnx itself": with_nnx_itself}


def mean_loss(apply):
    return lambda p, x, y: jnp.mean((apply(p, x) - y) ** 2)


def close(got, wanted, rtol=1e-10):
    got, wanted = jax.tree.leaves(got, is_leaf=lambda x: isinstance(x, sk.PartialArray)), jax.tree.leaves(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        ours = ours.reduce() if isinstance(ours, sk.PartialArray) else ours
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.every(4)
def test_against_one_device(model, count, microbatches, mesh_for):
    """The scale is right whatever the number of devices, and nothing but the value is reduced, nothing in the loop."""
    mesh = mesh_for({"dp": count})
    params, apply = MODELS[model]()
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    wanted = jax.value_and_grad(mean_loss(apply), allow_int=True)(params, X, Y)
    step = jax.jit(sk.value_and_grad(mean_loss(apply), batch_axes="dp", mesh=mesh, microbatches=microbatches))
    value, grads = step(params, X, Y)
    np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
    close(grads, wanted[1])
    leaves = jax.tree.leaves(grads, is_leaf=lambda x: isinstance(x, sk.PartialArray))
    assert all(isinstance(g, sk.PartialArray) and g.layout.partial_axes == ("dp",) for g in leaves)
    report = sk.assert_collectives(step, params, X, Y, in_loop=0, all_gather=0, all_reduce=(0, 1), max_bytes=16)
    assert len(report) == (count > 1)


def test_several_axes_and_explicit_ones(axis_types, mesh_for, ambient):
    mesh = mesh_for({"dp": 2, "fsdp": 2, "tp": 2}, axis_types)
    params, apply = plain()
    wanted = jax.value_and_grad(mean_loss(apply))(params, X, Y)
    with ambient(mesh):
        placed = jax.tree.map(lambda x: sk.shard_tensor(jnp.asarray(x), [R, R, R], mesh), params)
        x, y = (sk.shard_tensor(jnp.asarray(a), [S(0), S(0), R], mesh) for a in (X, Y))
        step = jax.jit(sk.value_and_grad(mean_loss(apply), batch_axes=("fsdp", "dp"), mesh=mesh))
        value, grads = step(placed, x, y)
        assert grads["w"].layout.partial_axes == ("dp", "fsdp")
        np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
        close(grads, wanted[1])


def test_a_column_sharded_weight(mesh_for):
    """Known outside jit, it's where the gradient's other axes are."""
    mesh = mesh_for({"dp": 4, "tp": 2})
    params, apply = plain()
    wanted = jax.grad(mean_loss(apply))(params, X, Y)
    placed = {"w": sk.shard_tensor(params["w"], [R, S(1)], mesh), "b": sk.shard_tensor(params["b"], [R, S(0)], mesh)}
    _, grads = sk.value_and_grad(mean_loss(apply), batch_axes="dp", mesh=mesh)(placed, X, Y)
    assert grads["w"].placements == (sk.Partial("mean"), S(1))
    close(grads, wanted)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_sum_and_count(microbatches, mesh_for):
    """Means over what counts, where devices and slices have other numbers of it; never a mean of means."""
    mesh = mesh_for({"dp": 4})
    params, apply = plain()
    mask = (np.arange(16) % 5 < 2).astype(float)

    def parts(p, x, y, m):
        return jnp.sum(((apply(p, x) - y) ** 2).mean(-1) * m), jnp.sum(m)

    def whole(p):
        total, count = parts(p, X, Y, mask)
        return total / count

    wanted = jax.value_and_grad(whole)(params)
    step = sk.value_and_grad(parts, batch_axes="dp", mesh=mesh, microbatches=microbatches)
    value, grads = jax.jit(step)(params, X, Y, mask)
    np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
    close(grads, wanted[1])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_sum(microbatches, mesh_for):
    mesh = mesh_for({"dp": 4})
    params, apply = plain()

    def loss(p, x, y):
        return jnp.sum((apply(p, x) - y) ** 2)

    wanted = jax.value_and_grad(loss)(params, X, Y)
    value, grads = jax.jit(
        sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, reduce="sum", microbatches=microbatches)
    )(params, X, Y)
    np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
    close(grads, wanted[1])
    assert grads["w"].layout.reduce == "sum"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_aux(microbatches, mesh_for):
    mesh = mesh_for({"dp": 4})
    params, apply = plain()

    def loss(p, x, y):
        out = apply(p, x)
        error = jnp.mean((out - y) ** 2)
        return error, {"out": out, "error": error, "right": jnp.sum(out > y), "any": jnp.any(out > 100)}

    step = sk.value_and_grad(loss, has_aux=True, batch_axes="dp", mesh=mesh, microbatches=microbatches)
    (value, aux), grads = jax.jit(step)(params, X, Y)
    (wanted, wanted_aux), wanted_grads = jax.value_and_grad(loss, has_aux=True)(params, X, Y)
    close(grads, wanted_grads)
    np.testing.assert_allclose([float(value), float(aux["error"])], float(wanted), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(aux["out"]), np.asarray(wanted_aux["out"]), rtol=1e-12)
    assert int(aux["right"]) == int(wanted_aux["right"]) and int(aux["any"]) == 0


def test_leaves_that_are_no_floats(mesh_for):
    """Integers get zeros, other things are handed on; scalars are whole, on both sides."""
    mesh = mesh_for({"dp": 4})
    params, _ = plain()
    params |= {"steps": np.array(3), "name": "linear", "nothing": None}

    def loss(p, x, y, scale, flag):
        assert p["name"] == "linear" and flag == "train"
        return scale * p["steps"] * jnp.mean((x @ p["w"] + p["b"] - y) ** 2)

    value, grads = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)(params, X, Y, np.array(2.0), "train")
    assert grads["name"] == "linear" and grads["nothing"] is None
    assert grads["steps"].dtype == params["steps"].dtype and int(grads["steps"]) == 0
    wanted = jax.value_and_grad(lambda w: loss({**params, "w": w}, X, Y, 2.0, "train"))(params["w"])
    np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
    close(grads["w"], wanted[1])


def test_random_keys_differ(mesh_for):
    """Another one on every device and for every slice."""
    mesh = mesh_for({"dp": 4})

    def loss(p, x, key):
        noise = jax.random.uniform(key, x.shape[:1])
        return jnp.mean(p * noise), noise

    step = sk.value_and_grad(loss, has_aux=True, batch_axes="dp", mesh=mesh, microbatches=2)
    (_, noise), _ = jax.jit(step)(jnp.ones(()), X, jax.random.key(0))
    assert noise.shape == (16,) and len(np.unique(np.asarray(noise))) == 16


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_slices_where_no_axis_cuts_dim_0(reduce, mesh_for):
    """They are cut from it all the same."""
    mesh = mesh_for({"dp": 4})
    fold = {"sum": jnp.sum, "mean": jnp.mean}[reduce]
    x, w = X[:, :1] * np.ones((16, 8)), np.float64(0.7)
    step = sk.value_and_grad(
        lambda w, x: fold((x * w) ** 2), batch_axes={"dp": 1}, mesh=mesh, reduce=reduce, microbatches=2
    )
    value, grad = jax.jit(step)(w, x)
    wanted = jax.value_and_grad(lambda w: fold((x * w) ** 2))(w)
    np.testing.assert_allclose([float(value), float(grad.reduce())], [float(v) for v in wanted], rtol=1e-12)
    with refuses("has 3 elements in dim 0"):
        step(w, x[:3])


@pytest.mark.not_smoke
def test_short_floats(mesh_for):
    """Neither a count nor the sum over slices goes through a dtype that can't hold it."""
    mesh = mesh_for({"dp": 4})
    x = jnp.full((80000, 1), 0.001, jnp.float16).at[0].set(1)
    w = jnp.ones((1,), jnp.float16)
    step = sk.value_and_grad(
        lambda w, x: (jnp.sum((x @ w).astype(jnp.float32)), jnp.float32(x.shape[0])), batch_axes="dp", mesh=mesh
    )
    np.testing.assert_allclose(np.asarray(jax.jit(step)(w, x)[1].reduce(), np.float32), 0.0010135, rtol=2e-2)
    x = jnp.full((8000, 1), 30.0, jnp.float32)
    step = sk.value_and_grad(
        lambda w, x: jnp.mean(x @ w.astype(jnp.float32)) * 1000,
        batch_axes="dp",
        mesh=mesh,
        microbatches=4,
        accumulator_dtype=jnp.float32,
    )
    _, grads = jax.jit(step)(w, x)
    total = sk.reduce_gradients([grads], axis="dp", reduce_dtype=jnp.float32)[0]
    assert total.dtype == jnp.float16 and float(total[0]) == 30000


@pytest.mark.parametrize("microbatches", [1, 2])
def test_numbers_of_examples_are_added_up(microbatches, mesh_for):
    """Though they are the same on every device."""
    mesh = mesh_for({"dp": 4})

    def loss(p, x):
        return jnp.mean(p * x), {"examples": x.shape[0], "one": 1.0}

    step = sk.value_and_grad(loss, has_aux=True, batch_axes="dp", mesh=mesh, microbatches=microbatches)
    (_, aux), _ = jax.jit(step)(jnp.ones(()), X)
    assert int(aux["examples"]) == 16 and float(aux["one"]) == 1.0


def test_named_arguments_and_keys_in_a_state(mesh_for):
    """Arguments given by name are cut like others; a model's own random keys differ from device to device."""
    mesh = mesh_for({"dp": 4})
    params = {"w": jnp.ones(()), "key": jax.random.key(0)}

    def loss(p, x, *, y):
        noise = jax.random.uniform(p["key"], x.shape[:1])
        return jnp.mean(p["w"] * noise) + jnp.mean((x[:, 0] - y[:, 0]) * p["w"]), noise

    step = sk.value_and_grad(loss, has_aux=True, batch_axes="dp", mesh=mesh, microbatches=2)
    (_, noise), grads = jax.jit(step)(params, X, y=Y)
    assert len(np.unique(np.asarray(noise))) == 16
    np.testing.assert_allclose(float(grads["w"].reduce()), noise.mean() + X[:, 0].mean() - Y[:, 0].mean(), rtol=1e-9)


@pytest.mark.not_smoke
def test_tied_weights_are_one_leaf(mesh_for):
    """Used twice, summed once."""
    mesh = mesh_for({"dp": 4})
    w = np.random.default_rng(5).normal(size=(3, 5))

    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ p["embedding"]) @ p["embedding"].T)

    step = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)
    _, grads = jax.jit(step)({"embedding": w}, X)
    close(grads, jax.grad(loss)({"embedding": w}, X))
    sk.assert_collectives(lambda g: sk.reduce_gradients(g, "all_reduce", axis="dp"), grads, all_reduce=1)


@pytest.mark.not_smoke
def test_argnums(mesh_for):
    mesh = mesh_for({"dp": 2})

    def loss(x, a, y, b):
        return jnp.mean((x * a - y * b) ** 2)

    a, b = np.float64(0.3), np.float64(0.7)
    step = sk.value_and_grad(loss, (1, -1), batch_axes="dp", mesh=mesh)
    _, grads = step(X[:, 0], a, Y[:, 0], b)
    close(grads, jax.grad(loss, (1, 3))(X[:, 0], a, Y[:, 0], b))


@pytest.mark.parametrize("kind", ["varies", "is summed by the layers"])
def test_a_spatial_axis(kind, mesh_for):
    """Images cut in space too: a ring convolution within, contributions over both axes; a loss summed already is so."""
    mesh = mesh_for({"dp": 2, "sp": 4})
    rng = np.random.default_rng(0)
    images, kernel = rng.normal(size=(4, 8, 3)), rng.normal(size=(3, 3, 2))
    numbers = ("NWC", "WIO", "NWC")

    def loss(k, x):
        y = sk.ring_conv(x, k, (1,), "SAME", dimension_numbers=numbers, spatial_axes={"sp": "W"})
        return jnp.mean(y**2) if kind == "varies" else jax.lax.pmean(jnp.mean(y**2), "sp")

    def whole(k):
        return jnp.mean(jax.lax.conv_general_dilated(images, k, (1,), "SAME", dimension_numbers=numbers) ** 2)

    wanted = jax.value_and_grad(whole)(kernel)
    step = jax.jit(sk.value_and_grad(loss, batch_axes={"dp": 0, "sp": 1}, mesh=mesh))
    value, grads = step(kernel, images)
    np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
    assert grads.layout.partial_axes == ("dp", "sp")
    close(grads, wanted[1])
    report = sk.collectives(lambda g: sk.reduce_gradients(g, "all_reduce", axis="dp"), grads)
    assert [e.axes for e in report] == [("dp", "sp")]


def test_accumulated_in_another_dtype(mesh_for):
    """Small gradients after a large one are lost in bfloat16, not in float32."""
    mesh = mesh_for({"dp": 2})
    x = jnp.where(jnp.arange(16) % 8 == 0, 256.0, 1.0).astype(jnp.bfloat16)
    w = jnp.ones((), jnp.bfloat16)
    step = sk.value_and_grad(
        lambda w, x: jnp.sum(w * x),
        batch_axes="dp",
        mesh=mesh,
        reduce="sum",
        microbatches=8,
        accumulator_dtype=jnp.float32,
    )
    _, g = jax.jit(step)(w, x)
    assert g.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(g.stack, np.float32), [np.float32(jnp.bfloat16(263.0))] * 2)


@pytest.mark.parametrize(
    ("arguments", "message", "kind"),
    [
        ({"batch_axes": "dp", "reduce": "max"}, "reduce='max' is unknown", ValueError),
        ({"batch_axes": "dp", "microbatches": 0}, "microbatches=0: a positive number", ValueError),
        ({"batch_axes": "tp"}, "['tp'] are none of them", ValueError),
        ({"batch_axes": ()}, "name at least one of the mesh's axes ('dp',)", ValueError),
        ({"batch_axes": {"dp": -1}}, "dims count from the front", ValueError),
        ({"batch_axes": "dp", "microbatches": 3}, "of size 4 times 3 microbatches do not divide", ValueError),
    ],
)
def test_refused(arguments, message, kind, mesh_for):
    params, apply = plain()
    mesh = mesh_for({"dp": 4})
    with refuses(message, kind):
        sk.value_and_grad(mean_loss(apply), mesh=mesh, **arguments)(params, X, Y)


def test_state_that_is_no_parameter(mesh_for):
    """Running averages, counts and keys of a Flax model: floats are differentiated, the others get zeros."""
    mesh = mesh_for({"dp": 4})
    model = nnx.Sequential(
        nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        return jnp.mean(nnx.merge(graph, params, rest)(x) ** 2)

    wanted = jax.grad(loss)(params, rest, X)
    step = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, batch_argnums=-1, microbatches=2)
    _, grads = jax.jit(step)(params, rest, X)  # `rest` holds no examples
    close(grads, wanted, rtol=1e-5)
    _, whole = jax.jit(sk.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2), batch_axes="dp", mesh=mesh))(model, X)
    assert type(whole) is type(model)
    kinds = {type(x).__name__: x for x in jax.tree.leaves(whole, is_leaf=lambda x: isinstance(x, sk.PartialArray))}
    assert set(kinds) == {"PartialArray", "ArrayImpl", "PRNGKeyArray"} and int(kinds["ArrayImpl"]) == 0


def test_explicit_zero_counts(mesh_for):
    """Outside jit an error; within, no number."""
    mesh = mesh_for({"dp": 4})
    step = sk.value_and_grad(lambda w, x, m: (jnp.sum(w * x[:, 0] * m), jnp.sum(m)), batch_axes="dp", mesh=mesh)
    with refuses("the counts that the loss returned sum to zero over the whole batch"):
        step(jnp.ones(()), X, np.zeros(16))
    value, _ = jax.jit(step)(jnp.ones(()), X, np.zeros(16))
    assert np.isnan(float(value))


@pytest.mark.not_smoke
def test_placements_that_jit_hides(mesh_for):
    """Said, the gradient of a column-sharded weight is cut like it, and nothing crosses that axis for it."""
    mesh = mesh_for({"dp": 4, "tp": 2})
    params, apply = plain()
    placed = {"w": sk.shard_tensor(params["w"], [R, S(1)], mesh), "b": sk.shard_tensor(params["b"], [R, S(0)], mesh)}
    wanted = jax.grad(mean_loss(apply))(params, X, Y)
    for said in (placed, {"w": [R, S(1)], "b": {"tp": S(0)}}, jax.tree.map(lambda x: x.sharding, placed)):
        step = sk.value_and_grad(mean_loss(apply), batch_axes="dp", mesh=mesh, param_placements=said)
        _, grads = jax.jit(step)(placed, X, Y)
        assert grads["w"].placements == (sk.Partial("mean"), S(1))
        close(grads, wanted)
    report = sk.collectives(lambda p, x, y: sk.reduce_gradients(step(p, x, y)[1], axis="dp"), placed, X, Y)
    assert all(e.axes == ("dp",) for e in report if e.bytes > 64)


def test_refused_in_words(mesh_for):
    params, apply = plain()
    mesh = mesh_for({"dp": 4})
    with refuses("has 10 elements in dim 0, which mesh axes ['dp'] of size 4 do not divide"):
        sk.value_and_grad(mean_loss(apply), batch_axes="dp", mesh=mesh)(params, X[:10], Y[:10])
    with refuses("the loss must be a scalar", TypeError):
        sk.value_and_grad(lambda p, x: x @ p["w"], batch_axes="dp", mesh=mesh)(params, X)
    with refuses("argument numbers (2,), but the loss was called with 2 arguments"):
        sk.value_and_grad(mean_loss(apply), 2, batch_axes="dp", mesh=mesh)(params, X)
    with refuses("the loss must be a real float to be differentiated, got int", TypeError):
        sk.value_and_grad(lambda p, x: jnp.sum(x > 0), batch_axes="dp", mesh=mesh)(params, X)
    with refuses('a loss that returns (sum, count) is a mean; give reduce="mean"'):
        sk.value_and_grad(lambda p, x: (jnp.sum(x @ p["w"]), 1), batch_axes="dp", mesh=mesh, reduce="sum")(params, X)
    other = {"w": sk.shard_tensor(params["w"], [R], mesh_for({"tp": 2})), "b": params["b"]}
    with refuses("lives on mesh {'tp': 2}, others on {'dp': 4}"):
        sk.value_and_grad(mean_loss(apply), batch_axes="dp", mesh=mesh)(other, X, Y)
    with refuses("value_and_grad found no mesh"):
        sk.value_and_grad(mean_loss(apply), batch_axes="dp")(params, X, Y)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_losses_in_short_floats_beside_an_auto_axis(dtype, microbatches, mesh_for):
    """They're summed in float32, which XLA on CPU can do there, and come out in their own dtype."""
    mesh = mesh_for({"dp": 2, "tp": 4})
    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), dtype)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), dtype)

    def loss(w, x):
        y = jnp.tanh(x @ w)
        return jnp.mean(y), {"mean": jnp.mean(y * y), "any": jnp.any(y > 2), "all": y}

    def counted(w, x):
        return jnp.sum(jnp.tanh(x @ w)), jnp.asarray(x.shape[0], dtype)

    placed = sk.shard_tensor(w, {"tp": sk.Shard(1)}, mesh), sk.shard_tensor(x, {"dp": sk.Shard(0)}, mesh)
    options = {"batch_axes": "dp", "mesh": mesh, "microbatches": microbatches}
    (value, aux), grads = jax.jit(sk.value_and_grad(loss, has_aux=True, **options))(*placed)
    wide = w.astype(jnp.float32), x.astype(jnp.float32)
    (wanted, wanted_aux), wanted_grads = jax.value_and_grad(loss, has_aux=True)(*wide)
    assert value.dtype == aux["mean"].dtype == dtype
    np.testing.assert_allclose(np.float32(value), wanted, atol=4e-3)
    np.testing.assert_allclose(np.float32(aux["mean"]), wanted_aux["mean"], atol=4e-3)
    np.testing.assert_allclose(np.float32(sk.unshard(grads)), wanted_grads, atol=4e-3)
    value, _ = jax.jit(sk.value_and_grad(counted, **options))(*placed)
    assert value.dtype == dtype
    np.testing.assert_allclose(np.float32(value), jnp.sum(jnp.tanh(wide[1] @ wide[0])) / 16, atol=2e-2)
