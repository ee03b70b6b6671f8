"""Batch norms in ``sk.value_and_grad``: statistics of the whole batch, which come out, as on one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import shardkit as sk

MESHES = {"dp": {"dp": 8}, "dp x sp": {"dp": 2, "sp": 4}, "dp x tp": {"dp": 4, "tp": 2}}
X = np.random.default_rng(0).normal(size=(8, 4, 8, 3)) * np.arange(1, 9)[:, None, None, None]  # parts differ
X = X.astype(np.float32)  # Flax keeps running statistics so
SETTINGS = {
    "as it comes": {},
    "exact variance": {"use_fast_variance": False},
    "its own axis": {"axis_name": "dp"},
}


class Nnx(nnx.Module):
    def __init__(self, rngs, **settings):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs, **settings)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x, train=True):
        return self.out(nnx.relu(self.norm(self.conv(x), use_running_average=not train)))


class Linen(nn.Module):
    settings: dict

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(4, (3, 3), name="conv")(x)
        x = nn.BatchNorm(not train, name="norm", **self.settings)(x)
        return nn.Dense(2, name="out")(nn.relu(x))


def loss_of(y):
    return jnp.mean(jnp.tanh(y) ** 2)


def nnx_case(settings, plan, mesh):
    model = Nnx(nnx.Rngs(0), **settings)
    if plan is not None:
        model = sk.parallelize(model, plan, mesh)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        value = loss_of(model(x))
        return value, nnx.state(model, nnx.BatchStat)

    return loss, params, rest


def linen_case(settings, plan, mesh):
    model = Linen(settings)
    variables = Linen({}).init(jax.random.key(0), X)
    if plan is not None:
        model = sk.parallelize(model, plan, mesh)

    def loss(params, rest, x):
        y, changed = model.apply({"params": params, "batch_stats": rest}, x, mutable=["batch_stats"])
        return loss_of(y), changed["batch_stats"]

    return loss, variables["params"], variables["batch_stats"]


CASES = {"nnx": nnx_case, "linen": linen_case}
PLANS = {
    "dp": {"": sk.DataParallel("dp")},
    "dp x sp": {"conv": sk.ConvParallel("sp", dim="W"), "norm": sk.ConvParallel("sp", dim="W")},
    "dp x tp": {"out": sk.ColWiseParallel("tp", gather_output=True)},
}


def is_partial(x):
    return isinstance(x, sk.PartialArray)


def flat(tree):
    return [np.asarray(sk.unshard(x) if is_partial(x) else x) for x in jax.tree.leaves(tree, is_leaf=is_partial)]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("flax", CASES)
@pytest.mark.every(2)
def test_losses_gradients_and_running_statistics(flax, on, name):
    mesh = sk.make_mesh(MESHES[on])
    loss, params, rest = CASES[flax](SETTINGS[name], PLANS[on], mesh)
    plain = {key: value for key, value in SETTINGS[name].items() if key != "axis_name"}
    alone, *same = CASES[flax](plain, None, None)
    (value, stats), grads = jax.value_and_grad(alone, has_aux=True)(*same, X)
    step = sk.value_and_grad(loss, has_aux=True, batch_axes="dp", batch_argnums=2, mesh=mesh)
    (got, got_stats), got_grads = jax.jit(step)(params, rest, X)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for a, b in zip(flat(got_stats), flat(stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(flat(got_grads), flat(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flax", CASES)
def test_one_all_reduce_forward_and_one_backward(flax):
    mesh = sk.make_mesh({"dp": 8})
    loss, params, rest = CASES[flax]({}, PLANS["dp"], mesh)
    step = sk.value_and_grad(loss, has_aux=True, batch_axes="dp", batch_argnums=2, mesh=mesh)
    report = sk.collectives(jax.jit(step), params, rest, X)
    # Mean and mean square together, there and back; the loss with one of them.
    assert report.count("all_reduce") == len(report) == 2


def test_a_model_in_training_goes_on_as_on_one_device():
    mesh = sk.make_mesh(MESHES["dp x sp"])
    model = sk.parallelize(Nnx(nnx.Rngs(0)), PLANS["dp x sp"], mesh)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        return loss_of(model(x)), nnx.split(model, nnx.Param, ...)[2]

    run = jax.jit(sk.value_and_grad(loss, has_aux=True, batch_axes="dp", batch_argnums=2, mesh=mesh))
    plain = Nnx(nnx.Rngs(0))
    for _ in range(3):
        (value, rest), grads = run(params, rest, X)
        grads = sk.reduce_gradients(grads, "all_reduce", axis="dp")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        expected, changes = nnx.value_and_grad(lambda m: loss_of(m(X)))(plain)
        nnx.update(plain, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(plain, nnx.Param), changes))
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    trained = nnx.merge(graph, params, rest)
    np.testing.assert_allclose(trained(X, train=False), plain(X, train=False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_traces_are_not_taken_over(wrap):
    """JAX keeps traces of jitted functions: the same layer outside of a loss, and in the user's own region."""
    mesh = sk.make_mesh({"dp": 8})
    layer = sk.parallelize(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh)
    graph, state = nnx.split(layer)
    call = wrap(lambda state, x: nnx.merge(graph, state)(x))

    def of_parts(state, x):
        return jax.shard_map(call, mesh=mesh, in_specs=(jax.P(), jax.P("dp")), out_specs=jax.P("dp"))(state, x)

    whole, parts = call(state, X), of_parts(state, X)
    run = sk.value_and_grad(
        lambda w, s, x: (w * 0.0, call(s, x)), has_aux=True, batch_axes="dp", batch_argnums=2, mesh=mesh
    )
    (_, spread), _ = jax.jit(run)(jnp.ones(()), state, X)
    np.testing.assert_allclose(spread, whole, rtol=1e-5, atol=1e-6)
    again = of_parts(state, X)
    np.testing.assert_array_equal(again, parts)
    assert np.abs(np.asarray(parts) - whole).max() > 0.1


