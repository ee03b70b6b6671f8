"""Flax models as they are, forward, backward and AdamW in one partitioned step, beside the same step on one device."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import shardkit as sk
from tests.spmd import models
from tests.spmd.models import COLUMNS_AND_ROWS, cross_entropy, cut_dim, squares, training

R, S = sk.Replicate(), sk.Shard
RNG = np.random.default_rng(1)
STEPS = 3

FEATURES = RNG.normal(size=(16, 16)).astype(np.float32)
CLASSES = RNG.integers(0, 8, 16).astype(np.int32)
IMAGES = RNG.normal(size=(8, 16, 16, 3)).astype(np.float32)
KINDS = RNG.integers(0, 10, 8).astype(np.int32)
SERIES = RNG.normal(size=(8, 16, 16)).astype(np.float32)
# So many that a table of them is more than what is looked up in it: nobody would gather it.
VOCABULARY = 512
TOKENS = RNG.integers(0, VOCABULARY, (8, 16)).astype(np.int32)
NEXT = RNG.integers(0, VOCABULARY, (8, 16)).astype(np.int32)

BATCHES = {
    "features": (FEATURES, CLASSES),
    "images": (IMAGES, KINDS),
    "image to image": (IMAGES, IMAGES[::-1]),
    "series": (SERIES, KINDS % 8),
    "tokens": (TOKENS, NEXT),
}

DROPPING = functools.partial(models.MLP, dropout=0.5)
MLP_CUTS = {"['up']['kernel']": 1, "['up']['bias']": 0, "['norm']": 0, "['down']['kernel']": 0}
EXPERTS = {"['up']": 0, "['down']": 0}
DP, TP, SP, BOTH, SPACE = {"dp": 4}, {"tp": 4}, {"sp": 4}, {"dp": 2, "tp": 4}, {"dp": 2, "sp": 4}


@dataclasses.dataclass
class Ran:
    """What a check leaves to look at.

    Attributes:
      program: the plan.
      report: the collectives of the compiled program.
      state: (params, optimizer state, other state) after the last step.
    """

    program: sk.Program
    report: sk.CollectiveReport
    state: tuple


def put(tree: Any, mesh: Any, cuts: dict[str, int]) -> Any:
    """Parameters (and what is kept of them) where the rules say, over "tp"; all else whole."""

    def one(path, x):
        dim = cut_dim(path, x, cuts)
        return sk.shard_tensor(x, {} if dim is None else {"tp": S(dim)}, mesh)

    return jax.tree_util.tree_map_with_path(one, tree)


def received(report: sk.CollectiveReport) -> int:
    return sum(c.bytes * (c.trip_count or 1) for c in report)


def widened(program: sk.Program) -> int:
    """What XLA's CPU compiler adds: it sums bfloat16 as float32."""
    sums = [r for r in program.reshards if r.plan.dtype == jnp.bfloat16 and set(r.collectives) <= {"all_reduce"}]
    return sum(r.bytes * r.times for r in sums)


@dataclasses.dataclass
class Alone:
    """What one device makes of some steps: their losses and the state after the last."""

    losses: list[Any]
    state: tuple


def alone(step: Callable, state: tuple, batch: tuple) -> Alone:
    jitted, losses = jax.jit(step), []
    for _ in range(STEPS):
        *state, value = jitted(*state, *batch)
        losses.append(value)
    return Alone(losses, tuple(state))


@functools.cache
def alone_with(make: Callable, loss: Callable, batch: str) -> Alone:
    """The same for an nnx model; several meshes are compared with it."""
    of = training(make, loss)
    return alone(of.step, of.state, BATCHES[batch])


def fitting(at: dict[str, Any], x: Any) -> dict[str, Any]:
    """Placements of the first array of a batch, for one that may have fewer dims (labels)."""
    return {axis: p if isinstance(p, S) and p.dim < x.ndim else R for axis, p in at.items()}


def check(
    step: Callable,
    state: tuple,
    batch: tuple,
    mesh: Any,
    at: dict[str, Any],
    cuts: dict[str, int],
    wanted: Alone,
    *,
    stay: bool = False,
    rtol: float = 1e-5,
) -> Ran:
    """Partitioned steps beside those of one device: values, places, bytes; nothing whole for want of a rule.

    Args:
      step: of (params, optimizer state, other state, *batch).
      at: placements of the batch.
      cuts: which dim of which parameters "tp" cuts.
      wanted: what one device makes of it.
      stay: whether to say that state shall stay where it is; else it does so because that's cheapest.
      rtol: of the losses.
    """
    mine = put(state, mesh, cuts)
    where = jax.tree.map(sk.placements, mine)
    placed = [sk.shard_tensor(x, fitting(at, x), mesh) for x in batch]
    partitioned = sk.partition(step, (), (*where, None) if stay else None, mesh=mesh)
    program = partitioned.program(*mine, *placed)
    assert program.replicated == ()
    report = sk.collectives(partitioned, *mine, *placed)
    assert received(report) == program.bytes_per_device + widened(program)
    for loss in wanted.losses:
        *mine, value = partitioned(*mine, *placed)
        np.testing.assert_allclose(value, loss, rtol=rtol)
    # Where they were: the next step is the same program.
    assert jax.tree.map(sk.placements, tuple(mine)) == where
    assert value.sharding.is_fully_replicated
    same(mine, wanted.state, 10 * rtol)
    return Ran(program, report, tuple(mine))


