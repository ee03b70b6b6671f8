"""`reshard`: from any placement to any other, on one mesh or from one to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardkit import scopes
from shardkit.arrays import Padded, PartialArray, from_unreduced, is_unreduced
from shardkit.arrays.placing import describe, misplaced
from shardkit.meshes import check_holds_arrays, concrete_mesh, manual_axes, mesh_of, resolve_mesh
from shardkit.placements import AnyMesh, Layout, Partial, Placement, Placements, Replicate, layout_of
from shardkit.reshard.crossing import crossing
from shardkit.reshard.one_mesh import on_one_mesh
from shardkit.reshard.place import shard_tensor
from shardkit.reshard.regions import region_between
from shardkit.reshard.transfer import transfer


def reshard(
    x: Any, placements: Placements | Layout, mesh: AnyMesh | None = None, *, src: Placements | Layout | None = None
) -> Any:
    """Move an array to other placements, by the cheapest collectives.

    The steps are those of ``sk.plan_reshard``, in one ``shard_map``. Differentiable in both modes: the transpose of a
    reshard is one (Partial to Replicate: a copy, nothing is communicated; Partial to Shard: an all_gather). Between
    meshes over other devices in reverse mode only.

    Args:
      x: a ``jax.Array`` (also one of JAX's ``unreduced``), ``Padded`` or ``PartialArray``; an array that is on no mesh
        yet is placed. Of a ``jax.ShapeDtypeStruct`` the result is one, at its new place.
      placements: where it shall be, in any form. With Partial among them the result is a ``PartialArray``, whose
        contributions reduce to the value: for "sum", "max", "min", "prod", "any", "all" one device holds each element
        and the others what changes nothing (0, -inf, inf, 1, False, True), for "mean" all hold it.
      mesh: the mesh of ``placements``; else that of a ``Layout`` or ``NamedSharding`` given as such, of ``x``, or the
        ambient one. It may be another than that of ``x``: other axes over the same devices, part of them, others.
      src: where ``x`` is, for a value under jit, grad or vmap on Auto mesh axes, whose placement can't be read. Left
        out, the compiler chooses how to bring such a value to its destination (and between meshes it can't).

    Returns:
      An array; a ``Padded`` for a ``Padded`` (or a ``PartialArray`` of one); a ``PartialArray`` if ``placements`` has
      Partial.

    Raises:
      ValueError: sizes that the mesh doesn't divide, where ``x`` isn't a ``Padded``; dim out of range; unknown axis;
        Partial axes of two kinds; no mesh; axes that are manual here; another mesh whose devices this process can't
        address, or, under jit, that has other devices.
      TypeError: a dtype that has no such reduction.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"x": 1})
      >>> x = sk.shard_tensor(jnp.arange(6.0), [sk.Shard(0)], mesh)
      >>> y = sk.reshard(x, [sk.Partial()])
      >>> sk.reshard(y, [sk.Replicate()]).tolist()
      [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if mesh is None:
        mesh = getattr(placements, "mesh", None)
    x = _array(x)
    if mesh is None and src is not None and mesh_of(x) is None:
        mesh = getattr(src, "mesh", None)
    where = concrete_mesh(resolve_mesh(mesh, x, what="reshard"))
    goal = Layout(where, placements).resolved(len(x.shape))
    goal.reduce  # noqa: B018  # two kinds are refused before anything else is
    if isinstance(x, jax.ShapeDtypeStruct):
        return _described(x, src, goal)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return shard_tensor(x, goal)  # keys of random numbers, which only JAX can take apart
    if not isinstance(_held(x), Tracer):
        check_holds_arrays(where, "reshard")
    if manual_axes():
        return _within(x, src, goal)
    return _anywhere(x, _source(x, src), goal)


def _described(x: jax.ShapeDtypeStruct, src: Placements | Layout | None, goal: Layout) -> Any:
    """What's only described needn't be moved: it's said to be elsewhere."""
    if goal.partial_axes or (src is not None and Layout(goal.mesh, src).resolved(len(x.shape)).partial_axes):
        raise ValueError(
            "reshard: a jax.ShapeDtypeStruct stands for a whole value, so that it has no Partial placement; "
            "jax.eval_shape of sk.reshard in a function gives one, and sk.plan_reshard says what it costs"
        )
    return shard_tensor(x, goal)


def unshard(x: Any) -> jax.Array:
    """The whole array on every device of its mesh (or as it is, where it is on one device).

    Args:
      x: a ``jax.Array``, ``Padded`` or ``PartialArray`` (which is reduced).

    Returns:
      An array of the logical shape, replicated.

    Raises:
      ValueError: inside a manual region.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = sk.shard_tensor(jnp.arange(5), {"sp": sk.Shard(0)}, sk.make_mesh({"sp": 1}), uneven="pad")
      >>> sk.unshard(x).shape
      (5,)
    """
    if isinstance(_held(x), Tracer) and manual_axes():
        raise ValueError(
            "unshard moves whole arrays, but here (inside jax.shard_map) a value is one device's block; call it "
            "outside, or use lax.all_gather"
        )
    x = _array(x)
    mesh = mesh_of(x)
    whole: Any = x if mesh is None else reshard(x, {}, mesh)
    return whole.value if isinstance(whole, Padded) else whole


def _held(x: Any) -> Any:
    """The JAX array that it's made of."""
    return x.stack if isinstance(x, PartialArray) else x.array if isinstance(x, Padded) else x


def _array(x: Any) -> Any:
    """What was given, as one of the arrays we know."""
    if isinstance(x, Mapping) or (isinstance(x, tuple | list) and any(hasattr(leaf, "shape") for leaf in x)):
        raise TypeError(f"this takes one array, got a {type(x).__name__}; for a pytree use jax.tree.map")
    if not isinstance(x, Padded | PartialArray) and not hasattr(x, "shape"):
        x = jnp.asarray(x)
    return from_unreduced(x) if is_unreduced(x) else x  # type: ignore[arg-type]  # then it's a jax.Array


def _source(x: Any, src: Placements | Layout | None) -> Layout | None:
    """The layout of ``x``; None where it's on no mesh, or it's the compiler's to know."""
    if isinstance(x, PartialArray):
        if src is not None:
            raise ValueError("reshard: a PartialArray says itself where it is; leave src out")
        mesh = resolve_mesh(None, x, what="reshard") if manual_axes() else mesh_of(x)
        return x.layout if mesh is None else x.layout.on(mesh)
    array = x.array if isinstance(x, Padded) else x
    if src is None:
        try:
            return layout_of(array)
        except ValueError:
            return None
    where = getattr(src, "mesh", None) or resolve_mesh(None, array, what="reshard")
    layout = Layout(concrete_mesh(where), src)
    if layout.partial_axes:
        raise ValueError(
            f"reshard: src={src!r} says Partial, but x is a {type(x).__name__}; contributions are kept in a "
            "PartialArray (sk.from_local, sk.local_map), which says itself where it is"
        )
    known = None if isinstance(array, Tracer) else misplaced(array, layout.mesh, layout.stack_spec(len(array.shape)))
    if known is not None:
        raise ValueError(f"reshard: x lives at {describe(known)}, which src={src!r} contradicts; leave src out")
    return layout


def _logical(x: Any) -> tuple[int, ...] | None:
    """The sizes that count, where dims are padded."""
    return x.logical_shape if isinstance(x, Padded | PartialArray) else None


def _anywhere(x: Any, source: Layout | None, goal: Layout) -> Any:
    if _logical(x) is None:
        goal.local_shape(x.shape)  # refuses what doesn't divide
    if source is None or (isinstance(x, Padded) and x.array.shape != source.padded_shape(x.logical_shape)):
        # On no mesh yet, or under jit wherever the compiler has it: JAX places it.
        whole = goal.without_partial()
        placed = shard_tensor(x, whole, uneven="pad" if isinstance(x, Padded) else "error")
        return _move(placed, whole, goal) if goal.partial_axes else placed
    return _move(x, source.resolved(len(x.shape)), goal)


def _within(x: Any, src: Placements | Layout | None, goal: Layout) -> Any:
    """Where some axes are manual already, a value is one device's block along them, and only others can change.

    Along a manual axis a ``PartialArray`` stays what it says it is, or is reduced by a collective of that region.
    """
    if isinstance(x, Padded) and any(held < size for held, size in zip(x.array.shape, x.logical_shape, strict=True)):
        raise ValueError(
            f"reshard: inside jax.shard_map this sk.Padded is one device's block {x.array.shape} of the logical "
            f"{x.logical_shape}; reshard its .array, or outside"
        )
    names = goal.mesh.axis_names
    source = _source(x, src)
    fixed = dict(zip(names, source.placements, strict=True)) if source is not None else {}
    asked = dict(zip(names, goal.placements, strict=True))
    for axis in (n for n in names if n in manual_axes()):
        before, after = fixed.setdefault(axis, Replicate()), asked[axis]
        stays = before == after or (isinstance(x, PartialArray) and isinstance(after, Replicate))
        if not stays:
            raise ValueError(
                f"reshard: mesh axis {axis!r} is manual here (inside jax.shard_map), where a value is one device's "
                f"block along it, so it can't go from {before} to {after}; leave the axis out of the placements, and "
                f"use jax.lax collectives along {axis!r}, or reshard outside"
            )
        if isinstance(before, Partial) and isinstance(after, Replicate):
            x = _reduced_here(x, axis)  # type: ignore[arg-type]  # what is Partial over it is a PartialArray
            fixed[axis] = after
    kept = {n: p for n, p in fixed.items() if n in manual_axes()}
    # What a manual axis cuts has been cut; what is Partial over it stays so, out of sight.
    unseen: dict[str, Placement] = {n: p if isinstance(p, Partial) else Replicate() for n, p in kept.items()}
    done = _anywhere(x, None if source is None else source.but(unseen), goal.but(unseen))
    return dataclasses.replace(done, layout=done.layout.but(kept)) if isinstance(done, PartialArray) else done


def _reduced_here(x: PartialArray, axis: str) -> Any:
    kind, axes = x.layout.reduce, x.layout.partial_axes
    reductions = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}
    if kind not in reductions:
        raise ValueError(
            f"reshard: mesh axis {axis!r} is manual here, where Partial({kind!r}) can't be reduced; do it outside "
            "jax.shard_map"
        )
    with scopes.scope(scopes.RESHARD):
        stack = jnp.squeeze(reductions[kind](x.stack, axis), axes.index(axis))
    return _closed(stack, x.layout.but({axis: Replicate()}), x.logical_shape)


def _move(x: Any, source: Layout, goal: Layout) -> Any:
    shape = tuple(x.shape)
    array = x.stack if isinstance(x, PartialArray) else x.array if isinstance(x, Padded) else x
    if region_between(source.mesh, goal.mesh) is None:
        way = crossing(shape, array.dtype, source, goal)
        array = on_one_mesh(array, shape, source, way.leave)
        array = transfer(array, shape, NamedSharding(goal.mesh, way.enter.stack_spec(len(shape))))  # type: ignore[arg-type]
        source = way.enter
    return _closed(on_one_mesh(array, shape, source, goal), goal, _logical(x))


def _closed(array: jax.Array, layout: Layout, logical: tuple[int, ...] | None) -> Any:
    if layout.partial_axes:
        return PartialArray(array, layout, logical)
    return array if logical is None else Padded(array, logical)
