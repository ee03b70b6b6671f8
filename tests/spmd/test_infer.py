"""Where outputs and gradients would be, and who made them Partial."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import shardkit as sk

R, S, P = sk.Replicate(), sk.Shard, sk.Partial()
MESH = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class TestOutputs:
    def test_without_devices_or_data(self):
        infer = sk.infer_placements(lambda x, w: {"y": x @ w, "x": (x,)}, ({"tp": S(1)}, {"tp": S(0)}), mesh=MESH)
        assert infer(f32(8, 16), f32(16, 4)) == {"y": (R, P), "x": ((R, S(1)),)}

    @pytest.mark.parametrize(
        ("fun", "places", "shapes", "want"),
        [
            (jnp.matmul, ({"dp": S(0)}, {"tp": S(1)}), [(8, 16), (16, 4)], (S(0), S(1))),  # column
            (jnp.matmul, ({"dp": S(0), "tp": S(1)}, {"tp": S(0)}), [(8, 16), (16, 4)], (S(0), P)),  # row
            (jnp.matmul, ({"dp": S(0)}, {"dp": S(0)}), [(2, 8, 16), (2, 16, 4)], (S(0), R)),  # batch
            (lambda x: x.sum(0), ({"dp": S(0), "tp": S(1)},), [(8, 16)], (P, S(0))),
            (lambda x: x.max(0), ({"dp": S(0)},), [(8, 16)], (sk.Partial("max"), R)),
            (lambda x: (x == 0).any(0), ({"dp": S(0)},), [(8, 16)], (sk.Partial("any"), R)),
            (lambda x: x.T, ({"dp": S(0)},), [(8, 16)], (S(1), R)),
            (lambda x: x.reshape(-1), ({"dp": S(0)},), [(8, 16)], (S(0), R)),
            (lambda x: x.reshape(2, 4, 16), ({"dp": S(0)},), [(8, 16)], (S(0), R)),
            (lambda x: 3 * (x.sum(0) + x.sum(0)).reshape(4, 4).T, ({"dp": S(0)},), [(8, 16)], (P, R)),
        ],
    )
    def test_rules_one_by_one(self, fun, places, shapes, want):
        assert sk.infer_placements(fun, places, mesh=MESH)(*(f32(*s) for s in shapes)) == want

    def test_an_axis_of_one_device_makes_nothing_partial(self):
        mesh = jax.sharding.AbstractMesh((1,), ("dp",))
        assert sk.infer_placements(jnp.sum, {"dp": S(0)}, mesh=mesh)(f32(8)) == (R,)


class Net(nnx.Module):
    """An embedding, a norm, a batched weight, a convolution."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)
        self.out = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.conv(self.norm(self.embed(ids))))


