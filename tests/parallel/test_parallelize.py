"""parallelize on whole models: a U-Net that trains the same, its state, its collectives, and bad plans."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk
from shardkit.parallel.nnx.spatial import RingConv, SpatialGroupNorm
from tests.parallel.layer_cases import F64, randomized


class Block(nnx.Module):
    def __init__(self, features, rngs):
        self.conv = nnx.Conv(features, features, (3, 3), param_dtype=F64, rngs=rngs)
        self.norm = nnx.GroupNorm(features, num_groups=2, param_dtype=F64, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.conv(x)))


class UNet(nnx.Module):
    """Down by 2, a norm of each kind, up by 2, a skip. Widths that don't divide are cropped back."""

    def __init__(self, rngs):
        self.down = nnx.Conv(2, 4, (3, 3), strides=2, param_dtype=F64, rngs=rngs)
        self.norm = nnx.BatchNorm(4, param_dtype=F64, rngs=rngs)
        self.blocks = nnx.List([Block(4, rngs)])
        self.up = nnx.ConvTranspose(4, 4, (2, 2), strides=2, param_dtype=F64, rngs=rngs)
        self.head = nnx.Conv(6, 1, (3, 3), param_dtype=F64, rngs=rngs)
        self.scale = nnx.Linear(1, 1, param_dtype=F64, rngs=rngs)

    def __call__(self, x):
        y = jnp.tanh(self.norm(self.down(x)))
        for block in self.blocks:
            y = block(y)
        y = self.up(y)[:, : x.shape[1], : x.shape[2]]
        return self.scale(self.head(jnp.concatenate([x, y], axis=-1)))


PLAN = {"**": sk.ConvParallel("sp", dim="W")}
LAYERS = ["down", "norm", "blocks/0/conv", "blocks/0/norm", "up", "head"]
SHAPE = (4, 6, 29, 2)
STEPS = 3


def plain_model(seed: int = 7) -> UNet:
    return randomized(nnx.eval_shape(lambda: UNet(nnx.Rngs(0))), seed)  # no initializer runs: much faster


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=SHAPE), rng.normal(size=(*SHAPE[:-1], 1))


def value(x):
    return x.value if isinstance(x, sk.Padded) else x


apply = nnx.jit(lambda model, x: model(x))  # one program a kind of model, shared by the tests


def make_step(model):
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, images, targets):
        def loss_of(model):
            return jnp.mean((model(value(images)) - value(targets)) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return optimizer, step


def train(model, data):
    optimizer, step = make_step(model)
    compiled = step.lower(model, optimizer, *data).compile()
    losses = [float(compiled(model, optimizer, *data)) for _ in range(STEPS)]
    return losses, nnx.state(model), compiled


@functools.cache
def trained_plain():
    return train(plain_model(), batch())


@functools.cache
def trained_on(*mesh_shape):
    mesh = sk.make_mesh(dict(mesh_shape))
    model = sk.parallelize(plain_model(), PLAN, mesh)
    placed = {"sp": sk.Shard(2)} | ({"dp": sk.Shard(0)} if "dp" in mesh.axis_names else {})
    data = [sk.shard_tensor(a, placed, mesh, uneven="pad") for a in batch()]
    return *train(model, data), mesh


def assert_same_state(got, want, rtol=0.0):
    """Names, kinds, shapes, dtypes and values."""
    got, want = nnx.to_flat_state(got), nnx.to_flat_state(want)
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, a), (_, b) in zip(got, want, strict=True):
        assert type(a) is type(b), path
        assert (a[...].shape, a[...].dtype) == (b[...].shape, b[...].dtype), path
        np.testing.assert_allclose(a[...], b[...], rtol=rtol, atol=rtol, err_msg=str(path))


