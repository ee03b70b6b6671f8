"""Lookups and scores of a vocabulary that devices share out, against `jnp.take` and a plain product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._compat import varying_axes
from shardkit.inspect.collectives import read_collectives
from shardkit.parallel.tensor.loss import loss_parallel
from shardkit.parallel.tensor.vocabulary import vocabulary_logits, vocabulary_lookup
from shardkit.testing import entered, mesh_id, meshes

BATCH, SEQ, VOCABULARY, FEATURES = 4, 8, 16, 6
CASES = [m for m in meshes(("dp", "tp")) if dict(m.shape) != {"dp": 4, "tp": 2}]
FAST = [m for m in CASES if dict(m.shape) in ({"dp": 1, "tp": 1}, {"dp": 2, "tp": 4})]
SLOW = pytest.mark.slow
EVERY = [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in CASES]
RESULT = BATCH * SEQ * FEATURES * 8  # bytes of all activations


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def ids_of(seed=1):
    """Negative ones too."""
    return np.random.default_rng(seed).integers(-VOCABULARY, VOCABULARY, (BATCH, SEQ))


def placed(mesh, x, *entries):
    return jax.device_put(x, NamedSharding(mesh, P(*entries)))


def lies(x, mesh, *entries):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, P(*entries)), x.ndim)


def with_gradients(fun, argnums=0):
    """(result, gradients)."""

    def run(*args):
        def loss(*args):
            out = fun(*args)
            return jnp.sum(out * random(*out.shape, seed=9)), out

        (_, out), grads = jax.value_and_grad(loss, argnums, has_aux=True)(*args)
        return out, grads

    return run


def same(got, wanted, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=tolerance, atol=tolerance)


def over(report, axis="tp"):
    """(kind, bytes) of what travels over one axis."""
    return sorted((e.kind, e.result_bytes) for e in report.select(axis=axis))


def compile_and_run(mesh, fun, *args):
    with entered(mesh):
        compiled = jax.jit(fun).lower(*args).compile()
        return compiled(*args), read_collectives(compiled.as_text(), mesh)


# --- lookup --------------------------------------------------------------------------------------------------


@jax.jit
def taken(table, ids):
    return with_gradients(lambda table: jnp.take(table, ids, axis=0))(table)


@pytest.mark.parametrize("scatter_dim", [None, 1])
@pytest.mark.parametrize("mesh", EVERY, ids=mesh_id)
def test_lookup(mesh, scatter_dim):
    """One all-reduce of the result and nothing backward; or one reduce-scatter, and one all-gather backward."""
    table, ids = random(VOCABULARY, FEATURES), ids_of()
    fun = functools.partial(vocabulary_lookup, mesh=mesh, scatter_dim=scatter_dim, batch_axes="dp")
    args = placed(mesh, table, "tp"), placed(mesh, ids, "dp")
    (out, gradient), report = compile_and_run(mesh, with_gradients(fun), *args)
    want, want_gradient = taken(table, ids)
    same(out, want, 0)
    same(gradient, want_gradient)
    assert lies(out, mesh, "dp", None if scatter_dim is None else "tp")
    assert lies(gradient, mesh, "tp")
    dp, tp = mesh.shape["dp"], mesh.shape["tp"]
    if tp == 1:
        assert over(report) == []
    elif scatter_dim is None:
        assert over(report) == [("all_reduce", RESULT // dp)], str(report)
    else:
        # (The compiler gathers the cotangent's parts, or computes it whole if it can: random numbers are constants.)
        assert ("reduce_scatter", RESULT // dp // tp) in over(report), str(report)
        assert set(over(report)) <= {("reduce_scatter", RESULT // dp // tp), ("all_gather", RESULT // dp)}
    others = [e for e in report if "tp" not in e.axes]
    assert all(e.kind == "all_reduce" for e in others), str(report)  # of the gradient, over the batch


def test_scattered_lookup_gathers_its_cotangent(mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 4})
    table, ids = random(VOCABULARY, FEATURES), ids_of()

    def loss(table, ids):
        return jnp.sum(jnp.sin(vocabulary_lookup(table, ids, mesh=mesh, scatter_dim=1, batch_axes="dp")))

    args = placed(mesh, table, "tp"), placed(mesh, ids, "dp")
    got, report = compile_and_run(mesh, jax.grad(loss), *args)
    same(got, jax.grad(lambda t: jnp.sum(jnp.sin(jnp.take(t, ids, axis=0))))(table))
    assert over(report) == [("all_gather", RESULT // 2), ("reduce_scatter", RESULT // 8)], str(report)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", pytest.param("float32", marks=pytest.mark.slow), pytest.param("complex128", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("scatter_dim", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_ids_that_are_no_entry(dtype, scatter_dim, mesh_for):
    """NaN, as `jnp.take` fills; and gradients go nowhere."""
    mesh = mesh_for({"tp": 4})
    table = jnp.asarray(random(VOCABULARY, 4), dtype)
    ids = np.array([0, 15, 16, 2**31 - 1, -1, -16, -17, -(2**31)])

    def both(fun):
        def run(table):
            out, pull = jax.vjp(fun, table)
            return out, pull(jnp.ones_like(out))[0]

        return jax.jit(run)(table)

    got = both(lambda t: vocabulary_lookup(t, ids, mesh=mesh, scatter_dim=scatter_dim))
    for a, b in zip(got, both(lambda t: jnp.take(t, ids, axis=0)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(*(np.real(np.asarray(x, complex)) for x in (a, b)))
    assert np.isnan(np.asarray(got[0], complex)).any(-1).tolist() == [i in (2, 3, 6, 7) for i in range(8)]


@pytest.mark.parametrize("dtype", ["uint32", "int8"])
@pytest.mark.slow
def test_kinds_of_integers(dtype, mesh_for):
    """More rows than the ids' dtype holds, and none that wraps around."""
    table = random(300, 2)
    ids = np.array([0, 5, 99, 127 if dtype == "int8" else 255]).astype(dtype)
    same(vocabulary_lookup(table, ids, mesh=mesh_for({"tp": 4})), jnp.take(table, ids, axis=0), 0)
    if dtype == "uint32":
        assert np.isnan(vocabulary_lookup(table, np.array([2**32 - 1], dtype), mesh=mesh_for({"tp": 4}))).all()


