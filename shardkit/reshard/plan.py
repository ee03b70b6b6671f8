"""`plan_reshard`: which collectives take an array from one layout to another, and what they cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from shardkit.meshes import manual_axes, resolve_mesh
from shardkit.placements import AnyMesh, Layout, Placements
from shardkit.reshard.crossing import crossing
from shardkit.reshard.describe import ReshardStep, describe
from shardkit.reshard.regions import region_between, same_order, same_place
from shardkit.reshard.route import route


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """How an array gets from one layout to another. Printing it gives one line a step.

    Attributes:
      shape: global logical shape.
      dtype: of the array.
      source, destination: the layouts.
      steps: what is done, in order.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
      >>> plan = sk.plan_reshard((8, 8), "float32", [sk.Shard(0)], [sk.Replicate()], mesh)
      >>> plan.bytes_per_device, plan.collectives
      (192, ('all_gather',))
    """

    shape: tuple[int, ...]
    dtype: Any
    source: Layout
    destination: Layout
    steps: tuple[ReshardStep, ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes that a device receives; where devices differ (permutes, transfers) the one that receives most."""
        return sum(step.bytes for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """The largest sum of a step's input and result on one device, in bytes."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def collectives(self) -> tuple[str, ...]:
        """The kinds of collective that the compiled program has, in order."""
        return tuple(step.collective for step in self.steps if step.collective)

    def __repr__(self) -> str:
        return f"<{self._headline()}; print() shows the steps>"

    def __str__(self) -> str:
        lines = [f"  {i}. {step}" for i, step in enumerate(self.steps, 1)] or ["  nothing to do"]
        return "\n".join([self._headline(), *lines])

    def _headline(self) -> str:
        name = f"{jnp.dtype(self.dtype).name}[{','.join(map(str, self.shape))}]"
        where = f"mesh {dict(self.source.mesh.shape)}"
        if not same_place(self.source.mesh, self.destination.mesh):
            where += f" to mesh {dict(self.destination.mesh.shape)}"
            where += "" if same_order(self.source.mesh, self.destination.mesh) else " of other devices"
        count = len(self.collectives)
        return (
            f"{name} on {where}: {self.bytes_per_device:,} bytes a device in {count} "
            f"collective{'' if count == 1 else 's'}"
        )


def plan_reshard(
    shape: Sequence[int],
    dtype: Any,
    src: Placements | Layout,
    dst: Placements | Layout,
    mesh: AnyMesh | None = None,
    dst_mesh: AnyMesh | None = None,
) -> ReshardPlan:
    """The cheapest steps from one layout to another.

    Found by a search over layouts whose steps are local slices, all_gather, all_to_all, psum and its kin,
    psum_scatter and ppermute, over one mesh axis, several at once, or parts of axes. Costs are compared in the order:
    bytes that one device receives, number of collectives, peak memory. ``sk.reshard`` runs exactly this. The search is
    A* (P. Hart, N. Nilsson, B. Raphael, "A Formal Basis for the Heuristic Determination of Minimum Cost Paths", IEEE
    Trans. SSC 4(2), 1968); ``ReshardStep`` says how bytes are counted.

    Between meshes over the same devices in the same order nothing is special; between others the plan has what the
    source mesh does, the transfer, and what the destination mesh does.

    Args:
      shape: global (logical) shape; sizes needn't divide.
      dtype: of the array.
      src, dst: placements in any form.
      mesh: the mesh of ``src`` (and of ``dst``, unless ``dst_mesh`` is given); else that of a ``Layout`` or
        ``NamedSharding`` given as ``src``, or the ambient one.
      dst_mesh: another mesh to go to. A mesh without devices (``AbstractMesh``) is taken to have those of the other.

    Returns:
      A ``ReshardPlan`` with ``.steps`` and ``.bytes_per_device``; print it.

    Raises:
      ValueError: no mesh, dim out of range, an axis the mesh doesn't have, Partial axes of two kinds.
      TypeError: a shape that is no tuple of sizes, a dtype that has no such reduction.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
      >>> print(sk.plan_reshard((8, 8), "float32", [sk.Shard(0)], [sk.Shard(1)], mesh))
      float32[8,8] on mesh {'x': 4}: 48 bytes a device in 1 collective
        1. all_to_all        x            [x, -] -> [-, x]   48 bytes
    """
    if not isinstance(shape, Sequence):
        raise TypeError(f"plan_reshard: shape is a tuple of sizes, got {shape!r}")
    where = resolve_mesh(mesh if mesh is not None else getattr(src, "mesh", None), what="plan_reshard")
    to = dst_mesh if dst_mesh is not None else getattr(dst, "mesh", None) or where
    source = Layout(where, src).resolved(len(shape))
    goal = Layout(to, dst).resolved(len(shape))
    source.local_shape(shape, uneven="pad")  # refuses sizes below 0
    return _plan(tuple(map(int, shape)), jnp.dtype(dtype), source, goal, manual_axes())


@functools.lru_cache(4096)
def _plan(shape: tuple[int, ...], dtype: Any, source: Layout, goal: Layout, _: frozenset[str]) -> ReshardPlan:
    region = region_between(source.mesh, goal.mesh)
    if region is None:
        steps = crossing(shape, dtype, source, goal).describe()
    else:
        steps = describe(route(region, shape, dtype, source, goal))
    return ReshardPlan(shape, dtype, source, goal, steps)
