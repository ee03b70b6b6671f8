"""What propagation compares: bytes first, computing as the bytes that could travel meanwhile, then tidiness."""

from __future__ import annotations

import math
from typing import NamedTuple

# A device multiplies this many numbers in the time in which it receives one byte (TPU v5e: 197 Tflop/s against 200 GB/s
# of all its links, H100: 990 against 450). Without it the fewest bytes would often be those of a weight that every
# device gathers, to then do the work of all.
FLOPS_A_BYTE = 1000.0

# A loop of which nobody knows how often it runs.
UNKNOWN_TRIPS = 8


class Price(NamedTuple):
    """Compared in this order.

    Attributes:
      bytes: that one device receives, now or, of what is left Partial, later; and the work, in bytes.
      collectives: how many.
      moves: reshards of any kind, local ones counted.
      memory: bytes of results on one device.
    """

    bytes: float
    collectives: float
    moves: int
    memory: int


def work(flops: float) -> float:
    """Flops as bytes."""
    return flops / FLOPS_A_BYTE


def local_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Of a block."""
    return math.prod(shape) * itemsize
