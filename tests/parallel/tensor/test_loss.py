"""`loss_parallel` against optax on one device: values, gradients, where they live, and what travels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.collectives import read_collectives
from shardkit.parallel.tensor.loss import loss_parallel
from shardkit.testing import entered, mesh_id, meshes

BATCH, SEQ, CLASSES = 4, 6, 16
CASES = [m for m in meshes(("dp", "tp")) if dict(m.shape) != {"dp": 4, "tp": 2}]
FAST = [m for m in CASES if dict(m.shape) in ({"dp": 1, "tp": 1}, {"dp": 2, "tp": 4})]
EVERY = [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in CASES]
SLOW = pytest.mark.slow


def logits_of(classes=CLASSES, dtype=np.float64, seed=0):
    return (3 * np.random.default_rng(seed).normal(size=(BATCH, SEQ, classes))).astype(dtype)


def labels_of(classes=CLASSES, seed=1):
    return np.random.default_rng(seed).integers(-classes, classes, (BATCH, SEQ))


def probabilities_of(classes=CLASSES, seed=2):
    """Not summing to one."""
    return np.random.default_rng(seed).uniform(size=(BATCH, SEQ, classes))


def oracle(logits, labels, label_smoothing=0.0, z_loss=0.0, where=None):
    """What optax has of it."""
    if labels.ndim < logits.ndim and not label_smoothing:
        found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        if labels.ndim < logits.ndim:
            labels = jax.nn.one_hot(labels % logits.shape[-1], logits.shape[-1], dtype=logits.dtype)
        found = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, label_smoothing))
    if z_loss:
        found = found + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return found if where is None else jnp.where(where, found, 0)


def placed(mesh, x, *entries):
    return jax.device_put(x, NamedSharding(mesh, P(*entries)))


def cotangents(shape=(BATCH, SEQ)):
    return np.random.default_rng(9).normal(size=shape)


def weighed(losses):
    return jnp.sum(losses * cotangents(losses.shape)), losses


def with_gradient(fun, argnums=0):
    """(losses, gradient) of a function of logits and labels."""

    def run(*args):
        (_, losses), grads = jax.value_and_grad(lambda *a: weighed(fun(*a)), argnums, has_aux=True)(*args)
        return losses, grads

    return run


@functools.cache
def wanted_of(argnums=0, **options):
    """(losses, gradient) on one device, compiled once for all tests."""
    return jax.jit(with_gradient(functools.partial(oracle, **options), argnums))


def same(got, wanted, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=tolerance, atol=tolerance)


# --- values, gradients, placements, collectives ------------------------------------------------------------


@pytest.mark.parametrize("mesh", EVERY, ids=mesh_id)
def test_integer_labels(mesh):
    """Two all-reduces, of one and of two numbers an example, forward and backward together."""
    logits, labels = logits_of(), labels_of()
    args = placed(mesh, logits, "dp", None, "tp"), placed(mesh, labels, "dp")
    with entered(mesh):
        compiled = jax.jit(with_gradient(functools.partial(loss_parallel, mesh=mesh))).lower(*args).compile()
        losses, gradient = compiled(*args)
    want, want_gradient = wanted_of()(logits, labels)
    same(losses, want)
    same(gradient, want_gradient)
    assert losses.sharding.is_equivalent_to(NamedSharding(mesh, P("dp")), 2)
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", None, "tp")), 3)
    report = read_collectives(compiled.as_text(), mesh)
    if mesh.shape["tp"] == 1:
        assert report.count(axis=("tp",)) == 0
    else:
        one = BATCH // mesh.shape["dp"] * SEQ * 8
        found = {(e.kind, e.reduction, e.result_bytes) for e in report.select(axis="tp")}
        assert found == {("all_reduce", "max", one), ("all_reduce", "add", 2 * one)}, str(report)
        assert report.count(axis="tp") == 2
    assert all(e.result_bytes == 8 for e in report.select(axis="dp")), str(report)  # the scalar that's differentiated


@pytest.mark.parametrize("mesh", CASES[-2:], ids=mesh_id)
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=SLOW), {"label_smoothing": 0.1, "z_loss": 0.01}], ids=["plain", "smooth"]
)
@pytest.mark.not_smoke
def test_probabilities(mesh, options):
    """Differentiated by both; three numbers an example travel, as labels needn't sum to one."""
    logits, labels = logits_of(), probabilities_of()
    args = placed(mesh, logits, "dp", None, "tp"), placed(mesh, labels, "dp", None, "tp")
    with entered(mesh):
        fun = functools.partial(loss_parallel, mesh=mesh, **options)
        compiled = jax.jit(with_gradient(fun, (0, 1))).lower(*args).compile()
        losses, gradients = compiled(*args)
    want, wanted = wanted_of((0, 1), **options)(logits, labels)
    same(losses, want)
    for got, goal in zip(gradients, wanted, strict=True):
        same(got, goal)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", None, "tp")), 3)
    report = read_collectives(compiled.as_text(), mesh)
    one = BATCH // 2 * SEQ * 8
    assert sorted(e.result_bytes for e in report.select(axis="tp")) == [one, 3 * one], str(report)
    assert set(report.by_kind()) == {"all_reduce"}


