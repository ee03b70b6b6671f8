"""What the user fixed of results costs no more than to compute them freely and to cut them, which is local."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk

S = sk.Shard
MESHES = {"2 x 4": {"dp": 2, "tp": 4}, "8": {"dp": 8}}
SIZES = {"wide": (512, 256, 1024, 256), "small": (32, 16, 64, 8), "deep batch": (4096, 32, 64, 32)}


def step(params, x, y):
    def loss(params):
        hidden = jax.nn.relu(x @ params["up"])
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def model_of(name):
    return {"up": {"tp": S(1)}, "down": {"tp": S(0)}} if name == "2 x 4" else {"up": {}, "down": {}}


ENDS = {
    "both": ({"dp": S(0)}, {"dp": S(1)}),
    "the first": ({"dp": S(0)}, {}),
    "the last": ({}, {"dp": S(1)}),
    "rows": ({"dp": S(0)}, {"dp": S(0)}),
}


def arguments(sizes):
    batch, inner, hidden, outer = sizes
    up, down, x, y = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((inner, hidden), (hidden, outer), (batch, inner), (batch, outer))
    )
    return {"up": up, "down": down}, x, y


def fixed(name, sizes, end):
    mesh, model = sk.make_mesh(MESHES[name]), model_of(name)
    batch = {"dp": S(0)}
    out = {key: place | ends for (key, place), ends in zip(model.items(), ENDS[end], strict=True)}
    given = arguments(SIZES[sizes])
    if end == "rows" and name == "2 x 4":
        out["down"] = {"tp": S(0)}
    free = sk.partition(step, (model, batch, batch), None, mesh=mesh)
    asked = sk.partition(step, (model, batch, batch), (out, {}), mesh=mesh)
    return free.program(*given), asked, given


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MESHES)
def test_costs_no_more(name, sizes, end):
    free, asked, given = fixed(name, sizes, end)
    assert asked.program(*given).bytes_per_device <= free.bytes_per_device


def test_gradients_are_scattered_at_once():
    """And nothing else changes: the two reductions of 262,144 bytes become halves."""
    free, asked, given = fixed("2 x 4", "wide", "both")
    program = asked.program(*given)
    kinds = sorted(kind for r in program.reshards for kind in r.collectives)
    assert kinds == ["all_reduce", "all_reduce", "reduce_scatter", "reduce_scatter"]
    assert program.bytes_per_device == free.bytes_per_device - 2 * 131_072


def test_values_and_places():
    _, asked, given = fixed("2 x 4", "small", "both")
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: rng.normal(size=x.shape), given)
    want, value = step(*values)
    got, found = asked(*values)
    np.testing.assert_allclose(found, value, rtol=1e-12)
    for key, place in {"up": (S(0), S(1)), "down": (S(1), S(0))}.items():
        np.testing.assert_allclose(got[key], want[key], rtol=1e-12, atol=1e-14)
        assert sk.placements(got[key]) == place