def same(mine: Any, theirs: Any, rtol: float) -> None:
    """Parameters and states, close: Adam's steps magnify rounding."""
    pairs = zip(jax.tree_util.tree_flatten_with_path(tuple(mine))[0], jax.tree.leaves(tuple(theirs)), strict=True)
    for (path, a), b in pairs:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=jax.tree_util.keystr(path))


def trained(make: Callable, loss: Callable, batch: str, mesh: Any, at: Any, cuts: Any = None, **options) -> Ran:
    """``check`` of an nnx model."""
    of = training(make, loss)
    return check(of.step, of.state, BATCHES[batch], mesh, at, cuts or {}, alone_with(make, loss, batch), **options)


def size_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def gradients_only(params: Any, devices: int, more: int = 0) -> float:
    """Bytes a device receives to sum all gradients and the loss (and ``more``) there and back."""
    return 2 * (devices - 1) / devices * (size_of(params) + 4 + more)


def cases(*given: Any) -> Any:
    """The first is for every run, the others are slow."""
    return pytest.mark.parametrize(
        ("shape", "at"),
        [pytest.param(*g, marks=[pytest.mark.slow] if i else [], id="x".join(g[0])) for i, g in enumerate(given)],
    )


# --- each model -----------------------------------------------------------------------------------


@cases((TP, {"tp": R}), (DP, {"dp": S(0)}), (BOTH, {"dp": S(0)}))
def test_mlp(shape, at, mesh_for):
    """Columns, a norm over cut features, rows: one sum forward, one of both moments of the norm, and back."""
    ran = trained(models.MLP, cross_entropy, "features", mesh_for(shape), at, MLP_CUTS if "tp" in shape else {})
    if shape == DP:
        assert ran.report.bytes() == gradients_only(ran.state[0], 4)


@cases((DP, {"dp": S(0)}), (SP, {"sp": S(2)}), (SPACE, {"dp": S(0), "sp": S(2)}))
@pytest.mark.not_smoke
def test_cnn_with_batch_norm(shape, at, mesh_for):
    ran = trained(models.CNN, cross_entropy, "images", mesh_for(shape), at)
    if shape == DP:
        # BatchNorm: mean and mean of squares of 8 features forward; back what the mean is given (what the variance is
        # given is the gradient of the scale but for a factor, and summed once for both).
        assert ran.report.bytes() == gradients_only(ran.state[0], 4, 3 * 8 * 4)


@cases((SPACE, {"dp": S(0), "sp": S(2)}), (DP, {"dp": S(0)}), (SP, {"sp": S(2)}))
@pytest.mark.not_smoke
def test_u_net(shape, at, mesh_for):
    ran = trained(models.UNet, squares, "image to image", mesh_for(shape), at)
    # Halos and sums, whatever is cut.
    assert set(ran.report.by_kind()) <= {"all_reduce", "collective_permute"}
    if shape == DP:
        assert ran.report.bytes() == gradients_only(ran.state[0], 4)


@cases((SP, {"sp": S(2)}), (DP, {"dp": S(0)}), (SPACE, {"dp": S(0), "sp": S(2)}))
@pytest.mark.not_smoke
def test_resnet(shape, at, mesh_for):
    ran = trained(models.ResNet, cross_entropy, "images", mesh_for(shape), at)
    assert set(ran.report.by_kind()) <= {"all_reduce", "collective_permute"}


@cases((BOTH, {"dp": S(0)}), (DP, {"dp": S(0)}), (TP, {"tp": R}), (TP, {"tp": S(1)}))
@pytest.mark.not_smoke
def test_encoder(shape, at, mesh_for):
    cuts = COLUMNS_AND_ROWS if "tp" in shape and at != {"tp": S(1)} else {}
    trained(models.Encoder, cross_entropy, "series", mesh_for(shape), at, cuts)