@pytest.mark.parametrize("mesh", [CASES[-2], pytest.param(CASES[-1], marks=SLOW)], ids=mesh_id)
@pytest.mark.not_smoke
def test_smoothing_z_loss_and_examples_that_do_not_count(mesh):
    """What lies in examples that don't count shows nowhere, NaN logits and labels that are no class too."""
    logits, labels = logits_of(), labels_of()
    where = np.random.default_rng(3).uniform(size=(BATCH, SEQ)) < 0.6
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    want, want_gradient = jax.jit(with_gradient(functools.partial(oracle, where=where, **options)))(logits, labels)
    dirty = np.where(where[..., None], logits, np.nan)
    args = placed(mesh, dirty, "dp", None, "tp"), placed(mesh, np.where(where, labels, 99), "dp")
    run = with_gradient(functools.partial(loss_parallel, mesh=mesh, where=where, **options))
    with entered(mesh):
        compiled = jax.jit(run).lower(*args).compile()
        losses, gradient = compiled(*args)
    same(losses, want)
    same(gradient, want_gradient)
    one = BATCH // 2 * SEQ * 8
    report = read_collectives(compiled.as_text(), mesh)
    assert sorted(e.result_bytes for e in report.select(axis="tp")) == [one, 2 * one], str(report)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=SLOW)])
@pytest.mark.slow
def test_short_floats_are_computed_in_float32(dtype, mesh_for):
    """And have optax's dtypes. A large common offset is nothing that's lost."""
    mesh = mesh_for({"tp": 8})
    logits = jnp.asarray(logits_of(dtype=np.float32) + 100, dtype)
    labels, probabilities = labels_of(), jnp.asarray(probabilities_of(), dtype)
    wide = np.asarray(logits, np.float64)
    near = 1e-5 if dtype == "float32" else 8e-3
    for target in (labels, probabilities):
        got, gradient = jax.jit(with_gradient(functools.partial(loss_parallel, mesh=mesh)))(logits, target)
        assert got.dtype == oracle(logits, target).dtype
        assert gradient.dtype == logits.dtype
        exact = wanted_of()(wide, target if target is labels else np.asarray(target, np.float64))
        np.testing.assert_allclose(np.asarray(got, np.float64), exact[0], rtol=near)
        np.testing.assert_allclose(np.asarray(gradient, np.float64), exact[1], rtol=near, atol=near)


def test_what_is_kept_for_backward(mesh_for):
    """The logits as they are, labels, and one number an example: not a matrix of probabilities."""
    mesh = mesh_for({"dp": 2, "tp": 4})
    logits = placed(mesh, jnp.asarray(logits_of(), jnp.bfloat16), "dp", None, "tp")
    labels = labels_of().astype(np.int32)
    pull = jax.eval_shape(lambda x: jax.vjp(lambda x: loss_parallel(x, labels, mesh=mesh), x)[1], logits)
    sizes = sorted((x.size * x.dtype.itemsize for x in jax.tree.leaves(pull)), reverse=True)
    assert sizes[0] == logits.size * 2
    assert sum(sizes[1:]) <= BATCH * SEQ * (8 + 4 + 4) + 64, sizes


# --- infinite and undefined numbers ------------------------------------------------------------------------


