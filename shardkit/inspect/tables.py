"""One small table, shown three ways: aligned plain text, HTML, and a rich table."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

import rich.box
import rich.table
import rich.text


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, rows of text under headers, and notes that say how to read them.

    Attributes:
      right: names of the headers whose column is aligned to the right.
      marked: the rows to be looked at first, by number; in colour where there is colour.
    """

    title: str
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: frozenset[str] = frozenset()
    notes: Sequence[str] = ()
    marked: frozenset[int] = frozenset()

    def to_text(self) -> str:
        """Aligned columns, two spaces apart, no trailing spaces and no final newline."""
        lines = [self.title]
        if self.rows:
            widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
            for row in (self.headers, *self.rows):
                lines.append("  " + "  ".join(map(self._pad, row, widths, self.headers)).rstrip())
        return "\n".join([*lines, *self.notes])

    def _pad(self, cell: str, width: int, header: str) -> str:
        return cell.rjust(width) if header in self.right else cell.ljust(width)

    def to_html(self) -> str:
        """A `<table>` with the title as its caption and the notes below."""
        body = "".join(f"<tr{self._mark(number)}>{self._cells(row)}</tr>" for number, row in enumerate(self.rows))
        head = "".join(self._cell("th", header, header) for header in self.headers)
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        head = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>" if self.rows else ""
        return f"<div><table>{caption}{head}</table>{notes}</div>"

    def _mark(self, number: int) -> str:
        return ' style="background:#fff3d6;color:#000"' if number in self.marked else ""

    def _cells(self, row: Sequence[str]) -> str:
        return "".join(self._cell("td", cell, header) for cell, header in zip(row, self.headers, strict=True))

    def _cell(self, tag: str, cell: str, header: str) -> str:
        side = "right" if header in self.right else "left"
        return f'<{tag} style="text-align:{side};padding:1px 8px">{html.escape(cell)}</{tag}>'

    def to_rich(self) -> rich.table.Table:
        """The same for `rich.print`."""
        # rich.text.Text, not str: a cell such as "f32[8]" must not be read as markup.
        plain = rich.text.Text
        table = rich.table.Table(
            title=plain(self.title),
            title_justify="left",
            caption=plain("\n".join(self.notes)) if self.notes else None,
            caption_justify="left",
            box=rich.box.SIMPLE_HEAD,
        )
        for header in self.headers if self.rows else ():
            table.add_column(header, justify="right" if header in self.right else "left")
        for number, row in enumerate(self.rows):
            table.add_row(*map(plain, row), style="yellow" if number in self.marked else None)
        return table


def format_bytes(count: int) -> str:
    """A number of bytes for people, in powers of 1024.

    Example:
      >>> [format_bytes(n) for n in (0, 1023, 1536, 5 * 2**20)]
      ['0 B', '1023 B', '1.5 KiB', '5.0 MiB']
    """
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
