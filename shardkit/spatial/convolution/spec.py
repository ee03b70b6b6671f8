"""The static description of a sharded convolution, and what it costs to exchange."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from shardkit.spatial.exchange import AxisName
from shardkit.spatial.windows import ShardedWindow


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A device's block of one spatial dim, cut into chunks that lie side by side in the batch dim.

    Attributes:
      position: of the spatial dim among them.
      count: chunks a device.
      major: all images of a chunk together; else all chunks of an image.
    """

    position: int
    count: int
    major: bool = False


@dataclasses.dataclass(frozen=True)
class LocalConv:
    """All that is static about one sharded convolution (hashable, so it can key a compilation cache).

    Attributes:
      lhs_spec, rhs_spec, out_spec: dims as (batch, feature, *spatial), (out, in, *spatial) and
        (batch, feature, *spatial), as in ``lax.ConvDimensionNumbers``.
      windows: one a spatial dim.
      axes: the mesh axis (or axes) of each spatial dim, None where it isn't sharded.
      modes: padding mode of each spatial dim.
      feature_groups, batch_groups, precision, preferred_element_type: as in lax.
      split_groups: run a grouped convolution as several that XLA can partition: it gathers the
        whole activation of a grouped one whose batch is sharded over an axis that is left to it
        (openxla/xla#47945), but not of an ungrouped or depthwise one.
      sum_over: mesh axes that cut the input features: contributions are summed over them.
      method: "concat", "overlap" or "blocks": how block and halos meet (see local.py).
      chunks: for "blocks", which spatial dim lies cut in the batch dim. Its window is then that of all
        devices' chunks, as if each were a shard.
      shift_kernel: where windows begin at another phase of a dilated input on each shard, a wider kernel is
        cut at the phase (more taps); else the outputs are (one more array).
    """

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]
    windows: tuple[ShardedWindow, ...]
    axes: tuple[AxisName, ...]
    modes: tuple[str, ...]
    feature_groups: int
    batch_groups: int
    precision: Any
    preferred_element_type: Any
    split_groups: bool = False
    sum_over: tuple[str, ...] = ()
    method: str = "concat"
    chunks: Chunks | None = None
    shift_kernel: bool = False

    def spatial(self) -> list[tuple[int, ShardedWindow, AxisName]]:
        """(array dim of the input, window, mesh axis) for each spatial dim."""
        return list(zip(self.lhs_spec[2:], self.windows, self.axes, strict=True))

    @property
    def received(self) -> int:
        return sum(w.exchange.received for w in self.windows)

    @property
    def permutes(self) -> int:
        return sum(w.exchange.permutes for w in self.windows)


def halo_bytes(conv: LocalConv, block_shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes a device receives in one forward pass, by the plan alone.

    Dims are exchanged one after the other, so a later dim's halos carry the corners.
    """
    shape, total = list(block_shape), 0
    for dim, window, _ in conv.spatial():
        others = math.prod(s for d, s in enumerate(shape) if d != dim)
        total += window.exchange.received * others * itemsize
        if window.exchange.table is None and window.kept_whole:
            shape[dim] += window.exchange.reach_lo + window.exchange.reach_hi
        else:
            shape[dim] = window.exchange.length
    return total
