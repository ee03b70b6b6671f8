import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.attention import from_zigzag, ring_attention, tiles, to_zigzag, zigzag_order
from shardkit.inspect.explaining.purposes import Facts, reason
from tests.attention.oracle import assert_equal, coin, normal, operands, plain, pulled


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 3)


def place(mesh, *spec):
    return lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    # axis types, shards, causal, order, kv_heads
    ("auto", 4, True, "zigzag", 2),
    slow("auto", 4, True, "contiguous", 4),
    ("explicit", 8, False, "contiguous", 1),
    slow("explicit", 4, True, "zigzag", 2),
    slow("explicit", 4, True, "contiguous", 4),
    slow("auto", 8, False, "contiguous", 1),
    *(slow(types, 2, False, "contiguous", 1) for types in ("auto", "explicit")),
    *(slow(types, 8, True, "zigzag", 1) for types in ("auto", "explicit")),
    *(slow(types, 8, False, "contiguous", 2) for types in ("auto", "explicit")),
    *(slow(types, 1, True, "contiguous", 2) for types in ("auto", "explicit")),
]


@pytest.mark.parametrize(("axis_types", "shards", "causal", "order", "kv_heads"), CASES)
def test_values_gradients_and_permutes(mesh_for, ambient, small_tiles, axis_types, shards, causal, order, kv_heads):
    mesh = mesh_for({"sp": shards}, axis_types)
    args = operands(rows=8 * shards, kv_heads=kv_heads)
    expected = pulled(functools.partial(plain, causal=causal))
    if order == "zigzag":
        at = jnp.asarray(zigzag_order(8 * shards, shards))
        back = jnp.argsort(at)
        truth = pulled(lambda *a: plain(*(x[:, back] for x in a), causal=causal)[:, at])
        args = tuple(x[:, at] for x in args)
    else:
        truth = expected
    attend = functools.partial(ring_attention, axis="sp", causal=causal, order=order, mesh=mesh)
    with ambient(mesh):
        placed = tuple(map(place(mesh, None, "sp"), args))
        step = pulled(attend).lower(*placed).compile()
        out, grads = step(*placed)
    assert_equal((out, grads), truth(*args))
    wanted = NamedSharding(mesh, PartitionSpec(None, "sp"))
    assert all(x.sharding.is_equivalent_to(wanted, 4) for x in (out, *grads))
    # Forward: keys and values in one. Backward, the other way round (the same on two devices): they, and gradients.
    permutes = (3 if shards > 2 else 2) * (shards - 1)
    report = sk.assert_collectives(step, all_gather=0, all_reduce=0, all_to_all=0, mesh=mesh)
    assert sum(entry.trip_count for entry in report) == permutes
    assert {reason(entry, Facts()).purpose for entry in report} <= {"attention"}


@pytest.mark.not_smoke
def test_bias_mask_and_lengths(mesh_for, small_tiles):
    mesh = mesh_for({"sp": 4})
    args = operands(rows=30, cols=21, kv_heads=2, depth_v=5)
    bias = normal(4, 30, 21)
    mask = coin(0.2, 2, 1, 30, 21).at[:, :, 3].set(False)
    found = pulled(lambda q, k, v, b: ring_attention(q, k, v, bias=b, mask=mask, axis="sp", mesh=mesh))
    assert_equal(found(*args, bias), pulled(lambda q, k, v, b: plain(q, k, v, bias=b, mask=mask))(*args, bias))


@pytest.mark.slow
def test_causal_with_broadcast_bias_and_mask(mesh_for, ambient, axis_types):
    mesh = mesh_for({"sp": 2, "tp": 2}, axis_types)
    args = operands(rows=16, kv_heads=2)
    bias = normal(4, 1, 16)
    mask = jnp.arange(16) >= jnp.array([0, 5])[:, None, None, None]  # the first rows see nothing
    attend = functools.partial(ring_attention, causal=True, mask=mask, axis="sp", mesh=mesh)
    with ambient(mesh):
        placed = tuple(map(place(mesh, None, "sp", "tp"), args))
        found = pulled(lambda q, k, v, b: attend(q, k, v, bias=b))(*placed, bias)
    assert_equal(found, pulled(lambda q, k, v, b: plain(q, k, v, bias=b, mask=mask, causal=True))(*args, bias))


@pytest.mark.slow
@pytest.mark.parametrize("other", ["dp", "tp"])
def test_other_mesh_axes_stay(mesh_for, ambient, axis_types, other):
    mesh = mesh_for({other: 2, "sp": 4}, axis_types)
    spec = ("dp", "sp") if other == "dp" else (None, "sp", "tp")
    args = operands(rows=32, kv_heads=2)
    attend = functools.partial(ring_attention, axis="sp", causal=True, mesh=mesh)
    with ambient(mesh):
        placed = tuple(map(place(mesh, *spec), args))
        step = pulled(attend).lower(*placed).compile()
        found = step(*placed)
    assert_equal(found, pulled(functools.partial(plain, causal=True))(*args))
    wanted = NamedSharding(mesh, PartitionSpec(*spec))
    assert all(x.sharding.is_equivalent_to(wanted, 4) for x in jax.tree.leaves(found))
    sk.assert_collectives(step, collective_permute={"sp": 9}, all_gather=0, all_reduce=0, all_to_all=0, mesh=mesh)