@pytest.mark.not_smoke
def test_infinite_and_undefined_logits_and_labels_that_are_no_class(mesh_for):
    """As optax has them, example by example. XLA's max of a CPU drops NaNs: the sum shows them."""
    mesh = mesh_for({"tp": 4})
    inf = np.inf
    logits = np.tile(logits_of()[0, 0], (9, 1))
    labels = np.array([5, 5, 5, 5, 5, 16, -17, -16, 5])
    logits[0, 12:] = -inf  # a whole block
    logits[1, [0, 7, 15]] = -inf
    logits[2, 5] = -inf  # the one wanted
    logits[3] = -inf  # all
    logits[4, 9] = np.nan
    logits[8, 3] = inf
    want, want_gradient = wanted_of()(logits, labels)
    got, gradient = jax.jit(with_gradient(functools.partial(loss_parallel, mesh=mesh)))(logits, labels)
    same(got, want)
    assert list(np.isnan(got)) == [i in (3, 4, 5, 6) for i in range(9)]
    assert float(got[2]) == inf == float(got[8])
    same(gradient[:3], want_gradient[:3])
    same(gradient[5:8], want_gradient[5:8])


@pytest.mark.not_smoke
def test_a_class_left_out_that_nobody_wants(mesh_for):
    """Probability 0 of a logit of -inf counts as nothing, as in the safe version of optax."""
    mesh = mesh_for({"tp": 4})
    logits, labels = logits_of(), probabilities_of()
    logits[..., 10:], labels[..., 10:] = -np.inf, 0
    run = jax.jit(with_gradient(functools.partial(loss_parallel, mesh=mesh), (0, 1)))
    got, gradients = run(logits, labels)
    want, wanted = wanted_of((0, 1))(logits[..., :10], labels[..., :10])
    same(got, want)
    for g, w in zip(gradients, wanted, strict=True):
        same(g[..., :10], w)
        assert not np.asarray(g)[..., 10:].any()


@pytest.mark.parametrize("dtype", ["int8", pytest.param("uint32", marks=SLOW)])
@pytest.mark.slow
def test_kinds_of_integers(dtype, mesh_for):
    """More classes than the labels' dtype holds; no label wraps around into another (optax's narrow ones would)."""
    mesh = mesh_for({"tp": 4})
    classes = 300
    labels = np.abs(labels_of(100)).astype(dtype)
    if dtype == "int8":
        labels[0, 0] = -1
    if dtype == "uint32":
        labels[0, 0] = 2**32 - 1
    got = loss_parallel(logits_of(classes), labels, mesh=mesh)
    want = np.array(oracle(logits_of(classes), labels.astype(np.int64)))
    if dtype == "uint32":
        want[0, 0] = np.nan
    same(got, want)


# --- classes that the axis doesn't divide ------------------------------------------------------------------


@pytest.mark.parametrize("mesh", CASES[-2:], ids=mesh_id)
@pytest.mark.parametrize("kind", ["integers", pytest.param("probabilities", marks=SLOW)])
@pytest.mark.not_smoke
def test_uneven_classes(mesh, kind):
    """13 over 4: as an array, and as a Padded in whose tail lies anything."""
    logits = logits_of(13)
    labels = labels_of(13) if kind == "integers" else probabilities_of(13)
    options = {"label_smoothing": 0.1}
    want, want_gradient = wanted_of(**options)(logits, labels)
    run = jax.jit(with_gradient(functools.partial(loss_parallel, mesh=mesh, **options)))
    with entered(mesh):
        losses, gradient = run(placed(mesh, logits, "dp"), placed(mesh, labels, "dp"))
        same(losses, want)
        same(gradient, want_gradient)
        dirty = np.full((BATCH, SEQ, 16), np.nan)
        dirty[..., :13] = logits
        padded = sk.Padded(placed(mesh, dirty, "dp", None, "tp"), logits.shape)
        if kind == "probabilities":
            labels = sk.shard_tensor(labels, P("dp", None, "tp"), mesh, uneven="pad")
        compiled = run.lower(padded, labels).compile()
        losses, gradient = compiled(padded, labels)
    same(losses, want)
    assert isinstance(gradient, sk.Padded)
    same(np.asarray(gradient.array)[..., :13], want_gradient)
    assert not np.asarray(gradient.array)[..., 13:].any()
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", None, "tp")), 3)
    assert read_collectives(compiled.as_text(), mesh).count("all_reduce", axis="tp") == 2
    assert read_collectives(compiled.as_text(), mesh).count("all_gather", axis="tp") == 0


