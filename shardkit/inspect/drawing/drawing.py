"""``Drawing``: who holds what, for a notebook, a terminal and a tool."""

from __future__ import annotations

import base64
import dataclasses
import html
from typing import Any

from shardkit.inspect.drawing import data, svg, terminal, words
from shardkit.inspect.drawing.plane import choose_plane
from shardkit.inspect.drawing.subject import Subject

_RECEIPTS = 64


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing:
    """Who holds what: ``print`` it, ``rich.print`` it, or leave it as the last line of a notebook cell.

    Made by ``sk.show``.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2,), ("dp",))
      >>> drawing = sk.show({"dp": sk.Shard(0)}, mesh, shape=(8,))
      >>> str(drawing).splitlines()[0], drawing.svg.startswith("<svg")
      ('shape [8] on mesh dp=2', True)
    """

    subject: Subject

    def to_text(self, width: int = 100) -> str:
        """Plain text; rows and columns that don't fit are left out in the middle.

        Args:
          width: about so many characters a line.

        Returns:
          The text, in several lines.
        """
        return terminal.to_text(self.subject, width)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: the whole, and one entry a device, in mesh order. None for what isn't known.

        Returns:
          ``kind``, ``mesh`` (axis sizes), ``shape``, ``dtype``, ``placements`` (by axis, as text), ``reduce``,
          ``partial_axes``, ``dims`` (size, parts, axes, elements of padding) and ``devices``. A device has its
          ``position`` in mesh order, ``device`` (id), ``platform``, ``process``, ``coordinates`` (by axis), ``dims``
          (the ``part``, ``start`` and ``stop`` of the elements that count, and ``padding``: how many more are stored
          after them), ``bytes`` (stored), ``only_padding``, ``copies`` (devices with the same values), ``contribution``
          (its position on the Partial axes) and ``receives`` (of halos: the elements, from whom, bytes).
        """
        return data.to_dict(self.subject)

    @property
    def svg(self) -> str:
        """The picture and its captions as an SVG document of its own."""
        return svg.to_svg(self.subject, heading=True)

    def _repr_html_(self) -> str:
        plane = choose_plane(self.subject.holdings.cuts, self.subject.halos)
        lines = [*words.captions(self.subject, plane), *svg.legend(self.subject)]
        told = "".join(f'<div style="opacity:0.8">{html.escape(line)}</div>' for line in lines)
        return (
            '<div style="font-size:13px;line-height:1.4">'
            f"<div><b>{html.escape(words.headline(self.subject))}</b></div>{told}"
            f'<div style="overflow:auto;padding:6px 0">{self._image()}</div>'
            f"{self._receipts()}</div>"
        )

    def _image(self) -> str:
        # As an image: pages that trust nobody (an untrusted notebook, GitHub) take <svg> out of HTML, and leave these.
        source = base64.b64encode(svg.to_svg(self.subject, heading=False).encode()).decode()
        told = html.escape(words.headline(self.subject))
        return f'<img alt="{told}" style="max-width:none" src="data:image/svg+xml;base64,{source}">'

    def _receipts(self) -> str:
        lines = words.receipt_lines(self.subject, _RECEIPTS)
        if not lines:
            return ""
        items = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        state = " open" if len(lines) <= 8 else ""
        box = f'<div style="max-height:20em;overflow:auto">{items}</div>'
        return f"<details{state}><summary>what each device receives</summary>{box}</details>"

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.to_text()

    def __rich__(self) -> terminal.InColour:
        return terminal.InColour(self.subject)
