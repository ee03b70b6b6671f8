"""The page that ``explain`` gives: what a program does, as text, HTML, a rich renderable, and data."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import rich.console

from shardkit.inspect.explaining.bars import bar
from shardkit.inspect.explaining.estimate import Estimate, runs
from shardkit.inspect.explaining.leaf import Leaf
from shardkit.inspect.explaining.purposes import PURPOSES, UNEXPLAINED
from shardkit.inspect.memory import MemoryReport
from shardkit.inspect.report import Collective, CollectiveReport, axes_text, loop_text
from shardkit.inspect.tables import Table, format_bytes

ROWS = 8  # of inputs, of outputs, that the page shows; to_dict() has all
LINES = 40  # of collectives
HEADERS = ("part", "amount", "how")


@dataclasses.dataclass(frozen=True)
class Explained:
    """A collective, and what it is for.

    Attributes:
      collective: see ``sk.Collective``.
      purpose: one of ``PURPOSES``.
      what: what exactly.
      seconds: an estimate for all its runs in a step; None where the hardware isn't in the table.
    """

    collective: Collective
    purpose: str
    what: str
    seconds: float | None

    @property
    def runs(self) -> int:
        """How often it runs in a step, as far as the compiler says; else once."""
        return runs(self.collective)

    @property
    def bytes(self) -> int:
        """What one device receives in a step: all runs."""
        return self.collective.bytes * self.runs


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a program will do on the hardware it was compiled for. ``print`` it, or end a notebook cell with it.

    Attributes:
      name: of the function.
      device_kind: as JAX names it: "TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu".
      devices, hosts: how many.
      mesh_axes: (name, size) of each mesh axis, or None if no mesh was found.
      inputs, outputs: their placements.
      collectives: each with its purpose.
      memory: of one device; None where the compiler doesn't analyse it.
      capacity: bytes of memory of one device; None: unknown.
      flops: floating-point operations of one device in a step: an even share of those of contractions and
        convolutions in the traced program; None where only a compiled program was given.
      flops_exact: no loop of unknown length, no choice between branches was in it.
      compiler_flops: what the compiler counts for one device, a loop's body once, elementwise operations too; None
        where it doesn't.
      estimate: seconds at best; None for hardware that isn't in the table.
      compile_seconds: what tracing and XLA took.
      notes: what else there is to know.
    """

    name: str
    device_kind: str
    devices: int
    hosts: int
    mesh_axes: tuple[tuple[Hashable, int], ...] | None
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    collectives: tuple[Explained, ...]
    memory: MemoryReport | None
    capacity: int | None
    flops: float | None
    flops_exact: bool
    compiler_flops: float | None
    estimate: Estimate | None
    compile_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def report(self) -> CollectiveReport:
        """The collectives without purposes, as ``sk.collectives`` gives them."""
        return CollectiveReport(tuple(e.collective for e in self.collectives), self.mesh_axes)

    @property
    def bytes_per_device(self) -> int:
        """What one device receives in a step; a collective in a loop counts as often as the loop is known to run."""
        return sum(e.bytes for e in self.collectives)

    @property
    def unexplained(self) -> tuple[Explained, ...]:
        """The collectives that nothing asks for."""
        return self.of(UNEXPLAINED)

    @property
    def fits(self) -> bool | None:
        """Whether one device's memory holds it; None where one of both isn't known."""
        if self.memory is None or self.capacity is None:
            return None
        return _in_use(self.memory) <= self.capacity

    def of(self, purpose: str) -> tuple[Explained, ...]:
        """The collectives of one purpose.

        Raises:
          ValueError: there is no such purpose.
        """
        if purpose not in PURPOSES:
            raise ValueError(f"purpose {purpose!r} is unknown; they are {', '.join(map(repr, PURPOSES))}")
        return tuple(e for e in self.collectives if e.purpose == purpose)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for ``json.dumps``."""
        plain = self.report.to_dict()
        for entry, explained in zip(plain["collectives"], self.collectives, strict=True):
            entry |= {"purpose": explained.purpose, "what": explained.what, "runs": explained.runs}
            entry |= {"bytes_per_step": explained.bytes, "seconds_estimate": explained.seconds}
        memory = self.memory
        return {
            "name": self.name,
            "device_kind": self.device_kind,
            "devices": self.devices,
            "hosts": self.hosts,
            "mesh": plain["mesh"],
            "inputs": [dataclasses.asdict(leaf) for leaf in self.inputs],
            "outputs": [dataclasses.asdict(leaf) for leaf in self.outputs],
            "collectives": plain["collectives"],
            "purposes": {
                p: {"count": len(found), "bytes_per_device": sum(e.bytes for e in found)}
                for p in PURPOSES
                if (found := self.of(p))
            },
            "bytes_per_device": self.bytes_per_device,
            "memory": None if memory is None else dataclasses.asdict(memory) | {"in_use": _in_use(memory)},
            "capacity": self.capacity,
            "fits": self.fits,
            "flops_per_device": self.flops,
            "flops_exact": self.flops_exact,
            "compiler_flops_per_device": self.compiler_flops,
            "estimate": None if self.estimate is None else dataclasses.asdict(self.estimate),
            "compile_seconds": self.compile_seconds,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n\n".join([self._headline(), *(table.to_text() for table in self._tables())])

    def _repr_html_(self) -> str:
        inputs, outputs, wire, memory, *rest = (table.to_html() for table in self._tables())
        parts = [inputs, outputs, wire + self._wire_bar(), memory + self._memory_bar(), *rest]
        blocks = "".join(f'<div style="margin-top:1em">{part}</div>' for part in parts)
        return f"<div><b>{html.escape(self._headline())}</b>{blocks}</div>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield rich.console.Group(self._headline(), *(table.to_rich() for table in self._tables()))

    def _wire_bar(self) -> str:
        sizes = [(p, sum(e.bytes for e in self.of(p))) for p in PURPOSES]
        return bar([(p, size, format_bytes(size)) for p, size in sizes if size], self.bytes_per_device)

    def _memory_bar(self) -> str:
        if self.memory is None:
            return ""
        used = _in_use(self.memory)
        given = {"arguments": self.memory.arguments, "outputs": self.memory.outputs - max(self.memory.aliased, 0)}
        sizes = given | {"temporaries": self.memory.temporaries, "program": self.memory.generated_code}
        parts = [(name, size, format_bytes(size)) for name, size in sizes.items() if size > 0]
        return bar(parts, max(used, self.capacity or 0, sum(size for _, size, _ in parts)))

    def _headline(self) -> str:
        mesh = "no mesh" if self.mesh_axes is None else "mesh " + ", ".join(f"{n}={s}" for n, s in self.mesh_axes)
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.name} on {self.devices} x {self.device_kind}{hosts}, {mesh}"

    def _tables(self) -> Sequence[Table]:
        return [
            _leaves("Inputs", self.inputs),
            _leaves("Outputs", self.outputs),
            self._collective_table(),
            self._memory_table(),
            self._work_table(),
            *([Table("Notes", notes=self.notes)] if self.notes else []),
        ]

    def _collective_table(self) -> Table:
        if not self.collectives:
            return Table("No collectives: every device works alone.")
        rows: dict[tuple[str, ...], list[Explained]] = {}
        for e in self.collectives:
            c = e.collective
            key = (e.purpose, c.kind, axes_text(c.axes), loop_text(c), e.what, c.source or "-")
            rows.setdefault(key, []).append(e)
        order = list(PURPOSES)
        keys = sorted(rows, key=lambda k: (order.index(k[0]), -sum(e.bytes for e in rows[k])))
        shown = [_row(key, rows[key]) for key in keys[:LINES]]
        totals = ", ".join(
            f"{p} {format_bytes(sum(e.bytes for e in found))}" for p in PURPOSES if (found := self.of(p))
        )
        notes = [
            f"Total {format_bytes(self.bytes_per_device)} that one device receives in a step ({totals}); in a loop, "
            "all of its runs."
        ]
        if any(e.collective.in_loop and e.collective.trip_count is None for e in self.collectives):
            notes.append("The compiler doesn't say how often some loops run: those count as one run.")
        if len(keys) > LINES:
            rest = sum(e.bytes for k in keys[LINES:] for e in rows[k])
            notes.append(f"And {len(keys) - LINES} more rows, {format_bytes(rest)}: to_dict() has all.")
        if self.unexplained:
            notes.append("Unexplained: " + PURPOSES[UNEXPLAINED] + ".")
        headers = ("for", "kind", "axes", "count", "in loop", "bytes/device", "at best", "what", "source")
        # Columns that say nothing here make room for those that do.
        silent = {
            h for at, h in enumerate(headers) if h in ("in loop", "at best") and {r[at] for r in shown} <= {"no", "?"}
        }
        kept = [at for at, h in enumerate(headers) if h not in silent]
        return Table(
            f"Collectives: {len(self.collectives)}",
            [headers[at] for at in kept],
            [[row[at] for at in kept] for row in shown],
            frozenset({"count", "bytes/device", "at best"}) - silent,
            notes,
            frozenset(at for at, key in enumerate(keys[:LINES]) if key[0] == UNEXPLAINED),
        )

    def _memory_table(self) -> Table:
        if self.memory is None:
            return Table("Memory on one device: this backend doesn't analyse it.")
        parts = ("arguments", "outputs", "temporaries", "aliased", "program")
        sizes = dataclasses.asdict(self.memory) | {"program": self.memory.generated_code}
        row = [format_bytes(sizes[part]) for part in parts]
        used = _in_use(self.memory)
        if self.capacity is None:
            verdict = "what one device has isn't known"
        else:
            share = f"{100 * used / self.capacity:.0f} % of {format_bytes(self.capacity)}"
            verdict = f"fits: {share}" if self.fits else f"DOES NOT FIT: {share}"
        return Table(
            f"Memory on one device: {format_bytes(used)} in use at once; {verdict}",
            parts,
            [row],
            frozenset(parts),
        )

    def _work_table(self) -> Table:
        rows: list[tuple[str, str, str]] = []
        if self.flops is not None:
            about = "" if self.flops_exact else "; loops of unknown length count once, of branches the dearest"
            rows.append(
                ("flops", _si(self.flops), "contractions and convolutions, an even share of the program's" + about)
            )
        if self.compiler_flops:
            rows.append(
                ("flops, compiler", _si(self.compiler_flops), "its own count: all operations, a loop's body once")
            )
        e = self.estimate
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


def _in_use(memory: MemoryReport) -> int:
    # Some compilers leave temporaries out of their peak.
    return max(memory.peak or 0, memory.total)


def _leaves(title: str, leaves: Sequence[Leaf]) -> Table:
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
