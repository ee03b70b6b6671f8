"""Which leaves travel together, and where each lies in its bucket. Sizes only, no arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

# Bytes, by platform, of benchmarks/optimizer.py. A TPU's compiler makes all-reduces of flat buckets' scatters and
# gathers, and combines leaves by itself; a GPU's combines scatters only, and buckets of all gradients take memory. On
# other platforms one bucket has the fewest collectives, and costs nothing.
BEST_LIMIT: dict[str, int] = {"tpu": 0, "gpu": 32 * 2**20, "cuda": 32 * 2**20}


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one leaf lies in a bucket.

    Attributes:
      leaf: its number in the flattened tree.
      start: its first column.
      size: how many columns it takes: elements of one piece.
    """

    leaf: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that one collective reduces.

    Seen as a matrix with a row for each device that is to get a piece (one row where all get all).

    Attributes:
      key: what all its leaves have in common.
      slots: in order, without gaps.
    """

    key: Hashable
    slots: tuple[Slot, ...]

    @property
    def width(self) -> int:
        """Columns, in elements."""
        return sum(slot.size for slot in self.slots)


def pack(keys: Sequence[Hashable], sizes: Sequence[int], itemsizes: Sequence[int], limit: int | None) -> list[Bucket]:
    """Leaves in buckets of equal key, in tree order, of about ``limit`` bytes.

    Args:
      keys: of each leaf, what must be equal in a bucket: dtype, what is reduced over, into how many pieces.
      sizes: of each leaf, the columns it takes.
      itemsizes: of each leaf, the bytes that a column takes.
      limit: a bucket is closed before it would get longer than this; None for one bucket a key. A leaf longer than it
        gets a bucket of its own; with 0, every leaf does.

    Raises:
      ValueError: a negative limit.

    Example:
      >>> [[slot.leaf for slot in bucket.slots] for bucket in pack("aba", [3, 1, 3], [4, 4, 4], 16)]
      [[0], [1], [2]]
    """
    if limit is not None and limit < 0:
        raise ValueError(
            f"bucket_bytes={limit}: a number of bytes; 0 leaves every array by itself, None takes what is best here"
        )
    done: list[Bucket] = []
    open_: dict[Hashable, list[Slot]] = {}
    for leaf, (key, size, itemsize) in enumerate(zip(keys, sizes, itemsizes, strict=True)):
        slots = open_.setdefault(key, [])
        filled = slots[-1].start + slots[-1].size if slots else 0
        if slots and limit is not None and (filled + size) * itemsize > limit:
            done.append(Bucket(key, tuple(slots)))
            slots = open_[key] = []
            filled = 0
        slots.append(Slot(leaf, filled, size))
    done += [Bucket(key, tuple(slots)) for key, slots in open_.items()]
    return sorted(done, key=lambda bucket: bucket.slots[0].leaf)


def best_limit(platform: str) -> int | None:
    """The bound on a bucket where the caller gives none: what ``benchmarks/optimizer.py`` shows to be best."""
    return BEST_LIMIT.get(platform)
