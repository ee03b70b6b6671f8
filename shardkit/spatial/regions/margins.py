"""How far a device must see beyond its own elements, and how far what it computes then reaches.

Pure integer arithmetic: no JAX, no arrays. A dim of ``size`` elements lies in ``shards`` blocks of ``b = ceil(size /
shards)``. With a *margin* ``(lo, hi)`` shard ``i`` holds elements ``[i*b - lo, (i+1)*b + hi)``. A window eats margin:
how much, and what is left of it, is the same on every shard where strides and blocks agree (``is_regular``).
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.spatial.windows import Window, block_size

Margin = tuple[int, int]

NONE: Margin = (0, 0)


class Padding(NamedTuple):
    """Padding of a window over one device's line, in dilated positions; negative crops."""

    lo: int
    hi: int


def is_regular(window: Window, shards: int) -> bool:
    """Every shard's outputs begin at the same place of its block, however far they reach beyond it.

    >>> is_regular(Window(8, 3, 2, 1, 1), 2), is_regular(Window(10, 3, 2, 1, 1), 4)
    (True, False)
    """
    out = window.output_size
    if out < 1:
        return False
    return block_size(out, shards) * window.stride == block_size(window.size, shards) * window.lhs_dilation


def needed(window: Window, shards: int, out: Margin = NONE) -> Margin:
    """Margin of the input that gives outputs with margin ``out``.

    >>> needed(Window(8, 3, 1, 1, 1), 2), needed(Window(8, 3, 1, 1, 1), 2, (2, 2)), needed(Window(8, 2, 2), 2)
    ((1, 1), (3, 3), (0, 0))
    """
    block, out_block = _blocks(window, shards)
    dilation = window.lhs_dilation
    lo = (out[0] * window.stride + window.pad_lo) // dilation
    end = (out_block - 1 + out[1]) * window.stride - window.pad_lo + window.reach - 1
    return max(lo, 0), max(end // dilation - (block - 1), 0)


def given(window: Window, shards: int, margin: Margin) -> Margin:
    """The widest margin of outputs that an input with ``margin`` gives; negative where it doesn't give its own.

    >>> given(Window(8, 3, 1, 1, 1), 2, (3, 2)), given(Window(8, 3, 1, 1, 1), 2, (0, 0))
    ((2, 1), (-1, -1))
    """
    block, out_block = _blocks(window, shards)
    dilation = window.lhs_dilation
    lo = ((margin[0] + 1) * dilation - window.pad_lo - 1) // window.stride
    hi = ((block + margin[1]) * dilation + window.pad_lo - window.reach) // window.stride - (out_block - 1)
    return lo, hi


def on_a_line(window: Window, shards: int, margin: Margin, out: Margin) -> Window:
    """The window as it moves over one device's line: a block with ``margin``, giving outputs with ``out``.

    >>> on_a_line(Window(8, 3, 1, 1, 1), 2, (1, 1), (0, 0))
    Window(size=6, kernel=3, stride=1, pad_lo=0, pad_hi=0, lhs_dilation=1, rhs_dilation=1)
    """
    block, out_block = _blocks(window, shards)
    length = margin[0] + block + margin[1]
    lo = out[0] * window.stride + window.pad_lo - margin[0] * window.lhs_dilation
    covered = (out[0] + out_block + out[1] - 1) * window.stride + window.reach
    hi = covered - lo - ((length - 1) * window.lhs_dilation + 1)
    return Window(length, window.kernel, window.stride, lo, hi, window.lhs_dilation, window.rhs_dilation)


def wider(a: Margin, b: Margin) -> Margin:
    """What serves both.

    >>> wider((1, 0), (0, 2))
    (1, 2)
    """
    return max(a[0], b[0]), max(a[1], b[1])


def suffices(has: Margin, wanted: Margin) -> bool:
    """``has`` holds all of ``wanted``."""
    return has[0] >= wanted[0] and has[1] >= wanted[1]


def _blocks(window: Window, shards: int) -> tuple[int, int]:
    return block_size(window.size, shards), block_size(window.output_size, shards)