# --- placements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=SLOW)])
@pytest.mark.parametrize("entries", [(), ("tp",), (("tp", "sp"),), ("sp", "tp")])
def test_logits_that_are_placed_otherwise(entries, axis_types, mesh_for):
    """Resharded first."""
    mesh = mesh_for({"dp": 2, "tp": 2, "sp": 2}, axis_types)
    logits, labels = logits_of(), labels_of()
    with entered(mesh):
        got = jax.jit(functools.partial(loss_parallel, mesh=mesh))(placed(mesh, logits, *entries), labels)
    same(got, oracle(logits, labels))


@pytest.mark.parametrize("axis_types", ["explicit", pytest.param("auto", marks=SLOW)])
def test_a_sequence_that_another_axis_cuts_and_classes_that_two_cut(axis_types, mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 2, "sp": 2}, axis_types)
    logits, labels = logits_of(), labels_of()
    for axis, entries in (("tp", ("dp", "sp", "tp")), (("tp", "sp"), ("dp", None, ("tp", "sp")))):
        with entered(mesh):
            args = placed(mesh, logits, *entries), placed(mesh, labels, *entries[:2])
            run = jax.jit(with_gradient(functools.partial(loss_parallel, axis=axis, mesh=mesh)))
            compiled = run.lower(*args).compile()
            losses, gradient = compiled(*args)
        want, want_gradient = wanted_of()(logits, labels)
        same(losses, want)
        same(gradient, want_gradient)
        assert losses.sharding.is_equivalent_to(NamedSharding(mesh, P(*entries[:2])), 2)
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, P(*entries)), 3)
        report = read_collectives(compiled.as_text(), mesh)
        assert report.count(axis=axis) == 2, str(report)
        assert max(e.result_bytes for e in report) <= BATCH * SEQ * 2 * 8
        assert set(report.by_kind()) == {"all_reduce"}, str(report)


@pytest.mark.not_smoke
def test_axes_of_two_types(mesh_for):
    """The batch's is Explicit, the classes' left to the compiler, and the other way around."""
    logits, labels = logits_of(), labels_of()
    want, want_gradient = wanted_of()(logits, labels)
    for types in ({"dp": "explicit"}, {"tp": "explicit"}):
        mesh = sk.make_mesh({"dp": 2, "tp": 4}, axis_types=types)
        with entered(mesh):
            args = placed(mesh, logits, "dp", None, "tp"), placed(mesh, labels, "dp")
            compiled = jax.jit(with_gradient(functools.partial(loss_parallel, mesh=mesh))).lower(*args).compile()
            losses, gradient = compiled(*args)
        same(losses, want)
        same(gradient, want_gradient)
        assert read_collectives(compiled.as_text(), mesh).by_kind() == {"all_reduce": 2}


@pytest.mark.parametrize("mesh", [CASES[-2], pytest.param(CASES[-1], marks=SLOW)], ids=mesh_id)
@pytest.mark.not_smoke
def test_eagerly(mesh):
    """The mesh is read from the logits."""
    logits, labels = logits_of(), labels_of()
    with entered(mesh):
        got, gradient = with_gradient(loss_parallel)(placed(mesh, logits, "dp", None, "tp"), labels)
    want, want_gradient = wanted_of()(logits, labels)
    same(got, want)
    same(gradient, want_gradient)
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", None, "tp")), 3)


@pytest.mark.not_smoke
def test_one_example_and_plain_arrays(mesh_for):
    mesh = mesh_for({"tp": 4})
    same(loss_parallel(logits_of()[0, 0], 3, mesh=mesh), oracle(logits_of()[0, 0], jnp.array(3)))
    same(
        loss_parallel(logits_of()[0].tolist(), labels_of()[0].tolist(), mesh=mesh), oracle(logits_of(), labels_of())[0]
    )


# --- other transformations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["integers", pytest.param("probabilities", marks=SLOW)])
@pytest.mark.not_smoke
def test_forward_mode_and_second_derivatives(kind, mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 4})
    logits, tangent = logits_of(), logits_of(seed=7)
    labels = labels_of() if kind == "integers" else probabilities_of()

    def everything(fun):
        def run(x, v):
            def loss(x):
                return fun(x, labels, z_loss=0.01)

            def gradient(x):
                return jax.grad(lambda x: weighed(loss(x) ** 2)[0])(x)

            first = jax.jvp(loss, (x,), (v,))[1]
            forward = jax.jvp(gradient, (x,), (v,))[1]
            return first, forward, jax.grad(lambda x: jnp.sum(gradient(x) * v))(x)

        return run

    got = jax.jit(everything(functools.partial(loss_parallel, mesh=mesh)))(
        placed(mesh, logits, "dp", None, "tp"), tangent
    )
    for a, b in zip(got, jax.jit(everything(oracle))(logits, tangent), strict=True):
        same(a, b)


