"""Who holds what, against what JAX says of the same shardings."""

import itertools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.inspect.drawing import show
from shardkit.inspect.drawing.blocks import even_cut, listed_holdings, mesh_holdings

P, S, R = PartitionSpec, sk.Shard, sk.Replicate()
MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 4}]


def spans(drawing):
    """device id -> ((start, stop) of each dim)"""
    devices = drawing.to_dict()["devices"]
    return {d["device"]: tuple((dim["start"], dim["stop"]) for dim in d["dims"]) for d in devices}


def oracle(sharding, shape):
    """The same, as JAX says it."""
    found = sharding.devices_indices_map(shape)
    return {
        device.id: tuple(index.indices(size)[:2] for index, size in zip(indices, shape, strict=True))
        for device, indices in found.items()
    }


def specs(axes, ndim):
    """Every way to put some of the axes, in any order, on the dims."""
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for dims in itertools.product(range(ndim), repeat=count):
                entries = [tuple(a for a, d in zip(chosen, dims, strict=True) if d == dim) for dim in range(ndim)]
                yield P(*(entry or None for entry in entries))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (16, 8), (8, 8, 8)], ids=str)
def test_blocks_are_those_of_devices_indices_map(mesh_for, axes, shape):
    mesh = mesh_for(axes)
    for spec in specs(tuple(axes), len(shape)):
        sharding = NamedSharding(mesh, spec)
        assert spans(show(sharding, shape=shape)) == oracle(sharding, shape), spec


@hypothesis.given(st.data())
def test_blocks_of_any_rank(mesh_for, data):
    mesh = mesh_for(data.draw(st.sampled_from(MESHES)))
    ndim = data.draw(st.integers(1, 5))
    dims = {name: data.draw(st.integers(-1, ndim - 1)) for name in mesh.axis_names}
    placements = {name: S(dim) for name, dim in dims.items() if dim >= 0}
    shape = tuple(8 * data.draw(st.integers(0, 3)) for _ in range(ndim))
    drawing = show(placements, mesh, shape=shape)
    assert spans(drawing) == oracle(sk.to_named_sharding(placements, mesh), shape)
    assert str(drawing)
    assert json.loads(json.dumps(drawing.to_dict())) == drawing.to_dict()


@hypothesis.given(st.integers(0, 40), st.integers(1, 9))
def test_the_parts_of_a_padded_dim_hold_each_element_once(size, parts):
    stored = -(-size // parts) * parts
    cut = even_cut(size, stored, parts)
    held = [i for part in range(parts) for i in range(*cut.interval(part))]
    assert held == list(range(size))
    assert sum(cut.padding(part) for part in range(parts)) == stored - size


def test_copies_and_bytes(mesh_for):
    x = jax.device_put(jnp.zeros((4, 6), jnp.float32), NamedSharding(mesh_for({"a": 2, "b": 4}), P("a")))
    entries = show(x).to_dict()["devices"]
    assert [e["copies"] for e in entries] == [4] * 8
    assert [e["bytes"] for e in entries] == [s.data.nbytes for s in x.addressable_shards]
    assert entries[5]["coordinates"] == {"a": 1, "b": 1}
    assert all(e["platform"] == "cpu" and e["process"] == 0 for e in entries)


def test_rank_0(mesh_for):
    drawing = show(jax.device_put(jnp.float32(1), NamedSharding(mesh_for({"a": 8}), P())))
    assert drawing.to_dict()["devices"][3]["dims"] == []
    assert "0-7" in str(drawing) and "x8 copies" in str(drawing)


def test_padded(mesh_for):
    x = sk.shard_tensor(jnp.zeros((5,)), {"a": S(0)}, mesh_for({"a": 8}), uneven="pad")
    told = show(x).to_dict()
    assert told["shape"] == [5] and told["dims"][0]["padding"] == 3
    assert [d["dims"][0]["padding"] for d in told["devices"]] == [0] * 5 + [1] * 3
    assert [d["only_padding"] for d in told["devices"]] == [False] * 5 + [True] * 3
    assert str(show(x)).count("only pad") == 3 and "·" in str(show(x))


def test_padded_that_is_only_described(mesh_for):
    sharding = NamedSharding(mesh_for({"a": 2, "b": 4}), P("a", "b"))
    x = sk.Padded(jax.ShapeDtypeStruct((6, 12), jnp.bfloat16, sharding=sharding), (5, 10))  # type: ignore[arg-type]
    told = show(x).to_dict()
    assert told["devices"][7]["dims"] == [
        {"dim": 0, "part": 1, "start": 3, "stop": 5, "padding": 1},
        {"dim": 1, "part": 3, "start": 9, "stop": 10, "padding": 2},
    ]
    assert told["devices"][7]["bytes"] == 3 * 3 * 2
    assert "+2 pad" in str(show(x)) and "+1 pad" in str(show(x))


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_partial(mesh_for, kind):
    mesh = mesh_for({"a": 2, "b": 4})
    x = sk.from_local([jnp.full((4, 3), float(i)) for i in range(8)], {"a": S(0), "b": sk.Partial(kind)}, mesh)
    told = show(x).to_dict()
    assert told["shape"] == [8, 3] and told["reduce"] == kind and told["partial_axes"] == ["b"]
    assert [d["contribution"] for d in told["devices"]] == [{"b": i % 4} for i in range(8)]
    assert [d["copies"] for d in told["devices"]] == [1] * 8
    assert f"{kind} of 4" in str(show(x))
    assert {"sum": "the sum", "max": "the maximum"}[kind] + " over b of 4 contributions" in str(show(x))


def test_partial_and_padded(mesh_for):
    mesh = mesh_for({"a": 2, "b": 4})
    layout = sk.Layout(mesh, {"a": sk.Partial(), "b": S(0)})
    stack = jax.device_put(jnp.zeros((2, 8)), NamedSharding(mesh, layout.stack_spec(1)))
    told = show(sk.PartialArray(stack, layout, (5,))).to_dict()
    assert told["shape"] == [5]
    assert [d["dims"][0]["padding"] for d in told["devices"]] == [0, 0, 1, 2] * 2


def test_native_unreduced_arrays(mesh_for):
    mesh = mesh_for({"a": 8}, "explicit")
    told = show(NamedSharding(mesh, P(None, unreduced={"a"})), shape=(3,)).to_dict()
    assert told["reduce"] == "sum" and told["partial_axes"] == ["a"]


def test_one_device():
    x = jax.device_put(jnp.zeros((3, 4)), jax.devices()[5])
    told = show(x).to_dict()
    assert told["mesh"] is None and told["placements"] is None
    assert [d["device"] for d in told["devices"]] == [5]
    assert told["devices"][0]["dims"][1] == {"dim": 1, "part": 0, "start": 0, "stop": 4, "padding": 0}


class Listed(jax.sharding.Sharding):
    """A sharding without a mesh, that only lists what devices hold."""

    def __init__(self, listed):
        self.listed = listed

    def devices_indices_map(self, global_shape):
        return self.listed


def test_other_shardings_through_devices_indices_map():
    devices = jax.devices()[:4]
    halves = [(slice(None), slice(4, 8)), (slice(None), slice(0, 4))]
    sharding = Listed(dict(zip(devices, halves * 2, strict=True)))
    drawing = show(sharding, shape=(2, 8))
    assert spans(drawing) == {0: ((0, 2), (4, 8)), 1: ((0, 2), (0, 4)), 2: ((0, 2), (4, 8)), 3: ((0, 2), (0, 4))}
    assert str(drawing).startswith("Listed shape [2, 8] on 4 devices (cpu)")
    assert drawing.to_dict()["devices"][0]["copies"] == 2


def test_abstract_meshes_have_positions_and_no_ids():
    mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "sp"))
    drawing = show(P("dp", "sp"), mesh, shape=(4, 4))
    assert [d["device"] for d in drawing.to_dict()["devices"]] == [None] * 4
    assert "dp=1 sp=0" in str(drawing)


