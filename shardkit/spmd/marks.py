"""What a user can say inside a traced function: where a value shall be, on which mesh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.meshes import ambient_mesh
from shardkit.placements import AnyMesh, Layout, Partial, Placements, Shard, entry_names
from shardkit.reshard import reshard

constrain_p: jex_core.Primitive = jex_core.Primitive("sk_constrain")
_tokens = itertools.count()


def constrain(x: Any, placements: Placements | Layout) -> Any:
    """Says, inside a partitioned function, where a value shall be.

    As ``jax.lax.with_sharding_constraint``, but with Partial too: the value then stays unreduced up to here. What it's
    made of is placed to suit it. Its cotangent is asked to be at the same place (where that has no Partial).
    Outside ``sk.partition`` placements without Partial are JAX's own constraint on the ambient mesh.

    Args:
      x: an array or a pytree of them.
      placements: in any form; a sequence has one an axis of the mesh that ``sk.partition`` is given.

    Returns:
      The same values.

    Raises:
      ValueError: an unknown axis, a dim out of range (raised when the function is partitioned, with the line); outside
        ``sk.partition``: no ambient mesh.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = jax.sharding.AbstractMesh((4,), ("dp",))
      >>> def fun(x):
      ...     return sk.constrain(x + 1, [sk.Shard(0)]) * 2
      >>> sk.infer_placements(fun, [sk.Replicate()], mesh=mesh)(jnp.ones(8))
      (Shard(dim=0),)
    """
    given = _frozen(placements)
    return jax.tree.map(lambda leaf: constrain_p.bind(leaf, placements=given), x)


def _frozen(placements: Any) -> Any:
    """The same in a form that hashes."""
    if isinstance(placements, dict):
        return _Mapping(tuple(placements.items()))
    return tuple(placements) if isinstance(placements, list) else placements


class _Mapping(tuple[Any, ...]):
    """Placements by axis name, as pairs."""


def thawed(given: Any) -> Any:
    """Placements as the user gave them."""
    return dict(given) if isinstance(given, _Mapping) else given


def _outside(x: jax.Array, *, placements: Any) -> jax.Array:
    mesh = ambient_mesh()
    if mesh is None:
        raise ValueError(
            "sk.constrain speaks to sk.partition, and this function runs outside it with no ambient mesh; partition "
            "it, or use jax.lax.with_sharding_constraint"
        )
    layout = Layout(mesh, thawed(placements))
    if layout.partial_axes:
        raise ValueError("sk.constrain: Partial means something inside sk.partition only; partition this function")
    return lax.with_sharding_constraint(x, layout.spec_for(x.ndim))


def _back(cotangent: Any, x: Any, *, placements: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [cotangent if _has_partial(placements) else constrain_p.bind(cotangent, placements=placements)]


def _has_partial(placements: Any) -> bool:
    if isinstance(placements, Layout):
        return bool(placements.partial_axes)
    return any(isinstance(p, Partial) for p in _listed(placements)) or bool(_unreduced(placements))


def _listed(placements: Any) -> Sequence[Any]:
    """The placements one by one, in any form that lists them; a spec doesn't."""
    given = thawed(placements)
    if isinstance(given, Layout):
        return given.placements
    if isinstance(given, PartitionSpec | NamedSharding):
        return ()
    return list(given.values()) if isinstance(given, dict) else given


def _unreduced(placements: Any) -> Any:
    spec = getattr(placements, "spec", placements) if not isinstance(placements, Layout) else None
    return getattr(spec, "unreduced", None)


def _batched(args: Any, dims: Any, *, placements: Any) -> tuple[Any, Any]:
    """A batched dim is put last: then no placement (counted from the front) changes its meaning."""
    (x,), (dim,) = args, dims
    if any(isinstance(p, Shard) and p.dim < 0 for p in _listed(placements)):
        raise ValueError("sk.constrain under vmap: count dims from the front")
    last = jax.numpy.moveaxis(x, dim, -1)
    return constrain_p.bind(last, placements=placements), last.ndim - 1


constrain_p.def_impl(_outside)
constrain_p.def_abstract_eval(lambda x, *, placements: x)
ad.deflinear2(constrain_p, _back)
batching.primitive_batchers[constrain_p] = _batched
mlir.register_lowering(constrain_p, mlir.lower_fun(_outside, multiple_results=False))


on_mesh_p: jex_core.Primitive = jex_core.Primitive("sk_on_mesh")


