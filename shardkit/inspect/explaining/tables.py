"""The sections of the page as tables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from shardkit.inspect.explaining.estimate import Estimate
from shardkit.inspect.explaining.explained import Explained, by_purpose
from shardkit.inspect.explaining.leaf import Leaf
from shardkit.inspect.explaining.purposes import PURPOSES, UNEXPLAINED
from shardkit.inspect.memory import MemoryReport
from shardkit.inspect.report import axes_text, loop_text
from shardkit.inspect.tables import Table, format_bytes

ROWS = 8  # of inputs, of outputs, that the page shows; to_dict() has all
LINES = 40  # of collectives
HEADERS = ("part", "amount", "how")


def in_use(memory: MemoryReport) -> int:
    """Bytes in use at once."""
    # Some compilers leave temporaries out of their peak.
    return max(memory.peak or 0, memory.total)


def leaves_table(title: str, leaves: Sequence[Leaf]) -> Table:
    """Leaves that differ in a number only (of a layer) share a row; the largest rows are shown."""
    groups: dict[tuple[str, ...], list[Leaf]] = {}
    for leaf in leaves:
        type_ = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        groups.setdefault((re.sub(r"\d+", "*", leaf.name), type_, leaf.where), []).append(leaf)
    ranked = sorted(groups.items(), key=lambda item: -sum(leaf.bytes for leaf in item[1]))
    rows = []
    for (name, type_, where), same in ranked[:ROWS]:
        size = format_bytes(sum(leaf.bytes for leaf in same))
        rows.append((same[0].name if len(same) == 1 else name, str(len(same)), type_, where, size))
    total = sum(leaf.bytes for leaf in leaves)
    notes = []
    if len(ranked) > ROWS:
        rest = sum(leaf.bytes for _, same in ranked[ROWS:] for leaf in same)
        notes.append(f"And {len(ranked) - ROWS} more rows, {format_bytes(rest)}: to_dict() has all.")
    if not leaves:
        return Table(f"{title}: none, or the program doesn't say.")
    return Table(
        f"{title}: {len(leaves)}, {format_bytes(total)} a device",
        ("name", "count", "type", "where", "bytes/device"),
        rows,
        frozenset({"count", "bytes/device"}),
        notes,
    )


def collective_table(collectives: Sequence[Explained]) -> Table:
    """Every collective, those that are alike in one row; what each is for first."""
    if not collectives:
        return Table("No collectives: every device works alone.")
    rows: dict[tuple[str, ...], list[Explained]] = {}
    for e in collectives:
        c = e.collective
        key = (e.purpose, c.kind, axes_text(c.axes), loop_text(c), e.what, c.source or "-")
        rows.setdefault(key, []).append(e)
    order = list(PURPOSES)
    keys = sorted(rows, key=lambda k: (order.index(k[0]), -sum(e.bytes for e in rows[k])))
    shown = [_row(key, rows[key]) for key in keys[:LINES]]
    sizes = {purpose: sum(e.bytes for e in found) for purpose, found in by_purpose(collectives).items()}
    totals = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in sizes.items())
    notes = [
        f"Total {format_bytes(sum(sizes.values()))} that one device receives in a step ({totals}); in a loop, "
        "all of its runs."
    ]
    if any(e.collective.in_loop and e.collective.trip_count is None for e in collectives):
        notes.append("The compiler doesn't say how often some loops run: those count as one run.")
    if len(keys) > LINES:
        rest = sum(e.bytes for k in keys[LINES:] for e in rows[k])
        notes.append(f"And {len(keys) - LINES} more rows, {format_bytes(rest)}: to_dict() has all.")
    if UNEXPLAINED in sizes:
        notes.append("Unexplained: " + PURPOSES[UNEXPLAINED] + ".")
    headers = ("for", "kind", "axes", "count", "in loop", "bytes/device", "at best", "what", "source")
    # Columns that say nothing here make room for those that do.
    silent = {
        h for at, h in enumerate(headers) if h in ("in loop", "at best") and {r[at] for r in shown} <= {"no", "?"}
    }
    kept = [at for at, h in enumerate(headers) if h not in silent]
    return Table(
        f"Collectives: {len(collectives)}",
        [headers[at] for at in kept],
        [[row[at] for at in kept] for row in shown],
        frozenset({"count", "bytes/device", "at best"}) - silent,
        notes,
        frozenset(at for at, key in enumerate(keys[:LINES]) if key[0] == UNEXPLAINED),
    )


def memory_table(memory: MemoryReport | None, capacity: int | None, refusal: str | None = None) -> Table:
    """What a program needs of one device's memory, and whether that has it."""
    if refusal is not None:
        return Table("Memory on one device: DOES NOT FIT, and so wasn't compiled", notes=[refusal])
    if memory is None:
        return Table("Memory on one device: this backend doesn't analyse it.")
    parts = ("arguments", "outputs", "temporaries", "aliased", "program")
    sizes = dataclasses.asdict(memory) | {"program": memory.generated_code}
    row = [format_bytes(sizes[part]) for part in parts]
    used = in_use(memory)
    if capacity is None:
        verdict = "what one device has isn't known"
    else:
        share = f"{100 * used / capacity:.0f} % of {format_bytes(capacity)}"
        verdict = f"fits: {share}" if used <= capacity else f"DOES NOT FIT: {share}"
    return Table(
        f"Memory on one device: {format_bytes(used)} in use at once; {verdict}",
        parts,
        [row],
        frozenset(parts),
    )


def work_table(flops: float | None, exact: bool, compiler_flops: float | None, e: Estimate | None) -> Table:
    """Arithmetic, and the least time that it can take."""
    rows: list[tuple[str, str, str]] = []
    if flops is not None:
        about = "" if exact else "; loops of unknown length count once, of branches the dearest"
        rows.append(("flops", _si(flops), "contractions and convolutions, an even share of the program's" + about))
    if compiler_flops:
        rows.append(("flops, compiler", _si(compiler_flops), "its own count: all operations, a loop's body once"))
    if e is None:
        return Table(
            "Work of one device in a step", HEADERS, rows, notes=["No estimate: this hardware isn't in the table."]
        )
    for what, seconds, how in (
        ("compute", e.compute, "flops at the peak of the matrix units, bfloat16"),
        ("memory", e.memory, "arguments, outputs, temporaries twice, at the memory's bandwidth"),
        ("communication", e.communication, "bytes received at the link's bandwidth, without latency or overlap"),
    ):
        rows.append((what, "?" if seconds is None else _seconds(seconds), how))
    return Table(
        "Work of one device in a step (times are ESTIMATES: the least that data sheets allow)",
        HEADERS,
        rows,
        notes=[f"Figures of the hardware: {e.source}."],
    )


def _row(key: tuple[str, ...], same: Sequence[Explained]) -> tuple[str, ...]:
    purpose, kind, axes, loop, what, source = key
    size = format_bytes(sum(e.bytes for e in same))
    return purpose, kind, axes, str(len(same)), loop, size, _time(same), what, source


def _time(same: Sequence[Explained]) -> str:
    known = [e.seconds for e in same if e.seconds is not None]
    return _seconds(sum(known)) if known and len(known) == len(same) else "?"


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0"


def _si(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"
