"""Positions in a large array as pairs of 32-bit words: arithmetic only, on NumPy arrays or JAX ones alike.

A pair is (high word, low word), both uint32, so that nothing depends on whether 64-bit types are enabled. Overflow
wraps around, as the types have it: arrays are expected, as NumPy warns of it in scalars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Pair = tuple[Any, Any]

WORD = 2**32


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index of each dim to the next, in row-major order.

    Example:
      >>> strides_of((2, 3, 4))
      (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def times(x: Any, factor: int) -> Pair:
    """``x * factor``.

    Args:
      x: uint32.
      factor: below 2 ** 64.
    """
    low, high = factor % WORD, factor // WORD
    # x = a * 2 ** 16 + b, low = c * 2 ** 16 + d: none of the four products is longer than a word.
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a, b = x >> half, x & mask
    c, d = np.uint32(low >> 16), np.uint32(low & 0xFFFF)
    first = b * d
    second = a * d + (first >> half)
    third = b * c + (second & mask)
    carried = a * c + (second >> half) + (third >> half)
    return carried + x * np.uint32(high), x * np.uint32(low)


def plus(x: Pair, y: Pair) -> Pair:
    """The sum of two, of shapes that broadcast."""
    low = x[1] + y[1]
    carry = (low < y[1]).astype(np.uint32)
    return x[0] + y[0] + carry, low


def positions(indices: Sequence[Any], shape: Sequence[int]) -> Pair:
    """Where the elements of a block lie in an array, counted in row-major order.

    Args:
      indices: for each dim the indices that the block holds: uint32, of one dim.
      shape: of the array.

    Returns:
      A pair of arrays of the block's shape, or an int 0 in place of the high words where none is needed.

    Example:
      >>> high, low = positions([np.uint32([1, 2]), np.uint32([3])], (5, 4))
      >>> high, low.tolist()
      (0, [[7], [11]])
    """
    small = math.prod(shape) <= WORD
    total: Any = None
    for dim, (index, stride) in enumerate(zip(indices, strides_of(shape), strict=True)):
        # Of one dim as long as they can be: little is multiplied.
        pair = (0, index * np.uint32(stride % WORD)) if small else times(index, stride)
        around = (1,) * dim + (-1,) + (1,) * (len(shape) - dim - 1)
        high, low = (x if isinstance(x, int) else x.reshape(around) for x in pair)
        if total is None:
            total = (high, low)
        else:
            total = (0, total[1] + low) if small else plus(total, (high, low))
    return total
