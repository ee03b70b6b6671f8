"""`bernoulli_block`: part of the random numbers that a key gives for a whole array, without drawing the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from shardkit._compat import varying_axes
from shardkit.parallel.layers.counters import positions
from shardkit.varying import varying


def bernoulli_block(key: Any, p: Any, shape: Sequence[int], starts: Sequence[Any], whole_shape: Sequence[int]) -> Any:
    """The block of ``jax.random.bernoulli(key, p, whole_shape)`` that begins at ``starts``, bit for bit.

    Threefry keys, in the partitionable way that is JAX's default, give each element the hash of its position (Salmon et
    al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so the block alone is computed. Of other keys (``rbg``, an
    implementation of one's own, ``jax_threefry_partitionable`` off) the whole is drawn, and the block taken out.

    Args:
      key: one key, typed or raw.
      p: the probability of True, a scalar; its dtype decides how many bits are drawn.
      shape: of the block.
      starts: its first index in each dim: ints, traced ones too. The block must lie within the whole.
      whole_shape: of all.

    Returns:
      Booleans of shape ``shape``.

    Raises:
      ValueError: shapes and starts of different lengths, a block larger than the whole, a ``p`` that is no scalar, a
        batch of keys.
      TypeError: a ``p`` that is no float.

    Example:
      >>> import jax, shardkit as sk
      >>> key = jax.random.key(0)
      >>> block = bernoulli_block(key, 0.5, (2, 3), (4, 0), (8, 3))
      >>> bool((block == jax.random.bernoulli(key, 0.5, (8, 3))[4:6]).all())
      True
    """
    shape, whole_shape, starts = tuple(shape), tuple(whole_shape), tuple(starts)
    if not len(shape) == len(whole_shape) == len(starts) or any(b > w for b, w in zip(shape, whole_shape, strict=True)):
        raise ValueError(
            f"bernoulli_block: a block of shape {shape} that begins at {len(starts)} indices doesn't lie within "
            f"{whole_shape}; give as many of each, and no more elements than there are"
        )
    if jnp.ndim(p):
        raise ValueError(f"bernoulli_block: p is a scalar, one of shape {jnp.shape(p)} was given")
    fixed = [isinstance(s, int | np.integer) for s in starts]
    if all(fixed) and shape == whole_shape:
        return jax.random.bernoulli(key, p, whole_shape)
    if not _counts(key, p):
        drawn = jax.random.bernoulli(key, p, whole_shape)
        return lax.dynamic_slice(drawn, [jnp.asarray(s, jnp.int32) for s in starts], shape)
    p = jnp.asarray(p, lax.dtype(p))
    return _uniform_block(key, p.dtype, shape, starts, whole_shape) < p


def _counts(key: Any, p: Any) -> bool:
    """Whether a number is the hash of its position, and can be computed alone."""
    return (
        jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
        and jnp.issubdtype(lax.dtype(p), np.floating)
        and jax.random.key_impl(key) == "threefry2x32"
        and jax.random.key_data(key).shape == (2,)
    )


def _uniform_block(
    key: Any, dtype: Any, shape: tuple[int, ...], starts: tuple[Any, ...], whole_shape: tuple[int, ...]
) -> Any:
    """The block of ``jax.random.uniform(key, whole_shape, dtype)``: random fractions of floats in [1, 2)."""
    kind = jnp.finfo(dtype)
    drawn = 8 if kind.nmant < 8 else kind.bits
    words = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}
    word = words[kind.bits]
    bits = _bits_block(key, words[drawn], shape, starts, whole_shape).astype(word)
    bits = lax.shift_right_logical(bits, jnp.asarray(drawn - kind.nmant, word))
    one = jnp.asarray(np.array(1.0, dtype).view(word), word)
    return lax.bitcast_convert_type(bits | one, dtype) - jnp.asarray(1.0, dtype)


def _bits_block(
    key: Any, word: Any, shape: tuple[int, ...], starts: tuple[Any, ...], whole_shape: tuple[int, ...]
) -> Any:
    """The block of ``jax.random.bits(key, whole_shape, word)``."""
    indices = [_word(s) + jnp.arange(n, dtype=jnp.uint32) for s, n in zip(starts, shape, strict=True)]
    high, low = positions(indices, whole_shape) if shape else (0, jnp.zeros((), jnp.uint32))
    words = jax.random.key_data(key)
    varies = sorted(varying_axes(low) | varying_axes(words))
    given = [words[0], words[1], *(jnp.broadcast_to(jnp.asarray(x, jnp.uint32), shape) for x in (high, low))]
    bits = threefry2x32_p.bind(*(varying(x, varies) for x in given))
    # The primitive's type doesn't say that a value differs from device to device.
    bits = [varying(x, varies) for x in bits]
    if word != jnp.uint64:
        return (bits[0] ^ bits[1]).astype(word)
    return lax.shift_left(bits[0].astype(word), jnp.asarray(32, word)) | bits[1].astype(word)


def _word(x: Any) -> Any:
    return np.uint32(x) if isinstance(x, int | np.integer) else x.astype(jnp.uint32)
