"""Every optimizer of the installed optax, sharded: the parameters of one device. Found by looking, not from a list."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import shardkit as sk

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()
STAGES = [sk.ShardingStage1, sk.ShardingStage2, sk.ShardingStage3]
SHAPES = {"w": (8, 6), "odd": (7, 3), "b": (6,), "s": ()}
MASK = {"w": True, "odd": False, "b": True, "s": False}
MATRICES = {"w": True, "odd": True, "b": False, "s": False}


def adam():
    return optax.adam(1e-2)


def stepping(tx):
    """A piece of an optimizer, and a step size behind it."""
    return optax.chain(tx, optax.scale(-1e-2))


def norm_of(updates):
    return optax.tree.norm(updates)


# How to build those that need more than a learning rate, or whose defaults do nothing at this size.
BUILD = {
    "adafactor": lambda f: f(1e-2, min_dim_size_to_factor=2),
    "adaptive_grad_clip": lambda f: stepping(f(0.01)),
    "add_noise": lambda f: stepping(f(0.01, 0.5, key=0)),
    "apply_every": lambda f: stepping(f(2)),
    "apply_if_finite": lambda f: f(adam(), 3),
    "chain": lambda f: f(optax.clip_by_global_norm(0.1), adam()),
    "clip": lambda f: stepping(f(0.01)),
    "clip_by_block_rms": lambda f: stepping(f(0.01)),
    "clip_by_global_norm": lambda f: stepping(f(0.01)),
    "conditionally_mask": lambda f: f(adam(), lambda step: step % 2 == 0),
    "conditionally_transform": lambda f: f(adam(), lambda step: step % 2 == 0),
    "contrib.galore": lambda f: f(1e-2, rank=2, update_proj_gap=2),
    "contrib.mechanize": lambda f: f(adam()),
    "contrib.reduce_on_plateau": lambda f: stepping(f(patience=1, rtol=0.5)),
    "contrib.sam": lambda f: f(adam(), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))),
    "contrib.scale_by_galore": lambda f: stepping(f(rank=2, update_proj_gap=2)),
    "contrib.scale_by_muon": lambda f: stepping(optax.masked(f(), MATRICES)),
    "contrib.schedule_free": lambda f: f(optax.sgd(1e-2), 1e-2),
    "contrib.sophia": lambda f: f(1e-2, update_interval=2),
    "contrib.split_real_and_imaginary": lambda f: f(adam()),
    "lbfgs": lambda f: f(memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(5)),
    "ema": lambda f: stepping(f(0.9)),
    "flatten": lambda f: f(adam()),
    "freeze": lambda f: stepping(f(MASK)),
    "masked": lambda f: f(adam(), MASK),
    "multi_transform": lambda f: f({True: adam(), False: optax.sgd(1e-2)}, MASK),
    "named_chain": lambda f: f(("clip", optax.clip_by_global_norm(0.1)), ("adam", adam())),
    "noisy_sgd": lambda f: f(1e-2, key=jax.random.key(0)),
    "partition": lambda f: f({True: adam(), False: optax.sgd(1e-2)}, MASK),
    "rmsprop": lambda f: f(1e-2, centered=True, momentum=0.9),
    "scale": lambda f: stepping(f(0.5)),
    "scale_by_backtracking_linesearch": lambda f: optax.chain(optax.sgd(1.0), f(5)),
    "scale_by_schedule": lambda f: stepping(f(optax.cosine_decay_schedule(1.0, 4))),
    "scale_by_zoom_linesearch": lambda f: optax.chain(optax.sgd(1.0), f(5)),
    "selective_transform": lambda f: f(adam(), freeze_mask=MASK),
    "sgd": lambda f: f(1e-2, momentum=0.9, nesterov=True),
    "snapshot": lambda f: stepping(f("norm", norm_of)),
    "stateless": lambda f: stepping(f(lambda updates, params: jax.tree.map(lambda u, p: u + 0.1 * p, updates, params))),
    "stateless_with_tree_map": lambda f: stepping(f(lambda u, p: u + 0.1 * p)),
    "trace": lambda f: stepping(f(0.9)),
    "with_extra_args_support": lambda f: f(adam()),
}
# What isn't a function that returns a transformation.
BESIDE = {
    "MultiSteps": lambda: optax.MultiSteps(adam(), 2),
    "MultiSteps, skipping": lambda: optax.MultiSteps(adam(), 2, should_skip_update_fn=optax.skip_not_finite),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 4)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=1e-2),
    "contrib.sam, opaque": lambda: BUILD["contrib.sam"](functools.partial(optax.contrib.sam, opaque_mode=True)),
    "lbfgs, as it comes": lambda: optax.lbfgs(),
    "a schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 5), mask=MASK),
}
# What they take in update besides gradients, state and parameters.
EXTRA = {
    "contrib.momo": {"value"},
    "contrib.momo_adam": {"value"},
    "contrib.reduce_on_plateau": {"value"},
    "contrib.sam, opaque": {"grad_fn"},
    "contrib.sophia": {"obj_fn"},
    "lbfgs": {"value", "grad", "value_fn"},
    "lbfgs, as it comes": {"value", "grad", "value_fn"},
    "polyak_sgd": {"value"},
    "scale_by_backtracking_linesearch": {"value", "grad", "value_fn"},
    "scale_by_polyak": {"value"},
    "scale_by_zoom_linesearch": {"value", "grad", "value_fn"},
}
# These fail on a scalar parameter, or give it another shape, on one device.
NO_SCALAR = {"sm3", "scale_by_sm3", "scale_by_distance_over_gradients"}
# These are for gradients of each example or for pairs of parameters, or don't return updates; see test_refused.
REFUSED = {"contrib.dpsgd", "contrib.differentially_private_aggregate", "lookahead", "measure_with_ema"}


def found():
    """Public functions of optax that return a transformation, by name; one that has two names, by the first."""
    functions, seen = {}, set()
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, f in sorted(vars(module).items()):
            if name.startswith("_") or not inspect.isfunction(f) or f in seen:
                continue
            signature = inspect.signature(f)
            returns = str(signature.return_annotation)
            made = "GradientTransformation" in returns and "Callable" not in returns
            unsaid = signature.return_annotation is signature.empty and "learning_rate" in signature.parameters
            if made or unsaid:
                functions[prefix + name] = f
                seen.add(f)
    return functions


FUNCTIONS = found()
NAMES = [name for name in [*FUNCTIONS, *BESIDE] if name not in REFUSED]


def build(name):
    """The transformation, from a learning rate alone where that's enough, and from none with a step size behind it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if name in BESIDE:
            return BESIDE[name]()
        f, parameters = FUNCTIONS[name], inspect.signature(FUNCTIONS[name]).parameters
        if name in BUILD:
            return BUILD[name](f)
        needed = {k for k, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        if needed - {"learning_rate"}:
            pytest.fail(f"optax.{name} needs {sorted(needed)}, which is new; say how to build it in BUILD of this file")
        tx = f(**dict.fromkeys(needed, 1e-2))
        return tx if {"learning_rate", "max_learning_rate"} & set(parameters) else stepping(tx)


def loss(p, x):
    """Never negative, as Polyak's step and its kind suppose."""
    return jnp.mean(jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2, -1)) + jnp.mean(p["odd"] ** 2) * (
        1 + p.get("s", 0) ** 2
    )


