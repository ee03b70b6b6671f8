"""The derivatives of ``reshard`` in every mode, and what their collectives are."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import shardkit as sk
from shardkit._compat import spec_entries
from shardkit.arrays.kinds import reduce_stack
from tests.reshard.reshard_cases import layouts, mesh_of, place, sample

S, R = sk.Shard, sk.Replicate()
SQUARE = (("x", 2), ("y", 2))
SHAPE = (8, 16)
WEIGHTS = np.random.default_rng(3).normal(size=SHAPE)


def rng_for(seed):
    return np.random.default_rng([ord(c) for c in str(seed)])


def lead_of(layout):
    return tuple(layout.mesh.shape[a] for a in layout.partial_axes)


def both_ends(way, kind, mesh):
    """The layouts of a way in which "P" stands for Partial of the kind."""
    return [sk.Layout(mesh, [sk.Partial(kind) if p == "P" else p for p in end]) for end in way]


def value_of(src, dst, axis_types):
    """array (or stack) at the source -> the value at the destination, as a function of plain arrays."""

    def f(a):
        x = sk.PartialArray(a, src) if src.partial_axes else a
        y = sk.reshard(x, dst, src=src if axis_types == "auto" and not src.partial_axes else None)
        return y.reduce() if isinstance(y, sk.PartialArray) else y

    return f


def on_one_device(src):
    """The same there."""
    kind, lead = src.reduce, range(len(src.partial_axes))
    return (lambda a: reduce_stack(kind, a, lead)) if src.partial_axes else (lambda a: a)


def all_derivatives(f, a, tangent, many):
    """One after the other; ``many`` has another dim in front."""

    def loss(a):
        return (jnp.sin(f(a)) * WEIGHTS.astype(a.dtype)).sum()

    def scanned(many):
        return lax.scan(lambda c, a: (c + loss(a), None), jnp.zeros((), many.dtype), many)[0]

    return {
        "value": loss(a),
        "grad": jax.grad(loss)(a),
        "jvp": jax.jvp(loss, (a,), (tangent,)),
        "jvp of grad": jax.jvp(jax.grad(loss), (a,), (tangent,)),
        "vmap": jax.vmap(f)(many),
        "vmap inside": jax.vmap(f, in_axes=1, out_axes=1)(jnp.moveaxis(many, 0, 1)),
        "grad of vmap": jax.grad(lambda m: jax.vmap(loss)(m).sum())(many),
        "grad of remat": jax.grad(jax.checkpoint(loss))(a),
        "grad of scan": jax.grad(scanned)(many),
    }


WAYS = [
    ([S(0), R], [R, S(1)]),
    ([R, R], [S(0), S(1)]),
    ([S(0), S(1)], [R, R]),
    ([S(0), S(1)], [S(1), S(0)]),
    (["P", R], [R, R]),
    (["P", S(1)], [S(0), S(1)]),
    (["P", "P"], [S(1), S(0)]),
    ([S(0), R], ["P", S(0)]),
    ([R, S(1)], [R, "P"]),
]


def check_derivatives(way, kind, stacks, axis_types, ambient):
    mesh = mesh_of(SQUARE, axis_types)
    src, dst = both_ends(way, kind, mesh)
    a, tangent, many = stacks
    want = jax.jit(lambda *args: all_derivatives(on_one_device(src), *args))(a, tangent, many)
    spec = src.stack_spec(2)
    placed = [jax.device_put(s, NamedSharding(mesh, spec)) for s in (a, tangent)]
    placed.append(jax.device_put(many, NamedSharding(mesh, type(spec)(None, *spec_entries(spec)))))
    with ambient(mesh):
        found = jax.jit(lambda *args: all_derivatives(value_of(src, dst, axis_types), *args))(*placed)
        jax.block_until_ready(found)
    for name, expected in want.items():
        for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10, err_msg=name)


def draw(way, kind, seed):
    rng = rng_for(seed)
    lead = tuple(2 for p in way[0] if p == "P")
    return tuple(rng.normal(size=(*n, *lead, *SHAPE)) for n in ((), (), (3,)))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.every(2)
def test_sums_and_values(way, axis_types, ambient):
    check_derivatives(way, "sum", draw(way, "sum", way), axis_types, ambient)


PARTIAL_WAYS = [WAYS[5], WAYS[7]]


@pytest.mark.parametrize("kind", ["mean", "max", "min", "prod"])
@pytest.mark.parametrize("way", PARTIAL_WAYS, ids=str)
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_other_kinds(way, kind, ambient):
    check_derivatives(way, kind, draw(way, kind, (way, kind)), "auto", ambient)


@pytest.mark.parametrize("way", [WAYS[4], WAYS[6]], ids=str)
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_ties_share(way, kind, ambient):
    a, tangent, many = draw(way, kind, kind)
    check_derivatives(way, kind, (np.round(a), tangent, np.round(many)), "explicit", ambient)


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("way", [WAYS[4], WAYS[6]], ids=str)
def test_gradients_of_products_with_zeros(way, zeros):
    mesh = mesh_of(SQUARE)
    src, dst = both_ends(way, "prod", mesh)
    stack = draw(way, "prod", zeros)[0]
    count = stack.reshape(-1, *SHAPE)[:zeros, :, :8]  # in half of the elements
    count[...] = 0

    def gradient(f):
        return jax.jit(jax.grad(lambda a: (jnp.sin(f(a)) * WEIGHTS).sum()))

    want = gradient(on_one_device(src))(stack)
    found = gradient(value_of(src, dst, "auto"))(jax.device_put(stack, NamedSharding(mesh, src.stack_spec(2))))
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[5], WAYS[7]], ids=str)
@pytest.mark.every(2)
def test_eager_gradients(way, axis_types, ambient):
    mesh = mesh_of(SQUARE, axis_types)
    src, dst = both_ends(way, "sum", mesh)
    a = draw(way, "sum", 7)[0]
    x = place(a, src)

    def loss(x):
        y = sk.reshard(x, dst, mesh, src=None if src.partial_axes else src)
        return (jnp.sin(y.reduce() if dst.partial_axes else y) * WEIGHTS).sum()

    want = jax.grad(lambda a: (jnp.sin(on_one_device(src)(a)) * WEIGHTS).sum())(a)
    with ambient(mesh):
        found = jax.block_until_ready(jax.grad(loss)(x))
    assert isinstance(found, sk.PartialArray) == bool(src.partial_axes)
    array = found.stack if src.partial_axes else found
    np.testing.assert_allclose(array, want, rtol=1e-12)
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, src.stack_spec(2)), array.ndim)


@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_low_precision(dtype, kind):
    mesh = mesh_of(SQUARE)
    src, dst = both_ends(WAYS[5], kind, mesh)
    a = jnp.asarray(np.round(draw(WAYS[5], kind, 5)[0] * 4), dtype)

    def loss(f):
        return lambda a: (f(a).astype("float32") ** 2).sum()

    want = jax.grad(loss(on_one_device(src)))(a)
    placed = jax.device_put(a, NamedSharding(mesh, src.stack_spec(2)))
    found = jax.jit(jax.grad(loss(value_of(src, dst, "auto"))))(placed)
    assert found.dtype == a.dtype
    np.testing.assert_array_equal(np.asarray(found, "float32"), np.asarray(want, "float32"))


# --- the transpose ------------------------------------------------------------------------------------


def transposed(src, dst, axis_types):
    """(x, cotangent of the result) -> cotangent of x, in the types that each has."""

    def run(x, cotangent):
        where = src if axis_types == "auto" and not src.partial_axes else None
        return jax.vjp(lambda x: sk.reshard(x, dst, src=where), x)[1](cotangent)[0]

    return run


@pytest.mark.parametrize(
    ("way", "kind", "expected"),
    [
        (("P", R), "sum", {}),
        (("P", R), "mean", {}),
        (("P", S(0)), "sum", {"all_gather": 1}),
        (("P", S(0)), "mean", {"all_gather": 1}),
        ((S(0), R), None, {}),
        ((R, S(0)), None, {"all_gather": 1}),
        ((S(0), S(1)), None, {"all_to_all": 1}),
        ((S(1), S(0)), None, {"all_to_all": 1}),
    ],
    ids=str,
)
def test_backward_collectives(way, kind, expected, axis_types, ambient):
    mesh = mesh_of((("x", 4),), axis_types)
    src, dst = both_ends([[end] for end in way], kind, mesh)
    x, cotangent = (place(np.ones((*lead_of(end), *SHAPE)), end) for end in (src, dst))
    with ambient(mesh):
        assert sk.collectives(jax.jit(transposed(src, dst, axis_types)), x, cotangent).by_kind() == expected


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_backward_to_a_partial(kind):
    """The gradient of a whole value made Partial: what each device's contribution was made of."""
    mesh = mesh_of((("x", 4),))
    for before, expected in ((S(0), {}), (R, {"all_gather" if kind == "sum" else "all_reduce": 1})):
        if kind == "mean" and before == S(0):
            continue  # which gathers first
        src, dst = both_ends([[before], ["P"]], kind, mesh)
        x, cotangent = (place(np.ones((*lead_of(end), *SHAPE)), end) for end in (src, dst))
        assert sk.collectives(jax.jit(transposed(src, dst, "auto")), x, cotangent).by_kind() == expected