@cases((TP, {"tp": R}), (DP, {"dp": S(0)}), (BOTH, {"dp": S(0)}))
@pytest.mark.not_smoke
def test_gpt(shape, at, mesh_for):
    layers = 1 if shape == TP else 2
    ran = trained(gpt(layers), cross_entropy, "tokens", mesh_for(shape), at, COLUMNS_AND_ROWS if "tp" in shape else {})
    if shape == DP:
        assert ran.report.bytes() == gradients_only(ran.state[0], 4)
    if shape == TP:
        megatron(ran, layers)


@functools.cache
def gpt(layers: int, remat: bool = False) -> Callable:
    return functools.partial(models.GPT, vocabulary=VOCABULARY, layers=layers, remat=remat)


def megatron(ran: Ran, layers: int) -> None:
    """Per block two sums forward (attention's, the MLP's) and two back; one of the embeddings, one of what the
    vocabulary's columns give back; the loss's maximum, sum and picked logit. No other."""
    residual, tokens = (8, 16, 32), (8, 16)
    found = collections.Counter()
    for r in ran.program.reshards:
        assert set(r.collectives) <= {"all_reduce"}
        found[tuple(r.plan.shape)[: 3 if r.plan.shape[-1:] == (32,) else 2]] += len(r.collectives)
    assert found[residual] == 4 * layers + 2
    assert found[tokens] == 3
    assert sum(found.values()) == ran.program.collectives == 4 * layers + 5


@pytest.mark.parametrize("shape", [TP, pytest.param(BOTH, marks=pytest.mark.slow)], ids="x".join)
@pytest.mark.not_smoke
def test_gpt_along_the_sequence(shape, mesh_for):
    """Parameters whole, tokens cut along the sequence: keys and values are what attention needs of the others."""
    layers = 1 if shape == TP else 2
    ran = trained(gpt(layers), cross_entropy, "tokens", mesh_for(shape), {"tp": S(1)}, stay=True)
    if shape == TP:
        heads = collections.Counter(r.collectives for r in ran.program.reshards if r.plan.shape == (8, 16, 4, 8))
        assert heads == {("all_gather",): 2 * layers, ("reduce_scatter",): 2 * layers}
        # At most: gradients, but for the positions', which are cut; those gathered in the end, with Adam's moments.
        block = 8 * 16 * 32 * 4 * 3 // 4
        parts = gradients_only(ran.state[0], 4) - 16 * 32 * 4 * 3 // 2
        assert ran.report.bytes() <= 4 * layers * block + parts + 3 * 16 * 32 * 4 * 3 // 4


@cases((DP, {"dp": S(0)}), (BOTH, {"dp": S(0)}))
@pytest.mark.not_smoke
def test_vit(shape, at, mesh_for):
    ran = trained(models.ViT, cross_entropy, "images", mesh_for(shape), at, COLUMNS_AND_ROWS if "tp" in shape else {})
    if shape == DP:
        assert ran.report.bytes() == gradients_only(ran.state[0], 4)


@pytest.mark.parametrize(
    "cell", [nnx.LSTMCell, pytest.param(nnx.GRUCell, marks=pytest.mark.slow)], ids=lambda c: c.__name__
)
@pytest.mark.not_smoke
def test_recurrent(cell, mesh_for):
    """Nothing travels while it runs over time: gradients are summed once, after."""
    ran = trained(functools.partial(models.Recurrent, cell=cell), cross_entropy, "series", mesh_for(DP), {"dp": S(0)})
    assert ran.report.count(in_loop=True) == 0
    assert ran.report.bytes() == gradients_only(ran.state[0], 4)


@cases((BOTH, {"dp": S(0)}), (DP, {"dp": S(0)}), (TP, {"tp": R}))
@pytest.mark.not_smoke
def test_moe(shape, at, mesh_for):
    """Experts cut over "tp": one sum of what they say, one of what they give back, none gathered."""
    ran = trained(models.MoE, cross_entropy, "features", mesh_for(shape), at, EXPERTS if "tp" in shape else {})
    assert set(ran.report.by_kind()) <= {"all_reduce"}


# --- ways to train --------------------------------------------------------------------------------


@pytest.mark.not_smoke
def test_linen_train_state(mesh_for):
    """A ``TrainState`` is a pytree like others."""
    mesh = mesh_for(DP)
    model = models.LinenCNN()
    described = jax.eval_shape(lambda: model.init(jax.random.key(0), IMAGES))
    variables = models.filled(described)
    assert isinstance(model, nn.Module)

    def step(state, stats, nothing, x, y):
        def loss(params):
            found, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return cross_entropy(found, y), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), stats, nothing, value

    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=models.adamw())
    state = state.replace(step=jnp.zeros((), jnp.int32))
    start = (state, variables["batch_stats"], ())
    ran = check(step, start, BATCHES["images"], mesh, {"dp": S(0)}, {}, alone(step, start, BATCHES["images"]))
    assert int(ran.state[0].step) == STEPS
    assert ran.report.bytes() == gradients_only(ran.state[0].params, 4, 3 * 8 * 4)


