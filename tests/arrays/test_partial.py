"""``PartialArray``: linear code works on contributions and communicates nothing; all else says to reduce first."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.arrays.kinds import reduce_stack

RNG = np.random.default_rng(0)
STACK = RNG.normal(size=(2, 3, 8))  # two contributions
PLACEMENTS = {"dp": sk.Partial(), "sp": sk.Shard(1)}


@pytest.fixture
def mesh(mesh_for, axis_types, ambient):
    mesh = mesh_for({"dp": 2, "sp": 2}, axis_types)
    with ambient(mesh):
        yield mesh


def make(mesh, stack=STACK, placements=PLACEMENTS, kind="sum"):
    """A PartialArray over all axes of ``placements`` that are Partial, of the kind."""
    placements = {n: sk.Partial(kind) if isinstance(p, sk.Partial) else p for n, p in placements.items()}
    layout = sk.Layout(mesh, placements)
    stack = np.asarray(stack)
    spec = layout.stack_spec(stack.ndim - len(layout.partial_axes))
    return sk.PartialArray(jax.device_put(stack, NamedSharding(mesh, spec)), layout)


def value(x):
    """What it reduces to, computed apart from what is tested."""
    k = len(x.layout.partial_axes)
    return np.asarray(reduce_stack(x.layout.reduce, jnp.asarray(np.asarray(x.stack)), range(k)))


def check(out, expected, like):
    """Value, sharding and type of a result."""
    assert isinstance(out, sk.PartialArray)
    assert out.placements == like.placements
    assert out.stack.sharding.is_equivalent_to(like.stack.sharding, out.stack.ndim)
    np.testing.assert_allclose(value(out), expected, rtol=1e-13, atol=1e-13)


# --- what it says of itself -----------------------------------------------------------------------


def test_attributes(mesh):
    x = make(mesh)
    assert (x.shape, x.ndim, x.size, x.dtype, len(x)) == ((3, 8), 2, 24, jnp.float64, 3)
    assert x.placements == sk.placements(x) == (sk.Partial(), sk.Shard(1))
    assert x.sharding == x.stack.sharding
    assert repr(x) == "PartialArray(float64[3, 8], dp=Partial('sum'), sp=Shard(1))"
    assert x.logical_shape is None


def test_dims_are_counted_from_the_front(mesh):
    assert make(mesh, placements={"dp": sk.Partial(), "sp": sk.Shard(-1)}).placements == (sk.Partial(), sk.Shard(1))


def test_a_padded_one_has_its_logical_shape(mesh):
    layout = sk.Layout(mesh, PLACEMENTS)
    x = sk.PartialArray(make(mesh).stack, layout, (3, 7))
    assert (x.shape, x.size) == ((3, 7), 21)
    check(x + 1, value(x) + np.pad(np.ones((3, 1)), ((0, 0), (0, 0))), x)  # a scalar reaches the tail too
    row = np.arange(7.0)
    check(x + row, value(x) + np.pad(row, (0, 1)), x)
    check(x * row, value(x) * np.pad(row, (0, 1), constant_values=1), x)
    padded = sk.shard_tensor(np.ones((3, 7)), {"sp": sk.Shard(1)}, mesh, uneven="pad")
    np.testing.assert_allclose(value(x + padded)[:, :7], value(x)[:, :7] + 1, rtol=1e-14)
    np.testing.assert_allclose(value(padded + x)[:, :7], value(x)[:, :7] + 1, rtol=1e-14)
    assert (x + row).logical_shape == (3, 7)


# --- as a pytree ----------------------------------------------------------------------------------


def test_through_jit_and_tree_map(mesh):
    x = make(mesh)
    check(jax.jit(lambda x: jax.tree.map(lambda s: 2 * s, x))(x), 2 * STACK.sum(0), x)
    assert [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(x)] == [".stack"]


@pytest.mark.parametrize("leaf", [None, object(), P(), jax.ShapeDtypeStruct((1,), "float32")])
def test_unflatten_takes_any_leaf(mesh, leaf):
    x = jax.tree.unflatten(jax.tree.structure(make(mesh)), [leaf])
    assert x.stack is leaf
    assert repr(x).startswith("PartialArray(")


def test_structures_compare_where_one_knows_the_abstract_mesh_only(mesh, mesh_for):
    x = make(mesh)
    abstract = sk.PartialArray(jax.ShapeDtypeStruct(STACK.shape, "float64"), sk.Layout(mesh.abstract_mesh, PLACEMENTS))
    assert jax.tree.structure(x) == jax.tree.structure(abstract)
    assert hash(jax.tree.structure(x)) == hash(jax.tree.structure(abstract))
    others = sk.make_mesh({"dp": 2, "sp": 2}, devices=jax.devices()[4:])
    for other in (make(mesh, kind="mean"), make(others), make(mesh, placements={"dp": sk.Partial(), "sp": sk.Shard(0)},
                  stack=np.ones((2, 4, 4)))):  # fmt: skip
        assert jax.tree.structure(x) != jax.tree.structure(other)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_scan_carry_accumulates_without_communication(mesh_for, axis_types, ambient, n):
    mesh = mesh_for({"dp": n}, axis_types)
    with ambient(mesh):
        stack = RNG.normal(size=(n, 4))
        x = make(mesh, stack, {"dp": sk.Partial()})

        @jax.jit
        def total(x):
            return jax.lax.scan(lambda c, s: (c + x * s - 1, None), x * 0, jnp.arange(3.0))[0]

        check(total(x), 3 * stack.sum(0) - 3, x)
        sk.assert_collectives(total, x, all_reduce=0, all_gather=0, collective_permute=0, all_to_all=0)


# --- linear code ----------------------------------------------------------------------------------

ROW = np.arange(8.0) + 1
OPS = {
    "x + 2": (lambda x, v: x + 2, lambda x, v: x + 2),
    "x + v": (operator.add, operator.add),
    "v + x": (lambda x, v: v + x, lambda x, v: v + x),
    "x - v": (operator.sub, operator.sub),
    "v - x": (lambda x, v: v - x, lambda x, v: v - x),
    "x * v": (operator.mul, operator.mul),
    "v * x": (lambda x, v: v * x, lambda x, v: v * x),
    "x / v": (operator.truediv, operator.truediv),
    "-x": (lambda x, v: -x, lambda x, v: -x),
    "x + x - 3 * x": (lambda x, v: x + x - 3 * x, lambda x, v: -x),
}
WORKS = {
    "sum": list(OPS),
    "mean": list(OPS),
    "max": ["x + 2", "x + v", "v + x", "x - v"],
    "min": ["x + 2", "x + v", "v + x", "x - v"],
    "prod": ["x * v", "v * x", "x / v"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in WORKS.items() for n in names])
@pytest.mark.every(2)
def test_linear(mesh, kind, name):
    """Eager and under jit, of plain values on the host, replicated, and placed as the layout says."""
    op, plain = OPS[name]
    x = make(mesh, kind=kind)
    expected = plain(value(x), ROW)
    check(op(x, ROW), expected, x)
    placed = jax.device_put(ROW, NamedSharding(mesh, P("sp")))
    jitted = jax.jit(op)
    check(jitted(x, placed), expected, x)
    assert len(sk.collectives(jitted, x, placed)) == 0


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.every(2)
def test_other_values_need_no_communication_either(mesh, kind):
    x = make(mesh, kind=kind)
    for v in (
        jax.device_put(ROW, NamedSharding(mesh, P())),
        jax.device_put(np.ones((3, 1)), NamedSharding(mesh, P())),
        jax.device_put(np.ones((3, 8)), NamedSharding(mesh, P(None, "sp"))),
        jnp.float32(2.0),
        np.float64(2.0),
        True,
    ):
        check(x + v, value(x) + np.asarray(v), x)
        check(v + x, value(x) + np.asarray(v), x)
        assert len(sk.collectives(jax.jit(operator.add), x, v)) == 0


def test_linear_ops_over_two_partial_axes(mesh):
    stack = RNG.normal(size=(2, 2, 3))
    x = make(mesh, stack, {"dp": sk.Partial(), "sp": sk.Partial()})
    add = jax.jit(lambda x, v: x + v - 2)
    check(add(x, np.arange(3.0)), stack.sum((0, 1)) + np.arange(3.0) - 2, x)
    assert len(sk.collectives(add, x, np.arange(3.0))) == 0


def test_in_a_concrete_closure(mesh):
    """A concrete Partial meets a traced value, and a traced one a constant."""
    x = make(mesh)
    check(jax.jit(lambda v: x + v)(ROW), STACK.sum(0) + ROW, x)
    check(jax.jit(lambda x: x + ROW + jnp.asarray(ROW))(x), STACK.sum(0) + 2 * ROW, x)


@pytest.mark.not_smoke
def test_gradients_of_both_operands(mesh):
    x, w = make(mesh), jax.device_put(RNG.normal(size=(3, 8)), NamedSharding(mesh, P(None, "sp")))
    v = jax.device_put(ROW, NamedSharding(mesh, P("sp")))

    def loss(x, v):
        return ((x + v) * 2 * w).stack.sum() + (x * v * w).stack.sum()

    got_x, got_v = jax.jit(jax.grad(loss, (0, 1)))(x, v)
    np.testing.assert_allclose(got_x.stack, np.broadcast_to(2 * w + v * w, STACK.shape), rtol=1e-13)
    assert got_x.sharding.is_equivalent_to(x.sharding, 3)
    np.testing.assert_allclose(got_v, np.asarray(2 * w + STACK.sum(0) * w).sum(0), rtol=1e-12)
    eager_x, eager_v = jax.grad(loss, (0, 1))(x, v)
    np.testing.assert_allclose(eager_x.stack, got_x.stack, rtol=1e-13)
    np.testing.assert_allclose(eager_v, got_v, rtol=1e-12)


@pytest.mark.parametrize("axes", [{"dp", "sp"}, {"dp"}, {"sp"}])
def test_inside_a_manual_region(mesh_for, axes):
    """Fully and partly manual: leading dims of manual axes have size 1, a value is added once still."""
    mesh = mesh_for({"dp": 2, "sp": 2})
    x = make(mesh)
    keep = lambda *names: P(*(n if n in axes else None for n in names))  # noqa: E731

    def body(x, v):
        assert x.stack.shape[0] == (1 if "dp" in axes else 2)
        return x * 2 + v

    specs = {"in_specs": (keep("dp", None, "sp"), keep("sp")), "out_specs": keep("dp", None, "sp")}
    fun = jax.jit(jax.shard_map(body, mesh=mesh, axis_names=axes, **specs))
    check(fun(x, ROW), 2 * STACK.sum(0) + ROW, x)
    assert len(sk.collectives(fun, x, jax.device_put(ROW, NamedSharding(mesh, P("sp"))))) == 0


def test_made_inside_a_manual_region(mesh):
    layout = sk.Layout(mesh, PLACEMENTS)

    def body(block):
        return sk.PartialArray(block, layout) + 1

    out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp", None, "sp"), out_specs=P("dp", None, "sp")))
    x = make(mesh)
    check(out(x.stack), STACK.sum(0) + 1, x)


def test_mixed_axis_types(mesh_for):
    mesh = sk.make_mesh({"dp": 2, "sp": 2}, axis_types={"dp": "explicit", "sp": "auto"})
    with jax.set_mesh(mesh):
        x = make(mesh)
        out = jax.jit(lambda x, v: x * 2 + v)(x, ROW)
    check(out, 2 * STACK.sum(0) + ROW, x)


# --- dtypes ---------------------------------------------------------------------------------------


def test_promotion_follows_jax(mesh):
    x = make(mesh, np.ones((2, 4), "int32"), {"dp": sk.Partial()})
    assert (x + 1).dtype == jnp.int32
    assert (x + 1.5).dtype == (jnp.int32(1) + 1.5).dtype
    assert (x / 2).dtype == (jnp.int32(1) / 2).dtype
    assert (make(mesh, np.ones((2, 4), "float32")[:, None], PLACEMENTS) * 2.0).dtype == jnp.float32
    np.testing.assert_array_equal(value(x + 1.5), [3.5] * 4)
    with pytest.raises(TypeError, match=r"Partial\('max'\) of dtype complex128 isn't defined"):
        make(mesh, kind="max") + 1j


def test_float_casts_stay_partial(mesh):
    x = make(mesh)
    assert x.astype("float64") is x
    y = x.astype(jnp.bfloat16)
    assert isinstance(y, sk.PartialArray) and y.dtype == jnp.bfloat16
    assert jax.jit(lambda x: x.astype("float32"))(x).dtype == jnp.float32
    assert len(sk.collectives(jax.jit(lambda x: x.astype("complex128")), x)) == 0
    ints = make(mesh, np.ones((2, 1, 4), "int32"))
    check(ints.astype("float64"), np.full((1, 4), 2.0), ints)
    with pytest.raises(TypeError, match="complex numbers have no order"):
        make(mesh, kind="max").astype("complex64")


def test_other_casts_reduce_first(mesh):
    x = make(mesh, STACK * 3)
    for dtype in ("int32", "bool"):
        out = x.astype(dtype)
        np.testing.assert_array_equal(out, value(x).astype(dtype))
        assert isinstance(out, jax.Array)
    flags = make(mesh, RNG.normal(size=(2, 3, 8)) > 1, kind="any")
    np.testing.assert_array_equal(flags.astype("float32"), value(flags).astype("float32"))


def test_reduce(mesh):
    x = make(mesh)
    out = x.reduce()
    np.testing.assert_allclose(out, STACK.sum(0), rtol=1e-14)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "sp")), 2)
    sk.assert_collectives(jax.jit(lambda x: x.reduce()), x, all_reduce=1, all_gather=0)


# --- what needs the value -------------------------------------------------------------------------

FIRST = re.escape("reduce first: sk.reshard(x, ...)")


@pytest.mark.parametrize(
    "use",
    [
        jnp.sqrt, jnp.sum, jnp.asarray, jnp.abs, jax.nn.relu, jnp.linalg.norm, np.asarray, abs, bool, float, int,
        complex, list, operator.index, operator.invert, round,
        lambda x: x**2, lambda x: 2**x, lambda x: x // 2, lambda x: x % 2, lambda x: x @ x.stack, lambda x: 1 / x,
        lambda x: x * x, lambda x: x / x, lambda x: x == 1, lambda x: x != x, lambda x: x < 1, lambda x: x <= 1,
        lambda x: jnp.ones(8) == x, lambda x: np.ones(8) < x, lambda x: x[0], lambda x: x.sum(), lambda x: x.T,
        lambda x: x.reshape(24), lambda x: x.at[0].set(1), lambda x: jnp.dot(x, x), lambda x: jnp.where(x, 1, 0),
        lambda x: jnp.stack([x, x]), lambda x: jnp.add(x, 1), lambda x: 1 in x, lambda x: jnp.ones(8) ** x,
    ],
)  # fmt: skip
def test_nonlinear_uses(mesh_for, use):
    x = make(mesh_for({"dp": 2, "sp": 2}))
    with pytest.raises(TypeError, match=FIRST):
        use(x)


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("max", lambda x: x + x),
        ("max", lambda x: 1 - x),
        ("min", lambda x: -x),
        ("min", lambda x: x * 2),
        ("prod", lambda x: x + 1),
        ("prod", lambda x: x + x),
        ("prod", lambda x: -x),
        ("sum", lambda x: 1 / x),
    ],
)
def test_uses_that_a_kind_does_not_allow(mesh_for, kind, use):
    with pytest.raises(TypeError, match=FIRST):
        use(make(mesh_for({"dp": 2, "sp": 2}), kind=kind))


def test_attributes_that_arrays_lack(mesh_for):
    x = make(mesh_for({"dp": 2, "sp": 2}))
    with pytest.raises(AttributeError, match="'PartialArray' object has no attribute 'quack'"):
        x.quack()
    assert not hasattr(x, "addressable_shards") and not hasattr(x, "_repr_html_")
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)
    with pytest.raises(TypeError, match="unsupported operand"):
        x + "a"


# --- bad input ------------------------------------------------------------------------------------


def test_partials_that_do_not_match(mesh, mesh_for):
    x = make(mesh)
    other = make(mesh, np.ones((2, 8, 8)), {"dp": sk.Partial(), "sp": sk.Shard(0)})
    for y in (other, make(mesh, kind="mean"), make(sk.make_mesh({"dp": 2, "sp": 2}, devices=jax.devices()[4:]))):
        with pytest.raises(ValueError, match=r"live differently; sk.reshard one of them to the placements"):
            x + y
    with pytest.raises(ValueError, match="differ in shape"):
        x - make(mesh, np.ones((2, 1, 8)))


def test_values_that_would_enlarge_it(mesh):
    x = make(mesh, np.ones((2, 1, 8)))
    for v in (np.ones((3, 8)), np.ones((1, 1, 8)), np.ones(3)):
        with pytest.raises(ValueError, match=r"doesn't broadcast to the shape \(1, 8\) of PartialArray"):
            x + v
    padded = sk.shard_tensor(np.ones((1, 7)), {"sp": sk.Shard(1)}, mesh, uneven="pad")
    with pytest.raises(ValueError, match=r"which isn't padded; use its .value"):
        x + padded


def test_construction_is_checked(mesh):
    layout = sk.Layout(mesh, PLACEMENTS)
    stack = make(mesh).stack
    with pytest.raises(ValueError, match="needs a Partial placement on at least one mesh axis"):
        sk.PartialArray(stack, sk.Layout(mesh, {"sp": sk.Shard(0)}))
    with pytest.raises(TypeError, match=r"takes an sk.Layout, got {}"):
        sk.PartialArray(stack, {})
    with pytest.raises(ValueError, match="wait for different reductions"):
        sk.PartialArray(stack, sk.Layout(mesh, [sk.Partial(), sk.Partial("max")]))
    with pytest.raises(ValueError, match="has 3 contributions along Partial axis 'dp', which has 2 here"):
        sk.PartialArray(np.ones((3, 3, 8)), layout)
    with pytest.raises(ValueError, match="needs a leading dim for each of the Partial axes"):
        sk.PartialArray(np.ones(()), sk.Layout(mesh, {"dp": sk.Partial()}))
    with pytest.raises(ValueError, match=r"out of|must lie in"):
        sk.PartialArray(np.ones((2, 8)), layout)
    with pytest.raises(TypeError, match="this dtype can wait for"):
        sk.PartialArray(np.ones((2, 3, 8), bool), layout)
    with pytest.raises(ValueError, match=r"the stack lives at .*make it with sk.from_local or sk.reshard"):
        sk.PartialArray(jax.device_put(STACK, NamedSharding(mesh, P())), layout)
    with pytest.raises(ValueError, match=r"don't fit logical_shape=\(3, 5\): on this layout it is padded to \(3, 6\)"):
        sk.PartialArray(stack, layout, (3, 5))


def test_a_traced_stack_on_explicit_axes_is_checked(mesh_for):
    mesh = mesh_for({"dp": 2, "sp": 2}, "explicit")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="the stack lives at"):
        jax.jit(lambda s: sk.PartialArray(s, sk.Layout(mesh, PLACEMENTS)))(jax.device_put(STACK, P("dp")))
