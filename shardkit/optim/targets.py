"""Where a gradient goes when it is reduced. Placements and sizes only."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.placements import AnyMesh, Layout, Partial, Placement, Replicate, Shard, axes_size

FUSES = ("reduce_scatter", "all_reduce")


def check_fuse(fuse: str) -> None:
    """Refuses an unknown way to fuse.

    Raises:
      ValueError: with what is allowed.
    """
    if fuse not in FUSES:
        raise ValueError(
            f'fuse={fuse!r} is unknown; use "reduce_scatter" (each device keeps its part of the sum) or "all_reduce" '
            "(each keeps all of it)"
        )


def check_axis(axis: str, mesh: AnyMesh) -> None:
    """Refuses an axis that isn't there.

    Raises:
      ValueError: with those that are.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"axis={axis!r} is not on the mesh, which has {tuple(mesh.axis_names)}; use one of these")


def target_placements(
    placements: Sequence[Placement], shape: Sequence[int], axis: str, fuse: str, mesh: AnyMesh
) -> tuple[Placement, ...]:
    """Placements of a gradient once it's reduced.

    "all_reduce": every Partial becomes Replicate, shards stay. "reduce_scatter": shards stay; of the other axes,
    ``axis`` first and then the rest in mesh order, each takes the lowest dim that no axis cuts yet and that it
    divides; where there's none it replicates.

    Args:
      placements: of the gradient, in mesh-axis order, dims counted from the front.
      shape: its global shape.
      axis: the mesh axis over which state is to be sharded.
      fuse: "reduce_scatter" or "all_reduce".
      mesh: the mesh.

    Raises:
      ValueError: unknown ``fuse``, an axis the mesh doesn't have.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2, 2, 2), ("x", "y", "z"))
      >>> target_placements([sk.Partial(), sk.Shard(0), sk.Partial()], (8, 8), "x", "reduce_scatter", mesh)
      (Shard(dim=1), Shard(dim=0), Replicate())
    """
    check_fuse(fuse)
    check_axis(axis, mesh)
    named = dict(zip(mesh.axis_names, placements, strict=True))
    if fuse == "all_reduce":
        return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    taken = {p.dim for p in placements if isinstance(p, Shard)}
    for name in sorted(named, key=lambda n: n != axis):  # stable: the rest stay in mesh order
        if isinstance(named[name], Shard):
            continue
        free = [d for d, size in enumerate(shape) if d not in taken and size % mesh.shape[name] == 0 and size > 0]
        named[name] = Shard(free[0]) if free else Replicate()
        taken |= set(free[:1])
    return tuple(named[name] for name in mesh.axis_names)


def target_layout(layout: Layout, shape: Sequence[int], axis: str, fuse: str) -> Layout:
    """The same as a layout, in which shards keep their order."""
    mesh = layout.mesh
    placements = target_placements(layout.placements, shape, axis, fuse, mesh)
    pairs = zip(mesh.axis_names, layout.placements, placements, strict=True)
    return layout.but({name: new for name, old, new in pairs if new != old})


def state_layout(layout: Layout, shape: Sequence[int], axis: str) -> Layout:
    """Where the state beside a parameter is kept: as its gradient is scattered, or else deeper.

    Where no dim is left for ``axis``, one that other axes cut already is cut once more, if it divides: each device
    keeps a part of its part.

    Args:
      layout: of the parameter.
      shape: its global shape.
      axis: the mesh axis over which state is sharded.
    """
    found = target_layout(layout, shape, axis, "reduce_scatter")
    mesh = layout.mesh
    if axis in found.shard_axes:
        return found
    for dim, axes in sorted(layout.dim_axes(len(shape)).items()):
        if shape[dim] and shape[dim] % (axes_size(mesh, axes) * mesh.shape[axis]) == 0:
            return target_layout(layout.but({axis: Shard(dim)}), shape, axis, "reduce_scatter")
    return found
