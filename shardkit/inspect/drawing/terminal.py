"""The drawing as lines of characters, and the same in colour for rich."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import rich.console
import rich.text

from shardkit.inspect.drawing import words
from shardkit.inspect.drawing.colours import colour
from shardkit.inspect.drawing.plane import Plane, cell_in, choose_plane, elided, panel_count, panels, parts_of
from shardkit.inspect.drawing.subject import Subject

_ROWS, _PANELS, _RECEIPTS = 16, 8, 16
_WIDEST = 20


@dataclasses.dataclass(frozen=True)
class Piece:
    """Characters of one colour, None for that of the terminal."""

    text: str
    colour: str | None = None


Line = list[Piece]


def lines_of(subject: Subject, width: int) -> list[Line]:
    """The drawing, line by line, in about ``width`` characters."""
    plane = choose_plane(subject.holdings.cuts, subject.halos)
    head = [words.headline(subject), *(f"  {line}" for line in words.captions(subject, plane))]
    found = [[Piece(text)] for text in head]
    for at in panels(subject.holdings.cuts, plane, _PANELS):
        found.append([])
        if at is None:
            left_out = panel_count(subject.holdings.cuts, plane) - (_PANELS - 1)
            found.append([Piece(f"… {left_out} more grids …")])
            continue
        if at:
            found.append([Piece(words.panel_name(subject, at))])
        found += _Grid(subject, plane, at, width).lines()
    receipts = words.receipt_lines(subject, _RECEIPTS)
    if receipts:
        found += [[], *([Piece(text)] for text in receipts)]
    return found


class _Grid:
    """One plane of blocks."""

    def __init__(self, subject: Subject, plane: Plane, at: dict[int, int], width: int):
        self.subject, self.plane, self.at = subject, plane, at
        self.cuts = subject.holdings.cuts
        self.rows = elided(parts_of(self.cuts, plane.row), _ROWS)
        self.row_names = [self._edge(plane.row, row) for row in self.rows]
        self.margin = max(len(name) for names in self.row_names for name in names)
        self.columns, self.width = self._columns(width - self.margin - 3)

    def _edge(self, dim: int | None, part: int | None) -> list[str]:
        """What's written at the edge of a row or column, over one another."""
        if dim is None:
            return [""]
        if part is None:
            return ["…"]
        cut = self.cuts[dim]
        names = [words.part_name(cut, part), words.padding_name(cut, part)]
        if dim in self.subject.halos:
            names += words.halo_names(self.subject.halos[dim][part])
        return [name for name in names if name]

    def _columns(self, room: int) -> tuple[list[int | None], int]:
        """The columns drawn, and the characters of one."""
        count = parts_of(self.cuts, self.plane.column)
        some = elided(count, 64)
        edges = max(len(n) for part in some for n in self._edge(self.plane.column, part))
        holders, notes = 1, 0
        for row in self.rows:
            for part in some:
                if row is not None and part is not None:
                    cell = self._cell(row, part)
                    holders = max(holders, len(words.holders_name(self.subject, cell, _WIDEST)))
                    notes = max(notes, *map(len, ["", *words.block_notes(self.subject, cell)]))
        wide = max(edges, holders, notes) + 2
        narrow = max(edges, min(holders, 9), notes)
        for width in range(wide, narrow - 1, -1):
            if count * (width + 1) <= room:
                return list(range(count)), width
        return elided(count, max(3, room // (narrow + 1))), narrow

    def _cell(self, row: int, column: int) -> tuple[int, ...]:
        return cell_in(self.plane, len(self.cuts), self.at, row, column)

    def lines(self) -> list[Line]:
        widths = [3 if column is None else self.width for column in self.columns]
        found = [self._titles(), *self._heads(widths)]
        found.append(self._rule("┌┬┐", widths))
        for number, row in enumerate(self.rows):
            if number:
                found.append(self._rule("├┼┤", widths))
            found += self._row(row, self.row_names[number], widths)
        found.append(self._rule("└┴┘", widths))
        return [line for line in found if line] + self._left_out()

    def _titles(self) -> Line:
        names = [("rows", self.plane.row), ("columns", self.plane.column)]
        told = [f"{what}: dim {dim}" for what, dim in names if dim is not None]
        return [Piece(", ".join(told))] if len(self.cuts) > 1 and told and not self.at else []

    def _heads(self, widths: Sequence[int]) -> Iterator[Line]:
        names = [self._edge(self.plane.column, column) for column in self.columns]
        for level in range(max(map(len, names))):
            texts = [edge[level] if level < len(edge) else "" for edge in names]
            cells = " ".join(text.center(width) for text, width in zip(texts, widths, strict=True))
            line = f"{' ' * (self.margin + 2)}{cells}".rstrip()
            if line:
                yield [Piece(line)]

    def _rule(self, ends: str, widths: Sequence[int]) -> Line:
        left, middle, right = ends
        return [Piece(" " * (self.margin + 1) + left + middle.join("─" * width for width in widths) + right)]

    def _row(self, row: int | None, names: Sequence[str], widths: Sequence[int]) -> Iterator[Line]:
        contents = [self._content(row, column, width) for column, width in zip(self.columns, widths, strict=True)]
        for level in range(max(len(names), *(len(texts) for texts, _, _ in contents))):
            name = names[level] if level < len(names) else ""
            line = [Piece(f"{name.rjust(self.margin)} │")]
            for (texts, fill, shade), width in zip(contents, widths, strict=True):
                text = texts[level] if level < len(texts) else ""
                spaced = f" {text} " if text and len(text) + 2 <= width else text
                line += [Piece(spaced.center(width, fill)[:width], shade)]
                line += [Piece("│")]
            yield line

    def _content(self, row: int | None, column: int | None, width: int) -> tuple[list[str], str, str | None]:
        """Lines of a cell, what fills the rest of it, and its colour."""
        if row is None or column is None:
            return ["…"], " ", None
        cell = self._cell(row, column)
        texts = [words.holders_name(self.subject, cell, width), *words.block_notes(self.subject, cell)]
        fill = "·" if self.subject.holdings.is_padding(cell) else " "
        return texts, fill, colour(cell, [cut.parts for cut in self.cuts])

    def _left_out(self) -> list[Line]:
        found = []
        for what, dim, shown in (("rows", self.plane.row, self.rows), ("columns", self.plane.column, self.columns)):
            if None in shown:
                count = parts_of(self.cuts, dim)
                found.append([Piece(f"… {count - (len(shown) - 1)} of {count} {what} are left out")])
        return found


def to_text(subject: Subject, width: int) -> str:
    """The drawing as plain text."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines_of(subject, width))


class InColour:
    """The drawing for rich: as wide as the console, lines that are wider are cropped."""

    def __init__(self, subject: Subject):
        self._subject = subject

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        for line in lines_of(self._subject, options.max_width):
            # Text, not str: "[8, 16]" must not be read as markup.
            pieces = [(p.text, f"black on {p.colour}" if p.colour else "") for p in line]
            drawn = any(p.text.strip() and p.colour for p in line)
            yield rich.text.Text.assemble(*pieces, no_wrap=drawn or None, overflow="crop" if drawn else None)
