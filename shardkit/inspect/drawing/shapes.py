"""The few SVG elements that drawings are made of. Coordinates in pixels, one decimal."""

from __future__ import annotations

import html

FONT, CHARACTER, LINE = 11, 6.7, 14  # pixels: font size, advance of a monospace character, from line to line


def number(value: float) -> str:
    """At most one decimal.

    >>> number(3.0), number(2.25)
    ('3', '2.2')
    """
    return f"{value:.1f}".removesuffix(".0")


def characters(width: float) -> int:
    """How many fit into ``width`` pixels."""
    return max(0, int((width - 4) // CHARACTER))


def text(x: float, y: float, content: str, *, anchor: str = "middle", fill: str = "currentColor") -> str:
    """One line, its baseline at ``y``."""
    return (
        f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" fill="{fill}">{html.escape(content)}</text>'
        if content
        else ""
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A filled rectangle; ``more``: further attributes."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect {place} fill="{fill}"{" " + more if more else ""}/>'


def hatching(x: float, y: float, width: float, height: float, step: float = 5, more: str = "") -> str:
    """Diagonal lines that fill a rectangle: rising ones, in a path that needs no shared pattern."""
    lines = []
    reach = step
    while reach < width + height:
        left, low = max(0.0, reach - height), min(reach, height)
        right, high = min(reach, width), max(0.0, reach - width)
        lines.append(f"M{number(x + left)} {number(y + low)}L{number(x + right)} {number(y + high)}")
        reach += step
    return f'<path d="{"".join(lines)}" fill="none" {more or HATCH}/>' if lines else ""


HATCH = 'stroke="#000" stroke-opacity="0.3" stroke-width="1"'


def group(content: str, title: str = "", kind: str = "", x: float = 0, y: float = 0) -> str:
    """Elements together; ``title`` is shown on hovering."""
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' transform="translate({number(x)} {number(y)})"' if x or y else ""
    told = f"<title>{html.escape(title)}</title>" if title else ""
    return f"<g{attributes}>{told}{content}</g>"
