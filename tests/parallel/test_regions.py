"""``ConvParallel`` on a whole nnx module: one region, or layer by layer where that can't be, and saying so."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, sorts: bool = False):
        self.conv1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.GroupNorm(8, num_groups=4, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.sorts = sorts

    def __call__(self, x: Any, scale: Any = 1.0, *, double: bool = False) -> Any:
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = self.drop(nnx.gelu(self.norm2(self.conv2(x)))) * scale
        x = jnp.sort(x, 2) if self.sorts else x
        return 2 * x if double else x


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, sorts: bool = False):
        self.encoder = Encoder(rngs, sorts)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.encoder(x).mean((1, 2)))


def loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def images(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(4, 16, 32, 3)), jnp.float32)


def close(a: Any, b: Any) -> None:
    jax.tree.map(lambda p, q: np.testing.assert_allclose(np.asarray(p), np.asarray(q), rtol=1e-5, atol=1e-5), a, b)


def collectives(model: Any, x: Any) -> dict[str, int]:
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    found = sk.collectives(
        jax.jit(jax.value_and_grad(lambda p, r, x: loss(nnx.merge(graph, p, r, copy=True), x))), params, rest, x
    )
    return dict(found.by_kind())


@pytest.mark.not_smoke
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_as_on_one_device(axis_types):
    mesh, x = sk.make_mesh({"dp": 2, "sp": 4}, axis_types=axis_types), images()
    plain = Net(nnx.Rngs(0))
    model = sk.parallelize(Net(nnx.Rngs(0)), {"encoder": sk.ConvParallel("sp", "W")}, mesh)
    step = nnx.jit(nnx.value_and_grad(loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 if axis_types == "auto" else 1):  # running statistics and the dropout's counter go on
            value, grads = nnx.value_and_grad(loss)(plain, x)
            got, found = step(model, x) if axis_types == "auto" else _set(mesh, step, model, x)
            close(value, got)
            close(grads, found)
    close(plain.encoder.norm1.mean[...], model.encoder.norm1.mean[...])
    assert int(model.encoder.drop.rngs.count[...]) == int(plain.encoder.drop.rngs.count[...])
    kinds = collectives(model, x) if axis_types == "auto" else {}
    assert not set(kinds) & {"all_gather", "all_to_all", "reduce_scatter"}
    assert kinds.get("collective_permute", 0) <= 6  # two convolutions; one of stride 2 reads on one side


def _set(mesh: Any, run: Any, *args: Any) -> Any:
    with jax.set_mesh(mesh):
        return run(*args)


@pytest.mark.not_smoke
def test_what_is_no_array_is_part_of_the_program():
    mesh, x = sk.make_mesh({"sp": 4}), images()
    plain = Encoder(nnx.Rngs(0))
    model = sk.parallelize(Encoder(nnx.Rngs(0)), {"": sk.ConvParallel("sp", "W")}, mesh)
    scale = jnp.float32(3.0)
    close(plain(x, scale, double=True), model(x, scale, double=True))
    out = jax.jit(lambda x: nnx.merge(*nnx.split(model), copy=True)(x, scale))(x)
    assert sk.placements(out)[0] == sk.Shard(2)


@pytest.mark.not_smoke
def test_falls_back_to_its_layers_and_says_why():
    mesh, x = sk.make_mesh({"sp": 4}), images()
    plain = Net(nnx.Rngs(0), sorts=True)
    model = sk.parallelize(Net(nnx.Rngs(0), sorts=True), {"encoder": sk.ConvParallel("sp", "W")}, mesh)
    with pytest.warns(UserWarning, match=r"'encoder' \(Encoder\) runs layer by layer, not as one region: sort at"):
        got = loss(model, x)
    close(loss(plain, x), got)


@pytest.mark.not_smoke
def test_masks_of_a_spread_batch():
    """With keys="shared" only a layer's twin knows which examples it has."""
    mesh, x = sk.make_mesh({"dp": 2, "sp": 4}), images()
    model = sk.parallelize(Net(nnx.Rngs(0)), {"encoder": sk.ConvParallel("sp", "W")}, mesh)
    plain = Net(nnx.Rngs(0))
    # Batch norm has statistics of the examples at hand: frozen, so that the batch's parts don't show.
    for net in (model, plain):
        net.encoder.norm1.use_running_average = True
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def of(params: Any, x: Any) -> Any:
        return loss(nnx.merge(graph, params, rest, copy=True), x)

    with pytest.warns(UserWarning, match="masks of a spread batch"):
        value, _ = jax.jit(sk.value_and_grad(of, batch_axes="dp", keys="shared", mesh=mesh))(params, x)
    close(loss(plain, x), value)
    # Without masks of the whole batch it is one region in the region of the batch.
    for net in (model, plain):
        net.encoder.drop.deterministic = True
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    close(loss(plain, x), jax.jit(sk.value_and_grad(of, batch_axes="dp", mesh=mesh))(params, x)[0])


