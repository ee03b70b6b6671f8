"""A colour for each block: light ones, on which black text is read, in a light and in a dark notebook."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

_GOLDEN = (math.sqrt(5) - 1) / 2  # steps of it around the hues keep neighbours apart, however many there are


def colour(cell: tuple[int, ...], parts: Sequence[int]) -> str:
    """The colour of a block as "#rrggbb".

    >>> colour((0,), [2]) != colour((1,), [2])
    True
    """
    number = 0
    for at, count in zip(cell, parts, strict=True):
        number = number * count + at
    light = (0.80, 0.70, 0.86)[number % 3]
    red, green, blue = colorsys.hls_to_rgb((0.56 + number * _GOLDEN) % 1, light, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
