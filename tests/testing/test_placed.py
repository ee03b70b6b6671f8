import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import shardkit as sk
from shardkit import testing


@pytest.fixture(scope="module")
def mesh():
    return sk.make_mesh({"dp": 2, "sp": 4})


@pytest.fixture(scope="module")
def x(mesh):
    return sk.shard_tensor(np.zeros((8, 16)), {"dp": sk.Shard(0), "sp": sk.Shard(1)}, mesh)


def test_every_form_of_the_same_layout_is_equal(mesh, x):
    for placements in (
        [sk.Shard(0), sk.Shard(1)],
        [sk.Shard(-2), sk.Shard(-1)],
        {"sp": sk.Shard(1), "dp": sk.Shard(0)},
        jax.P("dp", "sp"),
        jax.P(("dp",), ("sp",)),
        NamedSharding(mesh, jax.P("dp", "sp")),
        sk.Layout(mesh, [sk.Shard(0), sk.Shard(1)]),
    ):
        testing.assert_placements(x, placements)
        testing.assert_placements({"a": [x, x]}, placements, mesh)
        testing.assert_placements({"a": [x, x]}, {"a": placements})
        testing.assert_placements({"a": [x, 1]}, {"a": [placements, None]})


def test_axes_of_size_1_do_not_matter():
    mesh = sk.make_mesh({"dp": 1, "sp": 8})
    x = sk.shard_tensor(np.zeros((8, 8)), {"sp": sk.Shard(0)}, mesh)
    testing.assert_placements(x, {"dp": sk.Shard(1), "sp": sk.Shard(0)})
    testing.assert_placements(x, {"sp": sk.Shard(0)}, sk.make_mesh({"sp": 8}))
    one = sk.make_mesh({"dp": 1})
    testing.assert_placements(jnp.zeros(3), {"dp": sk.Shard(0)}, one)  # on that device, though on no mesh


@pytest.mark.parametrize(
    ("spec", "wanted", "said"),
    [
        (jax.P("dp"), {"dp": sk.Shard(1)}, "found {dp: Shard(0)} on mesh {'dp': 2, 'sp': 4}, wanted {dp: Shard(1)}"),
        (jax.P("dp"), {}, "wanted {} (replicated)"),
        (jax.P(), {"sp": sk.Shard(0)}, "found {} (replicated) on mesh"),
        (jax.P("dp"), {"dp": sk.Partial("max")}, "wanted {dp: Partial('max')}"),
        (jax.P(("dp", "sp")), jax.P(("sp", "dp")), "wanted {dp: Shard(0), sp: Shard(0)}, dim 0 by sp then dp"),
    ],
)
def test_says_what_was_found_and_what_was_wanted(mesh, spec, wanted, said):
    tree = {"a": jnp.zeros(3), "w": jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, spec))}
    with pytest.raises(AssertionError) as caught:
        testing.assert_placements(tree, {"a": None, "w": wanted})
    assert str(caught.value).startswith("1 of 2 arrays live elsewhere:\n  ['w']: ")
    assert said in str(caught.value)


def test_partial_padded_and_abstract_arrays(mesh):
    parts = sk.from_local([np.zeros(4)] * 8, {"dp": sk.Partial(), "sp": sk.Shard(0)}, mesh)
    testing.assert_placements([parts], [{"dp": sk.Partial(), "sp": sk.Shard(0)}])
    with pytest.raises(AssertionError, match=r"found {dp: Partial"):
        testing.assert_placements(parts, {"dp": sk.Partial("max"), "sp": sk.Shard(0)})
    padded = sk.shard_tensor(np.zeros(7), {"sp": sk.Shard(0)}, mesh, uneven="pad")
    testing.assert_placements({"x": padded}, {"x": {"sp": sk.Shard(0)}})
    testing.assert_placements(jax.ShapeDtypeStruct((8,), float, sharding=NamedSharding(mesh, jax.P("dp"))), jax.P("dp"))


def test_another_mesh(mesh, x):
    with pytest.raises(AssertionError, match=r"is on no mesh .*, wanted {dp: Shard"):
        testing.assert_placements(jnp.zeros(8), {"dp": sk.Shard(0)}, mesh)
    with pytest.raises(AssertionError, match="is on no mesh"):
        testing.assert_placements(jnp.zeros(8), {"dp": sk.Shard(0)})
    turned = sk.make_mesh({"dp": 2, "sp": 4}, devices=jax.devices()[::-1])
    moved = jax.device_put(x, NamedSharding(jax.sharding.Mesh(mesh.devices[::-1], ("dp", "sp")), jax.P("dp", "sp")))
    testing.assert_placements(moved, jax.P("dp", "sp"))
    with pytest.raises(AssertionError, match="whose devices are others or in another order"):
        testing.assert_placements(moved, jax.P("dp", "sp"), mesh)
    assert turned.shape == mesh.shape


@pytest.mark.parametrize(
    ("placements", "error", "said"),
    [
        ({"tp": sk.Shard(0)}, ValueError, "name mesh axes"),
        ([sk.Shard(0)], ValueError, "got 1 placements"),
        ({"x": {"dp": sk.Shard(2)}}, ValueError, "dim must lie in"),
        ({"y": {}}, ValueError, "are no prefix of the tree"),
        ({"x": 3}, TypeError, "3 is no placements"),
    ],
)
def test_bad_placements(x, placements, error, said):
    with pytest.raises(error, match=said):
        testing.assert_placements({"x": x}, placements)