X = np.random.default_rng(1).normal(size=(16, 8))


def params_of(name):
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=shape) for k, shape in SHAPES.items() if shape or name not in NO_SCALAR}


def extra_args(name, x, value, grads):
    """What this one takes in ``update`` besides."""

    def on_batch(params):
        return loss(params, x)

    known = {"value": value, "grad": grads, "value_fn": on_batch, "obj_fn": on_batch}
    known["grad_fn"] = lambda params, _: jax.grad(on_batch)(params)
    return {k: known[k] for k in EXTRA.get(name, ())}


one_device = jax.jit(jax.value_and_grad(loss))


@functools.cache
def many_devices(mesh):
    """One program of gradients for all optimizers (and placements): compiling is what these tests wait for."""
    return jax.jit(sk.value_and_grad(loss, batch_axes="dp", mesh=mesh))


def five_steps(name, tx, params, value_and_grad, reduce):
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, value, grads):
        if "grad" in EXTRA.get(name, ()):
            grads = reduce(grads)
        updates, state = tx.update(grads, state, params, **extra_args(name, x, value, grads))
        return optax.apply_updates(params, updates), state

    for _ in range(5):
        value, grads = jax.block_until_ready(value_and_grad(params, X))
        params, state = jax.block_until_ready(step(params, state, X, value, grads))
    return params, state


