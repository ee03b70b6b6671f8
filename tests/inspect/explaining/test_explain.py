"""``sk.explain`` on this machine's devices, and on other meshes than its arguments are on; what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.explaining import PURPOSES
from tests.inspect.explaining.example_step import AXES, example


@pytest.fixture(scope="module")
def mesh():
    return sk.make_mesh(AXES)


@pytest.fixture(scope="module")
def page(mesh):
    function, arguments = example(mesh, ring=True)
    return sk.explain(function, *arguments)


def test_what_it_says(page, mesh):
    assert (page.name, page.device_kind, page.devices, page.hosts) == ("step", "cpu", 8, 1)
    assert page.mesh_axes == (("dp", 2), ("sp", 4))
    assert [(leaf.name, leaf.where) for leaf in page.inputs] == [
        ("params['kernel']", "[-, -, -, -]"),
        ("params['layers']", "[-, dp, -]"),
        ("x", "[dp, -, sp, -]"),
    ]
    assert [leaf.shape for leaf in page.outputs] == [(3, 3, 4, 16), (3, 16, 16), ()]
    assert sum(leaf.bytes for leaf in page.inputs) == page.memory.arguments
    assert page.flops_exact
    assert (
        page.fits is None and page.capacity is None and page.estimate is None
    )  # of simulated devices nothing is known


def test_totals_are_those_of_the_report(page, mesh):
    function, arguments = example(mesh, ring=True)
    report = sk.collectives(function, *arguments)
    assert page.report.by_kind() == report.by_kind()
    assert page.report.bytes() == report.bytes()
    assert page.bytes_per_device == sum(c.bytes * (c.trip_count or 1) for c in report)
    assert sum(len(page.of(purpose)) for purpose in PURPOSES) == len(page.collectives)


def test_flops_are_those_of_the_formula(page):
    conv = 2 * (8 * 8 * 32 * 16) * (3 * 3 * 4)  # outputs times a group's window; the input has no gradient: 2 of 3
    layers = 3 * 2 * 8 * 16 * 16
    assert page.flops * 8 == 2 * conv + 3 * layers


def test_it_is_shown_in_four_forms(page):
    text = str(page)
    for word in (
        "step on 8 x cpu, mesh dp=2, sp=4",
        "Inputs: 3",
        "halo",
        "gradient reduction",
        "yes x3",
        "Memory on one",
    ):
        assert word in text
    assert len(text.splitlines()) < 60
    assert "<table>" in page._repr_html_() and "params[&#x27;kernel&#x27;]" in page._repr_html_()
    data = json.loads(json.dumps(page.to_dict()))
    assert data["purposes"]["halo"] == {"count": 2, "bytes_per_device": sum(e.bytes for e in page.of("halo"))}
    assert sum(p["bytes_per_device"] for p in data["purposes"].values()) == data["bytes_per_device"]
    with pytest.raises(ValueError, match="purpose 'halos' is unknown; they are 'halo', 'gradient reduction'"):
        page.of("halos")


def _loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def test_arrays_here_are_asked_about_on_another_mesh(mesh):
    """Each keeps its placement; what has none is replicated."""
    there = Mesh(np.array(jax.devices()).reshape(2, 4)[::-1], ("dp", "sp"))
    w, x = jnp.ones((16, 16)), sk.shard_tensor(jnp.ones((8, 16)), {"dp": sk.Shard(0)}, mesh)
    page = sk.explain(jax.grad(_loss), w, x, mesh=there)
    assert [leaf.where for leaf in page.inputs] == ["[-, -]", "[dp, -]"]
    assert [e.purpose for e in page.collectives] == ["gradient reduction"]


def test_functions_bound_to_a_mesh_are_asked_about_on_another():
    """A convolution that was given a mesh of the same axes takes the one that is asked about, of half the devices."""
    small, large = sk.make_mesh({"sp": 2}), sk.make_mesh({"sp": 4})
    numbers = ("NHWC", "HWIO", "NHWC")

    @jax.jit
    def conv(x, k):
        return sk.ring_conv(
            x, k, (1, 1), "SAME", dimension_numbers=numbers, spatial_axes={"sp": "W"}, mesh=large, method="concat"
        )

    x = sk.shard_tensor(jnp.ones((2, 4, 16, 3)), {"sp": sk.Shard(2)}, large)
    here, there = sk.explain(conv, x, jnp.ones((3, 3, 3, 5))), sk.explain(conv, x, jnp.ones((3, 3, 3, 5)), mesh=small)
    assert (here.devices, there.devices) == (4, 2)
    assert here.report.by_kind() == there.report.by_kind() == {"collective_permute": 2}
    assert conv(x, jnp.ones((3, 3, 3, 5))).sharding.mesh == large  # and is itself again


def test_padded_and_partial_arguments(mesh):
    there = Mesh(np.array(jax.devices()).reshape(2, 4)[::-1], ("dp", "sp"))
    padded = sk.shard_tensor(jnp.ones((2, 30)), {"sp": sk.Shard(1)}, mesh, uneven="pad")
    partial = sk.from_local([jnp.ones(4)] * 8, {"dp": sk.Partial()}, mesh)
    page = sk.explain(lambda a, b: (a.value.sum(), b.reduce()), padded, partial, mesh=there)
    assert [leaf.shape for leaf in page.inputs] == [(2, 32), (2, 4)]
    assert {e.purpose for e in page.collectives} == {"reduction"}
    assert not page.unexplained


def test_a_partitioned_function_has_names_lines_and_reasons(mesh):
    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(lambda p: _loss(p["w"], x))(params))

    part = sk.partition(step, ({}, {"dp": sk.Shard(0)}), mesh=mesh)
    page = sk.explain(part, {"w": jnp.ones((16, 16))}, jnp.ones((8, 16)))
    assert [leaf.name for leaf in page.inputs] == ["params['w']", "x"]
    assert [leaf.name for leaf in page.outputs] == ["result['w']"]
    assert [(e.purpose, e.collective.source.split(":")[0]) for e in page.collectives] == [
        ("gradient reduction", "test_explain.py")
    ]


def test_a_flax_step_whose_model_is_changed_in_place(mesh):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        model.kernel[...] -= grads["kernel"][...]

    x = sk.shard_tensor(jnp.ones((16, 8)), {"dp": sk.Shard(0)}, mesh)
    page = sk.explain(step.lower(model, x).compile(), mesh=mesh)
    assert page.name == "step"
    assert [e.purpose for e in page.collectives] == ["gradient reduction"]


def test_parameters_that_do_not_come_out_again_are_said(mesh):
    w = sk.shard_tensor(jnp.ones((16, 16)), {"dp": sk.Shard(0)}, mesh)
    x = jnp.ones((8, 16))

    def use(w, x):
        return jax.lax.with_sharding_constraint(jnp.sin(x) @ w, NamedSharding(mesh, P()))

    def forward(w, x):
        return use(jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P())), x)

    assert [e.purpose for e in sk.explain(forward, w, x).collectives] in (["reshard"], ["parameter gather"])
    with pytest.raises(ValueError, match="param_argnums=2 names argument 2, but those with arrays are 2: w, x"):
        sk.explain(forward, w, x, param_argnums=2)


def test_a_function_that_looks_at_values(mesh):
    def branch(x):
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(TypeError, match=r"branch looks at the values of its arguments.*static_argnums"):
        sk.explain(branch, jnp.ones(4), mesh=mesh)


def test_a_function_that_names_other_devices(mesh):
    elsewhere = NamedSharding(sk.make_mesh({"dp": 4}), P("dp"))

    def named(x):
        return jax.lax.with_sharding_constraint(x, elsewhere)

    with pytest.raises(ValueError, match=r"named names devices of another mesh .*or than mesh=\{'dp': 2, 'sp': 4\}"):
        sk.explain(named, jnp.ones(8), mesh=mesh)


def test_placements_that_the_mesh_does_not_have(mesh):
    x = sk.shard_tensor(jnp.ones((8, 4)), {"dp": sk.Shard(0)}, mesh)
    with pytest.raises(ValueError, match=r"argument \[0\]\[0\] of shape \(8, 4\) is placed .*doesn't work on mesh"):
        sk.explain(jnp.sin, x, mesh=sk.make_mesh({"tp": 8}))
    with pytest.raises(ValueError, match=r"doesn't work on mesh \{'dp': 3\}"):
        sk.explain(jnp.sin, x, mesh=sk.make_mesh({"dp": 3}))


def test_no_function():
    with pytest.raises(TypeError, match="expected a function"):
        sk.explain(7)


def test_a_backend_without_an_analysis_of_memory_says_so(monkeypatch, mesh):
    def none(self):
        raise NotImplementedError

    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", none)
    page = sk.explain(jnp.sin, jnp.ones(8), mesh=mesh)
    assert page.memory is None and page.fits is None
    assert "this backend doesn't analyse it" in str(page)
    assert page.to_dict()["memory"] is None


def test_on_explicit_axes():
    mesh = sk.make_mesh({"dp": 8}, axis_types="explicit")
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert [e.purpose for e in sk.explain(jax.grad(_loss), w, x, mesh=mesh).collectives] == ["gradient reduction"]
