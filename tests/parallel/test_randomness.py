"""Blocks of random arrays, against the whole ones that JAX draws."""

import re

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.nnx.nn import attention as nnx_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import shardkit as sk
from shardkit.optim.examples import Cut, Examples, Part, current_examples, examples_here, place, read_cuts
from shardkit.parallel.layers import counters
from shardkit.parallel.layers.dropout import attention_dropout, dropout, linen_dropout, nnx_dropout
from shardkit.parallel.layers.randomness import bernoulli_block

KEY = jax.random.key(7)


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), st.integers(0, 2**64 - 1))
def test_products_of_words(numbers, factor):
    high, low = counters.times(np.uint32(numbers), factor)
    assert [int(h) * 2**32 + int(n) for h, n in zip(high, low, strict=True)] == [x * factor % 2**64 for x in numbers]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=2))
def test_sums_of_pairs(numbers):
    pairs = [(np.uint32([x // 2**32]), np.uint32([x % 2**32])) for x in numbers]
    high, low = counters.plus(*pairs)
    assert int(high[0]) * 2**32 + int(low[0]) == sum(numbers) % 2**64


@given(st.data())
def test_positions_in_arrays_too_large_to_draw(data):
    shape = data.draw(
        st.lists(st.integers(1, 2**20), min_size=1, max_size=4).filter(lambda s: np.prod(s, dtype=float) < 2**64)
    )
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    block = [data.draw(st.integers(1, min(3, n - s))) for n, s in zip(shape, starts, strict=True)]
    indices = [np.arange(s, s + n, dtype=np.uint32) for s, n in zip(starts, block, strict=True)]
    high, low = counters.positions(indices, shape)
    assert low.shape == tuple(block) and isinstance(high, int) == (np.prod(shape, dtype=object) <= 2**32)
    found = np.broadcast_to(np.asarray(high, np.uint64), low.shape).astype(object) * 2**32 + low.astype(object)
    wanted = 0
    for dim, (index, stride) in enumerate(zip(indices, counters.strides_of(shape), strict=True)):
        wanted = wanted + index.astype(object).reshape((-1,) + (1,) * (len(shape) - dim - 1)) * stride
    assert (found == wanted).all()


@settings(max_examples=8)
@given(st.data())
def test_blocks_are_those_of_the_whole(data):
    whole = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    starts = tuple(data.draw(st.integers(0, n - 1)) for n in whole)
    shape = tuple(data.draw(st.integers(0, n - s)) for n, s in zip(whole, starts, strict=True))
    p = data.draw(st.sampled_from([0.5, 0.9, 0.0, 1.0, np.float32(0.3), np.float16(0.7), jnp.bfloat16(0.25)]))
    key = data.draw(st.sampled_from([KEY, jax.random.PRNGKey(3)]))
    # One program an example: eager operations would each be compiled for its shapes.
    run = jax.jit(
        lambda key, *starts: (bernoulli_block(key, p, shape, starts, whole), jax.random.bernoulli(key, p, whole))
    )
    got, drawn = run(key, *starts)
    wanted = np.asarray(drawn)[tuple(slice(s, s + n) for s, n in zip(starts, shape, strict=True))]
    assert got.dtype == bool and (np.asarray(got) == wanted).all()


@pytest.mark.parametrize("x64", [True, False])
def test_traced_starts_with_and_without_64_bits(x64):
    with jax.enable_x64(x64):
        block = jax.jit(lambda start: bernoulli_block(KEY, 0.5, (3, 40), (start, 0), (12, 40)))
        wanted = jax.random.bernoulli(KEY, 0.5, (12, 40))
        assert all((block(start) == wanted[start : start + 3]).all() for start in (0, 4, 9))
        # float64 draws other bits.
        assert jnp.result_type(0.5) == (jnp.float64 if x64 else jnp.float32)


@pytest.mark.not_smoke
def test_high_words_are_used():
    """Beyond 2 ** 32 elements nothing is drawn whole: against the hash of the positions themselves."""
    with jax.enable_x64(False):
        block = jax.jit(lambda start: bernoulli_block(KEY, 0.5, (2, 3), (2**20 + 5, start), (2**21, 2**31)))
        got = block(jnp.uint32(2**31 - 3))
        first, second = jax.random.key_data(KEY)
        at = [(2**20 + 5 + i) * 2**31 + 2**31 - 3 + j for i in range(2) for j in range(3)]
        high, low = jnp.asarray([x // 2**32 for x in at], jnp.uint32), jnp.asarray([x % 2**32 for x in at], jnp.uint32)
        words = jax.extend.random.threefry_2x32((first, second), jnp.concatenate([high, low]))
        bits = words[:6] ^ words[6:]
        assert (got.ravel() == (bits < jnp.uint32(2**31))).all()


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_keys_draw_the_whole(impl):
    key = jax.random.key(0, impl=impl)
    got = jax.jit(lambda start: bernoulli_block(key, 0.5, (2, 7), (start, 1), (6, 8)))(3)
    assert (got == jax.random.bernoulli(key, 0.5, (6, 8))[3:5, 1:]).all()


def test_positions_that_are_not_hashed():
    with jax.threefry_partitionable(False):
        got = bernoulli_block(KEY, 0.5, (2, 7), (jnp.asarray(3), 1), (6, 8))
        assert (got == jax.random.bernoulli(KEY, 0.5, (6, 8))[3:5, 1:]).all()


@pytest.mark.not_smoke
def test_the_block_alone_is_computed():
    """No array of the whole size, and nothing is communicated where the compiler shares out another dim."""
    mesh = sk.make_mesh({"dp": 2, "tp": 4})

    def masked(x, i):
        block = bernoulli_block(KEY, 0.5, x.shape, (i[0] * x.shape[0], 0), (2 * x.shape[0], x.shape[1]))
        return jnp.where(block, x, 0)

    dp = PartitionSpec("dp")
    region = jax.jit(jax.shard_map(masked, mesh=mesh, in_specs=(dp, dp), out_specs=dp, axis_names={"dp"}))
    x = sk.shard_tensor(jnp.ones((6, 8)), [sk.Shard(0), sk.Shard(1)], mesh)
    assert (region(x, jnp.arange(2)) == jax.random.bernoulli(KEY, 0.5, (6, 8))).all()
    assert not len(sk.collectives(region, x, jnp.arange(2)))
    assert "6,8" not in str(jax.make_jaxpr(bernoulli_block, static_argnums=(2, 4))(KEY, 0.5, (3, 8), (3, 0), (6, 8)))


def test_blocks_that_are_refused():
    with refuses("doesn't lie within"):
        bernoulli_block(KEY, 0.5, (2, 3), (0,), (4, 3))
    with refuses("no more elements"):
        bernoulli_block(KEY, 0.5, (5,), (jnp.asarray(0),), (4,))
    with refuses("p is a scalar"):
        bernoulli_block(KEY, jnp.ones(3), (3,), (0,), (6,))
    with refuses("single key"):
        bernoulli_block(jax.random.split(KEY), 0.5, (3,), (jnp.asarray(0),), (6,))
    with refuses("floating dtype", TypeError):
        bernoulli_block(KEY, 1, (3,), (jnp.asarray(0),), (6,))


def part_of(index, parts, rows, axes=("dp",)):
    return Part(jnp.asarray(index), Cut(axes, (parts,), 1, rows))


def test_how_a_batch_is_cut():
    cuts = read_cuts({"dp": 0, "fsdp": 0, "sp": 2}, {"dp": 2, "fsdp": 3, "sp": 4, "tp": 2}, 5, [(60, 7, 8), (60, 1, 4)])
    assert cuts == {0: Cut(("dp", "fsdp"), (2, 3), 5, 2), 2: Cut(("sp",), (4,), 1, None)}
    assert read_cuts({"sp": 1}, {"sp": 2}, 4, [(8, 6)]) == {0: Cut((), (), 4, 2), 1: Cut(("sp",), (2,), 1, 3)}
    here = place(cuts, {"dp": 1, "fsdp": 2, "sp": 3}, 4)
    assert [(d, p.index, p.start, p.rows, p.whole) for d, p in here.parts.items()] == [
        (0, 29, 58, 2, 60),
        (2, 3, *3 * [None]),
    ]


def test_blocks_of_arrays_made_of_examples():
    here = Examples({0: part_of(3, 4, 6), 2: part_of(1, 2, 8, ("sp",))})

    def ints(found):
        return [int(s) for s in found[0]], list(found[1])

    assert ints(here.block(jnp.ones((6, 5, 8)))) == ([18, 0, 8], [24, 5, 16])
    assert ints(here.block(jnp.ones((12, 5, 4)))) == ([36, 0, 4], [48, 5, 8])  # rows with others, a stride
    assert ints(here.block(jnp.ones((6, 5)))) == ([18, 0], [24, 5])
    assert ints(here.block(jnp.ones((5, 6)), {0: 1})) == ([0, 18], [5, 24])
    assert ints(here.block(jnp.ones((5, 7)), {})) == ([0, 0], [5, 7])
    with refuses("dim 0 of an array of shape (5, 6) is taken for dim 0 of the batch, of which 6 rows are here"):
        here.block(jnp.ones((5, 6)))


class Dropout(nnx.Dropout):
    def __call__(self, x, **kwargs):
        return nnx_dropout(self, x, **kwargs)


def intercepted(fun):
    def interceptor(next_fun, args, kwargs, context):
        if isinstance(context.module, linen.Dropout) and context.method_name == "__call__":
            return linen_dropout(context.module, *args, **kwargs)
        return next_fun(*args, **kwargs)

    with linen.intercept_methods(interceptor):
        return fun()


WAYS = [{}, {"broadcast_dims": (0,)}, {"broadcast_dims": (-1,)}, {"rate": 1.0}, {"rate": 0.0}, {"deterministic": True}]


# Outside of a region nnx layers are Flax's own.
@pytest.mark.parametrize(("way", "inside"), [({}, False), *((way, True) for way in WAYS)], ids=str)
@pytest.mark.every(2)
def test_nnx_layers(way, inside):
    """Values, and the number of keys taken, as of Flax's layer: of the whole, or of its rows."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 3)))
    args = {"rate": 0.4, **way}
    theirs, ours = nnx.Dropout(**args, rngs=nnx.Rngs(5)), Dropout(**args, rngs=nnx.Rngs(5))
    twice = nnx.jit(lambda layer, x: layer(layer(x)))
    wanted = twice(theirs, x)
    with examples_here(Examples({0: part_of(2, 4, 2)}) if inside else None):
        rows = slice(4, 6) if inside else slice(None)
        got = twice(ours, x[rows])
    assert (got == wanted[rows]).all()
    assert ours.rngs.count[...] == theirs.rngs.count[...]


@pytest.mark.parametrize(("way", "inside"), [*((way, False) for way in WAYS), (WAYS[2], True)], ids=str)
@pytest.mark.every(2)
def test_linen_layers(way, inside):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            args = {"rate": 0.4, "deterministic": False, **way}
            return linen.Dropout(**args)(linen.Dropout(**args, name="named")(x))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 3)))
    wanted = jax.jit(lambda: Model().apply({}, x, rngs={"dropout": KEY}))()
    with examples_here(Examples({0: part_of(2, 4, 2)}) if inside else None):
        rows = slice(4, 6) if inside else slice(None)
        got = intercepted(jax.jit(lambda: Model().apply({}, x[rows], rngs={"dropout": KEY})))
    assert (got == wanted[rows]).all()


@pytest.mark.not_smoke
def test_calls_of_layers_that_are_refused():
    """By Flax, in its words."""
    x = jnp.ones((2, 3))
    with examples_here(Examples({0: part_of(2, 4, 2)})):
        with refuses("No `deterministic` argument"):
            Dropout(0.5, deterministic=None, rngs=nnx.Rngs(0))(x)
        with refuses("no `rngs` argument"):
            Dropout(0.5)(x)
        with refuses("rngs must be", TypeError):
            Dropout(0.5)(x, rngs=3)
        for rngs in (nnx.Rngs(dropout=KEY), nnx.Rngs(dropout=KEY).dropout):
            assert (Dropout(0.5)(x, rngs=rngs) != 0).any()
        assert (Dropout(0.5)(x, rngs=KEY) == dropout(x, 0.5, KEY)).all()
        with refuses("needs PRNG", flax.errors.InvalidRngError):
            intercepted(lambda: linen.Dropout(0.5, deterministic=False).apply({}, x))
        with refuses("deterministic"):
            intercepted(lambda: linen.Dropout(0.5).apply({}, x, rngs={"dropout": KEY}))
        assert (intercepted(lambda: linen.Dropout(0.5).apply({}, x, False, KEY)) == dropout(x, 0.5, KEY)).all()
    assert current_examples() is None


@pytest.mark.parametrize("module", [nnx_attention, linen], ids=["nnx", "linen"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_attention(module, broadcast):
    q, k = (jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(2, 8, 5, 3, 4)))
    plain = module.dot_product_attention_weights
    args = {"dropout_rng": KEY, "dropout_rate": 0.4, "broadcast_dropout": broadcast}
    wanted = jax.jit(lambda: plain(q, k, **args))()
    with examples_here(Examples({0: part_of(2, 4, 2)})):
        got = jax.jit(lambda: attention_dropout(plain(q[4:6], k[4:6], deterministic=True), 0.4, KEY, broadcast))()
    np.testing.assert_allclose(got, wanted[4:6], rtol=1e-12)
    with examples_here(Examples({1: part_of(2, 4, 5)})), refuses("dims [1] of the batch are cut"):
        attention_dropout(wanted, 0.4, KEY, broadcast)
