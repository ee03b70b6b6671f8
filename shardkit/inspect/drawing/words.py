"""What the drawings say: of the whole, of a dim, of a part, of a block. Used by text and pictures alike."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from shardkit.inspect.drawing.blocks import Cut, Holder
from shardkit.inspect.drawing.halos import Run, pieces_of
from shardkit.inspect.drawing.plane import Plane
from shardkit.inspect.drawing.subject import Subject
from shardkit.inspect.tables import format_bytes


def headline(subject: Subject) -> str:
    """What it is, where it is, and what it takes."""
    name = "" if subject.kind in ("array", "layout") else f"{subject.kind} "
    if subject.shape is None:
        what = f"{name}layout of unknown shape"
    else:
        what = f"{name}{subject.dtype or 'shape '}{list(subject.shape)}"
    return f"{what} on {_place(subject)}{_cost(subject)}"


def _place(subject: Subject) -> str:
    platforms = sorted({device.platform for device in subject.devices})
    on = f" ({', '.join(platforms)})" if platforms else ""
    if subject.mesh is not None:
        sizes = " ".join(f"{name}={size}" for name, size in subject.mesh.items())
        return f"mesh {sizes or 'of no axes'}{on}"
    count = len(subject.devices)
    return f"{count} device{'' if count == 1 else 's'}{on}"


def _cost(subject: Subject) -> str:
    if subject.itemsize is None or subject.shape is None:
        return ""
    whole = format_bytes(math.prod(subject.shape) * subject.itemsize)
    return f": {whole}, {format_bytes(block_bytes(subject, subject.holdings.holders[0].cell) or 0)} a device"


def block_bytes(subject: Subject, cell: tuple[int, ...]) -> int | None:
    """Bytes that one device stores of a block; None where shape or dtype aren't known."""
    shape = subject.holdings.block_shape(cell)
    return None if shape is None or subject.itemsize is None else math.prod(shape) * subject.itemsize


def captions(subject: Subject, plane: Plane) -> list[str]:
    """One line a dim, then what the holders of one block are to each other, then how to read the cells."""
    lines = [_dim_line(subject, plane, dim) for dim in range(len(subject.holdings.cuts))]
    if subject.partial_axes:
        lines.append(f"each block: the {_contributions(subject)}")
    spare = [name for name, size in (subject.mesh or {}).items() if size > 1 and _same_along(subject, name)]
    if spare:
        lines.append(f"the same on all of {_and(spare)}")
    if subject.devices:
        processes = sorted(_processes(subject.devices))
        lines.append(
            "in the cells: device ids" + (f" of processes {ids_name(processes)}" if len(processes) > 1 else "")
        )
    elif len(subject.holdings.holders) > 1:
        lines.append("in the cells: positions on the mesh axes (the mesh is abstract, its devices have no ids)")
    return lines


def _contributions(subject: Subject) -> str:
    kind = {"any": "logical or (any)", "all": "logical and (all)", "prod": "product", "max": "maximum"}
    kind |= {"min": "minimum"}
    name = kind.get(subject.reduce or "", subject.reduce)
    return f"{name} over {_and(subject.partial_axes)} of {subject.contributions} contributions"


def _same_along(subject: Subject, axis: str) -> bool:
    return axis not in subject.partial_axes and not any(axis in cut.axes for cut in subject.holdings.cuts)


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _dim_line(subject: Subject, plane: Plane, dim: int) -> str:
    cut = subject.holdings.cuts[dim]
    span = f"dim {dim}" if cut.size is None else f"dim {dim}: 0:{cut.size}"
    if cut.parts == 1:
        return f"{span}, whole everywhere"
    major = f" ({cut.axes[0]} major)" if len(cut.axes) > 1 else ""
    over = f" over {_and(cut.axes)}{major}" if cut.axes else ""
    where = "rows" if dim == plane.row else "columns" if dim == plane.column else "one grid each"
    blocks = f"{cut.parts} parts" if cut.size is None else f"{cut.parts} parts of {cut.stored[0][1] - cut.stored[0][0]}"
    spare = sum(map(cut.padding, range(cut.parts)))
    padding = f", with {spare} element{'' if spare == 1 else 's'} of padding at the end" if spare else ""
    return f"{span}, cut{over} into {blocks}{padding} ({where})"


def part_name(cut: Cut, part: int) -> str:
    """The elements of a part, "4:8"; of unknown sizes its number."""
    if cut.size is None:
        return f"part {part}" if cut.parts > 1 else "whole"
    return "{}:{}".format(*cut.interval(part))


def padding_name(cut: Cut, part: int) -> str:
    """ "+2 pad", or nothing."""
    return f"+{cut.padding(part)} pad" if cut.padding(part) else ""


def halo_names(runs: Sequence[Run]) -> list[str]:
    """What a part receives, a line for either side: "halo 3:4", "and 8:9"."""
    sides = [_joined([run for run in runs if run.before == before]) for before in (True, False)]
    names = [name for name in sides if name]
    return [f"{'and' if number else 'halo'} {name}" for number, name in enumerate(names)] or ["no halo"]


def _joined(runs: Sequence[Run]) -> str:
    """Runs that follow each other as one: they came from several blocks."""
    found: list[list[int]] = []
    for run in runs:
        if found and found[-1][1] == run.start:
            found[-1][1] = run.stop
        else:
            found.append([run.start, run.stop])
    return ",".join(f"{start}:{stop}" for start, stop in found)


