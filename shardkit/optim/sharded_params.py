"""`shard_params`: parameters as stage 3 keeps them between steps."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from shardkit.meshes import concrete_mesh, resolve_mesh
from shardkit.optim.stored import is_leaf, known_layout, load, store
from shardkit.optim.targets import check_axis
from shardkit.placements import AnyMesh, Layout, Replicate, Shard
from shardkit.reshard import reshard


def shard_params(params: Any, axis: str, mesh: AnyMesh | None = None, *, first_dim: int = 0) -> Any:
    """Cut every parameter over a mesh axis, on top of how other axes cut it.

    Each takes the lowest dim that nothing cuts yet and that the axis divides; where there's none it becomes a padded
    flat shard (a pytree with one leaf), or stays whole if it has fewer elements than the axis devices, or is stacked
    (``first_dim``: a flat row can't be taken apart).
    ``sk.value_and_grad`` gathers such parameters where they are used, ``sk.shard_optimizer`` updates them as they are.

    Args:
      params: a tree of arrays, or of ``jax.ShapeDtypeStruct``, which stay such. Leaves that aren't floating
        point are left alone.
      axis: the mesh axis.
      mesh: else that of the parameters, or the ambient one.
      first_dim: dims before it are never cut: 1 for layers stacked along dim 0 for ``lax.scan``.

    Returns:
      The tree.

    Raises:
      ValueError: an axis that the mesh doesn't have, no mesh.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> sk.placements(sk.shard_params({"w": jnp.ones((8, 3))}, "dp", sk.make_mesh({"dp": 1}))["w"])
      (Shard(dim=0),)
    """
    where = concrete_mesh(resolve_mesh(mesh, *jax.tree.leaves(params), what="shard_params"))
    check_axis(axis, where)

    def cut(x: Any) -> Any:
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact) or is_leaf(x):
            return x
        layout = stage3_layout(known_layout(x, where), x.shape, axis, first_dim)
        return reshard(x, layout.spec_for(x.ndim), where) if first_dim else store(x, layout, axis)

    return jax.tree.map(cut, params, is_leaf=is_leaf)


def unshard_params(params: Any, axis: str, mesh: AnyMesh | None = None) -> Any:
    """The parameters of ``sk.shard_params`` whole again along the axis, as a model outside training takes them.

    Args:
      params: a tree as ``sk.shard_params`` returns it.
      axis: the mesh axis that cuts the parameters. What other axes cut stays cut.
      mesh: else that of the parameters, or the ambient one.

    Returns:
      The tree with its leaves whole along ``axis`` (an all-gather each).

    Raises:
      ValueError: an axis that the mesh doesn't have, no mesh.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> sk.unshard_params(sk.shard_params({"w": jnp.ones((7, 3))}, "dp", mesh), "dp", mesh)["w"].shape
      (7, 3)
    """
    where = concrete_mesh(resolve_mesh(mesh, *jax.tree.leaves(params), what="unshard_params"))

    def join(x: Any) -> Any:
        x = load(x)
        if not hasattr(x, "dtype"):
            return x
        return reshard(x, known_layout(x, where).but({axis: Replicate()}).spec_for(x.ndim), where)

    return jax.tree.map(join, params, is_leaf=is_leaf)


def stage3_layout(layout: Layout, shape: tuple[int, ...], axis: str, first_dim: int = 0) -> Layout:
    """``layout`` with ``axis`` on the lowest dim that nothing cuts and that it divides, if there's one."""
    taken = {p.dim for p in layout.placements if isinstance(p, Shard)}
    size = layout.mesh.shape[axis]
    free = [d for d in range(first_dim, len(shape)) if d not in taken and shape[d] % size == 0]
    cut = axis not in layout.shard_axes and free and math.prod(shape)
    return layout.but({axis: Shard(free[0])}) if cut else layout
