"""``sk.explain`` on this machine's devices, and on other meshes than its arguments are on; what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def _gathers(mesh):
    """Rows by a matrix that is put together for it, as a constraint in the program asks."""
    whole = NamedSharding(mesh, P())
    return lambda x, w: jnp.sin(x) @ jax.lax.with_sharding_constraint(w, whole)


def test_parameters_are_known_by_the_backward_pass_or_said(mesh):
    w = sk.shard_tensor(jnp.ones((16, 16)), {"dp": sk.Shard(0)}, mesh)
    x = jnp.ones((16, 16))  # as large as the parameter
    forward = _gathers(mesh)
    assert [e.purpose for e in sk.explain(forward, x, w).collectives] == ["reshard"]
    assert [(e.purpose, e.what) for e in sk.explain(forward, x, w, param_argnums=1).collectives] == [
        ("parameter gather", "w")
    ]
    training = sk.explain(jax.grad(lambda w, x: forward(x, w).sum()), w, x)
    assert {e.purpose for e in training.collectives} <= {"parameter gather", "gradient reduction"}


def test_an_activation_that_nobody_asked_to_put_together_is_no_parameter(mesh):
    """Of a program without a backward pass nothing is taken for a parameter, whatever comes out."""
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, "sp")))
    assert {e.purpose for e in sk.explain(lambda x: jnp.cumsum(x, 1), x).collectives} == {"unexplained"}


def test_argnums_are_positions_of_the_call(mesh):
    w = sk.shard_tensor(jnp.ones((16, 16)), {"dp": sk.Shard(0)}, mesh)
    x = jnp.ones((8, 16))
    forward = _gathers(mesh)
    static = jax.jit(lambda times, x, w, none: times * forward(x, w), static_argnums=0)
    assert {e.purpose for e in sk.explain(static, 2, x, w, None, param_argnums=2).collectives} == {"parameter gather"}
    assert {e.purpose for e in sk.explain(static, 2, x, w, None, param_argnums=-3).collectives} == {"reshard"}
    with pytest.raises(ValueError, match=r"names argument 0, but those with arrays are 1 \(x\), 2 \(w\)"):
        sk.explain(static, 2, x, w, None, param_argnums=0)
    with pytest.raises(TypeError, match=r"param_argnums must be an int or several, as for jax\.grad; got 'w'"):
        sk.explain(forward, x, w, param_argnums="w")


def test_a_function_that_says_itself_where_arguments_are(mesh):
    """Those that say nothing aren't taken to be replicated then."""
    cut = NamedSharding(mesh, P("dp"))
    page = sk.explain(jax.jit(jnp.sum, in_shardings=cut), jax.ShapeDtypeStruct((8, 8), jnp.float32), mesh=mesh)
    assert [leaf.where for leaf in page.inputs] == ["[dp, -]"]


def test_two_machines_one_after_the_other():
    """JAX remembers traces by the kind of devices: one for another mesh of that kind isn't taken."""
    devices = np.array(jax.devices())
    one, two = Mesh(devices.reshape(2, 4), ("dp", "sp")), Mesh(devices[::-1].reshape(2, 4), ("dp", "sp"))
    numbers = ("NHWC", "HWIO", "NHWC")
    x = sk.shard_tensor(jnp.ones((2, 4, 16, 3)), {"sp": sk.Shard(2)}, one)
    conv = jax.jit(
        lambda x: sk.ring_conv(
            x,
            jnp.ones((3, 3, 3, 5), x.dtype),
            (1, 1),
            "SAME",
            dimension_numbers=numbers,
            spatial_axes={"sp": 2},
            mesh=one,
        )
    )
    turned = Mesh(devices.reshape(4, 2).T, ("dp", "sp"))
    for mesh in (one, two, turned, one):
        assert sk.explain(conv, x, mesh=mesh).report.by_kind() == {"collective_permute": 2}


