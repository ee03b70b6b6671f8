"""The drawing as plain data, for tools."""

from __future__ import annotations

import math
from typing import Any

from shardkit.inspect.drawing.blocks import Holder
from shardkit.inspect.drawing.halos import Piece, pieces_of
from shardkit.inspect.drawing.subject import Subject
from shardkit.inspect.drawing.words import block_bytes


def to_dict(subject: Subject) -> dict[str, Any]:
    """Everything a drawing shows, of types that JSON has; None for what isn't known. See ``Drawing.to_dict``."""
    return {
        "kind": subject.kind,
        "mesh": None if subject.mesh is None else dict(subject.mesh),
        "shape": None if subject.shape is None else list(subject.shape),
        "dtype": subject.dtype,
        "placements": None if subject.placements is None else dict(subject.placements),
        "reduce": subject.reduce,
        "partial_axes": list(subject.partial_axes),
        "dims": [
            {"dim": dim, "size": cut.size, "parts": cut.parts, "axes": list(cut.axes), "padding": _padding(cut)}
            for dim, cut in enumerate(subject.holdings.cuts)
        ],
        "devices": [_device(subject, holder) for holder in subject.holdings.holders],
    }


def _padding(cut: Any) -> int:
    return sum(map(cut.padding, range(cut.parts)))


def _device(subject: Subject, holder: Holder) -> dict[str, Any]:
    device = subject.device(holder)
    return {
        "position": holder.number,
        "device": None if device is None else device.id,
        "platform": None if device is None else device.platform,
        "process": None if device is None else device.process,
        "coordinates": dict(holder.coordinates),
        "dims": [_part(subject, dim, part) for dim, part in enumerate(holder.cell)],
        "bytes": block_bytes(subject, holder.cell),
        "only_padding": subject.holdings.is_padding(holder.cell),
        "copies": subject.copies(holder.cell),
        "contribution": dict(holder.contribution),
        "receives": [_receipt(subject, holder, piece) for piece in pieces_of(holder.cell, subject.halos)],
    }


def _part(subject: Subject, dim: int, part: int) -> dict[str, Any]:
    cut = subject.holdings.cuts[dim]
    start, stop = (None, None) if cut.size is None else cut.interval(part)
    return {"dim": dim, "part": part, "start": start, "stop": stop, "padding": cut.padding(part)}


def _receipt(subject: Subject, holder: Holder, piece: Piece) -> dict[str, Any]:
    source = subject.holdings.neighbour(holder, piece.cell)
    device = subject.device(source)
    sizes = list(subject.holdings.block_shape(holder.cell) or ())
    for dim, (start, stop) in piece.spans.items():
        sizes[dim] = stop - start
    return {
        "dims": [{"dim": dim, "start": start, "stop": stop} for dim, (start, stop) in piece.spans.items()],
        "from_position": source.number,
        "from_device": None if device is None else device.id,
        "bytes": None if subject.itemsize is None else math.prod(sizes) * subject.itemsize,
    }