@pytest.mark.not_smoke
def test_what_flax_embeds_with():
    """The layers' own lookups, ids that are no entry included: what is to be equalled."""
    mesh = sk.make_mesh({"tp": 4})
    ids = np.array([[3, -1, 16], [-16, 7, -17]])
    layer = nnx.Embed(VOCABULARY, FEATURES, rngs=nnx.Rngs(0))
    got = vocabulary_lookup(layer.embedding[...], ids, mesh=mesh)
    np.testing.assert_array_equal(got, layer(ids))
    np.testing.assert_array_equal(
        got, linen.Embed(VOCABULARY, FEATURES).apply({"params": {"embedding": layer.embedding[...]}}, ids)
    )
    query = random(2, FEATURES).astype(np.float32)
    same(vocabulary_logits(query, layer.embedding[...], mesh=mesh), layer.attend(query), 1e-6)


@pytest.mark.not_smoke
def test_a_batch_that_its_axis_does_not_divide_is_left_to_the_compiler(mesh_for):
    table, ids = random(VOCABULARY, FEATURES), ids_of()[:3]
    run = functools.partial(vocabulary_lookup, mesh=mesh_for({"dp": 2, "tp": 4}), batch_axes="dp")
    same(run(table, ids), table[ids])
    same(run(table, ids[0], scatter_dim=0), table[ids[0]])
    same(run(table, 3), table[3])


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=SLOW)])
@pytest.mark.slow
def test_operands_that_are_placed_otherwise(axis_types, mesh_for):
    """Whole tables, ids that the axis cuts, and a vocabulary that two axes cut."""
    mesh = mesh_for({"dp": 2, "tp": 2, "sp": 2}, axis_types)
    table, ids = random(VOCABULARY, FEATURES), ids_of()
    for axis, table_entries, ids_entries in (
        ("tp", (), ("tp",)),
        ("tp", (None, "tp"), ("dp", "sp")),
        ("tp", ("tp", "dp"), ("dp",)),  # features cut over the batch's axis are put together
        (("sp", "tp"), (("sp", "tp"),), ("dp",)),
    ):
        with entered(mesh):
            run = jax.jit(functools.partial(vocabulary_lookup, axis=axis, mesh=mesh))
            same(
                run(placed(mesh, table, *table_entries), placed(mesh, ids, *ids_entries)), jnp.take(table, ids, axis=0)
            )


