"""Gather, the scatters, dynamic slices: windows whose places are data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.rule_cases import check, found, placed

SIZES = {"dp": 2, "tp": 4}
rng = np.random.default_rng(0)
TABLE = rng.normal(size=(12, 8))
IDS = np.array([[0], [11], [3], [-1], [12], [5], [3], [-20]])  # below and beyond; one twice
ROWS = rng.normal(size=(8, 8))
LOGITS = rng.normal(size=(8, 12))
LABELS = np.array([3, 0, 11, 7, -2, 12, 5, 5]).reshape(8, 1, 1)

EMBED = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
PICK = lax.GatherDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))
ADD = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
PUT = lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,))


def wanted(ways, operands, result):
    """Whether one of the strategies needs the operands so, and gives the result so."""
    return any(w.operands[: len(operands)] == tuple(operands) and w.results[0] == result for w in ways)


@functools.partial(jax.jit, static_argnums=3)  # jit: a start that's known would be checked at once
def sliced(x, i, j, size):
    return lax.dynamic_slice(x, (i, j), size, allow_negative_indices=False)


@jax.jit
def replaced(x, new, i, j):
    return lax.dynamic_update_slice(x, new, (i, j), allow_negative_indices=False)


def scattered(scatter, numbers, mode, **hints):
    return lambda target, ids, new: scatter(target, ids, new, numbers, mode=mode, **hints)


def lookup(mode, fill=None):
    return lambda table, ids: lax.gather(table, ids, EMBED, (1, table.shape[1]), mode=mode, fill_value=fill)


@pytest.mark.parametrize(("mode", "fill"), [("clip", None), ("fill", None), ("fill", 7.0)])
def test_lookup_in_a_table_cut_by_vocabulary(mode, fill):
    places = [placed("tp", None), placed("dp", None)]
    ways = check(lookup(mode, fill), (TABLE, IDS), places, SIZES)
    assert wanted(ways, places, placed("dp", None, partial=("tp",)))
    (way,) = (w for w in ways if list(w.operands) == places)
    assert way.why == "masked lookup" and not way.traffic


@pytest.mark.not_smoke
def test_lookup_in_other_dtypes():
    places = [placed("tp", "dp"), placed(None, None)]
    for table, kind in ((np.arange(96).reshape(12, 8), "sum"), (TABLE > 0, "any")):
        ways = check(lookup("fill"), (table, IDS), places, SIZES)
        assert wanted(ways, places, placed(None, "dp", partial=("tp",), reduce=kind))


@pytest.mark.not_smoke
def test_lookup_where_blocks_are_padded():
    places = [placed(("tp", "dp"), None), placed(None, None)]
    ids = IDS.astype(np.int8)
    for mode in ("clip", "fill"):
        ways = check(lookup(mode), (TABLE[:11], ids), places, SIZES)
        assert wanted(ways, places, placed(None, None, partial=("dp", "tp")))


def test_lookup_by_narrow_and_unsigned_indices():
    places = [placed("tp", None), placed(None, None)]
    tall = np.arange(200.0)[:, None]
    check(lookup("clip"), (tall, np.array([[-128], [127], [5]], np.int8)), places, SIZES)
    check(lookup("fill"), (TABLE, IDS.astype(np.uint64)), places, SIZES)


@pytest.mark.not_smoke
def test_lookup_of_contributions():
    table, ids = placed("dp", None, partial=("tp",)), placed(None, None)
    result = placed(None, None, partial=("dp", "tp"))
    for mode, fill in (("clip", None), ("fill", None)):
        assert wanted(check(lookup(mode, fill), (TABLE, IDS), [table, ids], SIZES), (table, ids), result)
    # A fill value would be added up.
    _, _, ways = found(lookup("fill", 7.0), (TABLE, IDS), [table, ids], SIZES)
    assert ways and not any(w.operands[0].partial for w in ways)
    kept = placed("dp", None, partial=("tp",), reduce="max")
    assert wanted(
        check(lookup("fill", 7.0), (TABLE, IDS), [kept, ids], SIZES),
        (placed(None, None, partial=("tp",), reduce="max"),),
        placed(None, None, partial=("tp",), reduce="max"),
    )


@pytest.mark.not_smoke
def test_label_of_logits_cut_by_class():
    places = [placed("dp", "tp"), placed("dp", None, None)]
    for mode in ("fill", "promise_in_bounds"):
        ways = check(lambda x, i, m=mode: lax.gather(x, i, PICK, (1, 1), mode=m), (LOGITS, LABELS), places, SIZES)
        assert wanted(ways, places, placed("dp", None, partial=("tp",)))


def test_points_of_two_cut_dims():
    numbers = lax.GatherDimensionNumbers((), (0, 1), (1, 0))
    at = np.array([[0, 0], [7, 11], [3, 4], [8, 1], [-1, 2]])
    places = [placed("tp", "dp"), placed(None, None)]
    for mode in ("clip", "fill"):
        ways = check(lambda x, i, m=mode: lax.gather(x, i, numbers, (1, 1), mode=m), (TABLE, at), places, SIZES)
        assert wanted(ways, places, placed(None, partial=("dp", "tp")))


def test_windows_that_span_a_dim_with_an_index():
    """A start that isn't 0 is moved to 0, or makes the window one that's out of bounds."""
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    at = np.array([[0, 0], [9, 1], [5, 0]])
    places = [placed(None, "tp"), placed(None, None)]
    for mode in ("clip", "fill"):
        ways = check(lambda x, i, m=mode: lax.gather(x, i, numbers, (3, 8), mode=m), (TABLE, at), places, SIZES)
        assert wanted(ways, places, placed(None, None, "tp"))


def test_random_keys_are_gathered():
    keys = jax.random.split(jax.random.key(0), 8)
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    _, _, ways = found(
        lambda k, i: lax.gather(k, i, numbers, (1,), mode="clip"),
        (keys, IDS),
        [placed("tp"), placed("dp", None)],
        SIZES,
    )
    assert {w.results[0] for w in ways} == {placed("dp"), placed(None)}


def test_slices_at_dynamic_places():
    places = [placed("dp", "tp"), placed(), placed()]
    for at, size in (((3, 0), (1, 8)), ((-4, 9), (12, 1)), ((50, 3), (5, 3))):
        start = [np.int32(i) for i in at]
        ways = check(lambda *a, s=size: sliced(*a, s), (TABLE, *start), places, SIZES)
        partial = [a for a, s, full in zip(("dp", "tp"), size, TABLE.shape, strict=True) if s != full]
        cut = [None if a in partial else a for a in ("dp", "tp")]
        assert wanted(ways, places, placed(*cut, partial=partial))


@pytest.mark.not_smoke
def test_slice_of_padded_blocks_and_of_contributions():
    def fun(*args):
        return sliced(*args, (4, 8))

    args = (TABLE[:11], np.int8(6), np.int8(0))
    check(fun, args, [placed("tp", None), placed(), placed()], SIZES)
    kept = placed(None, "dp", partial=("tp",), reduce="min")
    assert wanted(check(fun, args, [kept, placed(), placed()], SIZES), (kept,), kept)


@pytest.mark.not_smoke
def test_slices_are_replaced_at_dynamic_places():
    cut = placed("dp", "tp")
    for at, size in (((3, 0), (1, 8)), ((-4, 9), (12, 1)), ((50, 3), (7, 3))):
        update = placed(*(a if s == full else None for a, s, full in zip(("dp", "tp"), size, TABLE.shape, strict=True)))
        places = [cut, update, placed(), placed()]
        ways = check(replaced, (TABLE, LOGITS.T[: size[0], : size[1]], *(np.int32(i) for i in at)), places, SIZES)
        assert wanted(ways, places, cut)


@pytest.mark.not_smoke
def test_replacement_in_padded_blocks_and_in_contributions():
    args = (TABLE[:11], ROWS[:4], np.int32(6), np.int32(0))
    check(replaced, args, [placed("tp", None), placed(None, None), placed(), placed()], SIZES)
    kept = placed(None, "dp", partial=("tp",))
    assert wanted(check(replaced, args, [kept, kept, placed(), placed()], SIZES), (kept, kept), kept)


@pytest.mark.not_smoke
def test_vmapped_slices():
    """A gather with batching dims, and a scatter."""
    at = np.array([0, 11, 3, 20, 7, -1, 2, 5])
    cut = placed("dp", "tp")

    def taken(x, i):
        return jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (1,), allow_negative_indices=False))(x, i)

    def put(x, i, u):
        return jax.vmap(lambda x, i, u: lax.dynamic_update_slice(x, u, (i,), allow_negative_indices=False))(x, u=u, i=i)

    for fun, args, expected in (
        (taken, (LOGITS, at), placed("dp", None, partial=("tp",))),
        (put, (LOGITS, at, ROWS[:, :1]), cut),
    ):
        graph = jax.make_jaxpr(fun)(*args)
        (eqn,) = (e for e in graph.eqns if e.primitive.name in ("gather", "scatter"))
        inner = functools.partial(eqn.primitive.bind, **eqn.params)
        operands = (LOGITS, at[:, None], *args[2:])
        places = [cut, placed("dp", None), placed("dp", None)][: len(operands)]
        assert wanted(check(inner, operands, places, SIZES), places, expected)


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_gradient_of_a_table_cut_by_vocabulary(mode):
    fun = scattered(lax.scatter_add, ADD, mode)
    places = [placed("tp", "dp"), placed(None, None), placed(None, "dp")]
    ways = check(fun, (TABLE, IDS, ROWS), places, SIZES)
    assert wanted(ways, places, places[0])


@pytest.mark.not_smoke
def test_gradient_of_a_table_from_tokens_cut_by_batch():
    fun = scattered(lax.scatter_add, ADD, "drop")
    target = placed("tp", None, partial=("dp",))
    places = [placed("tp", None), placed("dp", None), placed("dp", None)]
    assert wanted(check(fun, (TABLE, IDS, ROWS), places, SIZES), (target, *places[1:]), target)
    # Five tokens on four devices: the padded ones count for nothing.
    target = placed(None, None, partial=("tp",))
    places = [target, placed("tp", None), placed("tp", None)]
    assert wanted(check(fun, (TABLE, IDS[:5], ROWS[:5]), places, SIZES), places, target)


def test_gradient_of_logits_cut_by_class():
    fun = scattered(lax.scatter_add, PUT, "drop", unique_indices=True)
    places = [placed("dp", "tp"), placed("dp", None, None), placed("dp", None)]
    assert wanted(check(fun, (LOGITS[:, :11], LABELS, ROWS[:, :1]), places, SIZES), places, places[0])


@pytest.mark.parametrize(
    ("scatter", "kind"), [(lax.scatter_min, "min"), (lax.scatter_max, "max"), (lax.scatter_mul, "prod")]
)
@pytest.mark.every(2)
def test_scatters_of_other_kinds(scatter, kind):
    fun = scattered(scatter, ADD, "clip")
    target = placed("dp", None, partial=("tp",), reduce=kind)
    places = [placed("dp", None), placed("tp", None), placed("tp", None)]
    args = (-1 - TABLE**2, IDS[:7], -1 - ROWS[:7] ** 2)
    assert wanted(check(fun, args, places, SIZES), (target, *places[1:]), target)


def test_scatter_that_replaces():
    fun = scattered(lax.scatter, ADD, "drop", unique_indices=True)
    ids = np.array([[4], [0], [-1], [10], [12], [7]])
    places = [placed("tp", "dp"), placed(None, None), placed(None, "dp")]
    ways = check(fun, (TABLE[:11], ids, ROWS[:6]), places, SIZES)
    assert wanted(ways, places, places[0])
    kept = placed(None, None, partial=("tp",))
    assert wanted(
        check(fun, (TABLE, ids, ROWS[:6]), [kept, placed("dp", None), kept], SIZES),
        (kept, placed(None, None), kept),
        kept,
    )


def test_scatter_with_an_own_function_is_not_linear():
    def fun(t, i):
        return lax.scatter_apply(t, i, jnp.sin, ADD, update_shape=(6, 8), mode="drop")

    ids = np.array([[4], [0], [-1], [10], [12], [7]])

    def inner(t, i, u):
        (eqn,) = (e for e in jax.make_jaxpr(fun)(t, i).eqns if e.primitive.name == "scatter")
        return eqn.primitive.bind(t, i, u, **eqn.params)

    places = [placed("tp", None, partial=("dp",)), placed(None, None), placed(None, None)]
    ways = check(inner, (TABLE, ids, np.zeros((6, 8))), places, SIZES)
    assert not any(w.operands[0].partial for w in ways)
    assert wanted(ways, (placed("tp", None),), placed("tp", None))


def test_windows_of_several_elements_keep_their_dim_whole():
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0,))
    _, _, ways = found(
        lambda x, i: lax.gather(x, i, numbers, (2, 8), mode="clip"),
        (TABLE, IDS),
        [placed("tp", "dp"), placed(None, None)],
        SIZES,
    )
    assert all(w.operands[0].dims[0] == () for w in ways)
    assert wanted(ways, (placed(None, "dp"),), placed(None, None, "dp"))