def panel_name(subject: Subject, at: dict[int, int]) -> str:
    """The parts of the dims that a small multiple stands for: "dim 0: 0:16"."""
    return ", ".join(f"dim {dim}: {_padded_name(subject.holdings.cuts[dim], part)}" for dim, part in at.items())


def _padded_name(cut: Cut, part: int) -> str:
    return " ".join(filter(None, (part_name(cut, part), padding_name(cut, part))))


def holder_name(subject: Subject, holder: Holder) -> str:
    """A device's id, or its position on the mesh: "dp=0 sp=1"."""
    device = subject.device(holder)
    return str(device.id) if device is not None else position_name(holder)


def position_name(holder: Holder) -> str:
    """ "dp=0 sp=1"."""
    return " ".join(f"{name}={at}" for name, at in holder.coordinates.items()) or "the only one"


def holders_name(subject: Subject, cell: tuple[int, ...], width: int) -> str:
    """Who holds a block, in at most ``width`` characters (or nothing, where none would do)."""
    holders = subject.holdings.cells[cell]
    if subject.devices:
        return _fitting([ids_name([subject.devices[h.number].id for h in holders])], width)
    fixed = {name: at for name, at in holders[0].coordinates.items() if not _varies(subject, name)}
    if not fixed:
        return _fitting(["all", "*"], width)
    return _fitting([" ".join(f"{n}={at}" for n, at in fixed.items()), ",".join(map(str, fixed.values()))], width)


def _varies(subject: Subject, axis: str) -> bool:
    """The holders of one block lie along the axis."""
    size = (subject.mesh or {})[axis]
    return size > 1 and not any(axis in cut.axes for cut in subject.holdings.cuts)


def _fitting(candidates: Sequence[str], width: int) -> str:
    for text in candidates:
        if len(text) <= width:
            return text
    return candidates[-1][: width - 1] + "…" if width >= 3 else ""


def ids_name(ids: Sequence[int]) -> str:
    """Device ids, runs and even steps written short.

    >>> ids_name([0, 1, 2, 5]), ids_name([0, 8, 16, 24, 32]), ids_name([3, 0])
    ('0-2,5', '0,8,…,32', '3,0')
    """
    steps = {b - a for a, b in itertools.pairwise(ids)}
    if len(ids) > 4 and len(steps) == 1 and steps != {1}:
        return f"{ids[0]},{ids[1]},…,{ids[-1]}"
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs)


def block_notes(subject: Subject, cell: tuple[int, ...]) -> list[str]:
    """What's to be said of a block besides who holds it: short, for a cell."""
    notes = []
    if subject.partial_axes:
        notes.append(f"{subject.reduce} of {subject.contributions}")
    if subject.copies(cell) > 1:
        notes.append(f"x{subject.copies(cell)} copies")
    if subject.holdings.is_padding(cell):
        notes.append("only pad")
    return notes


def block_story(subject: Subject, cell: tuple[int, ...]) -> str:
    """All there is to say of a block, for hovering."""
    lines = [
        f"dim {dim}: {_padded_name(cut, part)}"
        for dim, (cut, part) in enumerate(zip(subject.holdings.cuts, cell, strict=True))
    ]
    size = block_bytes(subject, cell)
    if size is not None:
        lines.append(f"{format_bytes(size)} on each of:")
    lines += _some([_holder_story(subject, h) for h in subject.holdings.cells[cell]], 12, "more")
    if subject.partial_axes:
        lines.append(f"the value: {_contributions(subject)}")
    if subject.copies(cell) > 1:
        lines.append(f"{subject.copies(cell)} copies")
    if subject.holdings.is_padding(cell):
        lines.append("holds only padding")
    if subject.halos:
        lines += [receipt_line(subject, h) for h in subject.holdings.cells[cell][:1]]
    return "\n".join(lines)


def _holder_story(subject: Subject, holder: Holder) -> str:
    device = subject.device(holder)
    if device is None:
        return position_name(holder)
    position = f" at {position_name(holder)}" if holder.coordinates else ""
    process = f", process {device.process}" if len(_processes(subject.devices)) > 1 else ""
    return f"device {device.id} ({device.platform}){position}{process}"


@functools.lru_cache(maxsize=8)
def _processes(devices: tuple[Any, ...]) -> frozenset[int]:
    return frozenset(device.process for device in devices)


def _some(lines: Sequence[str], limit: int, what: str) -> list[str]:
    if len(lines) <= limit:
        return list(lines)
    return [*lines[: limit - 1], f"… {len(lines) - limit + 1} {what}"]


def receipt_line(subject: Subject, holder: Holder) -> str:
    """What the halos bring to one device: "device 1 receives dim 1 3:4 from 0, dim 1 8:9 from 2"."""
    name = f"device {holder_name(subject, holder)}" if subject.devices else position_name(holder)
    pieces = pieces_of(holder.cell, subject.halos)
    if not pieces:
        return f"{name} receives nothing"
    found = []
    for piece in pieces:
        box = " x ".join(f"dim {dim} {start}:{stop}" for dim, (start, stop) in piece.spans.items())
        found.append(f"{box} from {holder_name(subject, subject.holdings.neighbour(holder, piece.cell))}")
    return f"{name} receives {', '.join(found)}"


def receipt_lines(subject: Subject, limit: int) -> list[str]:
    """Of every device what the halos bring; a few of them where there are many."""
    if not subject.halos:
        return []
    holders = subject.holdings.holders
    shown = holders if len(holders) <= limit else holders[: limit - 1]
    lines = [receipt_line(subject, holder) for holder in shown]
    if len(shown) < len(holders):
        lines.append(f"… and {len(holders) - len(shown)} more devices")
    return lines
