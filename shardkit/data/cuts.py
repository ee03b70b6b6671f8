"""The arithmetic of ``parts`` for layouts on a mesh of devices, kept: it's the same for each batch."""

from __future__ import annotations

import functools

from jax.sharding import Mesh

from shardkit.data import parts
from shardkit.hosts.digests import digest_of_text
from shardkit.placements import Layout

# Layouts of different ranks may be equal, so the rank is always part of the key.


def cut_of(layout: Layout) -> parts.Cut:
    """How a layout that knows its rank cuts an array."""
    return _cut(layout, layout.ndim or 0)


def grids_of(layout: Layout) -> dict[int, parts.Grid]:
    """What each process holds of an array of this layout."""
    return _grids(layout, layout.ndim or 0)


def shared_of(layout: Layout) -> dict[parts.Block, tuple[int, ...]]:
    """The blocks that several processes hold, and which."""
    return _shared(layout, layout.ndim or 0)


@functools.lru_cache(64)
def owners_of(mesh: Mesh) -> tuple[int, ...]:
    """The process of each device, in mesh order."""
    return tuple(d.process_index for d in mesh.devices.flat)


@functools.lru_cache(64)
def mesh_text(mesh: Mesh) -> str:
    """A mesh, as processes tell it each other."""
    devices = digest_of_text(str([d.id for d in mesh.devices.flat]))[:16]
    return f"{dict(mesh.shape)}, axis types {[t.name for t in mesh.axis_types]}, device order {devices}"


@functools.lru_cache(1024)
def _cut(layout: Layout, ndim: int) -> parts.Cut:
    return parts.cut(dict(layout.mesh.shape), layout.dim_axes(ndim), ndim)


@functools.lru_cache(1024)
def _grids(layout: Layout, ndim: int) -> dict[int, parts.Grid]:
    return parts.grids(_cut(layout, ndim), owners_of(layout.mesh))  # type: ignore[arg-type]


@functools.lru_cache(1024)
def _shared(layout: Layout, ndim: int) -> dict[parts.Block, tuple[int, ...]]:
    return parts.shared(_cut(layout, ndim), owners_of(layout.mesh))  # type: ignore[arg-type]
