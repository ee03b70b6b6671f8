"""Where a value of a program is, in mesh-axis names only. Integers and strings; no JAX.

A ``Layout`` speaks of a mesh and of an array of any rank; inside a program every rank is known, one mesh is meant, and
thousands of values have one. So here it is three tuples, which hash and compare fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardkit.placements import AnyMesh, Layout, Partial, Placement, Replicate, Shard

Sizes = Mapping[str, int]  # of the mesh axes that take part, in mesh order; none of size 1


class Placed(NamedTuple):
    """Which mesh axes cut which dim, and over which the value is Partial; along all others it is replicated.

    Attributes:
      dims: of each dim, the axes that cut it, major first.
      partial: the axes over which devices hold contributions, in mesh order.
      reduce: the kind of reduction they wait for; None where ``partial`` is empty.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    reduce: str | None = None

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes that cut some dim."""
        return tuple(a for axes in self.dims for a in axes)

    @property
    def whole(self) -> bool:
        """Every device holds all of it."""
        return not self.partial and not any(self.dims)

    def without_partial(self) -> Placed:
        """The same, reduced to every device."""
        return Placed(self.dims) if self.partial else self


def replicated(ndim: int) -> Placed:
    """Whole on every device.

    Example:
      >>> replicated(2)
      Placed(dims=((), ()), partial=(), reduce=None)
    """
    return Placed(((),) * ndim)


def parts(axes: Sequence[str], sizes: Sizes) -> int:
    """Devices along the axes together."""
    return math.prod(sizes[a] for a in axes)


def block_shape(shape: Sequence[int], placed: Placed, sizes: Sizes) -> tuple[int, ...]:
    """What one device holds, ``ceil(size / n)`` where a size doesn't divide.

    Example:
      >>> block_shape((8, 6), Placed((("dp",), ())), {"dp": 4})
      (2, 6)
    """
    return tuple(-(-s // parts(axes, sizes)) for s, axes in zip(shape, placed.dims, strict=True))


def even(shape: Sequence[int], placed: Placed, sizes: Sizes) -> bool:
    """Whether the axes divide every dim that they cut."""
    return all(s % parts(axes, sizes) == 0 for s, axes in zip(shape, placed.dims, strict=True))


def from_layout(layout: Layout, ndim: int, sizes: Sizes) -> Placed:
    """A layout's, without the axes that take no part."""
    dims = layout.dim_axes(ndim)
    cut = tuple(tuple(a for a in dims.get(d, ()) if a in sizes) for d in range(ndim))
    partial = tuple(a for a in layout.partial_axes if a in sizes)
    return Placed(cut, partial, layout.reduce if partial else None)


def to_placements(placed: Placed, mesh: AnyMesh) -> dict[str, Placement]:
    """The placement on every mesh axis (the order of axes that cut one dim isn't said; ``to_layout`` keeps it)."""
    found: dict[str, Placement] = {name: Replicate() for name in mesh.axis_names}
    for dim, axes in enumerate(placed.dims):
        found.update(dict.fromkeys(axes, Shard(dim)))
    found.update(dict.fromkeys(placed.partial, Partial(placed.reduce or "sum")))
    return found


def to_layout(placed: Placed, mesh: AnyMesh) -> Layout:
    """The layout on a mesh."""
    # An axis that newly cuts a dim is the minor one there: so added one by one, the order is kept.
    layout = Layout(mesh, dict.fromkeys(placed.partial, Partial(placed.reduce or "sum")))
    for dim, axes in enumerate(placed.dims):
        for axis in axes:
            layout = layout.but({axis: Shard(dim)})
    return layout.resolved(len(placed.dims))


def text(placed: Placed) -> str:
    """For people: ``[dp, -] sum over tp``.

    Example:
      >>> text(Placed((("dp",), ()), ("tp",), "sum"))
      '[dp, -] sum over tp'
    """
    dims = ", ".join("*".join(axes) or "-" for axes in placed.dims)
    return f"[{dims}]" + (f" {placed.reduce} over {'*'.join(placed.partial)}" if placed.partial else "")


def in_mesh_order(axes: Any, sizes: Sizes) -> tuple[str, ...]:
    """The axes, sorted as the mesh has them."""
    wanted = set(axes)
    return tuple(a for a in sizes if a in wanted)
