"""The page that ``explain`` gives: what a program does, as text, HTML, a rich renderable, and data."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import rich.console

from shardkit.inspect.explaining import tables
from shardkit.inspect.explaining.bars import memory_bar, wire_bar
from shardkit.inspect.explaining.estimate import Estimate
from shardkit.inspect.explaining.explained import Explained, by_purpose
from shardkit.inspect.explaining.leaf import Leaf
from shardkit.inspect.explaining.purposes import PURPOSES, UNEXPLAINED
from shardkit.inspect.memory import MemoryReport
from shardkit.inspect.report import CollectiveReport
from shardkit.inspect.tables import Table, format_bytes


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a program will do on the hardware it was compiled for. ``print`` it, or end a notebook cell with it.

    Attributes:
      name: of the function.
      device_kind: as JAX names it: "TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu".
      devices, hosts: how many.
      mesh_axes: (name, size) of each mesh axis, or None if no mesh was found.
      inputs, outputs: of each array ``.name``, ``.dtype``, ``.shape``, ``.local_shape`` and ``.bytes`` (of one device's
        block), and ``.where`` it lives.
      collectives: each with its purpose.
      memory: of one device; None where the compiler doesn't analyse it.
      capacity: bytes of memory of one device; None: unknown.
      flops: floating-point operations of one device in a step: an even share of those of contractions and
        convolutions in the traced program; None where only a compiled program was given.
      flops_exact: no loop of unknown length, no choice between branches was in it.
      compiler_flops: what the compiler counts for one device, a loop's body once, elementwise operations too; None
        where it doesn't.
      estimate: seconds a step at best: ``.compute``, ``.memory`` and ``.communication``, each at the peak that the data
        sheet says (``.source``); None for hardware that isn't in the table.
      compile_seconds: what tracing and XLA took, in seconds.
      notes: what else there is to know.
      refusal: why there is no compiled program: the compiler's words on memory that doesn't suffice. Nothing is known
        of its collectives then.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> page = sk.explain(lambda x: x @ x, jnp.ones((4, 4)))
      >>> page.flops, page.bytes_per_device, page.unexplained, page.of("halo")
      (128.0, 0, (), ())
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
    refusal: str | None = None

    @property
    def report(self) -> CollectiveReport:
        """The collectives without purposes, as ``sk.collectives`` gives them."""
        return CollectiveReport(tuple(e.collective for e in self.collectives), self.mesh_axes)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device receives in a step; a collective in a loop counts as often as that is known to run."""
        return sum(e.bytes for e in self.collectives)

    @property
    def unexplained(self) -> tuple[Explained, ...]:
        """The collectives that nothing asks for."""
        return self.of(UNEXPLAINED)

    @property
    def fits(self) -> bool | None:
        """Whether one device's memory holds it; None where one of both isn't known."""
        if self.refusal is not None:
            return False
        if self.memory is None or self.capacity is None:
            return None
        return tables.in_use(self.memory) <= self.capacity

    def of(self, purpose: str) -> tuple[Explained, ...]:
        """The collectives of one purpose.

        Args:
          purpose: "halo", "gradient reduction", "parameter gather", "attention", "reduction", "reshard" or
            "unexplained".

        Returns:
          An ``Explained`` each, in the order of the program.

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
                purpose: {"count": len(found), "bytes_per_device": sum(e.bytes for e in found)}
                for purpose, found in by_purpose(self.collectives).items()
            },
            "bytes_per_device": self.bytes_per_device,
            "memory": None if memory is None else dataclasses.asdict(memory) | {"in_use": tables.in_use(memory)},
            "capacity": self.capacity,
            "fits": self.fits,
            "flops_per_device": self.flops,
            "flops_exact": self.flops_exact,
            "compiler_flops_per_device": self.compiler_flops,
            "estimate": None if self.estimate is None else dataclasses.asdict(self.estimate),
            "compile_seconds": self.compile_seconds,
            "notes": list(self.notes),
            "refusal": self.refusal,
        }

    def __repr__(self) -> str:
        count = len(self.collectives)
        return (
            f"<{self._headline()}: {count} collective{'' if count == 1 else 's'}, "
            f"{format_bytes(self.bytes_per_device)} a device; print() shows the page>"
        )

    def __str__(self) -> str:
        return "\n\n".join([self._headline(), *(table.to_text() for table in self._tables())])

    def _repr_html_(self) -> str:
        inputs, outputs, wire, memory, *rest = (table.to_html() for table in self._tables())
        parts = [
            inputs,
            outputs,
            wire + wire_bar(self.collectives),
            memory + memory_bar(self.memory, self.capacity),
            *rest,
        ]
        blocks = "".join(f'<div style="margin-top:1em">{part}</div>' for part in parts)
        return f"<div><b>{html.escape(self._headline())}</b>{blocks}</div>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield rich.console.Group(self._headline(), *(table.to_rich() for table in self._tables()))

    def _headline(self) -> str:
        mesh = "no mesh" if self.mesh_axes is None else "mesh " + ", ".join(f"{n}={s}" for n, s in self.mesh_axes)
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.name} on {self.devices} x {self.device_kind}{hosts}, {mesh}"

    def _tables(self) -> Sequence[Table]:
        return [
            tables.leaves_table("Inputs", self.inputs),
            tables.leaves_table("Outputs", self.outputs),
            tables.collective_table(self.collectives) if self.refusal is None else Table("Collectives: not known."),
            tables.memory_table(self.memory, self.capacity, self.refusal),
            tables.work_table(self.flops, self.flops_exact, self.compiler_flops, self.estimate),
            *([Table("Notes", notes=self.notes)] if self.notes else []),
        ]
