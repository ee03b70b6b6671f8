"""Arguments as they would be on another mesh: shapes and placements, no data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import PartialArray
from shardkit.placements import Layout


def retarget(tree: Any, mesh: Mesh, *, place_all: bool = True) -> Any:
    """Every array described on ``mesh``, with the placement it has on its own mesh.

    Args:
      tree: arrays, ``jax.ShapeDtypeStruct``, ``sk.Padded``, ``sk.PartialArray``; everything else is left as it is.
      mesh: has the axes that the placements name.
      place_all: what says no placement is replicated; else it goes on saying none.

    Returns:
      ``jax.ShapeDtypeStruct`` in place of arrays.

    Raises:
      ValueError: a placement names an axis that ``mesh`` doesn't have, or cuts a dim into parts that don't fit.
    """

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, PartialArray):
            stack = _described(leaf.stack, mesh, path, place_all)
            return dataclasses.replace(leaf, stack=stack, layout=Layout(mesh, leaf.layout.placements))
        return _described(leaf, mesh, path, place_all)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, PartialArray))


def _described(leaf: Any, mesh: Mesh, path: Any, place_all: bool) -> Any:
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return leaf
    weak = {"weak_type": True} if getattr(leaf, "weak_type", False) else {}
    if not place_all and not isinstance(sharding, NamedSharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **weak)
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.shard_shape(leaf.shape)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"explain: the argument {jax.tree_util.keystr(path)} of shape {leaf.shape} is placed {spec}, which doesn't "
            f"work on mesh {dict(mesh.shape)}: {error}. Give a mesh with the same axes, or jax.ShapeDtypeStruct "
            "arguments with shardings on it."
        ) from error
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, **weak)