def check_adjoint(src, dst, axis_types, ambient):
    rng = rng_for((src.placements, dst.placements))
    a, b = (rng.normal(size=(*lead_of(end), *SHAPE)) for end in (src, dst))
    x, y = place(a, src), place(b, dst)

    @jax.jit
    def both(x, y):
        where = src if axis_types == "auto" and not src.partial_axes else None
        forward, back = jax.vjp(lambda x: sk.reshard(x, dst, src=where), x)
        doubled = sk.reshard(jax.tree.map(lambda leaf: 2 * leaf, x), dst, src=where)
        return forward, back(y)[0], doubled

    with ambient(src.mesh):
        forward, back, doubled = jax.block_until_ready(both(x, y))
    Fx, Fy, F2x = (np.asarray(v.stack if isinstance(v, sk.PartialArray) else v) for v in (forward, back, doubled))
    np.testing.assert_array_equal(F2x, 2 * Fx)
    np.testing.assert_allclose((Fx * b).sum(), (a * Fy).sum(), rtol=1e-10, atol=1e-10, err_msg=f"{src} {dst}")
    assert sk.placements(back) == src.resolved(2).placements


def linear_pairs(mesh, kind):
    found = itertools.product(layouts(mesh, 2, kind), repeat=2)
    return [p for p in found if kind == "sum" or p[0].partial_axes or p[1].partial_axes]


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 4}], ids=str)
@pytest.mark.every(2)
def test_adjoint_of_some(mesh, kind, axis_types, ambient):
    mesh = mesh_of(tuple(mesh.items()), axis_types)
    for src, dst in sample(linear_pairs(mesh, kind), 4, (mesh.axis_sizes, kind, axis_types)):
        check_adjoint(src, dst, axis_types, ambient)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_adjoint_of_all(mesh, kind, ambient):
    mesh = mesh_of(tuple(mesh.items()))
    for src, dst in linear_pairs(mesh, kind):
        check_adjoint(src, dst, "auto", ambient)


def test_the_derivative_of_a_max_that_stays_partial_is_refused():
    mesh = mesh_of(SQUARE)
    src, dst = both_ends((["P", "P"], ["P", S(0)]), "max", mesh)
    x = place(np.ones((2, 2, *SHAPE)), src)
    with pytest.raises(NotImplementedError, match=re.escape("reduce first: sk.reshard")):
        jax.jvp(lambda x: sk.reshard(x, dst), (x,), (x,))