@pytest.mark.parametrize("mesh", [CASES[-2], pytest.param(CASES[-1], marks=SLOW)], ids=mesh_id)
@pytest.mark.slow
def test_vmap(mesh):
    """Over a further dim of both, and of the logits alone; differentiated within and around."""
    logits = np.stack([logits_of(seed=s) for s in range(3)], 1)
    labels = np.stack([labels_of(seed=s) for s in range(3)], 1)
    with entered(mesh):
        x = placed(mesh, logits, "dp", None, None, "tp")
        fun = functools.partial(loss_parallel, mesh=mesh)
        both = jax.jit(with_gradient(jax.vmap(fun, (1, 1))))(x, placed(mesh, labels, "dp"))
        alone = jax.jit(jax.vmap(with_gradient(lambda x: fun(x, labels[:, 0])), 1))(x)
    for got, wanted in (
        (both, jax.jit(with_gradient(jax.vmap(oracle, (1, 1))))(logits, labels)),
        (alone, jax.jit(jax.vmap(with_gradient(lambda x: oracle(x, labels[:, 0])), 1))(logits)),
    ):
        for a, b in zip(got, wanted, strict=True):
            same(a, b)


# --- manual regions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=SLOW)])
@pytest.mark.parametrize("manual", [{"tp"}, pytest.param({"dp", "tp"}, marks=SLOW)], ids=["tp", "all"])
def test_inside_a_manual_region(manual, axis_types, mesh_for):
    """Blocks of logits in; gradients are each block's own, without communication."""
    mesh = mesh_for({"dp": 2, "tp": 4}, axis_types)
    logits, labels = logits_of(), labels_of()
    batch = "dp" if "dp" in manual else None
    entries = P(batch, None, "tp")

    def local(block, labels):
        pull = jax.vjp(lambda x: loss_parallel(x, labels, z_loss=0.01), block)
        return pull[0], pull[1](jnp.ones_like(pull[0]))[0]

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(entries, P(batch)), out_specs=(P(batch), entries), axis_names=manual
    )
    with entered(mesh):
        args = placed(mesh, logits, "dp", None, "tp"), placed(mesh, labels, "dp")
        compiled = jax.jit(run).lower(*args).compile()
        losses, gradient = compiled(*args)
    same(losses, jax.jit(functools.partial(oracle, z_loss=0.01))(logits, labels))
    same(gradient, jax.jit(jax.grad(lambda x: oracle(x, labels, z_loss=0.01).sum()))(logits))
    report = read_collectives(compiled.as_text(), mesh)
    assert report.count(axis="tp") == report.count("all_reduce") == 2, str(report)
    if axis_types == "auto":  # JAX takes what Explicit axes cut apart around any region that leaves them out
        assert report.by_kind() == {"all_reduce": 2}


