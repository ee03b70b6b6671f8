"""Where a value is known to live, and saying so to the compiler; nothing here moves a value that is right."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.meshes import ambient_mesh, manual_axes
from shardkit.placements import AnyMesh, Layout, entry_names


def mesh_here(mesh: AnyMesh) -> AnyMesh:
    """The mesh to name in shardings here: inside a manual region the ambient one, which knows what is manual."""
    return (ambient_mesh() or mesh) if manual_axes() else mesh


def keep_axes(spec: PartitionSpec, mesh: AnyMesh, axis_type: AxisType) -> PartitionSpec:
    """The part of ``spec`` that speaks of mesh axes of one type."""
    kept = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == axis_type}
    entries = []
    for entry in spec_entries(spec):
        axes = tuple(a for a in entry_names(entry) if a in kept)
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*entries)


def constrain(x: Any, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
    """``x`` placed as ``spec`` says on the axes that aren't manual: free where it is there already."""
    if AxisType.Explicit in mesh.axis_types:
        x = jax.sharding.reshard(x, NamedSharding(mesh, keep_axes(spec, mesh, AxisType.Explicit)))
    if AxisType.Auto in mesh.axis_types:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, keep_axes(spec, mesh, AxisType.Auto)))
    return x


def misplaced(x: Any, mesh: AnyMesh, spec: PartitionSpec) -> Any:
    """Where ``x`` lives, if that is known and isn't what ``spec`` says; else None.

    Nothing is known of NumPy arrays, of uncommitted ones, of empty ones, and of tracers on Auto axes.
    """
    if isinstance(x, Tracer):
        found = jax.typeof(x).sharding
        if AxisType.Explicit not in found.mesh.axis_types:
            return None
        if dict(found.mesh.shape) != dict(mesh.shape):
            return found.spec
        want = keep_axes(spec, found.mesh, AxisType.Explicit)
        same = _cuts(found.spec, mesh) == _cuts(want, mesh) and not getattr(found.spec, "unreduced", None)
        return None if same else found.spec
    if not isinstance(x, jax.Array) or not getattr(x, "committed", True) or x.size == 0:
        return None
    if isinstance(mesh, Mesh):
        same = x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    else:  # no devices to compare
        where = x.sharding
        same = (
            isinstance(where, NamedSharding)
            and dict(where.mesh.shape) == dict(mesh.shape)
            and _cuts(where.spec, mesh) == _cuts(spec, mesh)
        )
    same = same and not getattr(getattr(x.sharding, "spec", None), "unreduced", None)
    return None if same else x.sharding


def describe(where: Any) -> str:
    """A sharding or spec in words."""
    if isinstance(where, NamedSharding):
        return f"{where.spec} on mesh {dict(where.mesh.shape)}"
    return str(where)


def same_layout(a: Layout, b: Layout) -> bool:
    """Whether two layouts say the same, as far as both know: only two concrete meshes can differ in devices.

    Within ``jit`` one may know the devices and the other the ambient abstract mesh only; axis types change
    within a manual region.
    """
    if dict(a.mesh.shape) != dict(b.mesh.shape) or a.mesh.axis_names != b.mesh.axis_names or a._parsed != b._parsed:  # pyright: ignore[reportPrivateUsage]
        return False
    if isinstance(a.mesh, Mesh) and isinstance(b.mesh, Mesh):
        return a.mesh.devices.flat[:].tolist() == b.mesh.devices.flat[:].tolist()
    return True


def _cuts(spec: PartitionSpec, mesh: AnyMesh) -> dict[int, tuple[str, ...]]:
    """Which axes cut which dim; an axis of size 1 cuts nothing."""
    cuts = {d: tuple(a for a in entry_names(e) if mesh.shape[a] > 1) for d, e in enumerate(spec_entries(spec))}
    return {d: axes for d, axes in cuts.items() if axes}
