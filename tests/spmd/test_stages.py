"""Values on several meshes: stages that run one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk

R, S = sk.Replicate(), sk.Shard
rng = np.random.default_rng(3)
X, W0, W1 = (rng.normal(size=s).astype("float32") for s in [(8, 16), (16, 16), (16, 8)])


@pytest.fixture
def meshes():
    devices = jax.devices()
    return (
        sk.make_mesh({"dp": 2, "tp": 2}, devices=devices[:4]),
        sk.make_mesh({"dp": 4}, devices=devices[4:]),
    )


def training(second):
    def loss(w0, w1, x):
        h = sk.on_mesh(jax.nn.relu(x @ w0), second, {"dp": S(0)}) if second is not None else jax.nn.relu(x @ w0)
        return jnp.mean((h @ w1) ** 2)

    def step(w0, w1, x):
        value, (g0, g1) = jax.value_and_grad(loss, (0, 1))(w0, w1, x)
        return value, w0 - 0.1 * g0, w1 - 0.1 * g1

    return step


def partitioned(meshes):
    first, second = meshes
    places = (sk.Layout(first, {"tp": S(1)}), sk.Layout(second, {}), sk.Layout(first, {"dp": S(0)}))
    return sk.partition(training(second), places, mesh=first)


@pytest.mark.not_smoke
def test_a_training_step_over_two_meshes(meshes):
    step = partitioned(meshes)
    w0, w1 = W0, W1
    want = (W0, W1)
    for _ in range(2):
        value, w0, w1 = step(w0, w1, X)
        expected, *want = training(None)(*want, X)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(w0, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(w1, want[1], rtol=1e-5, atol=1e-6)
    # Parameters stay where they were.
    assert w0.sharding.mesh == meshes[0] and sk.placements(w0) == (R, S(1))
    assert w1.sharding.mesh == meshes[1] and sk.placements(w1) == (R,)


def test_a_crossing_is_two_reshards(meshes):
    program = partitioned(meshes).program(W0, W1, X)
    crossing = [r for r in program.reshards if r.crosses]
    # The activation there, its cotangent back: a half on either mesh.
    assert [len(r.src) for r in crossing] == [2, 1, 1, 2]
    assert [s.op.split(" + ")[-1] for s in program.steps if s.reshard is not None and s.reshard.crosses] == [
        "send",
        "receive",
        "send",
        "receive",
    ]
    assert program.meshes == meshes


def test_each_stage_keeps_its_half(meshes):
    program = partitioned(meshes).program(W0, W1, X)
    halves = [program.for_mesh(mesh) for mesh in meshes]
    assert sum(len(h.reshards) for h in halves) == len(program.reshards)
    assert sum(h.bytes_per_device for h in halves) == program.bytes_per_device
    assert [s.name for s in halves[0].steps if s.kind == "input"] == ["w0", "x"]
    assert [s.name for s in halves[1].steps if s.kind == "input"] == ["w1"]
    assert sum(s.op == "dot_general" for s in halves[0].steps) == 2  # forward, and the weight's gradient
    assert "mesh {'dp': 4}" in str(halves[1]) and "'tp'" not in str(halves[1]).split("before:")[0]
    with pytest.raises(ValueError, match="nothing of this program runs on"):
        program.for_mesh(sk.make_mesh({"other": 8}))


def test_to_the_mesh_it_is_on_is_a_mark(meshes):
    first, _ = meshes
    fun = sk.partition(lambda x: sk.on_mesh(x, first, {"tp": S(1)}) + 1, {"dp": S(0)}, mesh=first)
    np.testing.assert_allclose(fun(X), X + 1)
    assert len(fun.program(X).meshes) == 1 and sk.placements(fun(X)) == (R, S(1))


def test_constants_are_on_both(meshes):
    first, second = meshes
    fun = lambda x: sk.on_mesh(x * jnp.arange(16.0), second, {"dp": S(0)}) * jnp.arange(16.0)  # noqa: E731
    out = sk.partition(fun, {"dp": S(0)}, mesh=first)(X)
    np.testing.assert_allclose(out, X * np.arange(16.0) ** 2, rtol=1e-6)


def test_the_same_devices_under_other_names():
    one, two = sk.make_mesh({"a": 2, "b": 4}), sk.make_mesh({"c": 8})
    fun = sk.partition(lambda x: sk.on_mesh(x * 2, two, {"c": S(0)}).sum(0), {"a": S(0)}, mesh=one)
    np.testing.assert_allclose(fun(X), (X * 2).sum(0), rtol=1e-5)


def test_outside_it_is_a_reshard(meshes):
    x = sk.shard_tensor(X, {"dp": S(0)}, meshes[0])
    y = sk.on_mesh(x, meshes[1], {"dp": S(1)})
    assert y.sharding.mesh == meshes[1] and sk.placements(y) == (S(1),)


class TestErrors:
    def test_two_meshes_in_one_operation(self, meshes):
        fun = sk.partition(lambda x, w: x @ w, (sk.Layout(meshes[0], {}), sk.Layout(meshes[1], {})))
        with pytest.raises(
            ValueError, match=r"dot_general at test_stages\.py:\d+ has operands on different meshes.*sk\.on_mesh"
        ):
            fun(X, W0)

    def test_a_carry_that_cannot_keep_one_place(self, meshes):
        first, second = meshes
        body = lambda c, _: (sk.on_mesh(c * 2, second, {"dp": S(0)}), None)  # noqa: E731
        fun = sk.partition(lambda x: lax.scan(body, x, None, length=2)[0], {"dp": S(0)}, mesh=first)
        with pytest.raises(ValueError, match=r"on_mesh at test_stages\.py:\d+ is within a scan, whose carry"):
            fun(X)

    def test_partial_does_not_cross(self, meshes):
        with pytest.raises(ValueError, match="contributions are reduced before they cross"):
            sk.on_mesh(jnp.ones(8), meshes[1], {"dp": sk.Partial()})

    def test_under_jit(self, meshes):
        with pytest.raises(ValueError, match=r"several meshes \(sk\.on_mesh\)"):
            jax.jit(partitioned(meshes))(W0, W1, X)
        with pytest.raises(ValueError, match=r"for_mesh\(mesh\)"):
            partitioned(meshes).lower(W0, W1, X)

    def test_an_output_asked_for_on_the_other_mesh(self, meshes):
        first, second = meshes
        fun = sk.partition(lambda x: x + 1, {"dp": S(0)}, sk.Layout(second, {"dp": S(0)}), mesh=first)
        with pytest.raises(ValueError, match=r"made on mesh .* take it there with sk\.on_mesh"):
            fun(X)
