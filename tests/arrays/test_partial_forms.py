"""What a PartialArray is refused, or taken for, as it goes through JAX's and NumPy's own functions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk

PARTIAL = sk.Partial()


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


def partial(mesh, shape=(4, 2), kind="sum"):
    count = mesh.shape["x"]
    blocks = [np.arange(float(np.prod(shape))).reshape(shape) + i for i in range(count)]
    return sk.from_local(blocks, [sk.Partial(kind)], mesh), np.sum(blocks, axis=0)


@pytest.fixture(params=[1, 4])
def mesh(request, mesh_for):
    return mesh_for({"x": request.param})


@pytest.mark.parametrize("ufunc", [np.sqrt, np.exp, np.maximum, np.matmul, np.floor_divide], ids=lambda f: f.__name__)
def test_ufuncs_of_numpy(mesh, ufunc):
    p, _ = partial(mesh)
    with refuses("reduce first: sk.reshard(x, ...)", TypeError):
        ufunc(*[p] * ufunc.nin)
    if ufunc.nin == 2:
        with refuses("reduce first: sk.reshard(x, ...)", TypeError):
            ufunc(np.ones((4, 2)), p)


def test_linear_ufuncs_of_numpy(mesh):
    p, value = partial(mesh)
    plain = np.arange(8.0).reshape(4, 2)
    for got, wanted in [
        (plain + p, plain + value),
        (np.add(p, plain), value + plain),
        (plain - p, plain - value),
        (np.float64(3) * p, 3 * value),
        (np.negative(p), -value),
        (np.divide(p, 2.0), value / 2),
    ]:
        np.testing.assert_array_equal(np.asarray(got.reduce()), wanted)
    with refuses("reduce first: sk.reshard(x, ...)", TypeError):
        plain / p


def test_ranks_in_turn(mesh):
    """Equal layouts, arrays of other ranks: one program doesn't serve both."""
    for shape in [(4, 2), (4,), (), (2, 3, 4)]:
        p, value = partial(mesh, shape)
        np.testing.assert_array_equal(np.asarray((p * 0.5 + 1).reduce()), value * 0.5 + 1)


def test_a_new_dim_before_the_contributions(mesh):
    """As vmap and scan put there; it can't be told from contributions, so nothing is done with it."""
    p, value = partial(mesh)
    batched = jax.vmap(lambda c: p * c)(jnp.arange(3.0))
    _, scanned = jax.lax.scan(lambda carry, c: (carry, p * c), 0, jnp.arange(3.0))
    for each in (batched, scanned):
        for use in (lambda a: a.reduce(), lambda a: a.shape, lambda a: a + 1, lambda a: sk.reshard(a, [sk.Shard(0)])):
            with refuses("a new dim before it, as vmap and scan put there"):
                use(each)
        assert repr(each).startswith("PartialArray(")
    inside = jax.vmap(lambda c: (p * c).reduce())(jnp.arange(3.0))
    np.testing.assert_array_equal(np.asarray(inside), np.arange(3.0)[:, None, None] * value)


def test_a_padded_of_another_length(mesh_for):
    """What is padded for other shards counts as far as it counts."""
    mesh = mesh_for({"x": 2, "y": 4})
    value = np.arange(10.0).reshape(5, 2)
    other = sk.shard_tensor(value, {"y": sk.Shard(0)}, mesh, uneven="pad")
    p = sk.reshard(sk.shard_tensor(value, {"x": sk.Shard(0)}, mesh, uneven="pad"), {"y": PARTIAL, "x": sk.Shard(0)})
    assert other.array.shape != p.stack.shape[1:]
    total = (p + other).reduce()
    np.testing.assert_array_equal(np.asarray(total), 2 * value)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
def test_empty(mesh, shape):
    p = sk.reshard(np.zeros(shape), [PARTIAL], mesh)
    assert p.shape == shape and p.reduce().shape == shape
    assert sk.reshard(p, [sk.Shard(0)]).shape == shape


def test_a_padded_under_jit(mesh_for):
    """A traced Padded answers for its value; its mesh is found all the same."""
    mesh = mesh_for({"x": 4})
    value = np.arange(5.0)
    x = sk.shard_tensor(value, [sk.Shard(0)], mesh, uneven="pad")
    for f in (sk.unshard, lambda a: sk.reshard(a, [sk.Replicate()], mesh), lambda a: sk.reshard(a, [sk.Shard(0)])):
        np.testing.assert_array_equal(np.asarray(jax.jit(f)(x)), value)
