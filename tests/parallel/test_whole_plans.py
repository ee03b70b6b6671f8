"""Plans for whole models: what is placed, what may stand beside what, one dictionary for all, and every bad one."""

from __future__ import annotations

import re

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.parallel.nnx.apply import variables_of
from tests.parallel.models import LinenGPT, LinenMLP, NnxGPT, NnxMLP, NnxUNet

C, R, S = sk.ColWiseParallel("tp"), sk.RowWiseParallel("tp"), sk.SequenceParallel("tp")
IDS = np.zeros((4, 8), np.int32)


def mesh() -> jax.sharding.Mesh:
    return sk.make_mesh({"dp": 2, "tp": 4})


def gpt(**options) -> NnxGPT:
    return nnx.eval_shape(lambda: NnxGPT(nnx.Rngs(0), **options))  # no initializer runs: much faster


def specs(model) -> dict[str, P]:
    """Without the None at the end that some placements say and others don't."""
    found = {path: list(v.get_raw_value().sharding.spec) for path, v in variables_of(model)}
    for entries in found.values():
        while entries and entries[-1] is None:
            entries.pop()
    return {path: P(*entries) for path, entries in found.items()}


@pytest.mark.not_smoke
def test_every_parameter_is_placed_and_keeps_its_name():
    plain = NnxMLP(nnx.Rngs(0))
    names = [path for path, _ in variables_of(plain)]
    model = sk.parallelize(plain, {"up": C, "down": R}, mesh())
    assert model is plain
    assert specs(model) == {
        "up/kernel": P(None, "tp"),
        "up/bias": P("tp"),
        "down/kernel": P("tp"),
        "down/bias": P(),
        "scale": P(),  # of the model itself
    }
    assert sorted(names) == sorted(specs(model))


@pytest.mark.not_smoke
def test_made_sharded_with_the_values_of_the_seed():
    """Each device makes its part, of an nnx model and of a linen one; no array is whole meanwhile."""
    want = nnx.state(NnxMLP(nnx.Rngs(3)))
    model = sk.parallelize(lambda: NnxMLP(nnx.Rngs(3)), {"up": C, "down": R, "": sk.FullyShard("dp")}, mesh())
    got = nnx.state(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jax.device_get(got), want)
    assert specs(model)["up/kernel"] == P("dp", "tp")
    assert specs(model)["down/kernel"] == P("tp", "dp")
    x = jnp.ones((4, 8))
    planned = sk.parallelize(LinenMLP(), {"up": C, "down": R}, mesh())
    want = LinenMLP().init(jax.random.key(3), x)
    for init in (planned.init, jax.jit(planned.init)):
        got = init(jax.random.key(3), x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jax.device_get(got), want)
        assert got["params"]["up"]["kernel"].sharding.spec == P(None, "tp")
        assert got["params"]["scale"].sharding.is_fully_replicated
    hlo = jax.jit(planned.init).lower(jax.random.key(3), x).compile().as_text()
    assert "f32[8,16]" not in hlo and "f32[8,4]" in hlo
    y, variables = planned.init_with_output(jax.random.key(3), x)
    np.testing.assert_allclose(y, planned.apply(variables, x), rtol=1e-6)


@pytest.mark.not_smoke
def test_checkpoints_go_either_way():
    plain, model = NnxMLP(nnx.Rngs(0)), sk.parallelize(NnxMLP(nnx.Rngs(1)), {"up": C, "down": R}, mesh())
    saved = nnx.to_pure_dict(nnx.state(plain))
    state = nnx.state(model)
    places = jax.tree.map(lambda x: x.sharding, state)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(model, jax.tree.map(jax.device_put, state, places))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)))
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-6)
    back = nnx.state(NnxMLP(nnx.Rngs(2)))
    nnx.replace_by_pure_dict(back, nnx.to_pure_dict(nnx.state(model)))
    assert jax.tree.structure(back) == jax.tree.structure(nnx.state(plain))


def test_tied_layers_are_placed_once_under_any_of_their_names():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 8, rngs=rngs)
            self.b = self.a

        def __call__(self, x):
            return self.b(jnp.tanh(self.a(x)))

    model = sk.parallelize(Tied(nnx.Rngs(0)), {"b": sk.ColWiseParallel("tp", gather_output=True)}, mesh())
    assert model.a is model.b
    assert specs(model)["a/kernel"] == P(None, "tp")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), Tied(nnx.Rngs(0))(x), rtol=1e-6)


def twice(mesh, x):
    return 2 * x