@pytest.mark.not_smoke
def test_gradient_accumulation(mesh_for):
    """The sum over microbatches stays Partial in the loop: as many bytes as for one batch, none of them in it."""
    of = training(models.MLP, cross_entropy, microbatches=True)
    batch = FEATURES.reshape(2, 8, 16), CLASSES.reshape(2, 8)
    ran = check(of.step, of.state, batch, mesh_for(DP), {"dp": S(1)}, {}, alone(of.step, of.state, batch))
    assert ran.report.count(in_loop=True) == 0
    assert ran.report.bytes() == gradients_only(ran.state[0], 4)


@pytest.mark.not_smoke
def test_checkpointed_layers(mesh_for):
    """What is computed again is in the program as such. So is one sum: that of attention, which what follows it needs
    on the way back; the MLP's own result nobody needs."""
    ran = trained(gpt(1, remat=True), cross_entropy, "tokens", mesh_for(TP), {"tp": R}, COLUMNS_AND_ROWS)
    assert any(s.note == "computed again" for s in ran.program.steps)
    assert ran.program.collectives == 4 + 5 + 1
    assert set(ran.report.by_kind()) == {"all_reduce"}


def test_donated(mesh_for):
    """State that is given away is gone, and its memory holds the new one."""
    mesh = mesh_for(DP)
    of = training(models.MLP, cross_entropy)
    partitioned = sk.partition(of.step, (None, None, None, *[{"dp": S(0)}] * 2), mesh=mesh, donate_argnums=(0, 1))
    *theirs, wanted = jax.jit(of.step)(*of.state, FEATURES, CLASSES)
    mine = put(of.state, mesh, {})
    batch = [sk.shard_tensor(x, {"dp": S(0)}, mesh) for x in (FEATURES, CLASSES)]
    sk.memory(partitioned, *mine, *batch)  # to look at the program changes nothing
    *after, value = partitioned(*mine, *batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    same(after, theirs, 1e-4)
    assert all(x.is_deleted() for x in jax.tree.leaves(mine[:2]))
    assert not any(x.is_deleted() for x in jax.tree.leaves((mine[2], batch)))


@pytest.mark.parametrize("shape", [BOTH, pytest.param(DP, marks=pytest.mark.slow)], ids="x".join)
@pytest.mark.not_smoke
def test_dropout(shape, mesh_for):
    """The same features are dropped as on one device, from the keys in the model's own state."""
    ran = trained(
        DROPPING,
        cross_entropy,
        "features",
        mesh_for(shape),
        {"dp": S(0)},
        MLP_CUTS if "tp" in shape else {},
    )
    counts = [x for x in jax.tree.leaves(ran.state[2]) if x.dtype == jnp.uint32]
    assert [int(c) for c in counts] == [STEPS]


def test_dropout_with_a_key(mesh_for):
    """The key is an argument."""
    mesh = mesh_for(DP)
    drop = nnx.Dropout(0.5)

    def step(w, key, x):
        def loss(w):
            return jnp.mean(drop(jnp.tanh(x @ w), rngs=key) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return optax.apply_updates(w, jax.tree.map(lambda g: -0.1 * g, grad)), value

    w, key = RNG.normal(size=(16, 8)).astype(np.float32), jax.random.key(3)
    new, value = sk.partition(step, (None, None, {"dp": S(0)}), mesh=mesh)(w, key, FEATURES)
    theirs, wanted = jax.jit(step)(w, key, FEATURES)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(new, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "batch", "cuts"),
    [
        (models.MLP, "features", MLP_CUTS),
        pytest.param(models.Encoder, "series", COLUMNS_AND_ROWS, marks=pytest.mark.slow),
    ],
    ids=["MLP", "encoder"],
)
@pytest.mark.not_smoke
def test_bfloat16(model, batch, cuts, mesh_for):
    """Computed in bfloat16, kept in float32; sums over devices are rounded once more than on one device."""
    make = functools.partial(model, dtype=jnp.bfloat16)
    ran = trained(make, cross_entropy, batch, mesh_for(TP), {"tp": R}, cuts, rtol=1e-2)
    assert {x.dtype for x in jax.tree.leaves(ran.state[0])} == {jnp.dtype(jnp.float32)}
    assert any(r.plan.dtype == jnp.bfloat16 for r in ran.program.reshards)