def on_mesh(x: Any, mesh: AnyMesh, placements: Placements | Layout) -> Any:
    """Says, inside a partitioned function, that from here on a value lives on another mesh.

    What is computed from it runs there: a stage of a pipeline, on devices of its own. Each crossing is two reshards,
    what the mesh that is left does and what the other one does, with the transfer between them; the cotangent goes
    back to where the value came from. Arguments may live on any of the meshes (say so with a ``NamedSharding`` or
    ``sk.Layout``). Stages run one after the other. Outside ``sk.partition`` it's ``sk.reshard``.

    Args:
      x: an array or a pytree of them.
      mesh: where it shall be.
      placements: in any form, on that mesh; no Partial.

    Returns:
      The same values.

    Raises:
      ValueError: placements that the mesh doesn't have, Partial. (When the function is partitioned: values of two
        meshes that meet in one operation; a crossing within a loop.)

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> one, two = sk.make_mesh({"dp": 1}), sk.make_mesh({"tp": 1})
      >>> fun = sk.partition(lambda x: sk.on_mesh(x * 2, two, [sk.Replicate()]) + 1, [sk.Shard(0)], mesh=one)
      >>> fun(jnp.arange(2.0)).tolist()
      [1.0, 3.0]
    """
    layout = Layout(mesh, placements)
    if layout.partial_axes:
        raise ValueError(
            f"sk.on_mesh: {list(layout.placements)} has Partial, but contributions are reduced before they cross; "
            "give Shard or Replicate"
        )
    return jax.tree.map(lambda leaf: on_mesh_p.bind(leaf, layout=layout.resolved(leaf.ndim), token=next(_tokens)), x)


def _cross(x: Any, *, layout: Layout | None, token: int) -> Any:
    if layout is None:
        raise ValueError("the cotangent of sk.on_mesh goes back to another mesh inside sk.partition only")
    return reshard(x, layout)


def _cross_back(cotangent: Any, x: Any, *, layout: Layout | None, token: int) -> list[Any]:
    # Where the value came from is known to the program only: by its token.
    return [cotangent if type(cotangent) is ad.Zero else on_mesh_p.bind(cotangent, layout=None, token=token)]


def _cross_batched(args: Any, dims: Any, *, layout: Layout | None, token: int) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    last = jax.numpy.moveaxis(x, dim, -1)
    wider = None if layout is None else Layout(layout.mesh, _by_axis(layout)).resolved(last.ndim)
    return on_mesh_p.bind(last, layout=wider, token=token), last.ndim - 1


def _by_axis(layout: Layout) -> dict[str, Any]:
    return dict(zip(layout.mesh.axis_names, layout.placements, strict=True))


on_mesh_p.def_impl(_cross)
on_mesh_p.def_abstract_eval(lambda x, *, layout, token: x)
ad.deflinear2(on_mesh_p, _cross_back)
batching.primitive_batchers[on_mesh_p] = _cross_batched
mlir.register_lowering(on_mesh_p, mlir.lower_fun(_cross, multiple_results=False))


def _constrained(spec: PartitionSpec, ndim: int, now: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """A spec without UNCONSTRAINED."""
    entries = [*spec_entries(spec), *[PartitionSpec.UNCONSTRAINED] * (ndim - len(spec_entries(spec)))]
    named = {a for e in entries if e is not PartitionSpec.UNCONSTRAINED for a in entry_names(e)}
    kept = [tuple(a for a in axes if a not in named) for axes in now]
    return PartitionSpec(*((kept[d] or None) if e is PartitionSpec.UNCONSTRAINED else e for d, e in enumerate(entries)))


def asked(name: str, params: Any, mesh: AnyMesh, ndim: int, now: Sequence[tuple[str, ...]] | None = None) -> Layout:
    """The layout that a mark asks for: of ``sk.constrain`` or of ``lax.with_sharding_constraint``.

    Args:
      name, params: of the mark.
      mesh: the mesh of the program.
      ndim: rank of the value.
      now: the axes that cut each dim already, kept where a spec says UNCONSTRAINED (as one does of the dims that it
        doesn't speak of).

    Raises:
      ValueError: axes that the mesh doesn't have; a dim out of range; a sharding of a kind that names no axes.
    """
    if name == "sk_on_mesh":  # on the mesh it is on already
        return params["layout"].on(mesh)
    given = thawed(params["placements"]) if name == "sk_constrain" else params["sharding"]
    if name != "sk_constrain":
        spec = getattr(given, "spec", None)
        if spec is None:
            raise ValueError(
                f"with_sharding_constraint was given {given!r}, which names no mesh axes; use a NamedSharding"
            )
        where = getattr(given, "mesh", mesh)
        if dict(where.shape) != dict(mesh.shape):
            raise ValueError(
                f"{given} is on mesh {dict(where.shape)}, the program on {dict(mesh.shape)}; use its axes, "
                "or sk.on_mesh"
            )
        given = _constrained(spec, ndim, now or ((),) * ndim)
    return Layout(mesh, given).resolved(ndim)
