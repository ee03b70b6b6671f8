"""``reshard`` from one mesh to another: other names, parts, other devices, another order."""

import re
import types
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.reshard.transfer import transfer
from tests.reshard.reshard_cases import check, padded_source, source

S, R, PARTIAL = sk.Shard, sk.Replicate(), sk.Partial()
SHAPE = (8, 16)


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def mesh(devices, **shape):
    """A mesh of these positions among the devices."""
    picked = [jax.devices()[i] for i in devices]
    return Mesh(np.array(picked).reshape(tuple(shape.values())), tuple(shape))


ALL = range(8)
WIDE = mesh(ALL, x=2, y=4)
TALL = mesh(ALL, a=4, b=2)
LINE = mesh(ALL, i=8)
BACKWARD = mesh(ALL[::-1], i=8)
FIRST = mesh(range(4), i=4)
SECOND = mesh(range(4, 8), i=4)
MIDDLE = mesh((2, 3), i=2)
ONE = mesh((6,), i=1)

SAME_ORDER = [
    ((WIDE, [S(0), S(1)]), (TALL, [S(1), S(0)])),
    ((WIDE, [S(1), R]), (TALL, [R, S(1)])),
    ((WIDE, [PARTIAL, S(0)]), (TALL, [S(0), R])),
    ((LINE, [S(0)]), (WIDE, [S(1), PARTIAL])),
    ((WIDE, [R, PARTIAL]), (LINE, [PARTIAL])),
    ((WIDE, [sk.Partial("max"), S(1)]), (TALL, [R, sk.Partial("max")])),
]
OTHERS = [
    ((FIRST, [S(0)]), (SECOND, [S(0)])),
    ((FIRST, [S(0)]), (SECOND, [S(1)])),
    ((FIRST, [R]), (SECOND, [S(1)])),
    ((FIRST, [S(1)]), (SECOND, [R])),
    ((LINE, [S(0)]), (BACKWARD, [S(0)])),
    ((LINE, [S(0)]), (BACKWARD, [S(1)])),
    ((WIDE, [S(0), S(1)]), (FIRST, [S(0)])),
    ((MIDDLE, [S(1)]), (WIDE, [S(1), S(0)])),
    ((WIDE, [S(0), S(0)]), (ONE, [R])),
    ((ONE, [S(0)]), (LINE, [S(1)])),
    ((WIDE, [PARTIAL, S(0)]), (SECOND, [S(1)])),
    ((FIRST, [S(0)]), (WIDE, [PARTIAL, S(1)])),
    ((FIRST, [PARTIAL]), (SECOND, [PARTIAL])),
    ((FIRST, [sk.Partial("mean")]), (SECOND, [sk.Partial("max")])),
]


def name(ways):
    return ", ".join(f"{dict(m.shape)} {p}" for m, p in ways)


@pytest.mark.parametrize("ways", SAME_ORDER + OTHERS, ids=name)
@pytest.mark.every(2)
def test_values(ways):
    src, dst = (sk.Layout(*end) for end in ways)
    x, value = source(name(ways), src, SHAPE, "float64")
    check(jax.block_until_ready(sk.reshard(x, ways[1][1], ways[1][0])), dst, value)
    check(jax.block_until_ready(sk.reshard(x, dst)), dst, value)


@pytest.mark.parametrize("ways", SAME_ORDER, ids=name)
def test_the_same_devices_in_one_order_under_jit(ways):
    src, dst = (sk.Layout(*end) for end in ways)
    x, value = source(name(ways), src, SHAPE, "float64")
    given = None if src.partial_axes else src
    program = jax.jit(lambda a: sk.reshard(a, dst, src=given)).lower(x).compile()
    check(jax.block_until_ready(program(x)), dst, value)
    plan = sk.plan_reshard(SHAPE, "float64", src, dst)
    report = sk.collectives(program, mesh=src.mesh)
    assert sorted(entry.kind for entry in report) == sorted(plan.collectives)
    assert report.bytes() == plan.bytes_per_device


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ((WIDE, [S(0), S(0)]), (LINE, [S(0)])),
        ((WIDE, [S(0), S(0)]), (TALL, [S(0), S(0)])),
        ((WIDE, [R, R]), (LINE, [R])),
        ((LINE, [S(1)]), (TALL, P(None, ("a", "b")))),
    ],
    ids=str,
)
def test_other_words_for_the_same_place_copy_nothing(src, dst):
    src, dst = sk.Layout(*src), sk.Layout(*dst)
    x, value = source(0, src, SHAPE, "float64")
    y = sk.reshard(x, dst)
    check(y, dst, value)
    assert y.sharding.mesh == dst.mesh
    assert [s.data.unsafe_buffer_pointer() for s in y.addressable_shards] == [
        s.data.unsafe_buffer_pointer() for s in x.addressable_shards
    ]


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_explicit_meshes(axis_types):
    wide = sk.make_mesh({"x": 2, "y": 4}, axis_types="explicit")
    tall = sk.make_mesh({"a": 4, "b": 2}, axis_types=axis_types)
    half = sk.make_mesh({"a": 4}, axis_types=axis_types, devices=jax.devices()[4:])
    x, value = source(0, sk.Layout(wide, [S(0), S(1)]), SHAPE, "float64")
    for where, placements in ((tall, [S(1), S(0)]), (half, [S(1)]), (tall, [PARTIAL, R]), (half, [PARTIAL])):
        y = jax.block_until_ready(sk.reshard(x, placements, where))
        check(y, sk.Layout(where, placements), value)


