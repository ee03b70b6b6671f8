import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.attention import all_to_all_attention, tiles
from shardkit.inspect.explaining.purposes import Facts, reason
from tests.attention.oracle import assert_equal, coin, normal, operands, plain, pulled


def place(mesh, *spec):
    return lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("axis_types", "shape"),
    [
        ("auto", {"tp": 2, "sp": 2}),
        slow("explicit", {"tp": 2, "sp": 2}),
        *(slow(types, {"sp": 4}) for types in ("auto", "explicit")),
        *(slow(types, {"dp": 2, "sp": 2}) for types in ("auto", "explicit")),
    ],
)
def test_values_gradients_and_exchanges(mesh_for, ambient, monkeypatch, axis_types, shape):
    monkeypatch.setattr(tiles, "TILE", 5)
    mesh = mesh_for(shape, axis_types)
    spec = ("dp" if "dp" in shape else None, "sp", "tp" if "tp" in shape else None)
    args = operands(rows=16, heads=8, kv_heads=4)
    attend = functools.partial(all_to_all_attention, axis="sp", causal=True, mesh=mesh)
    with ambient(mesh):
        placed = tuple(map(place(mesh, *spec), args))
        step = pulled(attend).lower(*placed).compile()
        found = step(*placed)
    assert_equal(found, pulled(functools.partial(plain, causal=True))(*args))
    wanted = NamedSharding(mesh, PartitionSpec(*spec))
    assert all(x.sharding.is_equivalent_to(wanted, 4) for x in jax.tree.leaves(found))
    # One exchange for the operands, one for the result, and both again backward.
    permuted = axis_types == "auto" and len(shape) > 1
    used, unused = ("collective_permute", "all_to_all") if permuted else ("all_to_all", "collective_permute")
    counts: dict[str, Any] = {used: {"sp": 4}, unused: 0}
    report = sk.assert_collectives(step, all_gather=0, all_reduce=0, mesh=mesh, **counts)
    assert len(report) == 4
    assert {reason(entry, Facts()).purpose for entry in report} == {"attention"}


@pytest.mark.slow
def test_bias_mask_lengths_and_few_kv_heads(mesh_for):
    mesh = mesh_for({"sp": 4})
    args = operands(rows=14, cols=9, heads=4, kv_heads=2, depth_v=5)
    bias = normal(4, 14, 9)
    mask = coin(0.3, 2, 1, 14, 9).at[:, :, 3].set(False)
    attend = functools.partial(all_to_all_attention, mask=mask, axis="sp", mesh=mesh)
    found = pulled(lambda q, k, v, b: attend(q, k, v, bias=b))(*args, bias)
    assert_equal(found, pulled(lambda q, k, v, b: plain(q, k, v, bias=b, mask=mask))(*args, bias))


@pytest.mark.slow
@pytest.mark.parametrize("bias_shape", [(4, 16, 16), (1, 16, 16), (4, 1, 16)])
def test_inside_a_manual_region(mesh_for, bias_shape):
    mesh = mesh_for({"sp": 4})
    args = operands(rows=16)
    bias = normal(*bias_shape)
    spec = PartitionSpec(None, "sp")
    region = jax.shard_map(
        lambda q, k, v, b: all_to_all_attention(q, k, v, axis="sp", causal=True, bias=b),
        mesh=mesh,
        in_specs=(spec, spec, spec, spec if bias_shape[1] > 1 else PartitionSpec()),
        out_specs=spec,
    )
    found = pulled(region)(*args, bias)
    assert_equal(found, pulled(lambda q, k, v, b: plain(q, k, v, causal=True, bias=b))(*args, bias))


@pytest.mark.slow
def test_nested_in_value_and_grad(mesh_for):
    mesh = mesh_for({"dp": 2, "sp": 2})
    x = normal(4, 8, 2, 4, seed=0)
    w = normal(4, 4)

    def loss(attend, w, x):
        return jnp.mean(attend(x @ w, x, x @ w, causal=True) ** 2)

    attend = functools.partial(all_to_all_attention, axis="sp")
    step = sk.value_and_grad(functools.partial(loss, attend), batch_axes="dp", mesh=mesh)
    value, grad = jax.jit(step)(w, x)
    assert_equal((value, grad.reduce()), jax.jit(jax.value_and_grad(functools.partial(loss, plain)))(w, x))


def test_heads_that_do_not_divide(mesh_for):
    mesh = mesh_for({"sp": 4})
    with pytest.raises(ValueError, match="use ring_attention"):
        all_to_all_attention(*operands(heads=6), axis="sp", mesh=mesh)
