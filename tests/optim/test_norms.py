"""Norms over leaves that live in different ways, against optax on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import shardkit as sk

S, R, P = sk.Shard, sk.Replicate(), sk.Partial()


def trees(mesh, scale=1.0):
    """The same values as a Partial, a sharded, a replicated and a padded leaf, and on one device."""
    rng = np.random.default_rng(0)
    plain = {k: scale * rng.normal(size=(8, 4)) for k in ("partial", "sharded", "replicated")}
    plain["padded"] = scale * rng.normal(size=(5, 4))
    plain["complex"] = scale * (rng.normal(size=(8,)) + 1j * rng.normal(size=(8,)))
    n = mesh.shape["x"]
    placed = {
        "partial": sk.from_local([plain["partial"] / n] * n, [P], mesh),
        "sharded": sk.shard_tensor(plain["sharded"], [S(0)], mesh),
        "replicated": sk.shard_tensor(plain["replicated"], [R], mesh),
        "padded": sk.shard_tensor(plain["padded"], [S(0)], mesh, uneven="pad"),
        "complex": sk.shard_tensor(plain["complex"], [S(0)], mesh),
    }
    return placed, jax.tree.map(jnp.asarray, plain)


@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8]
)
@pytest.mark.every(2)
def test_global_norm(count, axis_types, mesh_for, ambient):
    mesh = mesh_for({"x": count}, axis_types)
    placed, plain = trees(mesh)
    with ambient(mesh):
        for f in (sk.global_norm, jax.jit(sk.global_norm)):
            np.testing.assert_allclose(float(f(placed)), float(optax.tree.norm(plain)), rtol=1e-12)
    assert float(sk.global_norm({})) == 0


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip(max_norm, mesh_for):
    mesh = mesh_for({"x": 4})
    placed, plain = trees(mesh)
    del placed["padded"], plain["padded"]
    ours, theirs = sk.clip_by_global_norm(max_norm), optax.clip_by_global_norm(max_norm)
    got, _ = ours.update(placed, ours.init(placed))
    wanted, _ = theirs.update(plain, theirs.init(plain))
    for name, value in got.items():
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted[name]), rtol=1e-12)
    assert sk.placements(got["sharded"]) == (S(0),)
    chained = optax.chain(sk.clip_by_global_norm(max_norm), optax.sgd(0.1))
    chained.update(placed, chained.init(plain))


def test_within_a_manual_region(mesh_for):
    """A part is summed over the axes that cut it, a replicated leaf counts once."""
    mesh = mesh_for({"x": 2, "y": 4})
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(8, 8)) for _ in range(4)]
    specs = [PartitionSpec("x"), PartitionSpec(), PartitionSpec("x", "y"), PartitionSpec(None, "y")]
    norm = jax.jit(
        jax.shard_map(lambda *tree: sk.global_norm(tree), mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec())
    )
    np.testing.assert_allclose(float(norm(*values)), float(optax.tree.norm(values)), rtol=1e-12)


@pytest.mark.parametrize("where", ["partial", "sharded", "replicated", "padded", "complex"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.not_smoke
def test_all_finite(where, bad, mesh_for):
    """One element of one device's part is enough."""
    mesh = mesh_for({"x": 4})
    placed, plain = trees(mesh)
    assert bool(sk.all_finite(placed))
    broken = np.array(plain[where])
    broken[-1 if where == "padded" else 3] = bad
    if where == "partial":
        placed[where] = sk.from_local([np.where(i == 2, broken, 0 * plain[where]) for i in range(4)], [P], mesh)
    else:
        placed[where] = (
            sk.reshard(broken, placed[where].sharding)
            if where != "padded"
            else sk.shard_tensor(broken, [S(0)], mesh, uneven="pad")
        )
    assert not bool(jax.jit(sk.all_finite)(placed))


def test_all_finite_of_a_sum_that_overflows(mesh_for):
    mesh = mesh_for({"x": 2})
    large = np.full(4, 2e38, np.float32)
    assert not bool(sk.all_finite(sk.from_local([large, large], [P], mesh)))


def test_all_finite_within_a_manual_region(mesh_for):
    mesh = mesh_for({"x": 4})
    f = jax.jit(
        jax.shard_map(lambda a: sk.all_finite([a]), mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec())
    )
    assert bool(f(jnp.ones(8)))
    assert not bool(f(jnp.ones(8).at[7].set(jnp.nan)))


@pytest.mark.parametrize("ask", [lambda x: sk.global_norm([x]), lambda x: sk.all_finite([x])], ids=["norm", "finite"])
@pytest.mark.not_smoke
def test_regions_without_types(ask, mesh_for):
    """Where types don't say what varies, one device's part would pass for the whole."""
    mesh = mesh_for({"dp": 4})
    region = {"mesh": mesh, "in_specs": jax.P("dp"), "out_specs": jax.P()}
    ask_all = jax.shard_map(ask, **region)
    assert ask_all(jnp.ones(16)) == ask(jnp.ones(16))
    with pytest.raises(ValueError, match="can't tell parts from copies"):
        jax.shard_map(ask, **region, check_vma=False)(jnp.ones(16))


@pytest.mark.parametrize(
    "call",
    [sk.global_norm, sk.all_finite, lambda tree: sk.clip_by_global_norm(1.0).update(tree, None)],
    ids=["norm", "finite", "clip"],
)
def test_eagerly_one_program(call, mesh_for, caplog):
    """Not one an operation: XLA can't have many with collectives under way at once."""
    mesh = mesh_for({"x": 4})
    shapes = [(8, n) for n in range(1, 6)]
    tree = [sk.from_local([np.ones(s)] * 4, [P], mesh) for s in shapes]
    tree += [sk.shard_tensor(np.ones(s), [S(0)], mesh) for s in shapes]
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        jax.block_until_ready(call(tree))
    assert sum(r.getMessage().startswith("Compiling") for r in caplog.records) == 1


def test_clipped_updates_stay_where_they_are(axis_types, mesh_for, ambient):
    mesh = mesh_for({"x": 4, "y": 2}, axis_types)
    places = [{"x": S(0)}, {"y": S(1)}, {"x": S(1), "y": S(0)}, {}]
    tree = [sk.shard_tensor(np.ones((8, 8)), place, mesh) for place in places]
    with ambient(mesh):
        updates, _ = sk.clip_by_global_norm(1.0).update(tree, None)
    assert [sk.placements(x) for x in updates] == [sk.placements(x) for x in tree]
