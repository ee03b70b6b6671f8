"""Bars of HTML: parts of a whole beside each other, each as long as it is large."""

from __future__ import annotations

import html
from collections.abc import Sequence

from shardkit.inspect.explaining.explained import Explained, by_purpose
from shardkit.inspect.explaining.tables import in_use
from shardkit.inspect.memory import MemoryReport
from shardkit.inspect.tables import format_bytes

_WIDTH = 640  # pixels
COLOURS = {
    "halo": "#4e79a7",
    "gradient reduction": "#59a14f",
    "parameter gather": "#76b7b2",
    "reduction": "#9c755f",
    "reshard": "#b07aa1",
    "unexplained": "#e15759",
    "arguments": "#4e79a7",
    "outputs": "#59a14f",
    "temporaries": "#f28e2b",
    "program": "#bab0ac",
}


def bar(parts: Sequence[tuple[str, float, str]], whole: float) -> str:
    """A bar with a legend.

    Args:
      parts: (name, size, size in words) of each; the name chooses the colour.
      whole: what the full width stands for.

    Example:
      >>> bar([("halo", 1, "1 B")], 2).count("width:320px")
      1
    """
    scale = _WIDTH / whole if whole else 0
    pieces, legend = [], []
    for name, size, words in parts:
        colour = COLOURS.get(name, "#888")
        title = html.escape(f"{name}: {words}")
        length = round(size * scale)
        pieces.append(f'<span title="{title}" style="height:14px;width:{length}px;background:{colour}"></span>')
        dot = f'<span style="display:inline-block;width:9px;height:9px;background:{colour}"></span>'
        legend.append(f'<span style="margin-right:14px;white-space:nowrap">{dot} {title}</span>')
    frame = f"display:flex;width:{_WIDTH}px;max-width:100%;height:14px;background:rgba(128,128,128,.2)"
    return f'<div style="{frame}">{"".join(pieces)}</div><div style="font-size:90%">{"".join(legend)}</div>'


def wire_bar(collectives: Sequence[Explained]) -> str:
    """What a device receives, by purpose."""
    sizes = {purpose: sum(e.bytes for e in found) for purpose, found in by_purpose(collectives).items()}
    return bar([(purpose, size, format_bytes(size)) for purpose, size in sizes.items()], sum(sizes.values()))


def memory_bar(memory: MemoryReport | None, capacity: int | None) -> str:
    """What a device holds, of what it has where that's known."""
    if memory is None:
        return ""
    given = {"arguments": memory.arguments, "outputs": memory.outputs - max(memory.aliased, 0)}
    sizes = given | {"temporaries": memory.temporaries, "program": memory.generated_code}
    parts = [(name, size, format_bytes(size)) for name, size in sizes.items() if size > 0]
    return bar(parts, max(in_use(memory), capacity or 0, sum(size for _, size, _ in parts)))
