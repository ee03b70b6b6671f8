"""``local_map``: blocks in, blocks out, nothing moves, gradients are those of the whole function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

X = np.random.default_rng(0).normal(size=(8, 4))
W = np.random.default_rng(1).normal(size=(4,))
SHARD, REP, PART = sk.Shard(0), sk.Replicate(), sk.Partial()


@pytest.fixture
def mesh(mesh_for, axis_types, ambient):
    mesh = mesh_for({"dp": 2, "sp": 2}, axis_types)
    with ambient(mesh):
        yield mesh


def none(fun, *args):
    assert len(sk.collectives(fun, *args)) == 0


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placements",
    [
        [SHARD, sk.Shard(1)],
        {"dp": SHARD, "sp": sk.Shard(1)},
        P("dp", "sp"),
        lambda mesh: NamedSharding(mesh, P("dp", "sp")),
        lambda mesh: sk.Layout(mesh, P("dp", "sp")),
    ],
)
def test_placements_once_for_all(mesh, placements):
    placements = placements(mesh) if callable(placements) else placements
    shapes = []

    def fun(x, tree):
        shapes.append(x.shape)
        return {"sum": x + tree["y"], "three": (tree["y"] * 3,)}

    mapped = jax.jit(sk.local_map(fun, placements, placements, mesh))
    out = mapped(X, {"y": X})
    np.testing.assert_array_equal(out["sum"], 2 * X)
    np.testing.assert_array_equal(out["three"][0], 3 * X)
    assert out["sum"].sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "sp")), 2)
    assert set(shapes) == {(4, 2)}
    x = sk.shard_tensor(X, P("dp", "sp"), mesh)
    none(mapped, x, {"y": x})


def test_placements_one_an_argument_and_result(mesh):
    x = sk.shard_tensor(X, P("dp", "sp"), mesh)

    def fun(x, w, scale, names):
        assert names == ["a", None]
        assert (x.shape, w.shape) == ((4, 2), (2,))
        return x * w, x.sum(1) * scale["k"], scale["k"] + 1

    outs = ({"dp": SHARD, "sp": sk.Shard(1)}, {"dp": SHARD, "sp": PART}, None)
    mapped = sk.local_map(fun, (P("dp", "sp"), {"sp": SHARD}, None, None), outs, mesh)
    for run in (mapped, lambda *args: jax.jit(lambda x, w, scale: mapped(x, w, scale, args[3]))(*args[:3])):
        y, s, k = run(x, W, {"k": jnp.float64(2.0)}, ["a", None])
        np.testing.assert_allclose(y, X * W, rtol=1e-14)
        assert isinstance(s, sk.PartialArray) and s.placements == (SHARD, PART)
        np.testing.assert_allclose(np.asarray(s.stack).sum(0), 2 * X.sum(1), rtol=1e-13)
        assert float(k) == 3 and k.sharding.is_fully_replicated


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_partial_in_and_out(mesh_for, axis_types, ambient, n):
    mesh = mesh_for({"dp": n}, axis_types)
    contributions = np.random.default_rng(2).normal(size=(n, 3))
    with ambient(mesh):
        x = sk.from_local(list(contributions), [sk.Partial("max")], mesh)

        def fun(c):
            assert c.shape == (3,)
            return c**3  # monotone

        mapped = jax.jit(sk.local_map(fun, [sk.Partial("max")], [sk.Partial("max")], mesh))
        out = mapped(x)
        none(mapped, x)
    assert isinstance(out, sk.PartialArray) and out.placements == (sk.Partial("max"),)
    np.testing.assert_allclose(np.max(out.stack, 0), contributions.max(0) ** 3, rtol=1e-14)
    assert out.sharding.is_equivalent_to(x.sharding, 2)


def test_the_mesh_is_found(mesh):
    double = sk.local_map(lambda x: 2 * x, {"dp": SHARD}, {"dp": SHARD})
    np.testing.assert_array_equal(double(sk.shard_tensor(X, {"dp": SHARD}, mesh)), 2 * X)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(double)(X), 2 * X)
    layout = sk.Layout(mesh, {"dp": SHARD})
    np.testing.assert_array_equal(sk.local_map(lambda x: 2 * x, layout, P("dp"))(X), 2 * X)


def test_under_jit_with_the_ambient_mesh_only(mesh):
    """There the mesh is abstract; what comes out knows its devices again."""
    with jax.set_mesh(mesh):
        out = jax.jit(sk.local_map(jnp.sum, {"dp": SHARD}, {"dp": PART}))(sk.shard_tensor(X, {"dp": SHARD}, mesh))
        assert out.layout.mesh == mesh
        np.testing.assert_allclose((out + 1).reduce(), X.sum() + 1, rtol=1e-13)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("reduce_inside", [True, False])
@pytest.mark.every(3)
def test_gradient_of_a_replicated_argument(mesh_for, axis_types, ambient, n, reduce_inside):
    """The trap: without check_vma it is off by the size of the axis."""
    mesh = mesh_for({"dp": n}, axis_types)

    def local(x, w):
        loss = ((x @ w) ** 2).sum()
        return lax.psum(loss, "dp") if reduce_inside else loss

    mapped = sk.local_map(local, ({"dp": SHARD}, {}), {} if reduce_inside else {"dp": PART}, mesh)

    def loss(x, w):
        out = mapped(x, w)
        return out if reduce_inside else out.stack.sum()

    with ambient(mesh):
        x, w = sk.shard_tensor(X, {"dp": SHARD}, mesh), sk.shard_tensor(W, {}, mesh)
        got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
        want = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(jnp.asarray(X), jnp.asarray(W))
        for g, e in zip(got, want, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-12)
        assert got[0].sharding.is_equivalent_to(x.sharding, 2)
        if n == 2:
            eager = jax.grad(loss, (0, 1))(x, w)
            np.testing.assert_allclose(eager[1], want[1], rtol=1e-12)


def test_vmap(mesh_for):
    mapped = sk.local_map(lambda x: lax.psum(x.sum(), "dp"), {"dp": SHARD}, {}, mesh_for({"dp": 4}))
    np.testing.assert_allclose(jax.jit(jax.vmap(mapped, in_axes=1))(X), X.sum(0), rtol=1e-13)


def test_in_a_scan(mesh):
    step = sk.local_map(lambda x: x * 2 + 1, {"dp": SHARD}, {"dp": SHARD}, mesh)
    run = jax.jit(lambda x: lax.scan(lambda c, _: (step(c), None), x, length=3)[0])
    x = sk.shard_tensor(X, {"dp": SHARD}, mesh)
    np.testing.assert_allclose(run(x), 8 * X + 7, rtol=1e-13)
    none(run, x)


@pytest.mark.parametrize("manual", [{"dp"}, {"dp", "sp"}])
def test_inside_a_manual_region(mesh_for, manual):
    mesh = mesh_for({"dp": 2, "sp": 2})
    inner = {} if "sp" in manual else {"sp": sk.Shard(1)}
    seen = []
    mapped = sk.local_map(lambda x: (seen.append(x.shape), 2 * x)[1], inner, inner, mesh)
    spec = P("dp", "sp") if "sp" in manual else P("dp")
    out = jax.jit(jax.shard_map(mapped, mesh=mesh, axis_names=manual, in_specs=spec, out_specs=spec))(X)
    np.testing.assert_array_equal(out, 2 * X)
    assert seen[-1] == (4, 2)


# --- bad input ------------------------------------------------------------------------------------


def test_nothing_is_moved(mesh):
    x = sk.shard_tensor(X, {"dp": SHARD}, mesh)
    mapped = sk.local_map(lambda x, y: y, ({"dp": SHARD}, {"sp": SHARD}), {"sp": SHARD}, mesh)
    message = (
        "local_map moves nothing: argument 1 of shape (8, 4) lives at P('dp', None) on mesh {'dp': 2, 'sp': 2}, but "
        "in_placements [Replicate(), Shard(dim=0)] say P('sp', None) on mesh {'dp': 2, 'sp': 2}; sk.reshard it first"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        mapped(x, x)
    with pytest.raises(ValueError, match=r"argument 0 of shape .* sk.reshard it first"):
        sk.local_map(lambda x: x, None, None, mesh)(x)


def test_nothing_is_moved_under_jit_on_explicit_axes(mesh_for):
    mesh = mesh_for({"dp": 2, "sp": 2}, "explicit")
    x = sk.shard_tensor(X, {"dp": SHARD}, mesh)
    mapped = sk.local_map(lambda y: y, {"sp": SHARD}, {"sp": SHARD}, mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"argument 0 of shape .* sk.reshard it first"):
        jax.jit(mapped)(x)


def test_partial_must_match(mesh):
    x = sk.from_local(list(np.ones((4, 3))), {"dp": PART}, mesh)
    take = lambda placements: sk.local_map(lambda x: x, placements, {"dp": PART}, mesh)  # noqa: E731
    with pytest.raises(TypeError, match=r"argument 0 is stated .*, but it is a whole value .*; give it contributions"):
        take({"dp": PART})(np.ones(3))
    with pytest.raises(ValueError, match=r"argument 0 is PartialArray.*, but in_placements say .*sk.reshard it first"):
        take({})(x)
    with pytest.raises(ValueError, match=r"sk.reshard it first"):
        take({"dp": sk.Partial("max")})(x)
    with pytest.raises(TypeError, match=r"argument 0 is an sk.Padded of shape .*; pass its .array"):
        take({"dp": SHARD})(sk.shard_tensor(np.ones(3), {"dp": SHARD}, mesh, uneven="pad"))


def test_native_unreduced_arrays_are_no_whole_values(mesh_for):
    mesh = mesh_for({"dp": 2}, "explicit")
    u = sk.to_unreduced(sk.from_local(list(np.ones((2, 4))), {"dp": PART}, mesh))
    with pytest.raises(ValueError, match=r"sk.reshard it first"):
        sk.local_map(lambda x: x, {}, {}, mesh)(u)


def test_counts_that_disagree(mesh):
    with pytest.raises(ValueError, match="in_placements has 2 entries for 1 arguments"):
        sk.local_map(lambda x: x, (None, None), None, mesh)(X)
    with pytest.raises(ValueError, match="out_placements speaks of 2 results, but fun returned one of type"):
        sk.local_map(lambda x: x, None, (None, None), mesh)(X)
    with pytest.raises(ValueError, match="out_placements speaks of 2 results, but fun returned 3"):
        sk.local_map(lambda x: (x, x, x), None, (None, None), mesh)(X)


def test_bad_placements(mesh):
    with pytest.raises(TypeError, match=r"local_map takes placements, or a tuple of them .*, got 3"):
        sk.local_map(lambda x: x, 3, None, mesh)(X)
    with pytest.raises(ValueError, match=re.escape("out_placements has Shard(dim=-1), but how many dims")):
        sk.local_map(lambda x: x, None, {"dp": sk.Shard(-1)}, mesh)(X)
    with pytest.raises(ValueError, match=r"name mesh axes \['tp'\]"):
        sk.local_map(lambda x: x, {"tp": SHARD}, None, mesh)(X)
    with pytest.raises(ValueError, match="does not divide"):
        sk.local_map(lambda x: x, {"dp": SHARD}, None, mesh)(np.ones(3))
    with pytest.raises(ValueError, match=re.escape("Shard(1) on mesh axis 'dp': the array has 1 dims")):
        sk.local_map(lambda x: x.sum(1), None, {"dp": sk.Shard(1)}, mesh)(X)
    with pytest.raises(ValueError, match="wait for different reductions"):
        sk.local_map(lambda x: x, None, [PART, sk.Partial("max")], mesh)(X)
    with pytest.raises(TypeError, match=re.escape("Partial('mean') of dtype int64 isn't defined")):
        sk.local_map(lambda x: x, None, {"dp": sk.Partial("mean")}, mesh)(np.ones(3, int))


def test_no_mesh():
    with pytest.raises(ValueError, match="local_map found no mesh"):
        sk.local_map(lambda x: x, {}, {})(np.ones(3))


def test_a_replicated_result_must_not_vary(mesh):
    with pytest.raises(ValueError, match="out_specs"):
        sk.local_map(lambda x: x.sum(), {"dp": SHARD}, {}, mesh)(X)


def test_axes_that_are_manual_already(mesh_for):
    mesh = mesh_for({"dp": 2, "sp": 2})
    mapped = sk.local_map(lambda x: x, {"dp": SHARD}, {}, mesh)
    with pytest.raises(ValueError, match=r"placements {'dp': Shard\(dim=0\)} on mesh axes that are manual here"):
        jax.shard_map(mapped, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(X)
