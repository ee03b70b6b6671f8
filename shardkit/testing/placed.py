"""``assert_placements``: arrays live where they should."""

from __future__ import annotations

from typing import Any

import jax

from shardkit.arrays.partial import is_whole
from shardkit.placements import AnyMesh, Layout, Partial, Replicate, Shard, layout_of
from shardkit.reshard.regions import same_order
from shardkit.spmd.arguments import spread_over
from shardkit.testing.values import name_of


def assert_placements(x: Any, placements: Any, mesh: AnyMesh | None = None) -> None:
    """Checks where the arrays of a pytree live.

    What counts is which device has which part: equal layouts written differently (a sequence, a mapping, a
    ``PartitionSpec``) are equal, and axes of size 1 don't matter.

    Args:
      x: a pytree of arrays (``sk.Padded``, ``sk.PartialArray``, JAX's ``unreduced`` and ``jax.ShapeDtypeStruct`` too).
      placements: placements in any form, or a pytree of them that is a prefix of ``x``. None in it: not checked.
      mesh: the mesh that they must be on. None: any, but that of a ``NamedSharding`` or ``Layout``.

    Raises:
      AssertionError: an array lives elsewhere; has what was found and what was wanted, by path.
      ValueError: placements that don't fit the tree, axes that the mesh doesn't have.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from shardkit import testing
      >>> x = sk.shard_tensor(jnp.ones((2, 4)), {"sp": sk.Shard(1)}, sk.make_mesh({"sp": 1}))
      >>> testing.assert_placements({"w": x}, jax.P(None, "sp"))
    """
    leaves = jax.tree.leaves_with_path(x, is_leaf=is_whole)
    texts = []
    for (path, leaf), wanted in zip(leaves, spread(placements, x), strict=True):
        text = "" if wanted is None else _misplaced(leaf, wanted, mesh)
        if text:
            texts.append(f"  {name_of(path)}: {text}")
    if texts:
        raise AssertionError(f"{len(texts)} of {len(leaves)} arrays live elsewhere:\n" + "\n".join(texts))


def spread(prefix: Any, tree: Any) -> list[Any]:
    """One entry a leaf of ``tree``, from placements given for whole branches."""

    def bad(x: Any) -> str:
        return (
            f"{x!r} is no placements; use a sequence in mesh-axis order, a mapping by axis name, a PartitionSpec, a "
            "NamedSharding, an sk.Layout, or None (not checked)"
        )

    def misfit(given: str, wanted: str) -> str:
        return (
            f"the placements {given} are no prefix of the tree {wanted} (* for each array); give "
            "them once for a whole branch, or in a tree of the same structure"
        )

    return spread_over(prefix, tree, bad, misfit)


def _misplaced(x: Any, wanted: Any, mesh: AnyMesh | None) -> str:
    """How an array's place differs from where it should be; "" if it doesn't."""
    mesh = getattr(wanted, "mesh", None) if mesh is None else mesh
    try:
        found = layout_of(x)
    except ValueError:
        found = None
    if mesh is None and found is None:
        return f"is on no mesh ({_where(x)}), wanted {wanted!r}"
    ndim = len(x.shape)
    where: Any = found.mesh if mesh is None and found is not None else mesh
    goal = Layout(where, wanted).resolved(ndim)
    if found is None:
        if not goal.partial_axes and _equivalent(x, goal, ndim):
            return ""
        return f"is on no mesh ({_where(x)}), wanted {said(goal)} on mesh {dict(where.shape)}"
    found = found.resolved(ndim)
    if _essence(found, ndim) == _essence(goal, ndim) and same_order(found.mesh, where):
        return ""
    meshes = "" if _essence(found, ndim) != _essence(goal, ndim) else ", whose devices are others or in another order"
    same_mesh = dict(found.mesh.shape) == dict(where.shape) and not meshes
    where_text = "" if same_mesh else f" on mesh {dict(where.shape)}{meshes}"
    return f"found {said(found)} on mesh {dict(found.mesh.shape)}, wanted {said(goal)}{where_text}"


def _where(x: Any) -> str:
    return str(getattr(x, "sharding", type(x).__name__))


def _equivalent(x: Any, goal: Layout, ndim: int) -> bool:
    sharding = getattr(x, "sharding", None)
    return sharding is not None and sharding.is_equivalent_to(goal.sharding, ndim)


def _essence(layout: Layout, ndim: int) -> Any:
    """What a layout says of the devices: axes of size 1 left out."""
    sizes = dict(layout.mesh.shape)
    cuts = {d: tuple((a, sizes[a]) for a in axes if sizes[a] > 1) for d, axes in layout.dim_axes(ndim).items()}
    named = zip(sizes.items(), layout.placements, strict=True)
    waiting = {axis: p.reduce for (axis, size), p in named if isinstance(p, Partial) and size > 1}
    return {d: axes for d, axes in cuts.items() if axes}, waiting, [s for s in sizes.items() if s[1] > 1]


def said(layout: Layout) -> str:
    """Placements by axis, as one writes them; the spec too where dims are cut by several axes."""
    parts = []
    for axis, p in zip(layout.mesh.axis_names, layout.placements, strict=True):
        if isinstance(p, Shard):
            parts.append(f"{axis}: Shard({p.dim})")
        elif isinstance(p, Partial):
            parts.append(f"{axis}: Partial({p.reduce!r})")
        elif not isinstance(p, Replicate):
            parts.append(f"{axis}: {p!r}")
    several = {d: axes for d, axes in layout.dim_axes().items() if len(axes) > 1} if layout.ndim is not None else {}
    order = "".join(f", dim {dim} by {' then '.join(axes)}" for dim, axes in several.items())
    return "{" + ", ".join(parts) + "}" + order if parts else "{} (replicated)"
