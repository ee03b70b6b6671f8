"""Parameters that are sharded between steps and gathered where they are used."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardkit as sk
from shardkit.optim import FlatShard

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()
RNG = np.random.default_rng(0)
PARAMS = {
    "w1": RNG.normal(size=(8, 16)),
    "w2": RNG.normal(size=(16, 8)),
    "odd": RNG.normal(size=(7, 3)),
    "b": RNG.normal(size=7),
    "s": np.array(2.0),
}
X = RNG.normal(size=(16, 8))


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w1"]) @ p["w2"] * p["s"]) + jnp.sum(p["odd"] ** 2) * jnp.sum(p["b"])


def placed(mesh):
    """Columns and rows over "tp", if there's one."""
    at = {"w1": {"tp": S(1)}, "w2": {"tp": S(0)}} if "tp" in mesh.axis_names else {}
    return {name: sk.shard_tensor(x, at.get(name, {}), mesh) for name, x in PARAMS.items()}


@pytest.mark.not_smoke
def test_where_they_are_cut(axis_types, mesh_for, ambient):
    """The lowest dim that nothing cuts; flat where none divides; whole where there's too little of it."""
    mesh = mesh_for({"dp": 4, "tp": 2}, axis_types)
    with ambient(mesh):
        cut = sk.shard_params(placed(mesh), "dp", mesh)
        assert sk.placements(cut["w1"]) == (S(0), S(1)) and sk.placements(cut["w2"]) == (S(1), S(0))
        assert isinstance(cut["odd"], FlatShard) and [b.shape for b in sk.to_local(cut["odd"].flat)] == [(6,)] * 8
        assert cut["s"].sharding.is_fully_replicated
        back = sk.unshard_params(cut, "dp", mesh)
        for name, x in PARAMS.items():
            np.testing.assert_array_equal(np.asarray(back[name]), x)
        assert sk.placements(back["w1"]) == (R, S(1))
        again = sk.shard_params(cut, "dp", mesh)
        assert again["odd"] is cut["odd"] and sk.placements(again["w1"]) == (S(0), S(1))
        stacked = sk.shard_params({"w": jnp.ones((4, 8, 3))}, "dp", mesh, first_dim=1)
        assert sk.placements(stacked["w"]) == (S(1), R)


def test_other_leaves_are_left_alone(mesh_for):
    tree = {"count": jnp.arange(8), "key": jax.random.key(0), "name": "linear", "half": jnp.ones(8, jnp.bfloat16)}
    cut = sk.shard_params(tree, "dp", mesh_for({"dp": 4}))
    assert cut["count"] is tree["count"] and cut["key"] is tree["key"] and cut["name"] == "linear"
    assert sk.placements(cut["half"]) == (S(0),)


@pytest.mark.parametrize(
    ("shape", "gather", "microbatches"),
    [
        ({"dp": 4, "tp": 2}, "use", 1),
        ({"dp": 4, "tp": 2}, "step", 2),
        ({"dp": 1}, "use", 2),
        pytest.param({"dp": 2}, "use", 2, marks=pytest.mark.slow),
        pytest.param({"dp": 8}, "use", 1, marks=pytest.mark.slow),
        ({"dp": 8}, "step", 1),
    ],
    ids=str,
)
def test_gradients_against_one_device(shape, gather, microbatches, mesh_for):
    """Partial, of the whole parameter, and nothing but parameters is gathered, over the axis that cuts them."""
    mesh = mesh_for(shape)
    cut = sk.shard_params(placed(mesh), "dp", mesh)
    wanted = jax.value_and_grad(loss)(PARAMS, X)
    step = sk.value_and_grad(
        loss, batch_axes="dp", mesh=mesh, microbatches=microbatches, gather=gather, param_placements=cut
    )
    value, grads = jax.jit(step)(cut, X)
    np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
    for name, g in grads.items():
        assert g.layout.partial_axes == ("dp",) and g.shape == PARAMS[name].shape
        np.testing.assert_allclose(np.asarray(g.reduce()), np.asarray(wanted[1][name]), rtol=1e-10)
    report = sk.collectives(step, cut, X)
    if shape["dp"] > 1:
        gathers = [e for e in report if e.kind == "all_gather"]
        assert {e.axes for e in gathers} == {("dp",)}
        assert report.count("all_reduce", axis="dp", in_loop=True) == 0