def test_the_ambient_mesh(mesh_for):
    mesh = mesh_for({"a": 8}, "explicit")
    with jax.set_mesh(mesh):
        drawing = show({"a": S(0)}, shape=(8,))
    assert [d["device"] for d in drawing.to_dict()["devices"]] == [d.id for d in mesh.devices.flat]


def test_a_layout_on_an_abstract_mesh_shown_on_its_devices(mesh_for):
    mesh = mesh_for({"a": 8})
    layout = sk.Layout(mesh.abstract_mesh, {"a": S(0)})
    assert show(layout, shape=(8,)).to_dict()["devices"][2]["device"] is None
    assert show(layout, mesh, shape=(8,)).to_dict()["devices"][2]["device"] == mesh.devices[2].id


def test_without_a_shape_parts_are_numbered(mesh_for):
    drawing = show([S(0), S(2)], mesh_for({"a": 2, "b": 4}))
    told = drawing.to_dict()
    assert told["shape"] is None
    assert told["devices"][6]["dims"] == [
        {"dim": d, "part": part, "start": None, "stop": None, "padding": 0} for d, part in enumerate((1, 0, 2))
    ]
    assert "part 3" in str(drawing) and "layout of unknown shape" in str(drawing)


def test_a_layout_that_cuts_nothing_without_a_shape(mesh_for):
    drawing = show({}, mesh_for({"a": 8}))
    assert drawing.to_dict()["shape"] is None and "layout of unknown shape" in str(drawing)


def test_a_mesh_order_that_is_not_that_of_ids():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4])[::-1].reshape(2, 2), ("a", "b"))
    drawing = show({"a": S(0)}, mesh, shape=(4,))
    assert spans(drawing) == oracle(NamedSharding(mesh, P("a")), (4,))


def test_neighbours_stay_at_the_same_place_on_other_axes():
    holdings = mesh_holdings({"a": 2, "b": 2}, [even_cut(4, 4, 2, ("b",))])
    assert holdings.neighbour(holdings.holders[2], (1,)).coordinates == {"a": 1, "b": 1}
    listed = listed_holdings((4,), [[(0, 2)], [(2, 4)], [(0, 2)], [(2, 4)]])
    assert listed.neighbour(listed.holders[2], (1,)).number == 3
