"""``assert_same_collectives`` and ``assert_adjoint``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk
from shardkit import testing

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def mesh():
    return sk.make_mesh({"dp": 2, "sp": 4})


def mapped(fun, mesh, out=("sp",)):
    return jax.shard_map(fun, mesh=mesh, in_specs=jax.P("sp"), out_specs=jax.P(*out), check_vma=False)


def shift(by):
    return lambda x: lax.ppermute(x, "sp", [(i, (i + by) % 4) for i in range(4)])


def test_the_same_collectives(mesh):
    x = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("sp")))
    forth = sk.collectives(mapped(shift(1), mesh), x)
    assert testing.assert_same_collectives(forth, mapped(shift(-1), mesh), x) is forth
    testing.assert_same_collectives(mapped(lambda x: 2 * shift(1)(x), mesh), forth, x)
    twice = mapped(lambda x: shift(1)(shift(1)(x) * x) + lax.psum(x, "sp"), mesh)
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_collectives(twice, forth, x)
    assert str(caught.value) == (
        "the programs' collectives differ: 1 wanted (-), 3 found (+):\n"
        "+ all_reduce, add, over sp, 24 bytes (24 B) a device\n"
        "+ collective_permute, over sp, 16 bytes (16 B) a device\n"
        "  1 is the same"
    )
    loop = mapped(lambda x: lax.fori_loop(0, 3, lambda _, x: shift(1)(x) * 2, x), mesh)
    with pytest.raises(AssertionError, match=r"\+ collective_permute, .* a device, in a loop"):
        testing.assert_same_collectives(loop, forth, x)
    testing.assert_same_collectives(loop, forth, x, by=["kind", "axes"])
    wide = jax.ShapeDtypeStruct((32,), jnp.float32, sharding=x.sharding)
    with pytest.raises(AssertionError, match="- collective_permute, over sp, 16 bytes"):
        testing.assert_same_collectives(mapped(shift(1), mesh), forth, wide)


@pytest.mark.parametrize("by", ["kind", [], ["size"]])
def test_what_collectives_are_compared_by(by):
    with pytest.raises(ValueError, match="are compared by some of"):
        testing.assert_same_collectives(jnp.sum, jnp.sum, jnp.ones(3), by=by)


def test_assert_collectives_is_here_too():
    assert testing.assert_collectives is sk.assert_collectives


@pytest.mark.parametrize("mode", ["zeros", pytest.param("circular", marks=pytest.mark.slow)])
def test_the_halo_exchange_and_its_derivative_are_adjoint(mesh, mode):
    def exchange(x):
        return sk.halo_exchange(x, "sp", 0, 2, 1, mode=mode)

    x = sk.shard_tensor(RNG.normal(size=24), {"sp": sk.Shard(0)}, mesh)
    y = sk.shard_tensor(RNG.normal(size=36), {"sp": sk.Shard(0)}, mesh)
    testing.assert_adjoint(mapped(exchange, mesh), None, x, y)


def test_a_reshard_and_its_reverse_are_adjoint(mesh):
    x = sk.shard_tensor(RNG.normal(size=(8, 8)), {"sp": sk.Shard(0)}, mesh)
    y = sk.shard_tensor(RNG.normal(size=(8, 8)), {"dp": sk.Shard(1)}, mesh)
    back = lambda y: sk.reshard(y, {"sp": sk.Shard(0)})  # noqa: E731
    testing.assert_adjoint(lambda x: sk.reshard(x, {"dp": sk.Shard(1)}), back, x, y)


def test_trees_and_complex_numbers():
    z = RNG.normal(size=3) + 1j * RNG.normal(size=3)
    testing.assert_adjoint(lambda t: {"s": t[0] + t[1]}, lambda y: [y["s"], y["s"]], [z, z**2], {"s": z[::-1]})
    testing.assert_adjoint(lambda x: 1j * x, lambda y: 1j * y, z, z)


@pytest.mark.parametrize(
    ("transpose", "said"),
    [
        (lambda y: 2 * jnp.roll(y, -1), r"<F x, y> = \S+, but <x, F\* y> = \S+, 0.5 times the other"),
        (lambda y: jnp.roll(y, 1), "the maps aren't adjoint"),
        (lambda y: y[:2], r"x has shape \(3,\) at the array, but transpose\(y\) has \(2,\)"),
        (lambda y: [y], r"x has the leaves \['the array'\], but transpose\(y\) has \['\[0\]'\]"),
    ],
)
def test_what_is_not_adjoint(transpose, said):
    x, y = RNG.normal(size=(2, 3))
    with pytest.raises(AssertionError, match=said):
        testing.assert_adjoint(lambda x: jnp.roll(x, 1), transpose, x, y)


def test_zero_is_adjoint_to_zero():
    testing.assert_adjoint(lambda x: 0 * x, lambda y: 0 * y, np.ones(3), np.ones(3))