@functools.cache
def reference(name):
    """How far the parameters go in five steps on one device."""
    start = params_of(name)
    tx = optax.with_extra_args_support(build(name))
    try:
        params, _ = five_steps(name, tx, jax.tree.map(jnp.asarray, start), one_device, lambda grads: grads)
    except (TypeError, ValueError) as error:
        pytest.fail(f"optax.{name} can't be run on one device; see EXTRA and BUILD of this file: {error}")
    return {k: np.asarray(params[k]) - start[k] for k in start}


def check(name, stage, mesh):
    """The way of one device, parameters where they were, and no large leaf of the state whole."""
    wanted, start = reference(name), params_of(name)
    assert name == "set_to_zero" or any(np.any(way) for way in wanted.values()), "the test is blind: it does nothing"
    cut = ["w"] if stage is sk.ShardingStage3 else []
    placed = {k: sk.shard_tensor(x, [S(0) if k in cut else R], mesh) for k, x in start.items()}
    homes = jax.tree.map(lambda x: x.sharding, placed)
    tx = sk.shard_optimizer(build(name), stage("dp"))
    params, state = five_steps(name, tx, placed, many_devices(mesh), lambda g: sk.reduce_gradients(g, axis="dp"))
    for k, way in wanted.items():
        np.testing.assert_allclose(np.asarray(params[k]) - start[k], way, rtol=1e-7, atol=1e-13, err_msg=k)
        assert params[k].sharding.is_equivalent_to(homes[k], params[k].ndim), k
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        assert x.size < 4 or not x.sharding.is_fully_replicated, jax.tree_util.keystr(path)


def rotation(name):
    return STAGES[NAMES.index(name) % 3]


# Element by element as adam, sgd, rmsprop or another that stays, or the same way round another optimizer.
ALIKE = {
    *("adadelta", "adagrad", "adamax", "adamaxw", "amsgrad", "adan", "lion", "radam", "rprop", "yogi"),
    *("optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent", "sign_sgd", "signum", "noisy_sgd"),
    *("add_decayed_weights", "ema", "fromage", "lars", "clip_by_block_rms", "conditionally_mask", "named_chain"),
    *("contrib.acprop", "contrib.ademamix", "contrib.adopt", "contrib.simplified_ademamix", "contrib.madgrad"),
    *("contrib.dadapt_adamw", "contrib.dowg", "contrib.momo_adam", "contrib.galore", "stateless_with_tree_map"),
    *("contrib.schedule_free_adamw", "contrib.schedule_free_sgd", "inject_stateful_hyperparams", "MultiSteps"),
}


def is_left_to_slow(name):
    """What optimizers are made of is seen in these; a search along a line takes ten seconds to compile."""
    parts = name.removeprefix("contrib.").startswith("scale_by_")
    return parts or name in ALIKE or name in ("lbfgs", "lbfgs, as it comes")