# --- what is received ---------------------------------------------------------------------------------


@pytest.fixture
def received(monkeypatch):
    """Bytes that each device was sent by device_put."""
    count = Counter()
    original = jax.device_put

    def counting(x, device=None, **kwargs):
        if isinstance(device, jax.Device) and isinstance(x, jax.Array) and x.device != device:
            count[device] += x.nbytes
        return original(x, device, **kwargs)

    monkeypatch.setattr(jax, "device_put", counting)
    return count


@pytest.mark.parametrize("ways", OTHERS, ids=name)
def test_no_more_is_received_than_planned(ways, received):
    src, dst = (sk.Layout(*end) for end in ways)
    x, value = source(1, src, SHAPE, "float64")
    received.clear()
    y = jax.block_until_ready(sk.reshard(x, dst))
    found = max(received.values(), default=0)
    check(y, dst, value)
    plan = sk.plan_reshard(SHAPE, "float64", src, dst)
    assert found == sum(step.bytes for step in plan.steps if step.kind == "transfer")


@pytest.mark.parametrize("ways", [OTHERS[0], OTHERS[2], OTHERS[4], OTHERS[7]], ids=name)
def test_the_plan_counts_what_a_device_lacks(ways):
    """Where nothing but a transfer is planned: the elements of its block that it doesn't hold."""
    src, dst = (sk.Layout(*end) for end in ways)
    plan = sk.plan_reshard(SHAPE, "float64", src, dst)
    held = NamedSharding(src.mesh, src.stack_spec(2)).devices_indices_map(SHAPE)
    wanted = NamedSharding(dst.mesh, dst.stack_spec(2)).devices_indices_map(SHAPE)
    lacking = []
    for device, index in wanted.items():
        here, own = np.zeros(SHAPE, bool), np.zeros(SHAPE, bool)
        here[index] = True
        if device in held:
            own[held[device]] = True
        lacking.append(int((here & ~own).sum()) * 8)
    assert [step.kind for step in plan.steps] == ["transfer"]
    assert plan.bytes_per_device == max(lacking)


# --- padded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", SAME_ORDER[:4] + OTHERS[:8] + OTHERS[10:12], ids=name)
@pytest.mark.every(2)
def test_padded(ways):
    src, dst = (sk.Layout(*end) for end in ways)
    x, value = padded_source(name(ways), src, (5, 7), np.nan)
    check(jax.block_until_ready(sk.reshard(x, dst)), dst, value, padded=True)


# --- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ways", [SAME_ORDER[0], SAME_ORDER[2], *OTHERS[1:3], OTHERS[5], OTHERS[6], OTHERS[10]], ids=name
)
@pytest.mark.every(2)
def test_gradients(ways):
    src, dst = (sk.Layout(*end) for end in ways)
    x, value = source(name(ways), src, SHAPE, "float64")
    given = None if src.partial_axes else src

    def loss(x):
        return (sk.reshard(x, dst, src=given) ** 2).sum()

    found = jax.block_until_ready(jax.grad(loss)(x))
    array, like = (v.stack if src.partial_axes else v for v in (found, x))
    np.testing.assert_array_equal(np.asarray(array), np.broadcast_to(2 * value, like.shape))
    assert array.sharding.is_equivalent_to(like.sharding, like.ndim)


# --- refused ------------------------------------------------------------------------------------------


def test_other_devices_under_jit():
    x, _ = source(0, sk.Layout(FIRST, [S(0)]), SHAPE, "float64")
    with refuses("on other devices, or in another order, under jit"):
        jax.jit(lambda a: sk.reshard(a, [S(0)], SECOND, src=sk.Layout(FIRST, [S(0)])))(x)
    with refuses("call sk.reshard between two jitted functions"):
        jax.jit(lambda a: sk.reshard(a, [S(0)], BACKWARD, src=sk.Layout(LINE, [S(0)])))(jnp.ones(SHAPE))


def test_another_mesh_under_jit_on_explicit_axes():
    wide = sk.make_mesh({"x": 2, "y": 4}, axis_types="explicit")
    x, _ = source(0, sk.Layout(wide, [S(0), S(1)]), SHAPE, "float64")
    with jax.set_mesh(wide), refuses("under jit on Explicit axes, whose types know one mesh a program"):
        jax.jit(lambda a: sk.reshard(a, [S(1), S(0)], TALL))(x)


class Far:
    """A stand-in for a device of another process."""

    process_index = 3


def test_devices_of_another_process():
    x, _ = source(0, sk.Layout(FIRST, [S(0)]), SHAPE, "float64")
    sharding: Any = types.SimpleNamespace(device_set={*jax.devices()[:4], Far()}, mesh=FIRST)
    with refuses("reshard: process 0 can't address the devices of processes [3]"):
        transfer(x, SHAPE, sharding)