def test_running_averages_need_nothing():
    mesh = sk.make_mesh({"dp": 8})
    layer = sk.parallelize(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh)
    layer.eval()
    graph, state = nnx.split(layer)
    step = sk.value_and_grad(
        lambda w, s, x: w * jnp.mean(nnx.merge(graph, s)(x)), batch_axes="dp", batch_argnums=2, mesh=mesh
    )
    assert len(sk.collectives(jax.jit(step), jnp.ones(()), state, X)) == 1  # the loss


@pytest.mark.parametrize("flax", CASES)
def test_masks_are_refused(flax):
    mesh = sk.make_mesh({"dp": 8})
    mask = np.ones((1, 4, 8, 1), bool)
    if flax == "nnx":
        layer = sk.parallelize(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh)
        graph, state = nnx.split(layer)
        run = lambda s, x: nnx.merge(graph, s)(x, mask=mask)  # noqa: E731
    else:
        layer = sk.parallelize(nn.BatchNorm(False), {"": sk.DataParallel("dp")}, mesh)
        state = layer.init(jax.random.key(0), X)
        run = lambda s, x: layer.apply(s, x, mask=mask, mutable=["batch_stats"])[0]  # noqa: E731
    step = sk.value_and_grad(lambda w, s, x: w * jnp.mean(run(s, x)), batch_axes="dp", batch_argnums=2, mesh=mesh)
    with pytest.raises(NotImplementedError, match="BatchNorm with a mask"):
        jax.jit(step)(jnp.ones(()), state, X)


def test_a_region_with_batch_norms_runs_layer_by_layer():
    """A region knows its own axes only; statistics of a spread batch are the layers' own."""
    mesh = sk.make_mesh(MESHES["dp x sp"])

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.conv(x)))

    model = sk.parallelize(Block(nnx.Rngs(0)), {"": sk.ConvParallel("sp", dim="W")}, mesh)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    step = sk.value_and_grad(
        lambda p, r, x: loss_of(nnx.merge(graph, p, r, copy=True)(x)), batch_axes="dp", batch_argnums=2, mesh=mesh
    )
    plain = Block(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="statistics of a spread batch are its BatchNorm layers' own"):
        value, _ = jax.jit(step)(params, rest, X)
    np.testing.assert_allclose(value, loss_of(plain(X)), rtol=1e-5)
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    with contextlib.nullcontext():
        jax.jit(step).lower(params, rest, X)