def rows(mesh, x, scale=1.0):
    assert mesh.axis_names == ("dp", "tp")
    return (x * scale,)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_functions_around_a_layer(framework):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
    plan = {"up": [sk.PrepareLayerInput(rows), C, sk.PrepareLayerOutput(twice)], "down": R}
    if framework == "nnx":
        plain = NnxMLP(nnx.Rngs(0))
        want = plain.down(nnx.gelu(2 * plain.up(x))) * plain.scale[...]
        got = sk.parallelize(NnxMLP(nnx.Rngs(0)), plan, mesh())(x)
    else:
        model = sk.parallelize(LinenMLP(), plan, mesh())
        params = jax.device_get(model.init(jax.random.key(0), x))
        p = params["params"]
        hidden = nn.gelu(2 * (x @ p["up"]["kernel"] + p["up"]["bias"]))
        want = (hidden @ p["down"]["kernel"] + p["down"]["bias"]) * p["scale"]
        got = model.apply(params, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_second_call_adds_to_the_first():
    model = sk.parallelize(NnxMLP(nnx.Rngs(0)), {"up": C}, mesh())
    sk.parallelize(model, {"down": R}, mesh())
    assert specs(model)["up/kernel"] == P(None, "tp") and specs(model)["down/kernel"] == P("tp")
    sk.parallelize(model, {"down": C}, mesh())
    assert specs(model)["down/kernel"] == P(None, "tp")
    x = jnp.ones((4, 8))
    np.testing.assert_allclose(model(x), NnxMLP(nnx.Rngs(0))(x), rtol=1e-6)
    sk.parallelize(model, {"": sk.PrepareLayerOutput(twice)}, mesh())
    sk.parallelize(model, {"up": C}, mesh())
    np.testing.assert_allclose(model(x), 2 * NnxMLP(nnx.Rngs(0))(x), rtol=1e-6)


def test_plain_parameters_by_rules():
    params = {"blocks": [{"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}], "scale": jnp.ones(3)}
    rules = {"blocks/*/up": {"tp": sk.Shard(1)}, re.compile(r"blocks/\d/d.*"): [sk.Replicate(), sk.Shard(0)]}
    placed = sk.parallelize_params(params, rules, mesh())
    assert placed["blocks"][0]["up"].sharding.spec == P(None, "tp")
    assert placed["blocks"][0]["down"].sharding.spec == P("tp", None)
    assert placed["scale"].sharding.is_fully_replicated
    described = sk.parallelize_params(jax.eval_shape(lambda: params), rules, mesh())
    assert described["blocks"][0]["up"].sharding.spec == P(None, "tp")
    inside = jax.jit(lambda p: sk.parallelize_params(p, rules, mesh()))(params)
    assert inside["blocks"][0]["up"].sharding.spec == P(None, "tp")
    first = sk.parallelize_params(params, {"**/up": {"tp": sk.Shard(0)}, "**": {}}, mesh())
    assert first["blocks"][0]["up"].sharding.spec == P("tp", None)
    with pytest.raises(ValueError, match=r"rule 'blocks/\*/uq' matches no parameter; nearest paths: \['blocks/0/up'"):
        sk.parallelize_params(params, {"blocks/*/uq": {}}, mesh())
    with pytest.warns(UserWarning, match="matches no parameter"):
        sk.parallelize_params(params, {"blocks/*/uq": {}}, mesh(), strict=False)
    with pytest.raises(ValueError, match=r"parameter 'scale' of shape \(3,\): dim 0 .* does not divide"):
        sk.parallelize_params(params, {"scale": {"tp": sk.Shard(0)}}, mesh())
    with pytest.raises(ValueError, match=r"parameter 'scale' of shape \(3,\)"):
        sk.parallelize_params(params, {"scale": {"tp": sk.Shard(1)}}, mesh())
    with pytest.raises(ValueError, match="a parameter is Shard or Replicate"):
        sk.parallelize_params(params, {"scale": {"tp": sk.Partial()}}, mesh())
    with pytest.raises(TypeError, match="rules map path patterns to placements"):
        sk.parallelize_params(params, [("a", {})], mesh())  # type: ignore[arg-type]


# plans that are guessed


def test_a_transformer_is_guessed_and_can_be_edited(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plan = sk.plans.transformer("tp", sequence=True)
    plan["norm"] = None
    plan["blocks/1/up"] = [sk.PrepareLayerInput(rows), C, S]
    chosen = plan.guess(gpt(), mesh=mesh())
    printed = capsys.readouterr().out
    assert "blocks/*/attn" in printed and "4 heads" in printed and "vocabulary of 32" in printed
    assert chosen["embed"] == [R, S] and chosen["blocks/0/attn"] == [C, S]
    assert chosen["blocks/0/up"] == [C, S] and chosen["blocks/0/down"] == [R, S]
    assert chosen["blocks/0/norm1"] == [S] and "norm" not in chosen
    assert chosen["blocks/1/up"] == plan["blocks/1/up"]
    assert "blocks/0/attn/query" not in chosen
    quiet = sk.plans.transformer("tp", verbose=False)
    assert set(quiet.guess(gpt())) == {
        "embed", *(f"blocks/{i}/{name}" for i in (0, 1) for name in ("attn", "up", "down"))
    }  # fmt: skip
    assert capsys.readouterr().out == ""
    linen = quiet.guess(LinenGPT(), jax.random.key(0), IDS)
    assert set(linen) == {path.replace("blocks/", "blocks_") for path in quiet.guess(gpt())}


def test_what_does_not_fit_is_left_whole_and_said_so(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    chosen = sk.plans.transformer("tp").guess(gpt(width=18, heads=3), mesh=mesh())
    printed = " ".join(capsys.readouterr().out.split())
    assert "blocks/0/attn" not in chosen and "3 heads can't be dealt out to 4" in printed
    assert chosen["blocks/0/up"] == [C] and chosen["blocks/0/down"] == [R]  # 72 hidden features


def test_unet_and_fsdp_are_guessed(capsys):
    model = nnx.eval_shape(lambda: NnxUNet(nnx.Rngs(0)))
    chosen = sk.plans.unet(sp="sp", dims="HW", verbose=False).guess(model)
    assert set(chosen) == {"inp", "down", "norm", "mid", "up", "out"}
    assert chosen["inp"] == [sk.ConvParallel("sp", "H")]
    assert sk.plans.unet(("a", "b"), "HW", verbose=False).guess(model)["mid"] == [sk.ConvParallel({"a": "H", "b": "W"})]
    assert sk.plans.fsdp("dp", min_size=64, verbose=False).guess(model) == {"": [sk.FullyShard("dp", 64)]}
    with pytest.raises(ValueError, match='different letters of "DHW"'):
        sk.plans.unet("sp", "WX")
    with pytest.raises(ValueError, match="names 2 mesh axes for the 1 dims"):
        sk.plans.unet(("a", "b"), "W")
    with pytest.raises(TypeError, match="give what its init takes"):
        sk.plans.fsdp("dp").guess(LinenMLP())
    with pytest.raises(TypeError, match=r"a flax\.nnx\.Module or a flax\.linen\.Module"):
        sk.plans.fsdp("dp").guess(lambda x: x)


# one dictionary


@pytest.mark.not_smoke
def test_config_merges_its_parts():
    tx = optax.adam(1e-3)
    config = {"dp": {"axis": "dp", "stage": 3}, "mp": {"plan": sk.plans.transformer("tp", verbose=False)}}
    model, opt = sk.parallelize(lambda: NnxMLP(nnx.Rngs(0)), config=config, mesh=mesh(), optimizer=tx)
    assert specs(model)["up/kernel"] == P("dp", "tp")
    state = opt.init(nnx.state(model, nnx.Param))
    assert all(sk.placements(x)[0] != sk.Replicate() for x in jax.tree.leaves(state.inner[0].mu))
    config = {"dp": {"axis": "dp"}, "mp": {"plan": {"": sk.PrepareLayerOutput(twice)}}}
    model, opt = sk.parallelize(NnxMLP(nnx.Rngs(0)), config=config, mesh=mesh(), optimizer=tx)
    x = jnp.ones((4, 8))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), 2 * NnxMLP(nnx.Rngs(0))(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dpp": {}}, r"config has an unknown key 'dpp' \(did you mean 'dp'\?\); known are"),
        ({"dp": {"axes": "dp"}}, r"config\['dp'\] has an unknown key 'axes' \(did you mean 'axis'\?\)"),
        ({"dp": {"stage": 4}}, r"config\['dp'\]\['stage'\] is 0 .*; got 4"),
        ({"dp": {"axis": "data"}}, r"config\['dp'\] uses mesh axis 'data', but the mesh has \('dp', 'tp'\)"),
        ({"mp": {}}, r'config\["mp"\] needs a plan'),
        ({"sp": {"plan": {}, "axis": "sp"}}, r"config\['sp'\] has a plan.*leave \['axis'\] out"),
        ({"dp": "dp"}, r"config\['dp'\] is a dictionary with keys among \('axis', 'stage'\); got 'dp'"),
        (["dp"], "config is a dictionary"),
        ({"mp": {"plan": [C]}}, "a plan maps path patterns to plan objects"),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        sk.parallelize(gpt(), config=config, mesh=mesh())


def test_an_optimizer_needs_a_config():
    with pytest.raises(ValueError, match="optimizer= goes with config="):
        sk.parallelize(gpt(), {"embed": R}, mesh(), optimizer=optax.sgd(1.0))
    with pytest.raises(TypeError, match="optimizer is an optax transformation"):
        sk.parallelize(gpt(), config={"dp": {}}, mesh=mesh(), optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a plan or a config"):
        sk.parallelize(gpt(), mesh=mesh())


# bad plans


BAD = [
    ({"blocks/*/upp": C}, {}, r"pattern '{0}' matches no layer that ColWiseParallel.*nearest paths: \['blocks"),
    ({"blocks/*/norm1": C}, {}, r"a LayerNorm, which ColWiseParallel doesn't know; it applies to"),
    ({"blocks/*/up": sk.RingAttention("tp")}, {}, r"which RingAttention doesn't know"),
    ({"blocks/*/up": R}, {"width": 18, "heads": 3}, r"input features of 'blocks.0/up' .* 4 devices don't divide 18"),
    ({"embed": sk.ColWiseParallel("tp")}, {"width": 18, "heads": 3}, r"features of 'embed' .* don't divide 18"),
    ({"blocks/*/attn": C}, {"width": 18, "heads": 3}, r"its 3 heads are fewer than the 4 devices"),
    ({"blocks/*/attn": C}, {"width": 18, "heads": 6}, r"its 6 heads can't be dealt out evenly over the 4 devices"),
    (
        {"blocks/*/attn": sk.RingAttention("tp", "all_to_all")},
        {"width": 18, "heads": 3},
        r"3 heads are fewer than the 4 devices",
    ),
    ({"blocks/*/up": [C, R]}, {}, "gets two plans that fight"),
    ({"blocks/*/up": C, "**/up": R}, {}, "matched by both .* with different plans"),
    ({"blocks/*/attn": C, "blocks/*/attn/query": R}, {}, "gets two plans that fight: .* as part of 'blocks.0/attn'"),
]


@pytest.mark.parametrize(("plan", "sizes", "message"), BAD)
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_bad_plans(framework, plan, sizes, message):
    message = message.replace("{0}", re.escape(next(iter(plan))))
    if framework == "nnx":
        with pytest.raises(ValueError, match=message):
            sk.parallelize(gpt(**sizes), plan, mesh())
        return
    plan = {path.replace("blocks/*", "blocks_*"): items for path, items in plan.items()}
    message = message.replace("blocks/", "blocks_").replace(re.escape("blocks/*"), re.escape("blocks_*"))
    model = sk.parallelize(LinenGPT(**sizes), plan, mesh())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, jax.random.key(0), IDS)


def test_two_plans_that_fight_over_one_parameter():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.b.kernel = self.a.kernel

    with pytest.raises(ValueError, match=r"two plans fight over parameter 'a/kernel': .* on 'a' .* on 'b'"):
        sk.parallelize(Tied(nnx.Rngs(0)), {"a": C, "b": R}, mesh())


def test_patterns_are_checked_when_a_linen_model_is_called():
    x = jnp.ones((4, 8))
    params = LinenMLP().init(jax.random.key(0), x)
    model = sk.parallelize(LinenMLP(), {"upp": C}, mesh())
    with pytest.raises(ValueError, match="pattern 'upp' matches no layer"):
        model.apply(params, x)
    model = sk.parallelize(LinenMLP(), {"upp": C}, mesh(), strict=False)
    with pytest.warns(UserWarning, match="pattern 'upp' matches no layer"):
        np.testing.assert_allclose(model.apply(params, x), LinenMLP().apply(params, x))


@pytest.mark.parametrize("plan", [S, sk.DataParallel("dp", dim=1)])
def test_activations_that_do_not_divide(plan):
    model = sk.parallelize(NnxMLP(nnx.Rngs(0)), {"up": plan}, mesh())
    with pytest.raises(ValueError, match=r"layer 'up': .* cuts dim 1 of shape \(2, 7, 8\) .* don't divide 7"):
        model(jnp.ones((2, 7, 8)))
    with pytest.raises(ValueError, match="counts from the back"):
        sk.SequenceParallel("tp", dim=-2)
    with pytest.raises(ValueError, match="backend='rings' is unknown"):
        sk.RingAttention("sp", backend="rings")
    with pytest.raises(TypeError, match="axis is the name of a mesh axis"):
        sk.ColWiseParallel(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="PrepareLayerInput takes a function"):
        sk.PrepareLayerInput(3)  # type: ignore[arg-type]


def test_layers_with_products_of_their_own():
    layer = nnx.Linear(8, 8, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the layer has its own dot_general"):
        sk.parallelize(nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)), layer]), {"*": C}, mesh())
    mixed = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), layer)
    with pytest.raises(ValueError, match="the layer has its own dot_general"):
        sk.parallelize(mixed, {"layers/*": C}, mesh())
    assert mixed.layers[0].dot_general is jax.lax.dot_general  # nothing has changed
    layer = sk.parallelize(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), {"": C}, mesh())
    with pytest.raises(ValueError, match="was called with out_sharding"):
        layer(jnp.ones((2, 8)), out_sharding=P())