MESHES = [pytest.param((("sp", 2),), marks=pytest.mark.slow), (("sp", 4),), (("dp", 2), ("sp", 4))]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.not_smoke
def test_a_unet_trains_the_same(mesh):
    want, want_state, _ = trained_plain()
    got, state, _, _ = trained_on(*mesh)
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-9)
    assert_same_state(state, want_state, rtol=1e-9)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_training_step_sends(mesh):
    """Permutes: down 1 forward and none back (its input has no gradient), conv and head 2 each way.

    up needs none where blocks are aligned (4 of 15 become 8 of 30), and 1 each way where not (8 of 15, 15 of 30).
    """
    _, _, compiled, on = trained_on(*mesh)
    report = sk.collectives(compiled, mesh=on)
    assert report.count("all_gather") == 0, str(report)
    assert report.count("all_to_all") == 0, str(report)
    up = {2: 1, 4: 0}[on.shape["sp"]]
    assert report.count("collective_permute", axis="sp") == 1 + 2 * (2 + up + 2), str(report)
    assert set(report.by_kind()) == {"collective_permute", "all_reduce"}
    # No activation is ever summed: only parameter gradients and statistics.
    parameters = sum(a.nbytes for a in jax.tree.leaves(nnx.state(plain_model(), nnx.Param)))
    assert all(e.result_bytes <= parameters for e in report if e.kind == "all_reduce"), str(report)


# --- state ----------------------------------------------------------------------------------------------------


def test_parameters_keep_names_shapes_and_values_and_lie_on_the_mesh():
    mesh = sk.make_mesh({"sp": 4})
    model = plain_model()
    same = sk.parallelize(model, PLAN, mesh)
    assert same is model
    assert_same_state(nnx.state(model), nnx.state(plain_model()))
    for path in ("down", "norm", "up"):
        for leaf in jax.tree.leaves(nnx.state(getattr(model, path))):
            assert leaf.sharding.mesh == mesh and leaf.sharding.is_fully_replicated


@pytest.mark.not_smoke
def test_states_load_either_way():
    mesh = sk.make_mesh({"sp": 4})
    x, _ = batch()
    other = plain_model(seed=8)
    want = apply(other, x)
    sharded = sk.parallelize(plain_model(), PLAN, mesh)
    nnx.update(sharded, nnx.state(plain_model(seed=8)))
    np.testing.assert_allclose(apply(sharded, x), want, rtol=1e-9, atol=1e-9)
    back = plain_model()
    nnx.update(back, nnx.state(sk.parallelize(plain_model(seed=8), PLAN, mesh)))
    np.testing.assert_allclose(apply(back, x), want, rtol=1e-9, atol=1e-9)


def test_only_the_named_layers_change():
    model = sk.parallelize(plain_model(), {"blocks/*/conv": sk.ConvParallel()}, sk.make_mesh({"sp": 4}))
    changed = {"/".join(map(str, p)) for p, m in nnx.iter_modules(model) if hasattr(m, "shardkit_plan")}
    assert changed == {"blocks/0/conv"}
    assert type(model.down) is nnx.Conv and type(model.blocks[0].conv) is RingConv
    assert model.blocks[0].conv.shardkit_plan.path == "blocks/0/conv"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**", LAYERS),
        ("blocks/**", ["blocks/0/conv", "blocks/0/norm"]),
        ("**/norm", ["norm", "blocks/0/norm"]),
        (re.compile("down|up"), ["down", "up"]),
    ],
)
def test_patterns_pick_layers(pattern, expected):
    model = sk.parallelize(plain_model(), {pattern: sk.ConvParallel()}, sk.make_mesh({"sp": 2}))
    changed = ["/".join(map(str, p)) for p, m in nnx.iter_modules(model) if hasattr(m, "shardkit_plan")]
    assert sorted(changed) == sorted(expected)


@pytest.mark.not_smoke
def test_parallelizing_again_replaces_the_plan():
    x, _ = batch()
    want = apply(plain_model(), x)
    model = plain_model()
    for mesh, plan in (
        ({"sp": 2}, sk.ConvParallel("sp")),
        ({"sh": 2, "sw": 4}, sk.ConvParallel({"sh": "H", "sw": "W"})),
    ):
        mesh = sk.make_mesh(mesh)
        sk.parallelize(model, {"**": plan}, mesh)
        assert type(model.down) is RingConv and type(model.blocks[0].norm) is SpatialGroupNorm
        assert model.down.shardkit_plan.plan == plan and model.down.shardkit_plan.mesh == mesh
    sk.parallelize(model, {"down": sk.ConvParallel({"sh": "H", "sw": "W"})}, mesh)
    np.testing.assert_allclose(apply(model, x), want, rtol=1e-9, atol=1e-9)


def test_equal_plans_may_overlap():
    plan = {"**": sk.ConvParallel(), "blocks/*/conv": sk.ConvParallel("sp", "W")}
    assert type(sk.parallelize(plain_model(), plan, sk.make_mesh({"sp": 2})).blocks[0].conv) is RingConv


