import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk
from shardkit import testing

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(8, 6)), RNG.normal(size=(6, 4))
BY_BATCH = ({"dp": sk.Shard(0)}, {})


def layer(x, w):
    return jnp.tanh(x @ w)


def loss(x, w):
    return jnp.mean(layer(x, w) ** 2)


@pytest.mark.parametrize("fun", [loss, layer, lambda x, w: {"y": layer(x, w), "n": jnp.argmax(x @ w)}])
def test_right_gradients_pass_on_1_2_4_and_8_devices(fun):
    testing.assert_same_gradients(fun, X, W, placements=BY_BATCH, argnums=(0, 1))


@pytest.mark.not_smoke
def test_two_axes_and_explicit_meshes():
    placements = ({"dp": sk.Shard(0)}, {"tp": sk.Shard(1)})
    meshes = (*testing.meshes(("dp", "tp"), devices=[8]), sk.make_mesh({"dp": 2}))
    testing.assert_same_gradients(layer, X, W, placements=placements, argnums=1, meshes=meshes, reference=layer)


def test_pytrees_with_placements_by_prefix():
    tree = {"w": W, "b": np.zeros(4)}
    placements = ({"w": {"tp": sk.Shard(1)}, "b": {"tp": sk.Shard(0)}}, {})
    testing.assert_same_gradients(
        lambda p, x: layer(x, p["w"]) + p["b"],
        tree,
        X,
        placements=placements,
        meshes=testing.meshes(("tp",), devices=[4], axis_types="auto"),
    )


def ring_resize(x):
    return sk.ring_resize(x, (1, 14), "linear", spatial_axes={"sp": 1})


def resize(x):
    return jax.image.resize(x, (1, 14), "linear")


def test_sizes_that_do_not_divide():
    options = {"placements": {"sp": sk.Shard(1)}, "reference": resize, "meshes": [sk.make_mesh({"sp": 4})]}
    testing.assert_same_gradients(ring_resize, RNG.normal(size=(1, 7)), uneven="pad", **options)
    with pytest.raises(ValueError, match='uneven="pad"'):
        testing.assert_same_gradients(ring_resize, np.zeros((1, 7)), **options)


def test_complex_numbers():
    z = X + 1j * X[::-1]
    testing.assert_same_gradients(lambda z: z**2, z, placements={"dp": sk.Shard(0)}, meshes=[sk.make_mesh({"dp": 4})])


def test_wrong_gradients_are_found():
    mesh = sk.make_mesh({"dp": 4})
    by_batch = {"dp": sk.Shard(0)}
    wrong = sk.local_map(lambda x: 2 * x - lax.stop_gradient(x), by_batch, by_batch, mesh)
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_gradients(wrong, X, placements={"dp": sk.Shard(0)}, reference=lambda x: x, meshes=[mesh])
    text = str(caught.value)
    assert text.startswith(
        "on mesh dp4 and on one device, value and gradients differ in 1 of 2 leaves:\n  ['gradients']: 48"
    )
    assert "largest relative error 1 " in text


def test_gradients_that_ones_would_not_tell_apart_are_told_apart():
    meshes = [sk.make_mesh({"dp": 2})]
    with pytest.raises(AssertionError, match="gradients"):
        testing.assert_same_gradients(lambda x: x, X, placements={}, reference=lambda x: x[::-1], meshes=meshes)


@pytest.mark.parametrize(
    ("placements", "options", "error", "said"),
    [
        (({},), {}, TypeError, "a sequence of 2, one an argument"),
        ([sk.Shard(0), sk.Shard(1)], {}, TypeError, "given by axis name"),
        (jax.P("dp"), {}, TypeError, "must be a mapping by axis name"),
        (({"w": {}}, {}), {}, ValueError, "placements of argument 0 are no prefix"),
        ({"dp": sk.Shard(0)}, {"meshes": []}, ValueError, "name axes"),
        (
            {"tp": sk.Shard(0)},
            {"meshes": "dp"},
            ValueError,
            r"name axes \['tp'\], which no mesh of meshes=\['dp8'\] has",
        ),
    ],
)
def test_bad_arguments(placements, options, error, said):
    if options.get("meshes") == "dp":
        options = {"meshes": [sk.make_mesh({"dp": 8})]}
    with pytest.raises(error, match=said):
        testing.assert_same_gradients(layer, X, W, placements=placements, **options)
