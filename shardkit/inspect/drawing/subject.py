"""What there is to draw, read off arrays, layouts and shardings once, so that the drawings need no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shardkit.inspect.drawing.blocks import Holder, Holdings
from shardkit.inspect.drawing.halos import Runs


@dataclasses.dataclass(frozen=True)
class DeviceName:
    """What is known of a device: its id, the platform, and the process that it belongs to."""

    id: int
    platform: str
    process: int


@dataclasses.dataclass(frozen=True)
class Subject:
    """An array or layout, as far as it can be drawn.

    Attributes:
      kind: "array", "Padded", "PartialArray", "layout" or the name of a sharding.
      holdings: who holds which block.
      devices: one a holder; empty where the mesh is abstract.
      mesh: size of each mesh axis; None where no mesh is known.
      placements: what each mesh axis does, as text; None where no mesh is known.
      reduce: the reduction that the contributions wait for; None without Partial axes.
      partial_axes: the mesh axes whose devices hold contributions.
      dtype: its name, and ``itemsize`` in bytes; None where only a layout is known.
      sized: the shape is known; else parts are only numbered.
      halos: what each part receives, for each dim with a halo.
    """

    kind: str
    holdings: Holdings
    devices: tuple[DeviceName, ...] = ()
    mesh: Mapping[str, int] | None = None
    placements: Mapping[str, str] | None = None
    reduce: str | None = None
    partial_axes: tuple[str, ...] = ()
    dtype: str | None = None
    itemsize: int | None = None
    sized: bool = True
    halos: Runs = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The sizes that count; None where they aren't known."""
        return tuple(cut.size or 0 for cut in self.holdings.cuts) if self.sized else None

    @property
    def contributions(self) -> int:
        """How many make up one value; 1 without Partial axes."""
        count = 1
        for axis in self.partial_axes:
            count *= (self.mesh or {})[axis]
        return count

    def copies(self, cell: tuple[int, ...]) -> int:
        """How many devices hold the same values of a block."""
        return len(self.holdings.cells[cell]) // self.contributions

    def device(self, holder: Holder) -> DeviceName | None:
        """The device of a holder, where it's known."""
        return self.devices[holder.number] if self.devices else None