def test_the_ambient_mesh_is_used():
    mesh = sk.make_mesh({"sp": 2})
    with jax.set_mesh(mesh):
        model = sk.parallelize(plain_model(), PLAN)
    assert model.down.shardkit_plan.mesh.shape == mesh.shape
    with pytest.raises(ValueError, match="no mesh"):
        sk.parallelize(plain_model(), PLAN)


# --- flax's own tools -------------------------------------------------------------------------------------------


@pytest.mark.not_smoke
def test_two_spatial_dims():
    mesh = sk.make_mesh({"sh": 2, "sw": 4})
    x, _ = batch()
    plain, model = plain_model(), plain_model()
    sk.parallelize(model, {"**": sk.ConvParallel({"sh": "H", "sw": "W"})}, mesh)
    placed = sk.shard_tensor(x, {"sh": sk.Shard(1), "sw": sk.Shard(2)}, mesh, uneven="pad")

    def loss(model, x):
        return jnp.mean(jnp.sin(model(value(x))))

    got, want = (nnx.jit(nnx.value_and_grad(loss))(m, a) for m, a in ((model, placed), (plain, x)))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-9)
    assert_same_state(got[1], want[1], rtol=1e-9)
    assert_same_state(nnx.state(model), nnx.state(plain), rtol=1e-9)  # running statistics


@pytest.mark.not_smoke
def test_padded_goes_through_a_stack_of_layers():
    make = lambda: randomized(  # noqa: E731
        nnx.Sequential(
            nnx.Conv(2, 4, (3, 3), param_dtype=F64, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(4, param_dtype=F64, rngs=nnx.Rngs(1)),
            nnx.ConvTranspose(4, 2, (2, 2), strides=2, param_dtype=F64, rngs=nnx.Rngs(2)),
            nnx.InstanceNorm(2, param_dtype=F64, rngs=nnx.Rngs(3)),
        )
    )
    mesh = sk.make_mesh({"sp": 4})
    x, _ = batch()
    model = sk.parallelize(make(), PLAN, mesh)
    out = apply(model, sk.shard_tensor(x, {"sp": sk.Shard(2)}, mesh, uneven="pad"))
    assert isinstance(out, sk.Padded) and out.shape == (4, 12, 58, 2)
    assert sk.placements(out) == (sk.Shard(2),)
    np.testing.assert_allclose(np.asarray(out), apply(make(), x), rtol=1e-9, atol=1e-9)


@pytest.mark.not_smoke
def test_split_merge_clone_and_grad():
    mesh = sk.make_mesh({"sp": 4})
    x, _ = batch()
    model, plain = sk.parallelize(plain_model(), PLAN, mesh), plain_model()
    graph, state = nnx.split(model)
    assert hash(graph) == hash(nnx.split(sk.parallelize(plain_model(), PLAN, mesh))[0])
    merged = nnx.merge(graph, state)
    copy = nnx.clone(model)
    for again in (merged, copy):
        assert type(again.down) is RingConv and again.down.shardkit_plan == model.down.shardkit_plan
    np.testing.assert_allclose(apply(copy, x), apply(plain, x), rtol=1e-9, atol=1e-9)
    # The gradient alone, eagerly, of one layer in a model that stays as it is.
    loss = lambda m: jnp.sum(m(x[..., :2]) ** 2)  # noqa: E731
    assert_same_state(nnx.grad(loss)(copy.down), nnx.grad(loss)(plain.down), rtol=1e-9)


def test_a_model_made_abstractly_can_be_parallelized():
    """Shapes first, values later: nothing is placed, nothing breaks."""
    model = nnx.eval_shape(lambda: UNet(nnx.Rngs(0)))
    sk.parallelize(model, PLAN, sk.make_mesh({"sp": 4}))
    nnx.update(model, nnx.state(plain_model()))
    x, _ = batch()
    np.testing.assert_allclose(apply(model, x), apply(plain_model(), x), rtol=1e-9, atol=1e-9)


# --- bad plans --------------------------------------------------------------------------------------------------


def test_a_pattern_that_matches_nothing_names_the_nearest_paths():
    with pytest.raises(
        ValueError, match=r"pattern 'blocks/0/cnov' matches no layer .*nearest paths: \['blocks/0/conv'"
    ):
        sk.parallelize(plain_model(), {"blocks/0/cnov": sk.ConvParallel()}, sk.make_mesh({"sp": 2}))
    with pytest.raises(ValueError, match=r"pattern 'decoder/\*\*' matches no layer"):
        sk.parallelize(plain_model(), {"decoder/**": sk.ConvParallel()}, sk.make_mesh({"sp": 2}))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "scale",
            "pattern 'scale' matches 'scale', a Linear, which ConvParallel doesn't know; it applies to .*nnx.Conv,",
        ),
        ("*", "matches 'blocks', a List, which ConvParallel doesn't know|matches 'scale', a Linear"),
        ("scale/**", r"pattern 'scale/\*\*' matches no layer that ConvParallel applies to"),
    ],
)
def test_the_wrong_kind_of_layer_is_named(pattern, message):
    with pytest.raises(ValueError, match=message):
        sk.parallelize(plain_model(), {pattern: sk.ConvParallel()}, sk.make_mesh({"sp": 2}))


