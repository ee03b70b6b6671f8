"""Where the wrong elements of a sharded array lie: in which dims, blocks and at which borders."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a dim is cut.

    Attributes:
      axes: name and size of the mesh axes, major first.
      block: elements on one device.
    """

    axes: tuple[tuple[str, int], ...]
    block: int

    def label(self, number: int) -> str:
        """Where a block lies on the axes: "sp=1", or "dp=0,sp=1" for several."""
        index = []
        for name, size in reversed(self.axes):
            number, i = divmod(number, size)
            index.append(f"{name}={i}")
        return ",".join(reversed(index))

    @property
    def parts(self) -> int:
        """Number of blocks."""
        return int(np.prod([size for _, size in self.axes]))


def where_wrong(mask: np.ndarray, cuts: Mapping[int, Cut]) -> str:
    """A sentence on where ``mask`` is true.

    Args:
      mask: true for the wrong elements, of which there is at least one.
      cuts: of the dims that are cut over devices.

    Example:
      >>> mask = np.zeros((2, 64), bool)
      >>> mask[:, 31:33] = True
      >>> where_wrong(mask, {1: Cut((("sp", 4),), 16)})
      'all wrong elements are in dim 1 (cut by sp into 4 blocks of 16) at 31:33, at the border of blocks sp=1 | sp=2'
    """
    texts = []
    for dim, size in enumerate(mask.shape):
        indices = np.flatnonzero(mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim)))
        if len(indices) == size:
            continue
        text = f"dim {dim}"
        if dim in cuts:
            cut = cuts[dim]
            text += f" (cut by {' x '.join(name for name, _ in cut.axes)} into {cut.parts} blocks of {cut.block})"
        text += f" at {_runs(indices)}"
        if dim in cuts:
            text += f", {_blocks(indices, size, cuts[dim])}"
        texts.append(text)
    if not texts:
        return "wrong elements are all over the array"
    return "all wrong elements are in " + "; and in ".join(texts)


def _runs(indices: np.ndarray) -> str:
    """Sorted indices as ranges: "3, 31:33"."""
    starts = [i for i, (a, b) in enumerate(itertools.pairwise(indices), 1) if b != a + 1]
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, starts)]
    texts = [str(a) if b == a + 1 else f"{a}:{b}" for a, b in runs]
    return ", ".join(texts[:_SHOWN]) + (f", ... ({len(texts)} runs)" if len(texts) > _SHOWN else "")


def _blocks(indices: np.ndarray, size: int, cut: Cut) -> str:
    borders = np.array([*range(0, size, cut.block), size])  # a tail of empty blocks has none
    distance = np.minimum(
        np.where(indices[:, None] >= borders, indices[:, None] - borders, size),
        np.where(indices[:, None] < borders, borders - 1 - indices[:, None], size),
    )
    if 4 * (int(distance.min(axis=1).max()) + 1) <= cut.block:  # else a border is always near
        near = sorted({int(borders[i]) for i in distance.argmin(axis=1)})
        return "at the border of blocks " + listed([_border(at, size, cut) for at in near])
    touched = sorted({int(i) // cut.block for i in indices})
    full = sum(min(cut.block, size - number * cut.block) for number in touched) == len(indices)
    return f"{'all' if full else 'part'} of block{'' if len(touched) == 1 else 's'} " + listed(
        [cut.label(number) for number in touched]
    )


def _border(at: int, size: int, cut: Cut) -> str:
    before = cut.label((at - 1) // cut.block) if at > 0 else "start of the array"
    return f"{before} | {cut.label(at // cut.block) if at < size else 'end of the array'}"


def listed(texts: Sequence[str]) -> str:
    """The first few."""
    return "; ".join(texts[:_SHOWN]) + (f"; ... ({len(texts)} in all)" if len(texts) > _SHOWN else "")
