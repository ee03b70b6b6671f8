"""The drawing as an SVG picture: no script, no style sheet, nothing from outside, no ids that could clash."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Iterator

from shardkit.inspect.drawing import shapes, words
from shardkit.inspect.drawing.colours import colour
from shardkit.inspect.drawing.halos import Run
from shardkit.inspect.drawing.plane import Plane, cell_in, choose_plane, elided, panel_count, panels, parts_of
from shardkit.inspect.drawing.subject import Subject

_LINE_OF_BLOCKS, _BLOCKS, _PANELS = 64, 1024, 16
_WIDE, _HIGH = 1100, 640  # pixels a picture should keep to
_STRIP, _STACK = 9, 5  # pixels: one run of a halo, one more contribution
_INK = "#111"
_FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_COLOUR = "#777"  # of text: an image knows nothing of the page around it; this is read on white and on black


@dataclasses.dataclass(frozen=True)
class Picture:
    """SVG elements, and the room that they take from (0, 0) on."""

    content: str
    width: float
    height: float


def to_svg(subject: Subject, *, heading: bool) -> str:
    """The picture; ``heading``: with what the text around it says in a notebook."""
    plane = choose_plane(subject.holdings.cuts, subject.halos)
    picture = _flowing([*_panels(subject, plane)])
    top = 0.0
    lines: list[str] = []
    if heading:
        told = [words.headline(subject), *words.captions(subject, plane), *legend(subject)]
        lines = [shapes.text(4, 14 + i * 16, line, anchor="start") for i, line in enumerate(told)]
        top = len(told) * 16 + 8
        picture = dataclasses.replace(picture, width=max(picture.width, max(map(len, told)) * shapes.CHARACTER + 8))
    width, height = shapes.number(picture.width), shapes.number(picture.height + top)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = f'font-family="{_FONTS}" font-size="{shapes.FONT}" color="{_COLOUR}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {style}>'
        f"<title>{html.escape(words.headline(subject))}</title>"
        f"{''.join(lines)}{shapes.group(picture.content, y=top)}</svg>"
    )


def legend(subject: Subject) -> list[str]:
    """What hatching and stacks stand for, where there are any."""
    lines = []
    if any(cut.padding(part) for cut in subject.holdings.cuts for part in range(cut.parts)):
        lines.append("hatched: padding, which is stored but doesn't count")
    if subject.halos:
        lines.append("hatched margins: halos that are received, in the colour of the block they come from")
    if subject.partial_axes:
        lines.append("stacked: contributions that are still to be reduced")
    return lines


def _flowing(pictures: list[Picture]) -> Picture:
    """Side by side, in as many lines as it takes."""
    placed = []
    x = y = tall = wide = 0.0
    for picture in pictures:
        if x and x + picture.width > _WIDE:
            x, y, tall = 0.0, y + tall + 14, 0.0
        placed.append(shapes.group(picture.content, x=x, y=y))
        tall, wide = max(tall, picture.height), max(wide, x + picture.width)
        x += picture.width + 14
    return Picture("".join(placed), wide, y + tall)


def _panels(subject: Subject, plane: Plane) -> Iterator[Picture]:
    cuts = subject.holdings.cuts
    columns = elided(parts_of(cuts, plane.column), _LINE_OF_BLOCKS)
    rows = elided(parts_of(cuts, plane.row), max(8, _BLOCKS // len(columns)) if len(columns) > 16 else 64)
    limit = max(3, min(_PANELS, _BLOCKS // (len(columns) * len(rows))))
    for at in panels(cuts, plane, limit):
        if at is None:
            note = f"… {panel_count(cuts, plane) - (limit - 1)} more …"
            yield Picture(shapes.text(8, 40, note, anchor="start"), len(note) * shapes.CHARACTER + 16, 60)
        else:
            yield _Panel(subject, plane, at, rows, columns).picture()


class _Panel:
    """One grid of blocks, with its edges."""

    def __init__(
        self, subject: Subject, plane: Plane, at: dict[int, int], rows: list[int | None], columns: list[int | None]
    ):
        self.subject, self.plane, self.at, self.rows, self.columns = subject, plane, at, rows, columns
        self.cuts = subject.holdings.cuts
        self.parts = [cut.parts for cut in self.cuts]
        self.stack = _STACK * min(subject.contributions - 1, 3)
        self.before = tuple(self._strips(dim, True) for dim in (plane.column, plane.row))
        self.after = tuple(self._strips(dim, False) for dim in (plane.column, plane.row))
        self.apart = bool(subject.halos) or self.stack > 0
        self.lines = self._lines_of_cells()
        self.width = self._cell_width()
        self.height = self._cell_height()

    def _strips(self, dim: int | None, before: bool) -> float:
        """Pixels that the halos take on one side of every block."""
        if dim is None or dim not in self.subject.halos:
            return 0
        most = max(sum(run.before == before for run in runs) for runs in self.subject.halos[dim])
        return _STRIP * most

    def _lines_of_cells(self) -> int:
        cells = itertools.islice(self._cells(), 64)
        return 1 + max((len(words.block_notes(self.subject, cell)) for cell in cells), default=0)

    def _cells(self) -> Iterator[tuple[int, ...]]:
        for row, column in itertools.product(self.rows, self.columns):
            if row is not None and column is not None:
                yield self._cell(row, column)

    def _cell_width(self) -> float:
        longest = max(len(line) for edge in map(self._column_edge, self.columns) for line in edge)
        for cell in itertools.islice(self._cells(), 256):
            told = [words.holders_name(self.subject, cell, 18), *words.block_notes(self.subject, cell)]
            longest = max(longest, *map(len, told))
        wanted = min(140, max(48, longest * shapes.CHARACTER + 14))
        return max(16, min(wanted, _WIDE / len(self.columns) - self._spare(0)))

    def _cell_height(self) -> float:
        wanted = max(44, self.lines * shapes.LINE + 16)
        return max(16, min(wanted, _HIGH / len(self.rows) - self._spare(1)))

    def _spare(self, way: int) -> float:
        """Pixels between one block and the next (0: along a row, 1: along a column)."""
        return self.before[way] + self.after[way] + (self.stack + 8 if self.apart else 0)

    def _cell(self, row: int, column: int) -> tuple[int, ...]:
        return cell_in(self.plane, len(self.cuts), self.at, row, column)

    def _column_edge(self, part: int | None) -> list[str]:
        return self._edge(self.plane.column, part)

    def _edge(self, dim: int | None, part: int | None) -> list[str]:
        if dim is None:
            return [""]
        if part is None:
            return ["…"]
        names = [words.part_name(self.cuts[dim], part), words.padding_name(self.cuts[dim], part)]
        return [name for name in names if name]

    def picture(self) -> Picture:
        edges = [self._edge(self.plane.row, row) for row in self.rows]
        margin = max(len(name) for edge in edges for name in edge) * shapes.CHARACTER + 12
        titles = self._titles()
        levels = max(len(self._column_edge(column)) for column in self.columns)
        head = len(titles) * 15 + levels * shapes.LINE + 8
        content = [shapes.text(4, 12 + 15 * i, title, anchor="start") for i, title in enumerate(titles)]
        lefts = self._offsets(self.columns, 0, margin)
        tops = self._offsets(self.rows, 1, head)
        content += self._column_names(lefts, len(titles) * 15 + 12)
        content += self._row_names(edges, tops, margin - 8)
        for (row, top), (column, left) in itertools.product(
            zip(self.rows, tops, strict=False), zip(self.columns, lefts, strict=False)
        ):
            content.append(self._block(row, column, left, top))
        bottom = tops[-1] + 4
        for note in self._left_out():
            bottom += 14
            content.append(shapes.text(4, bottom, note, anchor="start"))
        longest = max(map(len, [*titles, *self._left_out(), ""])) * shapes.CHARACTER + 8
        return Picture("".join(content), max(lefts[-1] + 4, longest), bottom + 4)

    def _offsets(self, parts: list[int | None], way: int, start: float) -> list[float]:
        """Where each block begins, and last where the grid ends."""
        size = (self.width, self.height)[way]
        found, at = [], start + self.before[way] + (self.stack if way == 1 else 0)
        for part in parts:
            found.append(at)
            at += (24 if part is None else size) + self._spare(way)
        return [*found, at - self.before[way]]

    def _titles(self) -> list[str]:
        if self.at:
            return [words.panel_name(self.subject, self.at)]
        names = [("rows", self.plane.row), ("columns", self.plane.column)]
        told = [f"{what}: dim {dim}" for what, dim in names if dim is not None]
        return [", ".join(told)] if told and len(self.cuts) > 1 else []

    def _column_names(self, lefts: list[float], top: float) -> Iterator[str]:
        """As many as there's room for."""
        pitch = self.width + self._spare(0)
        longest = max(len(line) for edge in map(self._column_edge, self.columns) for line in edge)
        every = max(1, -(-int((longest + 1) * shapes.CHARACTER) // int(pitch)))
        for number, (column, left) in enumerate(zip(self.columns, lefts, strict=False)):
            if number % every and column is not None:
                continue
            for level, name in enumerate(self._column_edge(column)):
                if every > 1 and column is not None:
                    yield shapes.text(left, top + level * shapes.LINE, name, anchor="start")
                else:
                    middle = left + (24 if column is None else self.width) / 2
                    yield shapes.text(middle, top + level * shapes.LINE, name)

    def _row_names(self, edges: list[list[str]], tops: list[float], right: float) -> Iterator[str]:
        for edge, row, top in zip(edges, self.rows, tops, strict=False):
            middle = top + (24 if row is None else self.height) / 2
            shown = edge if len(edge) * shapes.LINE <= self.height + 4 or row is None else [" ".join(edge)]
            for level, name in enumerate(shown):
                y = middle + 4 + (level - (len(shown) - 1) / 2) * shapes.LINE
                yield shapes.text(right, y, name, anchor="end")

    def _block(self, row: int | None, column: int | None, x: float, y: float) -> str:
        width = 24 if column is None else self.width
        height = 24 if row is None else self.height
        if row is None or column is None:
            return shapes.text(x + width / 2, y + height / 2 + 4, "…") if self._shows_gap(row, column) else ""
        cell = self._cell(row, column)
        fill = colour(cell, self.parts)
        stroke = 'stroke="#444" stroke-width="1"'
        content = [
            shapes.rectangle(x + shift, y - shift, width, height, fill, stroke)
            for shift in range(int(self.stack), -1, -_STACK)
        ]
        content += self._padding(cell, x, y, width, height)
        content += self._names(cell, x, y, width, height)
        block = shapes.group("".join(content), words.block_story(self.subject, cell), "cell")
        return block + "".join(self._halo(cell, x, y))

    def _shows_gap(self, row: int | None, column: int | None) -> bool:
        """One mark a row and column that's cut short, not one a block."""
        return (row is None and column == self.columns[0]) or (column is None and row == self.rows[0]) or row == column

    def _padding(self, cell: tuple[int, ...], x: float, y: float, width: float, height: float) -> Iterator[str]:
        wide, high = (self._padded_share(dim, cell) for dim in (self.plane.column, self.plane.row))
        if self.subject.holdings.is_padding(cell):
            wide, high = 1.0, 0.0
        for left, top, w, h in (
            (x + width * (1 - wide), y, width * wide, height),
            (x, y + height * (1 - high), width * (1 - wide), height * high),
        ):
            if w > 0 and h > 0:
                yield shapes.rectangle(left, top, w, h, "#fff", 'fill-opacity="0.55"')
                yield shapes.hatching(left, top, w, h)

    def _padded_share(self, dim: int | None, cell: tuple[int, ...]) -> float:
        if dim is None or not self.cuts[dim].padding(cell[dim]):
            return 0.0
        start, stop = self.cuts[dim].stored[cell[dim]]
        return self.cuts[dim].padding(cell[dim]) / (stop - start)

    def _names(self, cell: tuple[int, ...], x: float, y: float, width: float, height: float) -> Iterator[str]:
        fit = shapes.characters(width)
        told = [words.holders_name(self.subject, cell, fit)]
        told += [note for note in words.block_notes(self.subject, cell) if len(note) <= fit]
        told = [line for line in told if line][: max(1, int((height - 2) // shapes.LINE))]
        for level, line in enumerate(told):
            at = y + height / 2 + 4 + (level - (len(told) - 1) / 2) * shapes.LINE
            yield shapes.text(x + width / 2, at, line, fill=_INK)

    def _halo(self, cell: tuple[int, ...], x: float, y: float) -> Iterator[str]:
        across = self._spans(self.plane.column, cell, x, self.width)
        down = self._spans(self.plane.row, cell, y, self.height)
        for (column, left, width), (row, top, height) in itertools.product(across, down):
            taken = {dim: run for dim, run in ((self.plane.column, column), (self.plane.row, row)) if run is not None}
            if not taken:
                continue
            source = tuple(taken[dim].source if dim in taken else part for dim, part in enumerate(cell))
            fill = colour(source, self.parts)
            told = " x ".join(f"dim {dim} {run.start}:{run.stop}" for dim, run in sorted(taken.items()))
            told += f" from {words.holders_name(self.subject, source, 60)}"
            line = 'stroke="#444" stroke-width="0.8" stroke-dasharray="2 1.5"'
            content = shapes.rectangle(left, top, width, height, fill, line)
            yield shapes.group(content + shapes.hatching(left, top, width, height, 3.5), told, "halo")

    def _spans(
        self, dim: int | None, cell: tuple[int, ...], start: float, size: float
    ) -> list[tuple[Run | None, float, float]]:
        """The block and the halos before and after it, along one way: (run or None for the block, where, how long)."""
        found: list[tuple[Run | None, float, float]] = [(None, start, size)]
        if dim is None or dim not in self.subject.halos:
            return found
        runs = self.subject.halos[dim][cell[dim]]
        before, after = [r for r in runs if r.before], [r for r in runs if not r.before]
        found += [(r, start - _STRIP * (len(before) - i), _STRIP) for i, r in enumerate(before)]
        found += [(r, start + size + _STRIP * i, _STRIP) for i, r in enumerate(after)]
        return found

    def _left_out(self) -> list[str]:
        found = []
        for what, dim, shown in (("rows", self.plane.row, self.rows), ("columns", self.plane.column, self.columns)):
            if None in shown:
                count = parts_of(self.cuts, dim)
                found.append(f"… {count - (len(shown) - 1)} of {count} {what} are left out")
        return found
