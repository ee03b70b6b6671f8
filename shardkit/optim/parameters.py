"""How each parameter of a loss enters the region in which devices work, and where its gradient is."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from shardkit.arrays import PartialArray
from shardkit.arrays.placing import constrain
from shardkit.optim.on_use import Gather, ShardedParam
from shardkit.optim.stored import FlatShard, found_layout, load, said_layout, shape_of, shorter
from shardkit.placements import AnyMesh, Layout, Partial

GATHERS = ("use", "layer", "step")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One differentiated leaf.

    Attributes:
      shape: as the loss sees it.
      layout: where it lives; None where that's not known.
      spec: how it enters, of the region's manual axes.
      gather: how it's put together within; None where it enters whole.
      lazily: the loss does that itself.
    """

    shape: tuple[int, ...]
    layout: Layout | None
    spec: PartitionSpec = dataclasses.field(default_factory=PartitionSpec)
    gather: Gather | None = None
    lazily: bool = False

    @property
    def eager(self) -> bool:
        """It's gathered before the loss sees it."""
        return self.gather is not None and not self.lazily

    def seen(self, block: jax.Array, point: jax.Array) -> Any:
        """What the loss gets, of this device's block and what is differentiated: the whole, or a slot in its place."""
        if self.gather is None or not self.lazily:
            return point
        return ShardedParam(block, point, len(self.shape), self.gather)

    def gradient(self, stack: jax.Array, mesh: AnyMesh, axes: Collection[str], kind: str) -> PartialArray:
        """The contributions with their label: Partial over the batch axes, else where the parameter is."""
        partial = dict.fromkeys(axes, Partial(kind))
        if self.layout is None:
            return PartialArray(stack, Layout(mesh, partial).resolved(len(self.shape)))
        layout = self.layout.but(partial)
        return PartialArray(constrain(stack, mesh, layout.stack_spec(len(self.shape))), layout)


def read_parameters(
    own: Sequence[Any],
    said: Sequence[Any] | None,
    axes: Collection[str],
    mesh: AnyMesh,
    gather: str,
    gather_dtype: Any,
) -> tuple[list[Parameter], list[jax.Array]]:
    """What is known of each, and the arrays that enter.

    Args:
      own: the leaves.
      said: where each lives, as the caller says; None: what they say themselves.
      axes: those that cut the batch.
      mesh: the mesh.
      gather: one of ``GATHERS``.
      gather_dtype: that blocks travel in; None: their own.
    """
    described, arrays = [], []
    for x, where in zip(own, said if said is not None else [None] * len(own), strict=True):
        param, x = _read(x, where, axes, mesh, gather, gather_dtype)
        described.append(param)
        arrays.append(x)
    return described, arrays


def _read(x: Any, where: Any, axes: Collection[str], mesh: AnyMesh, gather: str, dtype: Any) -> tuple[Parameter, Any]:
    shape, lazily = shape_of(x), gather == "layer"
    if isinstance(x, FlatShard):
        whole = Layout(mesh, {}).resolved(len(shape))
        if gather == "step" or x.axis not in axes:
            return Parameter(shape, whole), load(x)
        recipe = Gather(((-1, (x.axis,)),), shape, shorter(dtype, x.flat))
        return Parameter(shape, whole, PartitionSpec(x.axis), recipe, lazily), x.flat
    layout = found_layout(x, mesh) if where is None else said_layout(where, mesh, len(shape))
    if layout is None:
        return Parameter(shape, None), x
    cuts, stays = {}, {}
    for dim, names in layout.dim_axes(len(shape)).items():
        mine = tuple(n for n in names if n in axes)
        if mine and mine != names:  # shared with an axis that is the compiler's: so is putting it together
            return Parameter(shape, layout), x
        (cuts if mine else stays)[dim] = names
    if not cuts or gather == "step":
        return Parameter(shape, layout), x
    if AxisType.Explicit in mesh.axis_types:
        stays = {}  # types say it all
    back = [tuple((dim - len(shape), names) for dim, names in found.items()) for found in (cuts, stays)]
    recipe = Gather(back[0], None, shorter(dtype, x), back[1])
    spec = PartitionSpec(*(cuts.get(d) for d in range(len(shape))))
    return Parameter(shape, layout, spec, recipe, lazily), x