@pytest.mark.parametrize(
    ("axis_types", "shards", "balance"),
    [
        ("auto", 2, True),
        slow("auto", 4, True),
        slow("auto", 4, False),
        slow("explicit", 4, True),
        slow("explicit", 4, False),
    ],
)
@pytest.mark.not_smoke
def test_nested_in_value_and_grad(mesh_for, ambient, axis_types, shards, balance):
    mesh = mesh_for({"dp": 2, "sp": shards}, axis_types)
    x = normal(4, 16, 8, seed=0)
    w = normal(8, 24)

    def loss(attend, w, x):
        parts = (p.reshape(*p.shape[:-1], 2, 4) for p in jnp.split(x @ w, 3, -1))
        return jnp.mean(attend(*parts, causal=True) ** 2)

    attend = functools.partial(ring_attention, axis="sp", balance=balance)
    with ambient(mesh):
        step = sk.value_and_grad(functools.partial(loss, attend), batch_axes="dp", mesh=mesh)
        value, grad = jax.jit(step)(w, place(mesh, "dp", "sp")(x))
        grad = grad.reduce()
    assert_equal((value, grad), jax.jit(jax.value_and_grad(functools.partial(loss, plain)))(w, x))


@pytest.mark.parametrize(("shards", "names"), [(2, ("sp",)), slow(4, ("sp",)), slow(4, ("dp", "sp"))])
@pytest.mark.not_smoke
def test_inside_a_manual_region(mesh_for, shards, names):
    mesh = mesh_for({"dp": 2, "sp": shards})
    args = operands(rows=16, kv_heads=2)
    bias = normal(4, 16, 16)
    spec = PartitionSpec("dp" if "dp" in names else None, "sp")
    region = jax.shard_map(
        lambda q, k, v, b: ring_attention(q, k, v, axis="sp", causal=True, bias=b),
        mesh=mesh,
        in_specs=(spec, spec, spec, PartitionSpec(None, "sp")),
        out_specs=spec,
        axis_names=set(names),
    )
    assert_equal(
        pulled(region)(*args, bias),
        pulled(lambda q, k, v, b: plain(q, k, v, causal=True, bias=b))(*args, bias),
    )


@pytest.mark.slow
def test_transformations(mesh_for):
    mesh = mesh_for({"sp": 2})
    args = operands(rows=8)
    attend = functools.partial(ring_attention, axis="sp", causal=True, mesh=mesh)
    truth = functools.partial(plain, causal=True)
    assert_equal(attend(*args), truth(*args))  # eager
    assert_equal(pulled(jax.checkpoint(attend))(*args), pulled(truth)(*args))
    many = tuple(jnp.stack([x, 2 * x]) for x in args)
    assert_equal(pulled(jax.vmap(attend))(*many), pulled(jax.vmap(truth))(*many))
    assert_equal(attend(*(x[0] for x in args)), truth(*(x[0] for x in args)))  # no batch


@pytest.mark.slow
def test_bfloat16_sums_in_float32(mesh_for):
    mesh = mesh_for({"sp": 4})
    args = tuple(x.astype(jnp.bfloat16) for x in operands(rows=32))
    exact = tuple(x.astype(jnp.float64) for x in args)
    out, grads = pulled(functools.partial(ring_attention, axis="sp", mesh=mesh))(*args)
    assert out.dtype == jnp.bfloat16 and all(g.dtype == jnp.bfloat16 for g in grads)
    truth = pulled(plain)(*exact)
    assert_equal(jax.tree.map(lambda x: x.astype(jnp.float64), (out, grads)), truth, 0.1)


@pytest.mark.parametrize("axis_types", ["explicit", slow("auto")])
def test_padded(mesh_for, ambient, axis_types):
    @jax.jit
    def spoil(x):  # what pads it means nothing
        return jnp.where(jnp.arange(16)[:, None, None] < 13, x, jnp.nan)

    mesh = mesh_for({"sp": 4}, axis_types)
    args = operands(rows=13)
    with ambient(mesh):
        padded = [sk.shard_tensor(x, {"sp": sk.Shard(1)}, mesh, uneven="pad") for x in args]
        padded = [sk.Padded(spoil(x.array), x.logical_shape) for x in padded]
        out = jax.jit(functools.partial(ring_attention, axis="sp", causal=True, mesh=mesh))(*padded)
    assert isinstance(out, sk.Padded) and out.shape == args[0].shape
    assert_equal(np.asarray(out), jax.jit(functools.partial(plain, causal=True))(*args))


