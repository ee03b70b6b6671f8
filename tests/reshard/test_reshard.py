"""``reshard``: values, placements and compiled collectives of every pair of layouts, and every way to call it."""

import itertools
import logging
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.shapes import array_bytes
from shardkit.reshard.cost import wire_bytes
from tests.reshard.reshard_cases import (
    KINDS,
    MESHES,
    REDUCE,
    by_source,
    check,
    dtype_for,
    even_shape,
    layouts,
    many,
    mesh_of,
    padded_source,
    pairs,
    place,
    sample,
    source,
    whole,
)


def refuses(message, kind: type[Exception] = ValueError):
    return pytest.raises(kind, match=re.escape(message))


def src_of(x, layout, axis_types):
    """What ``src`` must say under jit: nothing where types or the array itself do."""
    return layout if axis_types == "auto" and not isinstance(x, sk.PartialArray) else None


def planned(shape, dtype, src, dst):
    """The collectives of the plan and their bytes."""
    plan = sk.plan_reshard(shape, dtype, src, dst)
    steps = [(step.collective, step.bytes) for step in plan.steps if step.collective]
    assert plan.bytes_per_device == sum(bytes_ for _, bytes_ in steps)  # what is local costs nothing
    assert plan.collectives == tuple(kind for kind, _ in steps)
    return Counter(steps)


def compiled_collectives(program, mesh, *, combined=False):
    """Those of the program and their bytes; where XLA may have ``combined`` several, each counts by itself."""
    found = Counter()
    for entry in sk.collectives(program, mesh=mesh):
        if combined and entry.kind != "all_to_all":  # which is a tuple by itself
            found.update((entry.kind, wire_bytes(entry.kind, array_bytes(s), entry.group_size)) for s in entry.shapes)
        else:
            found[entry.kind, entry.bytes] += 1
    return found


# --- values, placements, collectives ----------------------------------------------------------------


def check_pair(src, dst, shape, dtype, axis_types, ambient):
    x, value = source((src, dst), src, shape, dtype)
    with ambient(src.mesh):
        program = jax.jit(lambda a: sk.reshard(a, dst, src=src_of(x, src, axis_types))).lower(x).compile()
        y = jax.block_until_ready(program(x))
    check(y, dst, value)
    assert compiled_collectives(program, src.mesh) == planned(shape, dtype, src, dst), (src, dst)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.every(4)
def test_some_of_every_kind(mesh, kind, axis_types, ambient):
    mesh = mesh_of(tuple(mesh.items()), axis_types)
    for ndim, count in ((1, 1), (2, 2), (3, 1)):
        found = pairs(mesh, ndim, kind, orders=True)
        for src, dst in sample(found, count, (mesh.axis_sizes, ndim, kind, axis_types)):
            check_pair(src, dst, even_shape(mesh, ndim), dtype_for(kind), axis_types, ambient)


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@pytest.mark.every(2)
def test_integers(kind, axis_types, ambient):
    mesh = mesh_of((("x", 2), ("y", 4)), axis_types)
    found = pairs(mesh, 2, kind)
    for (src, dst), dtype in itertools.product(sample(found, 2, kind), ("int32", "int8")):
        check_pair(src, dst, even_shape(mesh, 2), dtype, axis_types, ambient)


@pytest.mark.parametrize(("before", "after"), [("sum", "max"), ("max", "sum"), ("mean", "prod"), ("min", "mean")])
@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}], ids=str)
def test_from_one_kind_to_another(mesh, before, after, ambient):
    mesh = mesh_of(tuple(mesh.items()))
    sources = [layout for layout in layouts(mesh, 2, before) if layout.partial_axes]
    goals = [layout for layout in layouts(mesh, 2, after) if layout.partial_axes]
    for src, dst in sample(list(itertools.product(sources, goals)), 2, (mesh.axis_sizes, before)):
        check_pair(src, dst, even_shape(mesh, 2), "float64", "auto", ambient)


def check_matrix(found, shape, dtype):
    """Values and placements of all pairs; and that no collective is added to the plan's (some may be shared)."""
    for src, goals in by_source(found).items():
        x, value = source(src, src, shape, dtype)
        program = many(goals, src).lower(x).compile()
        results = jax.block_until_ready(program(x))
        for goal, y in zip(goals, results, strict=True):
            check(y, goal, value)
        allowed = sum((planned(shape, dtype, src, goal) for goal in goals), Counter())
        assert compiled_collectives(program, src.mesh, combined=True) <= allowed, src


