"""Views: slices, reversals, rolls and paddings of a blocked dim, told by which element each position shows.

``x[:, 1:]``, ``jnp.roll``, ``jnp.pad`` in every mode trace to slices put side by side. Nothing is moved for them until
something reads them: a window reads what they show in place; else the planner asks what the list of positions says.
Pure NumPy.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from shardkit.spatial.windows import Window, extended_index

ZERO = -1  # in a list of positions: no element, a zero


@dataclasses.dataclass(frozen=True)
class Extension:
    """Positions ``offset + [0, length)`` of a dim of ``size`` elements that goes on beyond its ends by ``mode``."""

    offset: int
    length: int
    size: int
    mode: str


def as_extension(index: np.ndarray, size: int) -> Extension | None:
    """The run of the extended dim that a list of positions is, if it's one.

    >>> as_extension(np.array([3, 0, 1, 2, 3, 0]), 4)
    Extension(offset=-1, length=6, size=4, mode='circular')
    >>> as_extension(np.array([-1, 0, 1]), 2), as_extension(np.array([1, 0]), 2, ) is None
    (Extension(offset=-1, length=3, size=2, mode='zeros'), False)
    """
    return _as_extension(tuple(int(i) for i in index), size)


@functools.lru_cache(maxsize=1024)
def _as_extension(index: tuple[int, ...], size: int) -> Extension | None:
    steps = [i for i in range(len(index) - 1) if index[i] >= 0 and index[i + 1] == index[i] + 1]
    starts = {index[i] - i for i in steps} | {p - i for i, p in enumerate(index[:1]) if p >= 0}
    real = [i for i, p in enumerate(index) if p >= 0]
    starts |= {index[real[0]] - real[0]} if real else set()
    for offset in sorted({s for o in starts for s in (o, o - size)}, key=abs):
        for mode in ("zeros", "circular", "reflect", "replicate"):
            if all(_shows(offset + i, size, mode) == p for i, p in enumerate(index)):
                return Extension(offset, len(index), size, mode)
    return None


def _shows(position: int, size: int, mode: str) -> int:
    element = extended_index(position, size, mode)
    return ZERO if element is None else element


def as_stride(index: np.ndarray, size: int) -> Window | None:
    """A window of one tap that takes every so-many-th element, if a list of positions does."""
    if len(index) < 2 or (index < 0).any():
        return None
    step = int(index[1] - index[0])
    if step < 2 or (np.diff(index) != step).any():
        return None
    lo = -int(index[0])
    return Window(size, 1, step, lo, int(index[-1]) + 1 - size)


def as_repeat(index: np.ndarray, size: int) -> int | None:
    """How often each element is repeated, if a list of positions repeats them.

    >>> as_repeat(np.array([0, 0, 1, 1]), 2)
    2
    """
    times, rest = divmod(len(index), size)
    same = not rest and times > 1 and (index == np.arange(len(index)) // times).all()
    return times if same else None


def repeating(size: int, times: int) -> Window:
    """The window whose arithmetic of margins is that of a repetition: output ``j`` reads element ``j // times``."""
    return Window(size, times, 1, times - 1, times - 1, times)