def test_attention_with_functions_and_masks_of_its_own():
    def mine(query, key, value, **more):
        return value

    layer = nnx.MultiHeadAttention(4, 16, attention_fn=mine, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the layer has its own attention_fn"):
        sk.parallelize(layer, {"": sk.RingAttention("tp")}, mesh())
    module = sk.parallelize(nn.MultiHeadDotProductAttention(4, attention_fn=mine), {"": sk.RingAttention("tp")}, mesh())
    with pytest.raises(ValueError, match="the layer has its own attention_fn"):
        jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, 8, 16)))
    layer = nnx.MultiHeadAttention(4, 16, dropout_rate=0.5, broadcast_dropout=False, decode=False, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(sk.parallelize(layer, {"": sk.DataParallel("dp")}, mesh()), nnx.Param, ...)

    def loss(p, x):
        return nnx.merge(graph, p, rest, copy=True)(x, deterministic=False).sum()

    run = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh(), keys="shared")
    with pytest.raises(ValueError, match="can't draw a dropout mask for each example"):
        jax.eval_shape(run, params, jnp.ones((4, 8, 16)))


@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.not_smoke
def test_attention_alone_is_a_model_too(framework):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32))
    if framework == "nnx":
        plain = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
        want = plain(x)
        model = sk.parallelize(plain, {"": C}, mesh())
        run, params = (lambda p, x: nnx.merge(graph, p)(x)), None
        graph, params = nnx.split(model)
        assert specs(model)["query/kernel"] == P(None, "tp") and specs(model)["out/kernel"] == P("tp")
    else:
        model = sk.parallelize(nn.MultiHeadDotProductAttention(4), {"": C}, mesh())
        params = model.init(jax.random.key(0), x)
        want = nn.MultiHeadDotProductAttention(4).apply(jax.device_get(params), x)
        assert params["params"]["out"]["kernel"].sharding.spec == P("tp", None, None)
        run = model.apply
    np.testing.assert_allclose(jax.jit(run)(params, x), want, rtol=1e-5, atol=1e-6)
    report = sk.collectives(run, params, x)
    assert report.by_kind() == {"all_reduce": 1}, str(report)