class TestGradients:
    def report(self, places, inputs):
        graphdef, params = nnx.split(Net(nnx.Rngs(0)))
        loss = lambda params, ids, y: ((nnx.merge(graphdef, params)(ids) - y) ** 2).mean()  # noqa: E731
        ids, y = jax.ShapeDtypeStruct((8, 12), jnp.int32), f32(8, 12, 8)
        return sk.infer_gradient_placements(loss, places, inputs, mesh=MESH)(params, ids, y)

    def test_data_parallel(self):
        report = self.report({}, {"dp": S(0)})
        assert {g.name for g in report.gradients if g.partial_axes == ("dp",)} == {g.name for g in report.gradients}
        made = {g.name.split("']")[0][2:] + g.name.split("['")[2][:-8]: g.made_by["dp"] for g in report.gradients}
        # What reduced over the examples: a lookup's scatter, a norm's and a bias's sum, a contraction, a convolution.
        assert made["embedembedding"].startswith("scatter-add")
        assert made["normscale"].startswith("reduce_sum") and made["normbias"].startswith("reduce_sum")
        assert made["convkernel"].startswith("conv_general_dilated") and made["convbias"].startswith("reduce_sum")
        assert made["outkernel"].startswith("dot_general")
        (group,) = report.groups
        assert (group.axes, group.size, group.mean_scale) == (("dp",), 2, 0.5)
        assert len(group.parameters) == len(report.gradients)
        assert group.bytes == sum(4 * int(np.prod(g.shape)) for g in report.gradients)

    def test_batch_and_space(self):
        # The axis that cuts the positions leaves its gradients Partial as that of the examples does.
        report = self.report({}, {"dp": S(0), "tp": S(1)})
        assert {g.partial_axes for g in report.gradients} == {("dp", "tp")}
        (group,) = report.groups
        assert (group.size, group.mean_scale) == (8, 1 / 8)

    def test_a_tensor_parallel_layer(self):
        loss = lambda p, x: (jax.nn.relu(x @ p["a"] + p["b"]) @ p["c"]).sum()  # noqa: E731
        params = {"a": f32(16, 32), "b": f32(32), "c": f32(32, 8)}
        places = {"a": {"tp": S(1)}, "b": {"tp": S(0)}, "c": {"tp": S(0)}}
        report = sk.infer_gradient_placements(loss, places, {"dp": S(0)}, mesh=MESH)(params, f32(8, 16))
        assert report.tree == {"a": (P, S(1)), "b": (P, S(0)), "c": (P, S(0))}
        assert report.groups[0].bytes == 4 * (16 * 8 + 8 + 8 * 8)  # a device's contributions

    def test_nothing_to_reduce(self):
        report = sk.infer_gradient_placements(lambda p, x: (p * x).sum(), {"dp": S(0)}, {"dp": S(0)}, mesh=MESH)(
            f32(8), f32(8)
        )
        assert report.groups == () and report.gradients[0].placements == (S(0), R)
        assert "none" in str(report)

    def test_a_batched_weight(self):
        # Of a weight for each expert, what cuts the extra leading dims of the activation.
        loss = lambda w, x: jnp.einsum("ebd,edf->ebf", x, w).sum()  # noqa: E731
        report = sk.infer_gradient_placements(loss, {"tp": S(0)}, {"tp": S(0), "dp": S(1)}, mesh=MESH)(
            f32(4, 16, 8), f32(4, 6, 16)
        )
        assert report.gradients[0].placements == (P, S(0))

    def test_printed_and_as_data(self):
        report = self.report({}, {"dp": S(0)})
        text = str(report)
        assert "Partial over dp" in text and "test_infer.py:" in text and "mean of local means: x 0.5" in text
        assert json.loads(json.dumps(report.to_dict()))["groups"][0]["axes"] == ["dp"]

    def test_with_something_besides(self):
        loss = lambda w, x: ((x @ w).sum(), x)  # noqa: E731
        infer = sk.infer_gradient_placements(loss, {}, {"dp": S(0)}, mesh=MESH, has_aux=True)
        assert infer(f32(16, 4), f32(8, 16)).gradients[0].partial_axes == ("dp",)

    @pytest.mark.not_smoke
    def test_they_are_what_a_gradient_is(self, mesh_for):
        mesh = mesh_for({"dp": 2, "tp": 4})
        rng = np.random.default_rng(0)
        w, x = rng.normal(size=(3, 5, 4)), rng.normal(size=(8, 16, 5))
        conv = lambda w, x: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # noqa: E731
        loss = lambda w, x: jnp.sin(conv(w, x)).sum()  # noqa: E731
        places = ({}, {"dp": S(0), "tp": S(1)})
        report = sk.infer_gradient_placements(loss, *places, mesh=mesh)(w, x)
        gradient = sk.partition(jax.grad(loss), places, "inferred", mesh=mesh)(w, x)
        assert gradient.layout.placements == report.gradients[0].placements == (P, P)
        np.testing.assert_allclose(sk.unshard(gradient), jax.grad(loss)(w, x), rtol=1e-9)
