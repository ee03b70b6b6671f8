"""Between two layouts of one set of devices, whatever their meshes call the axes: the program, and running it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.arrays.placing import constrain
from shardkit.meshes import manual_axes
from shardkit.placements import AnyMesh, Layout, entry_names
from shardkit.reshard import derivatives  # noqa: F401  # pyright: ignore[reportUnusedImport]  # makes programs differentiable
from shardkit.reshard.linear import End, Program, apply
from shardkit.reshard.regions import Names, region_between, same_place
from shardkit.reshard.route import route


@dataclasses.dataclass(frozen=True)
class _Way:
    """A program, and how the meshes of source and goal say what is at its ends.

    Attributes:
      program: on the region's mesh.
      source, goal: specs of the stack (or array) on the mesh of either.
      renames: the region's mesh isn't that of the source.
    """

    program: Program
    source: PartitionSpec
    goal: PartitionSpec
    renames: bool

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done but to say where the array is in other words."""
        program = self.program
        return not program.steps and program.source.lead == program.goal.lead


@functools.lru_cache(4096)
def _way(shape: tuple[int, ...], dtype: np.dtype, source: Layout, goal: Layout, manual: frozenset[str]) -> _Way:
    region = region_between(source.mesh, goal.mesh)
    assert region is not None
    found = route(region, shape, dtype, source, goal)
    ends = [
        End(state, _lead(layout, manual), _spec(layout, len(shape), names))
        for state, layout, names in (
            (found.source, source, region.source),
            (found.goal, goal, region.goal),
        )
    ]
    program = Program(region.mesh, region.axis_names, found.problem, ends[0], ends[1], found.steps)
    specs = [
        _spec(layout, len(shape), tuple((n, () if n in manual else (n,)) for n in layout.mesh.axis_names))
        for layout in (source, goal)
    ]
    return _Way(program, specs[0], specs[1], not same_place(source.mesh, region.mesh))


def _lead(layout: Layout, manual: frozenset[str]) -> tuple[int, ...]:
    return tuple(1 if axis in manual else layout.mesh.shape[axis] for axis in layout.partial_axes)


def _spec(layout: Layout, ndim: int, names: Names) -> PartitionSpec:
    """The spec of the stack in the names of a region."""
    made_of = dict(names)
    entries = []
    for entry in spec_entries(layout.stack_spec(ndim)):
        parts = tuple(n for axis in entry_names(entry) for n in made_of[axis])
        entries.append(None if not parts else parts[0] if len(parts) == 1 else parts)
    return PartitionSpec(*entries)


def on_one_mesh(array: jax.Array, shape: tuple[int, ...], source: Layout, goal: Layout) -> jax.Array:
    """The stack (or array) of ``goal``, from that of ``source``.

    Args:
      array: the stack, one leading dim a Partial axis of the source; dims may be padded beyond ``shape``.
      shape: logical shape. In a manual region: of this device's block along the manual axes.
      source, goal: layouts, resolved for the rank.
    """
    way = _way(shape, array.dtype, source, goal, manual_axes())
    if way.idle and way.source == way.goal and source.mesh == goal.mesh:
        return array
    if way.renames and isinstance(array, Tracer) and AxisType.Explicit in source.mesh.axis_types:
        raise ValueError(
            f"reshard: from mesh {dict(source.mesh.shape)} to {dict(goal.mesh.shape)} under jit on Explicit axes, "
            "whose types know one mesh a program; call sk.reshard between two jitted functions"
        )
    if not way.idle:
        if way.renames:
            array = _renamed(array, way.program.mesh, way.program.source.spec)
        array = apply(way.program, array)
    return _renamed(array, goal.mesh, way.goal) if way.idle or way.renames or source.mesh != goal.mesh else array


def _renamed(array: jax.Array, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
    """The same blocks on the same devices, their sharding in other words; nothing moves."""
    if isinstance(array, Tracer) or not isinstance(mesh, Mesh):
        return constrain(array, mesh, spec)
    return jax.device_put(array, NamedSharding(mesh, spec))
