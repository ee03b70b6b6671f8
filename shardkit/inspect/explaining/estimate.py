"""Seconds, roughly: what the figures of data sheets allow at best. No JAX here.

Nothing overlaps, nothing waits, latency is left out, every unit runs at its peak: real steps take longer. What it is
good for: which of compute, memory and communication a step is bound by, and how far apart two plans are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardkit.inspect.report import Collective
from shardkit.inspect.targets.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds a step, on one device.

    Attributes:
      compute: flops at the peak of the matrix units; None where flops aren't known.
      memory: bytes of arguments, outputs and twice the temporaries (written and read) at the memory's bandwidth: each
        once, the least that can be; None without a memory analysis.
      communication: bytes received, each over the link it takes; None where a link isn't in the table.
      source: where the figures come from.
    """

    compute: float | None
    memory: float | None
    communication: float | None
    source: str


def estimate(
    hardware: Hardware,
    flops: float | None,
    moved: int | None,
    collectives: Sequence[Collective] | None,
    hosts: Sequence[int],
) -> Estimate:
    """What a step takes at best.

    Args:
      hardware: of each device.
      flops: of one device.
      moved: bytes of memory that one device reads or writes.
      collectives: of the program; one in a loop counts as often as the loop is known to run. None: not known.
      hosts: the host of each position of the device assignment.

    Example:
      >>> from shardkit.inspect.targets import hardware_of
      >>> estimate(hardware_of("TPU v5 lite"), 197e12, 819 * 10**9, (), (0,)).compute
      1.0
    """
    times = None if collectives is None else [seconds(c, hardware, hosts) for c in collectives]
    return Estimate(
        compute=None if flops is None else flops / hardware.flops,
        memory=None if moved is None else moved / hardware.memory_bandwidth,
        communication=None if times is None or None in times else sum(t for t in times if t is not None),
        source=hardware.source,
    )


def seconds(collective: Collective, hardware: Hardware, hosts: Sequence[int]) -> float | None:
    """What one collective takes in a step, all its runs; None where the link isn't in the table.

    A TPU's ring takes both directions, a permute only one of them.
    """
    speed = hardware.link
    if hardware.network is not None and any(len({hosts[d] for d in group}) > 1 for group in collective.groups):
        speed = hardware.network
    elif speed is not None and hardware.network is None and collective.kind == "collective_permute":
        speed /= 2
    if speed is None:
        return None
    return collective.bytes * runs(collective) / speed


def runs(collective: Collective) -> int:
    """How often it runs in a step, as far as the compiler says; else once."""
    return collective.trip_count or 1