CUBE = {"x": 2, "y": 2, "z": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES[:-1], ids=str)
def test_every_pair(mesh, ndim, kind):
    mesh = mesh_of(tuple(mesh.items()))
    check_matrix(pairs(mesh, ndim, kind, orders=True), even_shape(mesh, ndim), dtype_for(kind))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_on_a_cube(ndim, kind, part):
    mesh = mesh_of(tuple(CUBE.items()))
    found = pairs(mesh, ndim, kind)
    if kind not in ("sum", "max"):  # what they add is the arithmetic of the steps, not the ways
        found = sample(found, 800, (ndim, kind))
    groups = list(by_source(found).items())[part::8]
    check_matrix([(src, goal) for src, goals in groups for goal in goals], even_shape(mesh, ndim), dtype_for(kind))


# --- every way to call it -----------------------------------------------------------------------------

GRID = (("x", 2), ("y", 4))
S, R, PARTIAL = sk.Shard, sk.Replicate(), sk.Partial()
WAYS = [
    ([S(0), S(1)], [S(1), S(0)]),
    ([S(0), R], [R, S(1)]),
    ([R, R], [S(1), S(1)]),
    ([S(0), S(0)], [R, R]),
    (P(("y", "x")), P(("x", "y"))),
    ([PARTIAL, S(0)], [R, S(0)]),
    ([PARTIAL, PARTIAL], [S(0), S(1)]),
    ([R, S(1)], [PARTIAL, S(1)]),
    ([S(0), PARTIAL], [PARTIAL, S(1)]),
]
SHAPE = (8, 16)