@pytest.mark.not_smoke
def test_explicit_axes(mesh_for, ambient):
    mesh = mesh_for({"dp": 4}, "explicit")
    with ambient(mesh):
        cut = sk.shard_params(placed(mesh), "dp", mesh)
        wanted = jax.value_and_grad(loss)(PARAMS, X)
        for gather in ("use", "step"):
            x = sk.shard_tensor(X, [S(0)], mesh)
            value, grads = jax.jit(sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, gather=gather))(cut, x)
            np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
            for name, g in grads.items():
                np.testing.assert_allclose(np.asarray(g.reduce()), np.asarray(wanted[1][name]), rtol=1e-10)


@pytest.mark.not_smoke
def test_unknown_placements_are_the_compilers(mesh_for):
    """Without param_placements, under jit: the same numbers."""
    mesh = mesh_for({"dp": 4})
    cut = sk.shard_params(placed(mesh), "dp", mesh)
    wanted = jax.grad(loss)(PARAMS, X)
    _, grads = jax.jit(sk.value_and_grad(loss, batch_axes="dp", mesh=mesh))(cut, X)
    for name, g in grads.items():
        np.testing.assert_allclose(np.asarray(g.reduce()), np.asarray(wanted[name]), rtol=1e-10)


@pytest.mark.parametrize("shape", [{"dp": 4}, {"dp": 4, "tp": 2}], ids=str)
@pytest.mark.not_smoke
def test_training(shape, mesh_for):
    """Five steps; parameters stay as they were, no full parameter or gradient leaves the step."""
    mesh = mesh_for(shape)
    cut = sk.shard_params(placed(mesh), "dp", mesh)
    tx = sk.shard_optimizer(optax.adamw(1e-2), sk.ShardingStage3("dp"))

    @jax.jit
    def step(params, state, x):
        _, grads = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, param_placements=cut)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    one = optax.adamw(1e-2)
    theirs, state_one = dict(PARAMS), one.init(PARAMS)
    ours, state = cut, tx.init(cut)
    for _ in range(5):
        ours, state = jax.block_until_ready(step(ours, state, X))
        updates, state_one = one.update(jax.grad(loss)(theirs, X), state_one, theirs)
        theirs = optax.apply_updates(theirs, updates)
    assert jax.tree.structure(ours) == jax.tree.structure(cut)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(cut), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    for name, x in sk.unshard_params(ours, "dp", mesh).items():
        np.testing.assert_allclose(np.asarray(x), np.asarray(theirs[name]), rtol=1e-9)
    assert sk.placements(state.inner[0].mu["w1"])[0] == S(0)
    report = sk.collectives(step, ours, state, X)
    assert report.count("reduce_scatter", axis="dp") == 1


def stacked_loss(layer):
    def run(layers, x):
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0] ** 2)

    return run


@pytest.mark.not_smoke
def test_layers_in_a_scan(mesh_for):
    """Each gathers its own, forward and backward: one layer's parameters are whole at a time."""
    mesh = mesh_for({"dp": 4, "tp": 2})
    layers = {"w": RNG.normal(size=(3, 8, 8)), "b": RNG.normal(size=(3, 8))}

    def apply(p, x):
        return jnp.tanh(x @ p["w"] + p["b"])

    wanted = jax.value_and_grad(stacked_loss(apply))(layers, X)
    at = {"w": {"tp": S(2)}, "b": {"tp": S(1)}}
    layers = {name: sk.shard_tensor(x, at[name], mesh) for name, x in layers.items()}
    cut = sk.shard_params(layers, "dp", mesh, first_dim=1)
    assert sk.placements(cut["w"]) == (S(1), S(2))
    step = jax.jit(
        sk.value_and_grad(
            stacked_loss(sk.gather_on_use(apply)), batch_axes="dp", mesh=mesh, gather="layer", param_placements=cut
        )
    )
    value, grads = step(cut, X)
    np.testing.assert_allclose(float(value), float(wanted[0]), rtol=1e-12)
    for name, g in grads.items():
        assert g.layout.partial_axes == ("dp",)
        np.testing.assert_allclose(np.asarray(g.reduce()), np.asarray(wanted[1][name]), rtol=1e-10)
    gathered = [e for e in sk.collectives(step, cut, X) if e.kind == "all_gather" and e.axes == ("dp",)]
    assert all(e.in_loop for e in gathered if e.result_bytes >= 8 * 4 * 8) and len(gathered) >= 2
    assert max(e.result_bytes for e in gathered) == 8 * 4 * 8  # one layer's, cut over "tp"


def test_a_layer_that_gathers_is_itself_elsewhere(mesh_for):
    layer = sk.gather_on_use(lambda p, x: x @ p)
    np.testing.assert_array_equal(np.asarray(layer(jnp.eye(8), X)), X)


