"""The mesh that a plan runs on, where source and destination may name the same devices differently."""

from __future__ import annotations

import dataclasses
import functools
import math

from jax.sharding import AbstractMesh, AxisType, Mesh

from shardkit.meshes import manual_axes
from shardkit.placements import AnyMesh
from shardkit.reshard.factors import common

Names = tuple[tuple[str, tuple[str, ...]], ...]  # of each axis of a mesh, the axes of the region it's made of


@dataclasses.dataclass(frozen=True)
class Region:
    """The mesh a plan runs on.

    Attributes:
      mesh: the mesh.
      sizes: (name, size) of its axes that take part: those that aren't manual already.
      source, goal: how the meshes of the source and of the goal name these axes. An axis that's manual already is
        made of none.
    """

    mesh: AnyMesh
    sizes: tuple[tuple[str, int], ...]
    source: Names
    goal: Names

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes that take part."""
        return tuple(name for name, _ in self.sizes)


def same_place(one: AnyMesh, other: AnyMesh) -> bool:
    """Whether the meshes are the same, but for the types of their axes."""
    if one.axis_names != other.axis_names or one.axis_sizes != other.axis_sizes:
        return False
    return same_order(one, other)


def same_order(one: AnyMesh, other: AnyMesh) -> bool:
    """Whether the meshes have the same devices in the same order. One without devices is taken to have the other's."""
    if isinstance(one, Mesh) and isinstance(other, Mesh):
        return one.devices.size == other.devices.size and bool((one.devices.ravel() == other.devices.ravel()).all())
    return math.prod(one.axis_sizes) == math.prod(other.axis_sizes)


def region_between(source: AnyMesh, goal: AnyMesh) -> Region | None:
    """The region in which both meshes can be named; None where they don't have the same devices in one order."""
    return _region_between(source, goal, manual_axes())


@functools.lru_cache(1024)
def _region_between(source: AnyMesh, goal: AnyMesh, manual: frozenset[str]) -> Region | None:
    if same_place(source, goal):
        sizes = zip(source.axis_names, source.axis_sizes, strict=True)
        names = tuple((n, () if n in manual else (n,)) for n in source.axis_names)
        mesh = source if isinstance(source, Mesh) else goal  # devices, where they're known
        return Region(mesh, tuple((n, s) for n, s in sizes if n not in manual), names, names)
    if not same_order(source, goal):
        return None
    found = common(source.axis_sizes, goal.axis_sizes)
    if found is None:
        return None
    strides = [math.prod(found[i + 1 :]) for i in range(len(found))]
    named = [(name, _covered(source, name, strides)) for name in source.axis_names]
    labels = {i: name if len(mine) == 1 else f"{name}.{k}" for name, mine in named for k, i in enumerate(mine)}
    axes = tuple(labels[i] for i in range(len(found)))
    known = source if isinstance(source, Mesh) else goal
    if isinstance(known, Mesh):
        mesh: AnyMesh = Mesh(known.devices.reshape(found), axes, axis_types=(AxisType.Auto,) * len(axes))
    else:
        mesh = AbstractMesh(found, axes)

    def made_of(named: AnyMesh) -> Names:
        return tuple((name, tuple(axes[i] for i in _covered(named, name, strides))) for name in named.axis_names)

    return Region(mesh, tuple(zip(axes, found, strict=True)), made_of(source), made_of(goal))


def _covered(mesh: AnyMesh, name: str, strides: list[int]) -> list[int]:
    """Which factors, given by their strides, make up an axis."""
    at = mesh.axis_names.index(name)
    low = math.prod(mesh.axis_sizes[at + 1 :])
    high = low * mesh.axis_sizes[at]
    return [i for i, stride in enumerate(strides) if low <= stride < high]