def both_ends(way, mesh):
    return tuple(sk.Layout(mesh, placements) for placements in way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.every(2)
def test_eager_jit_and_scan(way, axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    src, dst = both_ends(way, mesh)
    x, value = source(way, src, SHAPE, "float64")

    def go(a):
        return sk.reshard(a, dst, src=src_of(a, src, axis_types))

    def back(b):
        return sk.reshard(b, src, src=src_of(b, dst, axis_types))

    @jax.jit
    def there_and_back(a):
        return lax.scan(lambda c, step: (back(go(c)), go(c)), a, jnp.arange(3))

    with ambient(mesh):
        for call in (lambda a: sk.reshard(a, dst), lambda a: sk.reshard(a, way[1], mesh), jax.jit(go)):
            check(jax.block_until_ready(call(x)), dst, value)
        carry, each = jax.block_until_ready(there_and_back(x))
        check(carry, src, value)
        last = jax.tree.map(lambda leaf: leaf[-1], each)
    array = last.stack if dst.partial_axes else last
    np.testing.assert_array_equal(np.sum(np.asarray(array), tuple(range(len(dst.partial_axes)))), value)


def test_destinations_in_every_form():
    mesh = mesh_of(GRID)
    src, dst = both_ends(([S(0), R], [R, S(1)]), mesh)
    x, value = source(0, src, SHAPE, "float64")
    for given in ([R, S(-1)], {"y": S(1)}, P(None, "y"), NamedSharding(mesh, P(None, "y")), dst):
        check(jax.block_until_ready(sk.reshard(x, given)), dst, value)


def test_arrays_on_no_mesh_are_placed(axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    value = np.arange(128.0).reshape(SHAPE)
    for x in (value, jnp.asarray(value), jax.device_put(value, jax.devices()[5]), value.tolist()):
        for placements in ([S(1), S(0)], [PARTIAL, S(0)], [R, R]):
            with ambient(mesh):
                y = jax.block_until_ready(sk.reshard(x, placements, mesh))
            check(y, sk.Layout(mesh, placements), value)
    with jax.set_mesh(mesh):
        check(jax.block_until_ready(sk.reshard(value, [S(0), R])), sk.Layout(mesh, [S(0), R]), value)


@pytest.mark.parametrize("way", [w for w in WAYS if sk.Partial() not in tuple(w[0])], ids=str)
def test_under_jit_the_compiler_moves_what_it_has_placed(way):
    mesh = mesh_of(GRID)
    src, dst = both_ends(way, mesh)
    x, value = source(way, src, SHAPE, "float64")
    check(jax.block_until_ready(jax.jit(lambda a: sk.reshard(2 * a, dst))(x)), dst, 2 * value)


def test_constants_under_jit(axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    value = np.arange(128.0).reshape(SHAPE)
    for placements in ([S(1), S(0)], [PARTIAL, S(0)]):
        with ambient(mesh):
            y = jax.block_until_ready(jax.jit(lambda p=placements: sk.reshard(2 * jnp.asarray(value), p, mesh))())
        check(y, sk.Layout(mesh, placements), 2 * value)


def test_between_operations_under_jit(axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    src, middle, dst = (sk.Layout(mesh, p) for p in ([S(0), R], [PARTIAL, S(1)], [R, S(0)]))
    x, value = source(1, src, SHAPE, "float64")

    @jax.jit
    def f(a):
        partial = 2 * sk.reshard(a + 1, middle, src=src_of(a, src, axis_types)) + 1
        return 3 * sk.reshard(partial, dst)

    with ambient(mesh):
        check(jax.block_until_ready(f(x)), dst, 3 * (2 * (value + 1) + 1))


@pytest.mark.parametrize("goal", [[R, S(0)], [S(1), S(0)], [R, PARTIAL], [S(0), R]], ids=str)
def test_native_unreduced_arrays(goal):
    mesh = mesh_of(GRID, "explicit")
    src, dst = both_ends(([PARTIAL, S(0)], goal), mesh)
    partial, value = source(goal, src, SHAPE, "float64")
    with jax.set_mesh(mesh):
        x = sk.to_unreduced(partial)
        check(jax.block_until_ready(sk.reshard(x, goal)), dst, value)
        check(jax.block_until_ready(jax.jit(lambda a: sk.reshard(a, goal))(x)), dst, value)


def pointers(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def test_the_same_layout_is_the_same_object(axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    with ambient(mesh):
        for placements in ([S(0), S(1)], [R, R], P(("y", "x"))):
            layout = sk.Layout(mesh, placements)
            x, _ = source(0, layout, SHAPE, "float64")
            assert sk.reshard(x, placements) is x
            assert sk.reshard(x, layout) is x
        partial, _ = source(0, sk.Layout(mesh, [PARTIAL, S(0)]), SHAPE, "float64")
        assert sk.reshard(partial, [PARTIAL, S(0)]).stack is partial.stack


def test_other_words_for_the_same_place_copy_nothing(axis_types, ambient):
    mesh = mesh_of((("x", 4), ("one", 1)), axis_types)
    with ambient(mesh):
        x, value = source(0, sk.Layout(mesh, [S(0), R]), SHAPE, "float64")
        y = sk.reshard(x, [S(0), S(1)])
        check(y, sk.Layout(mesh, [S(0), S(1)]), value)
        assert pointers(y) == pointers(x)
        assert not sk.plan_reshard(SHAPE, "float64", [S(0), R], [S(0), S(1)], mesh).collectives


def test_an_axis_of_one_device_may_be_partial(axis_types, ambient):
    mesh = mesh_of((("x", 4), ("one", 1)), axis_types)
    with ambient(mesh):
        layouts_ = [sk.Layout(mesh, p) for p in ([S(0), R], [S(0), PARTIAL], [PARTIAL, PARTIAL], [PARTIAL, S(0)])]
        for src, dst in itertools.product(layouts_, repeat=2):
            x, value = source(0, src, SHAPE, "float64")
            check(jax.block_until_ready(sk.reshard(x, dst)), dst, value)


# --- inside a region that is manual already -------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(S(1), S(2)), (S(2), R), (R, S(1)), (R, PARTIAL)], ids=str)
def test_over_the_free_axis_of_a_partly_manual_region(before, after, axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    x, value = source(0, sk.Layout(mesh, {"x": S(0), "y": before}), (2, *SHAPE), "float64")

    def body(block):
        y = sk.reshard(block, {"y": after}, src={"y": before} if axis_types == "auto" else None)
        if after == PARTIAL:
            assert isinstance(y, sk.PartialArray)
            y = sk.reshard(y, {"y": before})
        return 2 * y

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}))
    with ambient(mesh):
        np.testing.assert_array_equal(whole(jax.block_until_ready(f(x))), 2 * value)


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
def test_a_partial_over_the_manual_axis_is_reduced_within(kind, axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    src = sk.Layout(mesh, {"x": sk.Partial(kind), "y": S(0)})
    x, value = source(kind, src, SHAPE, "float64")

    def body(partial):
        assert partial.stack.shape == (1, *SHAPE)
        return sk.reshard(partial, {"y": S(1)})

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"}))
    with ambient(mesh):
        np.testing.assert_array_equal(whole(jax.block_until_ready(f(x))), value)


@pytest.mark.parametrize("goal", [{}, {"y": S(1)}, {"x": S(0), "y": S(1)}], ids=str)
def test_a_partial_that_the_manual_axis_cuts(goal, axis_types, ambient):
    """Its layout is of the whole array; within, the manual axis is out of sight."""
    mesh = mesh_of(GRID, axis_types)
    src = sk.Layout(mesh, {"x": S(0), "y": sk.Partial("max")})
    x, value = source(0, src, SHAPE, "float64")
    f = jax.jit(
        jax.shard_map(
            lambda partial: sk.reshard(partial, goal),
            mesh=mesh,
            in_specs=P(None, "x"),
            out_specs=P("x"),
            axis_names={"x"},
        )
    )
    with ambient(mesh):
        np.testing.assert_array_equal(whole(jax.block_until_ready(f(x))), value)


def test_a_partial_over_the_free_axis_is_reduced_within():
    mesh = mesh_of(GRID)
    x, value = source(0, sk.Layout(mesh, {"y": sk.Partial("max")}), SHAPE, "float64")
    f = jax.shard_map(
        lambda partial: sk.reshard(partial, {"y": S(1)}),
        mesh=mesh, in_specs=P(None, "x"), out_specs=P("x"), axis_names={"x"},
    )  # fmt: skip
    np.testing.assert_array_equal(whole(jax.block_until_ready(jax.jit(f)(x))), value)


# --- padded -------------------------------------------------------------------------------------------

UNEVEN = [(5,), (1,), (9,), (5, 7)]
UNEVEN_MESHES = [{"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 4}]
GARBAGE = [np.nan, 1e300]


def check_padded(found, shape, seed):
    for i, (src, goals) in enumerate(by_source(found).items()):
        x, value = padded_source((seed, src), src, shape, GARBAGE[i % 2])
        results = jax.block_until_ready(many(goals, src)(x))
        for goal, y in zip(goals, results, strict=True):
            check(y, goal, value, padded=True)


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("shape", UNEVEN, ids=str)
@pytest.mark.parametrize("mesh", UNEVEN_MESHES, ids=str)
@pytest.mark.every(3)
def test_some_padded(mesh, shape, kind):
    mesh = mesh_of(tuple(mesh.items()))
    sources = sample(layouts(mesh, len(shape), kind), 3, (mesh.axis_sizes, shape, kind))
    goals = sample(layouts(mesh, len(shape), kind), 3, (kind, shape, mesh.axis_sizes))
    check_padded(list(itertools.product(sources, goals)), shape, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("shape", UNEVEN, ids=str)
@pytest.mark.parametrize("mesh", UNEVEN_MESHES, ids=str)
def test_every_padded_pair(mesh, shape, kind):
    mesh = mesh_of(tuple(mesh.items()))
    check_padded(pairs(mesh, len(shape), kind, orders=True), shape, kind)


@pytest.mark.not_smoke
def test_padded_eagerly_and_on_explicit_axes(axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    names = ([S(0), S(1)], [R, S(0)], [PARTIAL, S(1)], [R, R])
    for src, dst in itertools.product([sk.Layout(mesh, p) for p in names], repeat=2):
        x, value = padded_source(0, src, (5, 7), np.nan)
        with ambient(mesh):
            check(jax.block_until_ready(sk.reshard(x, dst)), dst, value, padded=True)


def test_a_padded_on_no_mesh_is_placed():
    mesh = mesh_of(GRID)
    value = np.arange(35.0).reshape(5, 7)
    x = sk.Padded(jnp.pad(value, ((0, 3), (0, 1)), constant_values=np.nan), (5, 7))
    for placements in ([S(0), S(1)], [PARTIAL, S(1)]):
        y = jax.block_until_ready(sk.reshard(x, placements, mesh))
        check(y, sk.Layout(mesh, placements), value, padded=True)


@pytest.mark.parametrize("way", [([S(0), R], [R, S(1)]), ([PARTIAL, S(0)], [S(1), R])], ids=str)
def test_padded_collectives_are_the_plans(way):
    mesh = mesh_of(GRID)
    src, dst = both_ends(way, mesh)
    x, _ = padded_source(0, src, (5, 7), np.nan)
    f = jax.jit(lambda a: sk.reshard(a, dst, src=src_of(a, src, "auto")))
    assert compiled_collectives(f.lower(x), mesh) == planned((5, 7), "float64", src, dst)


# --- extremes and zeros -----------------------------------------------------------------------------

FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5, -3.0, 7.0, -1e-7]
LINE = (("x", 4),)


def extreme_stack(dtype, seed=0):
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        pool = np.array([info.min, info.max, 0, 1, info.max - 1], dtype)
    else:
        pool = np.array(FLOATS).astype(jnp.dtype(dtype))
    stack = rng.choice(pool, (4, 64))
    stack[:, :3] = pool[:3]  # all contributions the same: also the extremes themselves
    return stack


@pytest.mark.parametrize("goal", [R, S(0)], ids=str)
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int64"])
@pytest.mark.every(2)
def test_extremes(dtype, kind, goal):
    mesh = mesh_of(LINE)
    stack = extreme_stack(dtype)
    y = sk.reshard(place(stack, sk.Layout(mesh, [sk.Partial(kind)])), [goal])
    want = np.asarray(getattr(jnp, kind)(jnp.asarray(stack), axis=0))
    assert y.dtype == stack.dtype
    np.testing.assert_array_equal(np.asarray(y).astype("float64"), want.astype("float64"))


@pytest.mark.parametrize(("kind", "negative"), [("max", False), ("min", True)])
def test_the_extreme_of_both_zeros(kind, negative):
    mesh = mesh_of(LINE)
    x = place(np.array([[0.0], [-0.0], [-0.0], [0.0]]), sk.Layout(mesh, [sk.Partial(kind)]))
    assert np.signbit(np.asarray(sk.reshard(x, [R]))) == negative


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "int64"])
@pytest.mark.every(3)
def test_contributions_that_change_nothing(dtype, kind):
    mesh = mesh_of(LINE)
    value = extreme_stack(dtype)[0]
    for before in (R, S(0)):
        y = sk.reshard(place(value, sk.Layout(mesh, [before])), [sk.Partial(kind)])
        stack = np.asarray(y.stack)
        exact = stack if jnp.issubdtype(dtype, jnp.integer) else stack.astype("float64")  # np.sum knows no bfloat16
        found = REDUCE[kind](exact, axis=0)
        np.testing.assert_array_equal(found, value.astype(found.dtype))
        back = jax.block_until_ready(sk.reshard(y, [R]))
        np.testing.assert_array_equal(np.asarray(back).astype("float64"), value.astype("float64"))


def test_products_with_zeros(axis_types, ambient):
    mesh = mesh_of(GRID, axis_types)
    stack = np.ones((2, 4, *SHAPE)) * 2
    stack[1, 2, 0] = 0
    stack[0, :, 1, 3] = 0
    src = sk.Layout(mesh, [sk.Partial("prod")] * 2)
    for goal in ([R, R], [S(0), S(1)], [sk.Partial("prod"), S(1)]):
        with ambient(mesh):
            y = jax.block_until_ready(sk.reshard(place(stack, src), goal))
        check(y, sk.Layout(mesh, goal), stack.prod((0, 1)))


# --- nothing is compiled twice ------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_second_call_compiles_nothing(way, axis_types, ambient, caplog):
    mesh = mesh_of(GRID, axis_types)
    src, dst = both_ends(way, mesh)
    shape = (16, 8)
    with ambient(mesh):
        first, again = (source(seed, src, shape, "float32")[0] for seed in (0, 1))
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            jax.block_until_ready(sk.reshard(first, dst))
            assert any("Compiling" in record.message for record in caplog.records)
            caplog.clear()
            jax.block_until_ready(sk.reshard(again, dst))
    assert not [record.message for record in caplog.records if "ompil" in record.message]


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([R, S(2)], "Shard(2) on mesh axis 'y': the array has 2 dims, so dim must lie in [-2, 1]"),
        ([sk.Partial("sum"), sk.Partial("max")], "wait for different reductions, {'x': 'sum', 'y': 'max'}"),
        ({"z": S(0)}, "name mesh axes ['z'], but the mesh has ('x', 'y')"),
        (P("z"), "name mesh axes ['z'], but the mesh has ('x', 'y')"),
        ([S(0)], "got 1 placements [Shard(dim=0)] for a mesh with 2 axes ('x', 'y')"),
        ({"y": S(1)}, "dim 1 of shape (8, 6) has 6 elements, which mesh axis 'y' of size 4 does not divide"),
        ([PARTIAL, S(1)], 'use sk.shard_tensor(x, placements, uneven="pad")'),
        (P(None, None, "x"), "speaks of 3 dims, but the array has 2"),
    ],
    ids=str,
)
def test_bad_placements(placements, message, jit):
    mesh = mesh_of(GRID)
    x = place(np.ones((8, 6)), sk.Layout(mesh, [S(0), R]))

    def call(a):
        return sk.reshard(a, placements, mesh)

    with refuses(message):
        (jax.jit(call) if jit else call)(x)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("int32", "mean"), ("bool", "sum"), ("complex64", "max"), ("int32", "any")]
)
def test_a_kind_that_the_dtype_has_not(dtype, kind):
    mesh = mesh_of(GRID)
    x = place(np.ones(SHAPE, dtype), sk.Layout(mesh, [S(0), R]))
    with refuses(f"reshard: Partial({kind!r}) of dtype {dtype} isn't defined", TypeError):
        sk.reshard(x, [sk.Partial(kind), R])


def test_no_mesh():
    for x in (np.ones(SHAPE), jnp.ones(SHAPE)):
        with refuses("reshard found no mesh: not in mesh=, not on its array arguments"):
            sk.reshard(x, [R, R])


def test_a_source_that_is_wrong():
    mesh = mesh_of(GRID)
    x, _ = source(0, sk.Layout(mesh, [S(0), R]), SHAPE, "float64")
    with refuses("says Partial, but x is a"):
        sk.reshard(x, [R, R], src=[PARTIAL, R])
    with refuses("contributions are kept in a PartialArray"):
        jax.jit(lambda a: sk.reshard(a, [R, R], mesh, src={"y": PARTIAL}))(x)
    partial, _ = source(0, sk.Layout(mesh, [PARTIAL, R]), SHAPE, "float64")
    with refuses("reshard: a PartialArray says itself where it is; leave src out"):
        sk.reshard(partial, [R, R], src=[R, R])


def test_a_numpy_constant_under_jit(axis_types, ambient):
    """It's no tracer, but is to be placed all the same."""
    mesh = mesh_of(GRID, axis_types)
    value = np.arange(64.0).reshape(8, 8)
    with ambient(mesh):
        y = jax.jit(lambda: sk.reshard(value, [S(1), S(0)], mesh))()
        assert sk.placements(y) == (S(1), S(0))
        np.testing.assert_array_equal(whole(y), value)
        z = jax.jit(lambda: sk.reshard(value, [PARTIAL, S(0)], mesh))()
        np.testing.assert_array_equal(np.asarray(z.stack).sum(0), value)


def test_axes_that_are_manual():
    mesh = mesh_of(GRID)
    x, _ = source(0, sk.Layout(mesh, [S(0), R]), SHAPE, "float64")

    def run(body):
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}))(x)

    with refuses("reshard: mesh axis 'x' is manual here (inside jax.shard_map)"):
        run(lambda b: sk.reshard(b, {"x": S(1)}, src={"y": R}))
    with refuses("use jax.lax collectives along 'x', or reshard outside"):
        run(lambda b: sk.reshard(b, {}, src={"x": S(0)}))
    with refuses("leave mesh out there"):
        run(lambda b: sk.reshard(b, {}, mesh_of(LINE)))


def test_kinds_that_a_manual_axis_cannot_reduce():
    mesh = mesh_of(GRID)
    x, _ = source(0, sk.Layout(mesh, {"x": sk.Partial("prod")}), SHAPE, "float64")
    f = jax.shard_map(lambda p: sk.reshard(p, {}), mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"})
    with refuses("mesh axis 'x' is manual here, where Partial('prod') can't be reduced"):
        jax.jit(f)(x)