def test_gathered_in_another_dtype(mesh_for):
    """Short on the wire; the masters, and the gradient's dtype, stay long."""
    mesh = mesh_for({"dp": 4})
    w = np.full((8, 4), 1 / 3, np.float32)
    cut = sk.shard_params({"w": w}, "dp", mesh)
    step = sk.value_and_grad(
        lambda p, x: jnp.sum(p["w"]) + 0 * jnp.sum(x),
        batch_axes="dp",
        mesh=mesh,
        gather_dtype=jnp.bfloat16,
        param_placements=cut,
    )
    x = X.astype(np.float32)
    value, grads = jax.jit(step)(cut, x)
    assert float(value) == 32 * float(jnp.bfloat16(w[0, 0])) and grads["w"].dtype == np.float32
    (entry,) = [e for e in sk.collectives(step, cut, x) if e.kind == "all_gather"]
    assert entry.bytes <= 3 / 4 * w.size * 4  # a CPU may widen bfloat16 for itself


@pytest.mark.parametrize(("dtype", "travels"), [("complex64", jnp.bfloat16), ("bfloat16", jnp.float32)])
def test_only_longer_floats_are_shortened(dtype, travels, mesh_for):
    mesh = mesh_for({"dp": 4})
    w = jnp.asarray(RNG.normal(size=(8, 4)) * (1 + 1j if dtype == "complex64" else 1), dtype)
    cut = sk.shard_params(w, "dp", mesh)

    def mean(w, x):
        return jnp.mean(jnp.abs(x.astype(w.dtype) @ w).astype(jnp.float32) ** 2)

    keywords = {"batch_axes": "dp", "mesh": mesh, "param_placements": cut}
    plain, short = (
        jax.jit(sk.value_and_grad(mean, gather_dtype=d, **keywords))(cut, X.astype(np.float32)) for d in (None, travels)
    )
    assert float(plain[0]) == float(short[0])
    np.testing.assert_array_equal(np.asarray(plain[1].stack), np.asarray(short[1].stack))


@pytest.mark.not_smoke
def test_nnx(mesh_for):
    """A model whose state is cut."""
    mesh = mesh_for({"dp": 4})
    graph, params = nnx.split(
        nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    )
    cut = sk.shard_params(params, "dp", mesh)

    def mean(p, x):
        return jnp.mean(nnx.merge(graph, p)(x) ** 2)

    wanted = jax.grad(mean)(params, X)
    _, grads = jax.jit(sk.value_and_grad(mean, batch_axes="dp", mesh=mesh, param_placements=cut))(cut, X)
    grads = sk.reduce_gradients(grads, axis="dp")
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)


def test_what_is_kept_for_the_backward_pass(mesh_for):
    """Blocks, not what was gathered from them; a layer that is run again stays so."""
    mesh = mesh_for({"dp": 4})
    cut = sk.shard_params({"w1": PARAMS["w1"], "w2": PARAMS["w2"]}, "dp", mesh)
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))

    def mean(p, x):
        return jnp.mean(layer(p["w1"], x) @ p["w2"])

    wanted = jax.grad(mean)({"w1": PARAMS["w1"], "w2": PARAMS["w2"]}, X)
    step = sk.value_and_grad(mean, batch_axes="dp", mesh=mesh, param_placements=cut)
    text = str(jax.make_jaxpr(step)(cut, X))
    assert text.count(" all_gather[") == 4  # each once forward, once backward
    assert text.count(" tanh ") == 2 and text.count("optimization_barrier") == 1
    _, grads = jax.jit(step)(cut, X)
    for name, g in grads.items():
        np.testing.assert_allclose(np.asarray(g.reduce()), np.asarray(wanted[name]), rtol=1e-10)


def test_refused(mesh_for):
    mesh = mesh_for({"dp": 4})
    with refuses("axis='tp' is not on the mesh"):
        sk.shard_params(PARAMS, "tp", mesh)
    with refuses("shard_params found no mesh"):
        sk.shard_params(PARAMS, "dp")
    with refuses("gather='late' is unknown; use one of ('use', 'layer', 'step'), or None"):
        sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, gather="late")
    with refuses("param_placements must have the structure of the parameters"):
        sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, param_placements={"w1": [R]})(PARAMS, X)
    layers = sk.shard_params({"w": RNG.normal(size=(4, 8, 8))}, "dp", mesh)  # cut over the layers themselves
    layer = sk.gather_on_use(lambda p, x: x @ p["w"])

    def first_only(p, x):
        return jnp.mean(layer(jax.tree.map(lambda a: a[0], p), x))

    with refuses("dim 0 of a parameter is cut over mesh axes, and was taken apart"):
        sk.value_and_grad(first_only, batch_axes="dp", mesh=mesh, gather="layer")(layers, X)