@pytest.mark.parametrize("axis_types", ["auto", slow("explicit")])
def test_zigzag_and_back(mesh_for, ambient, axis_types):
    mesh = mesh_for({"sp": 4}, axis_types)
    x = jnp.arange(48.0).reshape(3, 16)
    with ambient(mesh):
        placed = place(mesh, None, "sp")(x)
        move = jax.jit(functools.partial(to_zigzag, axis="sp", mesh=mesh)).lower(placed).compile()
        moved = move(placed)
        back = from_zigzag(moved, axis="sp", mesh=mesh)
    np.testing.assert_array_equal(moved, x[:, np.array(zigzag_order(16, 4))])
    np.testing.assert_array_equal(back, x)
    sk.assert_collectives(move, collective_permute=2, all_gather=0, mesh=mesh)


def _temporaries(shards, length):
    mesh = sk.make_mesh({"sp": shards})
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "sp")))
    attend = functools.partial(ring_attention, axis="sp", causal=True, balance=False, mesh=mesh)
    return sk.memory(jax.jit(jax.grad(lambda *a: attend(*a).sum(), (0, 1, 2))), x, x, x).temporaries


@pytest.mark.not_smoke
def test_memory_is_that_of_a_block(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 64)
    assert _temporaries(8, 16_384) < 8 * 2**20  # scores of one block would be 32 MiB


@pytest.mark.slow
def test_memory_grows_with_the_block_alone(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 64)
    short, long = _temporaries(8, 16_384), _temporaries(8, 65_536)
    assert long < 4.5 * short
    assert short < 0.5 * _temporaries(2, 16_384)
    assert 0.7 * _temporaries(4, 8_192) < short < 1.1 * _temporaries(4, 8_192)  # the same block, steps written out


def error(match, kind=ValueError, *, shapes=((2, 8, 4, 8),) * 3, **kwargs):
    return pytest.param(shapes, kwargs, kind, match, id=match)


@pytest.mark.parametrize(
    ("shapes", "kwargs", "kind", "match"),
    [
        error("the mesh has", axis="x"),
        error("names the mesh axis", TypeError, axis=3),
        error("order='x' is unknown", order="x"),
        error("balance='x' is unknown", balance="x"),
        error("equally many dims", shapes=((8, 8), (8, 8), (8, 8))),
        error("batch dims must be equal", shapes=((2, 8, 4, 8), (1, 8, 4, 8), (1, 8, 4, 8))),
        error("same length and heads", shapes=((2, 8, 4, 8), (2, 8, 4, 8), (2, 6, 4, 8))),
        error("same head_dim", shapes=((2, 8, 4, 8), (2, 8, 4, 6), (2, 8, 4, 8))),
        error("must be a multiple", shapes=((2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 3, 8))),
        error("as many queries as keys", shapes=((2, 8, 4, 8), (2, 6, 4, 8), (2, 6, 4, 8)), causal=True),
        error("empty operands", shapes=((0, 8, 4, 8),) * 3),
        error("must be broadcastable", bias=np.zeros((3, 8, 8))),
        error("of a float dtype", TypeError, bias=np.zeros((8, 8), int)),
        error("scale must be a number", TypeError, scale="x"),
        error("needs dropout_rng", dropout_rate=0.5),
        error("in \\[0, 1\\)", dropout_rate=1.0),
        error("in a float dtype", TypeError, dtype="int32"),
        error("must divide its length", shapes=((2, 6, 4, 8),) * 3, order="zigzag"),
        error("must divide its length", shapes=((2, 6, 4, 8),) * 3, causal=True, balance=True),
    ],
)
def test_errors(mesh_for, shapes, kwargs, kind, match):
    args = (np.ones(s, np.float32) for s in shapes)
    with pytest.raises(kind, match=match):
        ring_attention(*args, **{"axis": "sp", "mesh": mesh_for({"sp": 2}), **kwargs})


def test_errors_on_explicit_axes(mesh_for, ambient):
    mesh = mesh_for({"sp": 2, "tp": 2}, "explicit")
    q, k, v = operands(rows=9)
    with ambient(mesh), pytest.raises(ValueError, match="don't divide the q_length 9"):
        ring_attention(q, k, v, axis="sp", mesh=mesh)
    q, k, v = map(place(mesh, None, "tp"), operands(rows=8))
    with ambient(mesh), pytest.raises(ValueError, match="along its sequence, over"):
        ring_attention(q, k, v, axis="sp", mesh=mesh)
    q, k, v = map(place(mesh, "sp"), operands(rows=8))
    with ambient(mesh), pytest.raises(ValueError, match="along other dims than its sequence"):
        ring_attention(q, k, v, axis="sp", mesh=mesh)
