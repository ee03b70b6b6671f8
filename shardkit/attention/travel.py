"""Blocks that travel round the ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardkit import scopes
from shardkit.spatial.exchange import AxisName, permute

T = TypeVar("T")

# Up to so many devices every step of the ring is written out; beyond, those in the middle are one loop: a program of
# bounded size, whose memory doesn't depend on the order in which a compiler puts the steps (on CPU it drops barriers,
# and may send all blocks at once). Temporaries of forward and backward on 8 CPU devices, blocks of 1 MiB: 35 MiB in a
# loop, 43 to 56 written out. A GPU compiler keeps the order: 138 and 122 MiB (H100, blocks of 4 MiB), but it takes 2.5
# times longer.
WRITTEN_OUT = 4

# Backward goes the other way round. Else the compiler could take its blocks for those of forward, and keep all of them
# in between: the whole sequence.
FORWARD, BACKWARD = 1, -1


def pack(key: Array, value: Array) -> tuple[Array, ...]:
    """What travels together: one array, so one permute, if shapes agree."""
    return (jnp.stack([key, value]),) if key.shape == value.shape else (key, value)


def unpack(packed: tuple[Array, ...]) -> tuple[Array, Array]:
    """The inverse of ``pack``."""
    return (packed[0][0], packed[0][1]) if len(packed) == 1 else (packed[0], packed[1])


def send_on(x: T, axis_name: AxisName, shards: int, by: int) -> T:
    """To the device ``by`` places on (1 or -1) in the ring."""
    pairs = tuple((i, (i + by) % shards) for i in range(shards))
    with scopes.scope(scopes.ATTENTION):
        return jax.tree.map(lambda leaf: permute(leaf, axis_name, pairs), x)


def came_from(index: Any, step: Any, shards: int, by: int) -> Any:
    """Whose block is here after ``step`` steps."""
    return (index + (shards - step if by == 1 else step)) % shards


def around(shards: int, step: Callable[[Any, T, bool, bool], T], carry: T) -> T:
    """``step(number, carry, first, last)`` for numbers 1 to ``shards - 1``."""
    last = shards - 1
    if last < 1:
        return carry
    carry = step(1, carry, True, last == 1)
    if last <= WRITTEN_OUT - 1:
        for number in range(2, last):
            carry = step(number, carry, False, False)
    elif last > 2:
        carry = lax.fori_loop(np.int32(2), np.int32(last), lambda number, c: step(number, c, False, False), carry)
    return step(last, carry, False, True) if last > 1 else carry


def in_turn(*values: Any) -> Any:
    """The values, all computed before any is used: a block is sent on only once the step before is done.

    Else the compiler could send all blocks at once, and a device would hold the whole sequence.
    """
    return lax.optimization_barrier(values)
