"""Shapes as HLO prints them, and how many bytes they take. No JAX here."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

Array = tuple[str, tuple[int, ...]]
"""Element type as HLO names it ("f32", "bf16", "s64", "pred", ...) and the dimensions."""

_TOKEN = re.compile(r"\(|\)|([a-z][a-z0-9]*)\[([^\]]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_WIDTH = re.compile(r"[a-z]+?(\d+)")


@functools.lru_cache(maxsize=4096)
def parse_shape(text: str) -> Any:
    """Reads a shape: an `Array`, or for a tuple a tuple of what its elements are.

    Layouts, tilings and memory spaces are dropped; a dynamic dimension `<=n` counts as its bound `n`.

    Example:
      >>> parse_shape("(f32[8,<=4]{1,0:T(8,128)S(1)}, (u32[], bf16[2]{0}))")
      (('f32', (8, 4)), (('u32', ()), ('bf16', (2,))))
    """
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.finditer(_LAYOUT.sub("", text)):
        if token[0] == "(":
            stack.append([])
        elif token[0] == ")":
            closed = tuple(stack.pop())
            stack[-1].append(closed)
        else:
            stack[-1].append((token[1], _dimensions(token[2])))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"not a shape as XLA prints it: {text!r}")
    return stack[0][0]


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(size.strip().removeprefix("<=")) for size in text.split(",") if size.strip())


def is_array(shape: Any) -> bool:
    """Whether a parsed shape is one array, not a tuple of shapes."""
    return bool(shape) and isinstance(shape[0], str)


def arrays(shape: Any) -> tuple[Array, ...]:
    """All arrays of a parsed shape, however deep, in order."""
    if is_array(shape):
        return (shape,)
    return tuple(array for element in shape for array in arrays(element))


def element_bits(dtype: str) -> int:
    """Bits of one element: the number in the type's name, with `pred` a byte and tokens nothing.

    Example:
      >>> [element_bits(t) for t in ("f32", "bf16", "c128", "f8e4m3fn", "s4", "pred", "token")]
      [32, 16, 128, 8, 4, 8, 0]
    """
    if dtype == "pred":
        return 8
    width = _WIDTH.match(dtype)
    return int(width[1]) if width else 0


def array_bytes(array: Array) -> int:
    """Bytes of one array, without the padding of tiled layouts; 4-bit elements are packed in pairs."""
    dtype, dims = array
    return -(-math.prod(dims) * element_bits(dtype) // 8)