def test_one_dimensional_layers_have_no_height():
    model = nnx.Sequential(nnx.Conv(1, 1, (3,), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="'layers/0' convolves over 1 spatial dims, so it has no dim 'H'"):
        sk.parallelize(model, {"**": sk.ConvParallel("sp", "H")}, sk.make_mesh({"sp": 2}))


def test_unknown_mesh_axes_are_named():
    with pytest.raises(
        ValueError, match=r"the plan for '\*\*' uses mesh axes \['tp'\], but the mesh has \('dp', 'sp'\)"
    ):
        sk.parallelize(plain_model(), {"**": sk.ConvParallel("tp")}, sk.make_mesh({"dp": 2, "sp": 2}))


def test_two_patterns_that_fight():
    plan = {"**": sk.ConvParallel("sp", "W"), "down": sk.ConvParallel("sp", "H")}
    with pytest.raises(ValueError, match=r"'down' is matched by both '\*\*' and 'down' with different plans"):
        sk.parallelize(plain_model(), plan, sk.make_mesh({"sp": 2}))


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (lambda x: x, PLAN, r"takes a flax\.nnx\.Module, .*; got <function"),
        (None, {"**": "sp"}, r"the plan for '\*\*' is 'sp'; use a plan object such as sk.ConvParallel"),
        (None, {"**": sk.ConvParallel}, r"the plan for '\*\*' is <class"),
        (None, {3: sk.ConvParallel()}, "path patterns .strings. or compiled regexes, got 3"),
    ],
)
def test_wrong_types_are_named(model, plan, message):
    with pytest.raises(TypeError, match=message):
        sk.parallelize(plain_model() if model is None else model, plan, sk.make_mesh({"sp": 2}))


def test_a_failed_plan_changes_nothing():
    model = plain_model()
    with pytest.raises(ValueError, match="matches no layer"):
        sk.parallelize(model, {"down": sk.ConvParallel(), "nowhere": sk.ConvParallel()}, sk.make_mesh({"sp": 2}))
    assert type(model.down) is nnx.Conv and not hasattr(model.down, "shardkit_plan")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("nowhere", "matches no layer"), ("sc*", "a Linear, which ConvParallel doesn't know")],
)
def test_not_strict_warns_and_does_the_rest(pattern, message):
    model = plain_model()
    with pytest.warns(UserWarning, match=message) as caught:
        sk.parallelize(
            model, {pattern: sk.ConvParallel(), "up": sk.ConvParallel()}, sk.make_mesh({"sp": 2}), strict=False
        )
    assert {w.filename for w in caught} == {__file__}  # the warning points at the caller
    assert hasattr(model.up, "shardkit_plan") and not hasattr(model.scale, "shardkit_plan")


def test_a_subclass_with_its_own_code_is_left_alone_and_named():
    class Mine(nnx.Conv):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.mine = Mine(1, 2, (3,), rngs=rngs)
            self.conv = nnx.Conv(1, 2, (3,), rngs=rngs)

    mesh = sk.make_mesh({"sp": 2})
    with pytest.warns(UserWarning, match="'mine' is a Mine, a subclass with code of its own"):
        net = sk.parallelize(Net(nnx.Rngs(0)), {"**": sk.ConvParallel("sp")}, mesh)
    assert type(net.mine) is Mine
    assert type(net.conv) is not nnx.Conv
    with pytest.raises(ValueError, match="'mine' is a Mine"):
        sk.parallelize(Net(nnx.Rngs(0)), {"mine": sk.ConvParallel("sp")}, mesh)