def test_features_that_an_explicit_axis_cuts_stay_cut(mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 2, "sp": 2}, "explicit")
    table, ids = random(VOCABULARY, FEATURES), ids_of()
    args = placed(mesh, table, "tp", "sp"), placed(mesh, ids, "dp")
    (out, gradient), report = compile_and_run(mesh, with_gradients(vocabulary_lookup), *args)
    want, want_gradient = taken(table, ids)
    same(out, want)
    same(gradient, want_gradient)
    assert lies(out, mesh, "dp", None, "sp")
    assert lies(gradient, mesh, "tp", "sp")
    assert over(report) == [("all_reduce", RESULT // 4)], str(report)


# --- logits --------------------------------------------------------------------------------------------------


@jax.jit
def product(query, table):
    return with_gradients(lambda q, t: q @ t.T, (0, 1))(query, table)


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("mesh", EVERY, ids=mesh_id)
@pytest.mark.every(2)
def test_logits(mesh, sequence_dim):
    """Backward one all-reduce of the query's cotangent; or an all-gather forward, a reduce-scatter backward."""
    query, table = random(BATCH, SEQ, FEATURES), random(VOCABULARY, FEATURES, seed=1)
    entries = ("dp", None if sequence_dim is None else "tp")
    fun = functools.partial(vocabulary_logits, mesh=mesh, sequence_dim=sequence_dim, batch_axes="dp")
    args = placed(mesh, query, *entries), placed(mesh, table, "tp")
    (out, gradients), report = compile_and_run(mesh, with_gradients(fun, (0, 1)), *args)
    want, wanted = product(query, table)
    same(out, want)
    for got, goal in zip(gradients, wanted, strict=True):
        same(got, goal)
    assert lies(out, mesh, "dp", None, "tp")
    assert lies(gradients[0], mesh, *entries) or mesh.shape["tp"] == 1  # (all is left to the compiler then)
    assert lies(gradients[1], mesh, "tp")
    dp, tp = mesh.shape["dp"], mesh.shape["tp"]
    if tp == 1:
        assert over(report) == []
    elif sequence_dim is None:
        assert over(report) == [("all_reduce", RESULT // dp)], str(report)
    else:
        assert over(report) == [("all_gather", RESULT // dp), ("reduce_scatter", RESULT // dp // tp)], str(report)
    assert all(e.kind == "all_reduce" for e in report if "tp" not in e.axes), str(report)


@pytest.mark.parametrize("axis_types", ["explicit", pytest.param("auto", marks=SLOW)])
def test_queries_that_are_placed_otherwise(axis_types, mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 2, "sp": 2}, axis_types)
    query, table = random(BATCH, SEQ, FEATURES), random(VOCABULARY, FEATURES, seed=1)
    for dim, query_entries, table_entries in (
        (None, ("dp", "sp", "tp"), ("tp", "dp")),
        (1, ("dp", None), ()),
        (-2, ("tp",), ("tp",)),
    ):
        with entered(mesh):
            args = placed(mesh, query, *query_entries), placed(mesh, table, *table_entries)
            same(jax.jit(functools.partial(vocabulary_logits, mesh=mesh, sequence_dim=dim))(*args), query @ table.T)


def test_precision_of_logits(mesh_for):
    """Operands are promoted as jnp.dot does it, and the result's dtype may be asked for."""
    mesh = mesh_for({"tp": 4})
    query, table = jnp.asarray(random(2, FEATURES), jnp.bfloat16), jnp.asarray(random(VOCABULARY, FEATURES), "float32")
    assert vocabulary_logits(query, table, mesh=mesh).dtype == jnp.float32
    short = table.astype(jnp.bfloat16)
    assert vocabulary_logits(query, short, mesh=mesh).dtype == jnp.bfloat16
    got = vocabulary_logits(query, short, mesh=mesh, preferred_element_type=jnp.float32, precision="highest")
    assert got.dtype == jnp.float32
    same(got, np.asarray(query, np.float32) @ np.asarray(short, np.float32).T, 1e-5)


# --- other transformations and regions -----------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [CASES[-2], pytest.param(CASES[-1], marks=SLOW)], ids=mesh_id)
@pytest.mark.not_smoke
def test_eagerly_and_with_forward_mode_and_vmap(mesh):
    table, ids, tangent = random(VOCABULARY, FEATURES), ids_of(), random(VOCABULARY, FEATURES, seed=5)
    with entered(mesh):
        held, held_ids = placed(mesh, table, "tp"), placed(mesh, ids, "dp")
        out, gradient = with_gradients(vocabulary_lookup)(held, held_ids)
        assert lies(out, mesh, "dp")
        assert lies(gradient, mesh, "tp")

        @jax.jit
        def others(held, ids, tangent):
            fun = functools.partial(vocabulary_lookup, ids=ids, mesh=mesh)
            moved = jax.jvp(fun, (held,), (tangent,))[1]
            rows = jax.vmap(functools.partial(vocabulary_lookup, mesh=mesh), (None, 1), 1)(held, ids)
            scores = jax.vmap(functools.partial(vocabulary_logits, mesh=mesh), (1, None), 1)(moved, held)
            return moved, rows, scores

        moved, rows, scores = others(held, held_ids, placed(mesh, tangent, "tp"))
    want, want_gradient = taken(table, ids)
    same(out, want)
    same(gradient, want_gradient)
    same(moved, tangent[ids])
    same(rows, want)
    same(scores, tangent[ids] @ table.T)


@pytest.mark.parametrize("manual", [{"dp", "tp"}, pytest.param({"tp"}, marks=pytest.mark.slow)], ids=["all", "tp"])
@pytest.mark.not_smoke
def test_inside_a_manual_region(manual, mesh_for):
    """Blocks in and out, scattered between the two."""
    mesh = mesh_for({"dp": 2, "tp": 4})
    table, ids = random(VOCABULARY, FEATURES), ids_of()
    batch = "dp" if "dp" in manual else None

    def local(block, ids):
        def scores(block):
            rows = vocabulary_lookup(block, ids, scatter_dim=1)
            assert rows.shape[1] == SEQ // 4
            return vocabulary_logits(jnp.sin(rows), block, sequence_dim=1)

        out, pull = jax.vjp(scores, block)
        gradient = pull(jnp.ones_like(out))[0]
        return out, jax.lax.psum(gradient, "dp") if "dp" in varying_axes(gradient) else gradient

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("tp"), P(batch)),
        out_specs=(P(batch, None, "tp"), P("tp")),
        axis_names=manual,
    )
    (out, gradient), report = compile_and_run(mesh, run, placed(mesh, table, "tp"), placed(mesh, ids, "dp"))

    def whole(table):
        return jnp.sin(table[ids]) @ table.T

    same(out, whole(table))
    same(gradient, jax.grad(lambda t: whole(t).sum())(table))
    kinds = [kind for kind, _ in over(report)]
    assert kinds == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"], str(report)


# --- a language model's two ends -----------------------------------------------------------------------------


def model(params, ids, labels, lookup, scores, loss):
    x = lookup(params["table"], ids)
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean(loss(scores(x, params["table"]), labels))


def plainly(params, ids, labels):
    return model(
        params,
        ids,
        labels,
        lambda t, i: jnp.take(t, i, axis=0),
        lambda x, t: x @ t.T,
        optax.softmax_cross_entropy_with_integer_labels,
    )


def shared_out(mesh, sequence_dim, batch_axes="dp"):
    return functools.partial(
        model,
        lookup=functools.partial(vocabulary_lookup, mesh=mesh, scatter_dim=sequence_dim, batch_axes=batch_axes),
        scores=functools.partial(vocabulary_logits, mesh=mesh, sequence_dim=sequence_dim, batch_axes=batch_axes),
        loss=functools.partial(loss_parallel, mesh=mesh),
    )


def parameters():
    return {
        "table": random(VOCABULARY, FEATURES),
        "up": random(FEATURES, 5, seed=1),
        "down": random(5, FEATURES, seed=2),
    }


@pytest.mark.parametrize("mesh", [CASES[-2], pytest.param(CASES[-1], marks=SLOW)], ids=mesh_id)
@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.not_smoke
def test_a_language_model(mesh, sequence_dim):
    """A table that's looked up in and scored with: no gather of it, nor of logits."""
    params, ids, labels = parameters(), ids_of(), ids_of(2)
    held = {name: placed(mesh, x, *(["tp"] if name == "table" else [])) for name, x in params.items()}
    step = jax.value_and_grad(shared_out(mesh, sequence_dim))
    (value, grads), report = compile_and_run(mesh, step, held, placed(mesh, ids, "dp"), placed(mesh, labels, "dp"))
    want, wanted = jax.jit(jax.value_and_grad(plainly))(params, ids, labels)
    same(value, want)
    for name in params:
        same(grads[name], wanted[name])
    assert lies(grads["table"], mesh, "tp")
    one = BATCH // 2 * SEQ * 8
    tp = [e for e in report if e.axes == ("tp",)]
    sums = sorted(e.result_bytes for e in tp if e.kind == "all_reduce")
    if sequence_dim is None:
        assert report.by_kind().keys() == {"all_reduce"}, str(report)
        assert sums == sorted([one, 2 * one, one * FEATURES, one * FEATURES]), str(report)
    else:
        assert {one, 2 * one} <= set(sums) and max(sums) < one * FEATURES, str(report)
        kinds = sorted((e.kind, e.result_bytes) for e in report if e.kind != "all_reduce")
        whole, part = one * FEATURES, one * FEATURES // 4
        assert kinds == [("all_gather", whole)] * 2 + [("reduce_scatter", part)] * 2, str(report)


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sequence_dim", [1, pytest.param(None, marks=SLOW)])
@pytest.mark.not_smoke
def test_a_language_model_nested_in_value_and_grad(axis_types, sequence_dim, mesh_for):
    """The batch's axis is manual around it all."""
    mesh = mesh_for({"dp": 2, "tp": 4}, axis_types)
    params, ids, labels = parameters(), ids_of(), ids_of(2)
    cuts = {"table": {"tp": sk.Shard(0)}, "up": {}, "down": {}}

    def step(params, ids, labels):
        run = sk.value_and_grad(shared_out(None, sequence_dim, ()), batch_axes="dp", mesh=mesh, param_placements=cuts)
        value, grads = run(params, ids, labels)
        return value, sk.reduce_gradients(grads, fuse="all_reduce", axis="dp")

    with entered(mesh):
        held = {name: placed(mesh, x, *(["tp"] if name == "table" else [])) for name, x in params.items()}
    (value, grads), report = compile_and_run(mesh, step, held, placed(mesh, ids, "dp"), placed(mesh, labels, "dp"))
    want, wanted = jax.jit(jax.value_and_grad(plainly))(params, ids, labels)
    same(value, want)
    for name in params:
        same(grads[name], wanted[name])
    if axis_types == "auto":  # JAX takes what Explicit axes cut apart around any region that leaves them out
        kinds = [e.kind for e in report if e.axes == ("tp",) and e.kind != "all_reduce"]
        assert kinds.count("all_gather") == kinds.count("reduce_scatter") == (0 if sequence_dim is None else 2), str(
            report
        )


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"table": np.ones((13, 6))},
            ValueError,
            "a vocabulary of 13 can't be cut over mesh axis 'tp' of size 4; make",
        ),
        ({"table": np.ones(16)}, ValueError, "table must be [vocabulary, features], got shape (16,)"),
        ({"table": np.ones((16, 6), int)}, TypeError, "table must be float or complex, got int64"),
        ({"table": sk.Padded(jnp.ones((16, 6)), (13, 6))}, TypeError, "a table is an array"),
        ({"axis": "sp"}, ValueError, "axis='sp' names ['sp']; the mesh has ('tp',)"),
        ({"axis": None}, TypeError, "axis must be the name of a mesh axis, or a tuple of names, got None"),
    ],
)
@pytest.mark.parametrize("what", ["vocabulary_lookup", "vocabulary_logits"])
def test_bad_tables_and_axes_are_named(what, changes, error, message, mesh_for):
    given = {"table": random(VOCABULARY, FEATURES), "mesh": mesh_for({"tp": 4})} | changes
    table = given.pop("table")
    lookup, logits = (
        (lambda t, **k: vocabulary_lookup(t, ids_of(), **k)),
        functools.partial(vocabulary_logits, np.ones(6)),
    )
    with pytest.raises(error) as caught:
        (lookup if what == "vocabulary_lookup" else logits)(table, **given)
    assert str(caught.value).startswith(f"{what}: {message}")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": np.ones(3)}, TypeError, "ids must be integers, got float64"),
        ({"scatter_dim": 3}, ValueError, "scatter_dim=3, but the result has 3 dims"),
        ({"scatter_dim": "S"}, TypeError, "scatter_dim is the number of a dim, got 'S'"),
        ({"batch_axes": ("dp",)}, ValueError, "batch_axes=('dp',) names ['dp']; the mesh has ('tp',)"),
        ({"batch_axes": "tp"}, ValueError, "batch_axes='tp' names ['tp'], which cut the vocabulary (axis='tp')"),
        ({"scatter_dim": -1}, ValueError, "dim 2 of the result, (4, 8, 6), has 6 elements, which mesh axis 'tp' of"),
    ],
)
def test_bad_lookups_are_named(changes, error, message, mesh_for):
    given = {"ids": ids_of(), "mesh": mesh_for({"tp": 4})} | changes
    with pytest.raises(error) as caught:
        vocabulary_lookup(random(VOCABULARY, FEATURES), given.pop("ids"), **given)
    assert str(caught.value).startswith(f"vocabulary_lookup: {message}")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": np.ones((4, 5))}, ValueError, "query (4, 5) must end with the table's 6 features ((16, 6))"),
        ({"query": 1.0}, ValueError, "query () must end with the table's 6 features"),
        ({"sequence_dim": 2}, ValueError, "sequence_dim=2 is the dim of features; it names another dim of query"),
        ({"sequence_dim": -4}, ValueError, "sequence_dim=-4, but query has 3 dims"),
        ({"sequence_dim": 1.0}, TypeError, "sequence_dim is the number of a dim, got 1.0"),
        ({"query": np.ones((4, 7, 6)), "sequence_dim": 1}, ValueError, "dim 1 of query, (4, 7, 6), has 7 elements"),
    ],
)
def test_bad_queries_are_named(changes, error, message, mesh_for):
    given = {"query": random(BATCH, SEQ, FEATURES), "mesh": mesh_for({"tp": 2})} | changes
    with pytest.raises(error) as caught:
        vocabulary_logits(given.pop("query"), random(VOCABULARY, FEATURES), **given)
    assert str(caught.value).startswith(f"vocabulary_logits: {message}")


def test_a_dim_that_another_explicit_axis_cuts(mesh_for):
    mesh = mesh_for({"dp": 2, "tp": 4}, "explicit")
    table = random(VOCABULARY, FEATURES)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"dim 0 of the result is cut over Explicit mesh axes \('dp',\)"):
            vocabulary_lookup(table, placed(mesh, ids_of(), "dp"), scatter_dim=0)
        with pytest.raises(ValueError, match=r"dim 0 of query is cut over Explicit mesh axes \('dp',\)"):
            vocabulary_logits(placed(mesh, random(BATCH, SEQ, FEATURES), "dp"), table, sequence_dim=0)


def test_no_mesh():
    with pytest.raises(ValueError, match="vocabulary_lookup found no mesh"):
        vocabulary_lookup(random(VOCABULARY, FEATURES), ids_of())
    with pytest.raises(ValueError, match="vocabulary_logits found no mesh"):
        vocabulary_logits(random(BATCH, FEATURES), random(VOCABULARY, FEATURES))