def test_another_mesh_is_ambient(mesh):
    there = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "sp"))
    x = sk.shard_tensor(jnp.ones((8, 4)), {"dp": sk.Shard(0)}, mesh)
    described = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(there, P("dp")))
    with jax.set_mesh(mesh):
        assert sk.explain(jax.jit(jnp.sum), x, mesh=there).devices == 4
        assert sk.explain(jax.jit(jnp.sum), described).devices == 4


@pytest.mark.not_smoke
def test_an_optimizer_bound_to_a_mesh_is_asked_about_on_another(mesh):
    there = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("dp", "sp"))
    tx = sk.shard_optimizer(optax.adam(1e-2), sk.ShardingStage2("dp"), mesh=mesh)
    params = {"w": sk.shard_tensor(jnp.ones((16, 16)), {}, mesh)}
    state = tx.init(params)
    x = sk.shard_tensor(jnp.ones((8, 16)), {"dp": sk.Shard(0)}, mesh)

    @jax.jit
    def step(params, state, x):
        value, grads = sk.value_and_grad(lambda p, x: _loss(p["w"], x), batch_axes="dp", mesh=mesh)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    here = sk.explain(step, params, state, x)
    assert {e.purpose for e in here.collectives} == {"gradient reduction", "parameter gather", "reduction"}
    assert sk.explain(step, params, state, x, mesh=there).report.by_kind() == here.report.by_kind()
    _, after, _ = step(params, state, x)  # what was asked about changes nothing
    assert jax.tree.leaves(after)[0].sharding.mesh == mesh


def test_a_program_that_the_compiler_refuses_for_want_of_memory(monkeypatch, mesh):
    def refuse(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 128.00G of 15.75G hbm.\nand much more")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    x = sk.shard_tensor(jnp.ones((8, 16)), {"dp": sk.Shard(0)}, mesh)
    page = sk.explain(jax.grad(_loss), jnp.ones((16, 16)), x, mesh=mesh)
    assert page.fits is False
    assert page.refusal == "RESOURCE_EXHAUSTED: Used 128.00G of 15.75G hbm."
    assert [leaf.where for leaf in page.inputs] == ["[-, -]", "[dp, -]"]
    assert page.flops * 8 == 2 * 2 * 8 * 16 * 16
    assert "DOES NOT FIT" in str(page) and "Collectives: not known." in str(page)
    assert json.loads(json.dumps(page.to_dict()))["fits"] is False and "DOES NOT FIT" in page._repr_html_()


def test_branches_are_all_in_the_totals():
    mesh = sk.make_mesh({"dp": 8})
    x = sk.shard_tensor(jnp.ones(8), {"dp": sk.Shard(0)}, mesh)

    def sums(x, flag):
        one = lambda x: jax.lax.psum(x, "dp")  # noqa: E731
        body = lambda x, f: jax.lax.cond(f, one, lambda x: 2 * jax.lax.psum(x, "dp"), x)  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P())(x, flag)

    page = sk.explain(sums, x, jnp.asarray(True), mesh=mesh)
    if len(page.collectives) > 1:
        assert "Of a conditional, the collectives of all branches are in the totals." in page.notes


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


def test_values_constrained_inside_a_region_that_leaves_axes_to_the_compiler():
    """JAX can't say how large their part on a device is."""
    mesh = sk.make_mesh({"dp": 2, "tp": 4})

    def loss(w, x):
        y = jnp.tanh(x @ w)
        within = jax.sharding.get_abstract_mesh()
        return jnp.mean(jax.lax.with_sharding_constraint(y, NamedSharding(within, P(P.UNCONSTRAINED, "tp"))) ** 2)

    def step(w, x):
        gradient = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)(w, x)[1]
        return sk.reduce_gradients(gradient, "all_reduce", axis="dp")

    page = sk.explain(step, jnp.ones((8, 16)), jnp.ones((4, 8)))
    assert "gradient" in str(page)