@pytest.mark.not_smoke
def test_the_ambient_mesh_makes_and_places():
    plan = {"up": C, "down": R}
    with jax.set_mesh(mesh()):
        made = sk.parallelize(lambda: NnxMLP(nnx.Rngs(0)), plan)
        placed = sk.parallelize(NnxMLP(nnx.Rngs(0)), plan)
        params = sk.parallelize(LinenMLP(), plan).init(jax.random.key(0), jnp.ones((4, 8)))
    for model in (made, placed):
        assert all(isinstance(v.get_raw_value(), jax.Array) for _, v in variables_of(model))
        assert specs(model)["up/kernel"] == P(None, "tp")
    assert params["params"]["up"]["kernel"].sharding.spec == P(None, "tp")
    described = mesh().abstract_mesh
    shapes = sk.parallelize(lambda: NnxMLP(nnx.Rngs(0)), plan, described)
    assert specs(shapes)["up/kernel"] == P(None, "tp")
    kept = sk.parallelize(NnxMLP(nnx.Rngs(0)), plan, described)
    assert isinstance(kept.up.kernel.get_raw_value(), jax.Array)


@pytest.mark.parametrize("name", ["min_size", "first_dim"])
def test_fully_shard_counts_from_zero(name):
    with pytest.raises(ValueError, match=f"FullyShard: {name}=-1 must be 0 or more"):
        sk.FullyShard("dp", **{name: -1})
    with pytest.raises(TypeError, match=f"FullyShard: {name} is a number, 0 or more; got 1.5"):
        sk.FullyShard("dp", **{name: 1.5})