def test_a_module_whose_changes_would_be_lost():
    mesh = sk.make_mesh({"dp": 8})
    model = sk.parallelize(Nnx(nnx.Rngs(0)), PLANS["dp"], mesh)
    step = jax.jit(sk.value_and_grad(lambda model, x: loss_of(model(x)), batch_axes="dp", mesh=mesh))
    with pytest.raises(ValueError, match=r"the loss changed norm\.mean, norm\.var of a module .* would be lost; split"):
        step(model, X)
    value, _ = jax.jit(sk.value_and_grad(lambda m, x: loss_of(m(x, train=False)), batch_axes="dp", mesh=mesh))(model, X)
    np.testing.assert_allclose(value, loss_of(model(X, train=False)), rtol=1e-5)
    told = sk.value_and_grad(
        lambda model, x: (loss_of(model(x)), nnx.state(model, nnx.BatchStat)), has_aux=True, batch_axes="dp", mesh=mesh
    )
    with pytest.raises(ValueError, match="would be lost"):
        jax.jit(told)(model, X)
    norm = sk.parallelize(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh)

    def loss(w, norm, x):
        return w * jnp.mean(norm(x)), nnx.state(norm, nnx.BatchStat)

    step = sk.value_and_grad(loss, has_aux=True, batch_axes="dp", batch_argnums=2, mesh=mesh)
    (_, stats), _ = jax.jit(step)(jnp.ones(()), norm, X)
    plain = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    plain(X)
    for a, b in zip(flat(stats), flat(nnx.state(plain, nnx.BatchStat)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    drops = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"the loss drew random numbers of a module .* \(rngs\.count\)"):
        jax.jit(sk.value_and_grad(lambda w, d, x: w * jnp.mean(d(x)), batch_axes="dp", batch_argnums=2, mesh=mesh))(
            jnp.ones(()), drops, X
        )


def spread_loss(layer, mesh, x, **options):
    """The mean of squares of what a layer makes of a spread batch, in the loss that one device has."""
    options = {"batch_axes": "dp", "batch_argnums": 2, "mesh": mesh} | options
    if isinstance(layer, nnx.Module):
        graph, state = nnx.split(layer)
        run = lambda s, x: nnx.merge(graph, s, copy=True)(x)  # noqa: E731
    else:
        state = layer.init(jax.random.key(0), x)
        run = lambda s, x: layer.apply(s, x, mutable=["batch_stats"])[0]  # noqa: E731
    step = sk.value_and_grad(lambda w, s, x: w * loss_of(run(s, x)), **options)
    return float(jax.jit(step)(jnp.ones(()), state, x)[0]), float(loss_of(run(state, x)))


class OwnNnx(nnx.BatchNorm):
    def __call__(self, x, *args, **kwargs):
        return super().__call__(x + 1, *args, **kwargs)


class OwnLinen(nn.BatchNorm):
    def __call__(self, x):
        return super().__call__(x + 1)


@pytest.mark.parametrize("make", [lambda: OwnNnx(3, rngs=nnx.Rngs(0)), lambda: OwnLinen(False)], ids=["nnx", "linen"])
def test_a_class_made_of_one(make):
    mesh = sk.make_mesh({"dp": 8})
    got, wanted = spread_loss(sk.parallelize(make(), {"": sk.DataParallel("dp")}, mesh), mesh, X)
    assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("flax", CASES)
def test_axes_that_cut_other_dims_too(flax, fast):
    """What has been reduced over an axis, or isn't cut by it, isn't averaged over it once more."""
    mesh = sk.make_mesh({"dp": 2, "sp": 4})
    plan = {"": sk.ConvParallel("sp", dim="W")}
    settings = {"use_fast_variance": fast}
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0), **settings) if flax == "nnx" else nn.BatchNorm(False, **settings)
    norm = sk.parallelize(norm, plan, mesh)
    got, wanted = spread_loss(norm, mesh, X, batch_axes={"dp": 0, "sp": 2})
    assert got == pytest.approx(wanted, rel=1e-5)
    plain = sk.parallelize(
        nnx.BatchNorm(3, rngs=nnx.Rngs(0), **settings) if flax == "nnx" else nn.BatchNorm(False, **settings),
        {"": sk.DataParallel("dp")},
        mesh,
    )
    for x in (X, X[:, 0, 0]):  # the second isn't cut by "sp"
        got, wanted = spread_loss(plain, mesh, x, batch_axes={"dp": 0, "sp": 2})
        assert got == pytest.approx(wanted, rel=1e-5)