def test_a_layer_of_its_own_plan_keeps_it():
    mesh = sk.make_mesh({"a": 2, "b": 2})
    plan = {"encoder": sk.ConvParallel("a", "W"), "encoder/conv2": sk.ConvParallel("b", "W")}
    model = sk.parallelize(Net(nnx.Rngs(0)), plan, mesh)
    assert model.encoder.conv1.shardkit_plan.plan.mesh_axes == ("a",)
    assert model.encoder.conv2.shardkit_plan.plan.mesh_axes == ("b",)


def test_dims_that_images_do_not_have():
    model = sk.parallelize(Net(nnx.Rngs(0)), {"encoder": sk.ConvParallel("sp", "D")}, sk.make_mesh({"sp": 2}))
    with pytest.raises(ValueError, match=r"'encoder' .*no dim 'D'"):
        model(images())


def test_a_module_without_such_layers():
    with pytest.raises(ValueError, match="which ConvParallel doesn't know"):
        sk.parallelize(Net(nnx.Rngs(0)), {"head": sk.ConvParallel("sp", "W")}, sk.make_mesh({"sp": 2}))


class Join(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, how: str = ""):
        self.conv = nnx.Conv(6, 4, (3, 3), rngs=rngs)
        self.how = how
        self.calls = 0

    def __call__(self, x: Any, skip: Any, bias: Any = None) -> Any:
        y = self.conv(jnp.concatenate([x, skip], -1))
        if self.how == "makes":
            self.last = nnx.Intermediate(y)
        if self.how == "counts":
            self.calls += 1
        return y if bias is None else y + bias


@pytest.mark.not_smoke
def test_another_image_is_cut_as_the_first():
    mesh, x, skip = sk.make_mesh({"sp": 4}), images(), images(1)
    model = sk.parallelize(Join(nnx.Rngs(0)), {"": sk.ConvParallel("sp", "W")}, mesh)
    for bias in (jnp.arange(4.0), jnp.arange(16.0).reshape(4, 1, 1, 4)):  # of other sizes: no images
        close(Join(nnx.Rngs(0))(x, skip, bias=bias), model(x, skip, bias=bias))
    graph, state = nnx.split(model)
    report = sk.collectives(jax.jit(lambda s, a, b: nnx.merge(graph, s)(a, b)), state, x, skip)
    assert dict(report.by_kind()) == {"collective_permute": 2}


@pytest.mark.parametrize("how", ["makes", "counts"])
def test_what_a_region_would_lose(how):
    mesh, x, skip = sk.make_mesh({"sp": 4}), images(), images(1)
    model = sk.parallelize(Join(nnx.Rngs(0), how), {"": sk.ConvParallel("sp", "W")}, mesh)
    with pytest.warns(UserWarning, match="which a region would lose"):
        got = model(x, skip)
    close(Join(nnx.Rngs(0))(x, skip), got)
    assert model.calls == (how == "counts") and hasattr(model, "last") == (how == "makes")


def test_layers_with_plans_of_their_own():
    mesh, x = sk.make_mesh({"a": 2, "b": 2}), images()
    plan = {"encoder": sk.ConvParallel("a", "W"), "encoder/conv2": sk.ConvParallel("b", "W")}
    model = sk.parallelize(Net(nnx.Rngs(0)), plan, mesh)
    with pytest.warns(UserWarning, match="layers in it have plans of their own"):
        got = model(x)
    close(Net(nnx.Rngs(0))(x), got)
