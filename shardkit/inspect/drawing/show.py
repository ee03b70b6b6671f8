"""``show``: who holds what of an array, drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.inspect.drawing.drawing import Drawing
from shardkit.inspect.drawing.halo_reading import read_halos
from shardkit.inspect.drawing.reading import read_subject
from shardkit.placements import AnyMesh


def show(
    x: Any, mesh: AnyMesh | None = None, *, shape: Sequence[int] | None = None, halo: Mapping[int, Any] | None = None
) -> Drawing:
    """A drawing of who holds what: an SVG in a notebook, text for ``print``, colours for ``rich.print``.

    Arrays of any rank: the last two dims that are cut make the rows and columns of a grid, further ones a grid for each
    of their parts. In a cell is the block's devices (ids; positions on the mesh axes where the mesh is abstract), how
    many copies or contributions they are, and how much of it is padding. Nothing is moved or compiled.

    Args:
      x: an array (also a ``jax.ShapeDtypeStruct`` with a sharding), ``sk.Padded``, ``sk.PartialArray``, ``sk.Layout``,
        a sharding, or placements in any form.
      mesh: for placements; by default the ambient one. For what's on an abstract mesh: the one with the devices.
      shape: of what has none itself. Without it parts are only numbered.
      halo: what each part of a dim needs of its neighbours, by dim: ``(before, after)`` elements, or ``(before, after,
        padding_mode)``; a convolution's arguments along that dim, such as ``{"kernel": 3, "window_strides": 1,
        "padding": "SAME"}`` (also ``lhs_dilation``, ``rhs_dilation``, ``padding_mode``); or a ``Window``,
        ``ShardedWindow`` or ``Exchange`` of ``shardkit.spatial.windows``. Drawn is what the exchange brings to each
        device: nothing from beyond the ends, unless the padding mode is circular.

    Returns:
      A ``Drawing``: ``str()``, ``.svg``, ``.to_dict()``.

    Raises:
      TypeError: what has no layout (a traced value, a NumPy array, a tree of arrays), what is no mesh, shape or halo.
      ValueError: no mesh, a mesh that isn't ``x``'s, a dim out of range, sizes that don't divide, a halo on a dim that
        isn't cut.

    Example:
      >>> import jax, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "sp"))
      >>> sk.show({"sp": sk.Shard(0)}, mesh, shape=(8,))
      shape [8] on mesh dp=2 sp=2
        dim 0: 0:8, cut over sp into 2 parts of 4 (columns)
        the same on all of dp
        in the cells: positions on the mesh axes (the mesh is abstract, its devices have no ids)
      <BLANKLINE>
            0:4         4:8
       ┌───────────┬───────────┐
       │    sp=0   │    sp=1   │
       │ x2 copies │ x2 copies │
       └───────────┴───────────┘
    """
    subject = read_subject(x, mesh, shape)
    return Drawing(dataclasses.replace(subject, halos=read_halos(halo, subject)))