@pytest.mark.parametrize("name", [n for n in NAMES if not is_left_to_slow(n)])
def test_against_one_device(name, mesh_for):
    """Each at one of the stages, in turn."""
    check(name, rotation(name), mesh_for({"dp": 4}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
def test_every_stage(stage, name, mesh_for):
    check(name, stage, mesh_for({"dp": 4}))


def test_tables():
    """Optimizers old and new are found, and the tables above name nothing that isn't there."""
    assert {"adam", "lbfgs", "sgd", "contrib.muon", "contrib.prodigy", "contrib.dog"} <= set(FUNCTIONS)
    assert len(FUNCTIONS) > 90
    assert set(EXTRA) | NO_SCALAR <= set(NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if n in FUNCTIONS])
def test_can_be_built(name):
    """Pieces too: what a new version of optax adds is built, or it's said what is missing."""
    tx = build(name)
    assert callable(tx.init) and callable(tx.update)


def test_what_is_new_and_unknown_fails(monkeypatch):
    def needy(learning_rate, secret) -> optax.GradientTransformation:
        del secret
        return optax.sgd(learning_rate)

    def hungry(learning_rate) -> optax.GradientTransformationExtraArgs:
        def update(updates, state, params=None, *, moon):
            return jax.tree.map(lambda u: u * moon, updates), state

        return optax.GradientTransformationExtraArgs(optax.sgd(learning_rate).init, update)

    monkeypatch.setattr(optax, "needy", needy, raising=False)
    monkeypatch.setattr(optax.contrib, "hungry", hungry, raising=False)
    new = found()
    assert set(new) - set(FUNCTIONS) == {"needy", "contrib.hungry"}
    monkeypatch.setitem(FUNCTIONS, "needy", needy)
    monkeypatch.setitem(FUNCTIONS, "contrib.hungry", hungry)
    with pytest.raises(pytest.fail.Exception, match=r"needs .*'secret'.* in BUILD of this file"):
        build("needy")
    with pytest.raises(pytest.fail.Exception, match=r"contrib.hungry can't be run .* EXTRA .*moon"):
        reference("contrib.hungry")


def ones_on(mesh):
    params = {"w": np.ones((8, 6)), "v": np.ones((8,))}
    placed = {k: sk.shard_tensor(x, [R], mesh) for k, x in params.items()}
    return placed, {k: sk.from_local([x] * 4, [P], mesh) for k, x in params.items()}


def dpsgd():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return optax.contrib.dpsgd(1e-2, 1.0, 0.0, seed=0)


@pytest.mark.not_smoke
def test_refused(mesh_for):
    mesh = mesh_for({"dp": 4})
    placed, grads = ones_on(mesh)
    tx = sk.shard_optimizer(dpsgd(), sk.ShardingStage1("dp"))
    each = {k: jnp.ones((16, *x.shape)) for k, x in placed.items()}  # of sixteen examples
    with pytest.raises(ValueError, match="gradients don't match the parameters"):
        tx.update(each, tx.init(placed), placed)
    tx = sk.shard_optimizer(optax.lookahead(adam(), 2, 0.5), sk.ShardingStage1("dp"))
    for given in (placed, optax.LookaheadParams(placed, placed)):
        with pytest.raises(TypeError, match="lookahead has two sets of parameters"):
            tx.init(given)
    for made in (dpsgd(), optax.measure_with_ema(lambda g, *_: optax.tree.norm(g), 0.9)):
        tx = sk.shard_optimizer(made, sk.ShardingStage1("dp"))
        with pytest.raises(ValueError, match=r"other updates than one for every parameter.*it can't be sharded"):
            tx.update(grads, tx.init(placed), placed)


MATRICES = ["adam", "contrib.muon", "contrib.galore", "contrib.prodigy", "contrib.momo", "adafactor"]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.not_smoke
@pytest.mark.every(2)
def test_explicit_axes(name, mesh_for, ambient):
    """Where types refuse to contract what is cut, the optimizer within runs as on Auto axes."""
    mesh = mesh_for({"dp": 4}, "explicit")
    start = params_of(name)
    tx = optax.with_extra_args_support(build(name))
    grads = jax.tree.map(lambda x: jnp.cos(x), start)
    extra = {k: v for k, v in {"value": 0.5}.items() if k in EXTRA.get(name, ())}
    wanted, _ = tx.update(grads, tx.init(start), start, **extra)
    with ambient(mesh):
        placed = {k: sk.shard_tensor(x, [R], mesh) for k, x in start.items()}
        ours = sk.shard_optimizer(tx, sk.ShardingStage2("dp"))
        parts = {k: sk.reshard(sk.shard_tensor(g, [R], mesh), [P]) for k, g in grads.items()}
        state = ours.init(placed)
        got, _ = jax.jit(ours.update)(parts, state, placed, **extra)
    for k, way in wanted.items():
        np.testing.assert_allclose(np.asarray(got[k]), np.asarray(way), rtol=1e-7, atol=1e-13, err_msg=k)
        assert got[k].sharding.is_fully_replicated