def test_inside_a_manual_region_a_padded_says_how_many_classes_there_are(mesh_for):
    mesh = mesh_for({"tp": 4})
    logits, labels = logits_of(13), labels_of(13)
    padded = sk.shard_tensor(logits, P(None, None, "tp"), mesh, uneven="pad")

    def local(block):
        return loss_parallel(sk.Padded(block, logits.shape), labels)

    run = jax.shard_map(local, mesh=mesh, in_specs=P(None, None, "tp"), out_specs=P())
    same(jax.jit(run)(padded.array), oracle(logits, labels))


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=SLOW)])
@pytest.mark.parametrize("kind", ["integers", pytest.param("probabilities", marks=SLOW)])
def test_nested_in_value_and_grad(kind, axis_types, mesh_for):
    """Each device group on its part of the batch: backward keeps nothing but the region's operands."""
    mesh = mesh_for({"dp": 2, "tp": 4}, axis_types)
    x, w = logits_of(8), np.random.default_rng(5).normal(size=(8, CLASSES))
    labels = labels_of() if kind == "integers" else probabilities_of()

    def loss(w, x, labels, fun):
        return jnp.mean(fun(x @ w, labels))

    def step(w, x, labels):
        fun = functools.partial(loss, fun=functools.partial(loss_parallel, axis="tp"))
        cut = {"tp": sk.Shard(1)}
        value, gradient = sk.value_and_grad(fun, batch_axes="dp", mesh=mesh, param_placements=cut)(w, x, labels)
        return value, gradient.reduce()

    with entered(mesh):
        label_entries = ("dp",) if kind == "integers" else ("dp", None, "tp")
        args = placed(mesh, w, None, "tp"), placed(mesh, x, "dp"), placed(mesh, labels, *label_entries)
        compiled = jax.jit(step).lower(*args).compile()
        value, gradient = compiled(*args)
    want, want_gradient = jax.jit(jax.value_and_grad(functools.partial(loss, fun=oracle)))(w, x, labels)
    same(value, want)
    same(gradient, want_gradient)
    report = read_collectives(compiled.as_text(), mesh)
    assert report.count("all_reduce", axis="tp") == 2, str(report)
    if axis_types == "auto":  # JAX takes what Explicit axes cut apart around any region that leaves them out
        assert report.count(axis="tp") == 2, str(report)


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": np.zeros((4, 6, 16), int)}, TypeError, "logits must be real floats, got int64"),
        ({"logits": np.zeros((4, 6, 16), complex)}, TypeError, "logits must be real floats, got complex128"),
        ({"logits": 1.0, "labels": 0}, ValueError, "logits must be [..., classes], got a scalar"),
        ({"logits": np.zeros((4, 6, 0))}, ValueError, "dim 2 of shape (4, 6, 0) is empty"),
        ({"labels": np.zeros((4, 5), int)}, ValueError, "labels (4, 5) must be of the shape of logits without classes"),
        ({"labels": np.zeros((4, 6, 15))}, ValueError, "labels (4, 6, 15) must be of the shape of logits (4, 6, 16)"),
        ({"labels": np.zeros((4, 6))}, TypeError, "must be integers, got float64; probabilities have the shape"),
        ({"labels": np.zeros((4, 6, 16), complex)}, TypeError, "real probabilities or integers, got complex128"),
        ({"axis": "sp"}, ValueError, "axis='sp' names ['sp']; the mesh has ('tp',)"),
        ({"axis": ("tp", "tp")}, ValueError, "names an axis twice"),
        ({"axis": 2}, TypeError, "axis must be the name of a mesh axis, or a tuple of names, got 2"),
        ({"where": np.zeros((4, 6))}, TypeError, "where must be bools, got float64"),
        ({"where": np.zeros((4, 6, 16), bool)}, ValueError, "must have their shape (4, 6), got (4, 6, 16); to leave"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing must be at least 0 and below 1, got 1.0"),
        ({"z_loss": -1e-4}, ValueError, "z_loss must be at least 0, and finite, got -0.0001"),
        (
            {"logits": sk.Padded(jnp.zeros((4, 6, 16)), (3, 6, 16))},
            ValueError,
            "dim 0 of logits holds 4 elements for 3 of shape (3, 6, 16); only classes",
        ),
    ],
)
def test_bad_input_is_named(changes, error, message, mesh_for):
    given = {"logits": logits_of(), "labels": labels_of(), "mesh": mesh_for({"tp": 4})} | changes
    with pytest.raises(error) as caught:
        loss_parallel(given.pop("logits"), given.pop("labels"), **given)
    assert message in str(caught.value)
    assert str(caught.value).startswith("loss_parallel: ")


def test_other_bad_calls(mesh_for):
    with pytest.raises(ValueError, match="loss_parallel found no mesh"):
        loss_parallel(logits_of(), labels_of())
    mesh = mesh_for({"tp": 4})
    with pytest.raises(TypeError, match="z_loss must be a number that's known when tracing"):
        jax.jit(lambda z: loss_parallel(logits_of(), labels_of(), mesh=mesh, z_loss=z))(0.1)
    mesh = mesh_for({"dp": 2, "tp": 4}, "explicit")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"classes are cut over Explicit mesh axes \['dp'\] that"):
        loss_parallel(placed(mesh, logits_of(), None, None, ("dp", "tp")), labels_of())
    with pytest.raises(ValueError, match="only some are manual here"):
        jax.shard_map(
            lambda x: loss_parallel(x, labels_of(), axis=("dp", "tp")),
            mesh=mesh_for({"dp": 2, "tp": 4}),
            in_specs=P(None, None, "tp"),
            out_specs=P(),
            axis_names={"tp"},
        )(logits_of())