def test_its_own_axis_and_others():
    mesh = sk.make_mesh({"dp": 2, "fsdp": 4})
    layer = nnx.BatchNorm(3, axis_name="dp", rngs=nnx.Rngs(0))
    layer = sk.parallelize(layer, {"": sk.DataParallel("dp")}, mesh)
    plain = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    step = sk.value_and_grad(
        lambda w, s, x: w * loss_of(nnx.merge(graph, s, copy=True)(x)),
        batch_axes=("dp", "fsdp"),
        batch_argnums=2,
        mesh=mesh,
    )
    value, _ = jax.jit(step)(jnp.ones(()), state, X)
    np.testing.assert_allclose(value, loss_of(plain(X)), rtol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_statistics_in_short_floats_beside_an_auto_axis(dtype, fast):
    """XLA on CPU can't sum them there, nor their derivatives; in float32 it can."""
    mesh = sk.make_mesh({"dp": 4, "tp": 2})
    settings = {"dtype": dtype, "param_dtype": dtype, "force_float32_reductions": False, "use_fast_variance": fast}
    norm = sk.parallelize(nn.BatchNorm(False, **settings), {"": sk.DataParallel("dp")}, mesh)
    plain = nn.BatchNorm(False, **settings | {"dtype": jnp.float32, "force_float32_reductions": True})
    variables = norm.init(jax.random.key(0), X)

    def loss(module):
        def of(w, rest, x):
            y, changed = module.apply(variables | rest, x * w.astype(x.dtype), mutable=["batch_stats"])
            return loss_of(y), changed

        return of

    rest = {"batch_stats": variables["batch_stats"]}
    w = jnp.ones(3, jnp.float32) + jnp.arange(3)
    step = sk.value_and_grad(loss(norm), has_aux=True, batch_axes="dp", batch_argnums=2, mesh=mesh)
    (got, changed), grads = jax.jit(step)(w, rest, jnp.asarray(X, dtype))
    (wanted, stats), wanted_grads = jax.value_and_grad(loss(plain), has_aux=True)(w, rest, X)
    np.testing.assert_allclose(np.float32(got), wanted, rtol=2e-2)
    np.testing.assert_allclose(np.float32(sk.unshard(grads)), wanted_grads, atol=2e-2)
    for a, b, before in zip(*map(jax.tree.leaves, (changed, stats, rest)), strict=True):
        assert (a.dtype, a.shape) == (before.dtype, before.shape)
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-2, atol=2e-2)


def test_axes_of_one_device():
    """They cut nothing, and what is averaged over the others comes out once all the same."""
    mesh = sk.make_mesh({"dp": 1, "fsdp": 8})
    layer = sk.parallelize(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh)
    graph, state = nnx.split(layer)

    def loss(w, s, x):
        norm = nnx.merge(graph, s, copy=True)
        return w * loss_of(norm(x)), nnx.state(norm, nnx.BatchStat)

    step = sk.value_and_grad(loss, has_aux=True, batch_axes=("dp", "fsdp"), batch_argnums=2, mesh=mesh)
    (value, stats), _ = jax.jit(step)(jnp.ones(()), state, X)
    plain = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(value, loss_of(plain(X)), rtol=1e-5)
    for a, b in zip(flat(stats), flat(nnx.state(plain, nnx.BatchStat)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_one_device_takes_masks():
    mesh = sk.make_mesh({"dp": 1})
    layer = sk.parallelize(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh)
    graph, state = nnx.split(layer)
    mask = np.ones((1, 4, 8, 1), bool)
    step = sk.value_and_grad(
        lambda w, s, x: w * loss_of(nnx.merge(graph, s, copy=True)(x, mask=mask)),
        batch_axes="dp",
        batch_argnums=2,
        mesh=mesh,
    )
    value, _ = jax.jit(step)(jnp.ones(()), state, X)
    np.testing.assert_allclose(value, loss_of(nnx.BatchNorm(3, rngs=nnx.Rngs(0))(X, mask=mask)), rtol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("keys", ["split", "shared"])
def test_counts_of_draws_and_keys_come_out_as_they_are(keys, microbatches):
    """A count is the same on all devices, and no part of a sum: else it would grow eightfold a step."""
    mesh = sk.make_mesh({"dp": 8})

    class Drops(nnx.Module):
        def __init__(self, rngs):
            self.drop, self.norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.norm(x))

    model = sk.parallelize(Drops(nnx.Rngs(0)), {"": sk.DataParallel("dp")}, mesh)
    graph, rest = nnx.split(model)

    def loss(kinds):
        def of(w, rest, x):
            model = nnx.merge(graph, rest, copy=True)
            return w * loss_of(model(x)), nnx.state(model, kinds)

        options = {"batch_axes": "dp", "batch_argnums": 2, "mesh": mesh, "keys": keys, "microbatches": microbatches}
        return jax.jit(sk.value_and_grad(of, has_aux=True, **options))

    x = np.concatenate([X, X])
    run = loss((nnx.BatchStat, nnx.RngCount))
    for step in range(1, 4):
        (_, changed), _ = run(jnp.ones(()), rest, x)
        if microbatches == 1:
            rest = nnx.merge_state(rest, changed)
        assert int(changed["drop"]["rngs"]["count"][...]) == (step if microbatches == 1 else 1)
    whole = loss((nnx.BatchStat, nnx.RngState))
    if keys == "shared":
        (_, changed), _ = whole(jnp.ones(()), rest, x)
        before, after = (s["drop"]["rngs"]["key"][...] for s in (rest, changed))
        np.testing.assert_array_equal(jax.random.key_data(after), jax.random.key_data(before))
    else:
        with pytest.raises(TypeError, match="aux has a random key that is another on each device"):
            whole(jnp.ones(()), rest, x)
