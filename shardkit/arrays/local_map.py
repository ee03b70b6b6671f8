"""``local_map``: a function of each device's own values, applied to whole arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.arrays.entering import enter
from shardkit.arrays.padded import Padded
from shardkit.arrays.partial import PartialArray, is_whole
from shardkit.meshes import concrete_mesh, manual_axes, resolve_mesh
from shardkit.placements import AnyMesh, Layout, Placement, Replicate, Shard


def local_map(
    fun: Callable[..., Any], in_placements: Any, out_placements: Any, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """A function of whole arrays that runs ``fun`` on each device's values, with the placements said on both sides.

    Nothing moves: an argument that is known to live elsewhere is an error. On Auto mesh axes under ``jit`` only the
    compiler knows where a value lives; there the stated placement is what the compiler is told to make it.

    Args:
      fun: gets this device's block of every argument: of a Partial one its contribution, without leading dims. May
        use collectives by mesh axis name.
      in_placements: a tuple or list with one entry an argument: placements in any form that ``sk.Layout`` takes, or
        None for an argument passed as it is (arrays in it replicated, all else static). Or placements once, for all
        arguments: a sequence of placements, a mapping, a ``PartitionSpec``, ``NamedSharding`` or ``Layout``. An
        argument may be a pytree; its placements go for every array in it.
      out_placements: the same for the results of ``fun``: once, or in a tuple of one entry an element of the tuple
        that ``fun`` returns. None is replicated. For a Partial one ``fun`` returns its contribution.
      mesh: else the mesh of a ``Layout``/``NamedSharding`` placement, of an argument, or the ambient one.

    Returns:
      A function with the positional arguments of ``fun``. Gradients are right for replicated arguments too: JAX
      checks over which axes values vary (``check_vma``), and so refuses a result stated Replicate that varies; reduce
      it in ``fun`` (``lax.psum``) or state it Partial.

    Raises:
      ValueError: no mesh found; a wrong number of placements, arguments or results; an argument that lives elsewhere,
        or whose dim the mesh doesn't divide; placements on an axis that is manual here.
      TypeError: a Partial placement for a plain array or the reverse, an ``sk.Padded``.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> sums = sk.local_map(jnp.sum, {"dp": sk.Shard(0)}, {"dp": sk.Partial()}, mesh)
      >>> sums(jnp.arange(4, dtype="float32"))
      PartialArray(float32[], dp=Partial('sum'))
    """

    @functools.wraps(fun)
    def mapped(*args: Any) -> Any:
        ins = _per_item(in_placements, len(args), "in_placements", "arguments")
        named = [p for p in (*ins, *_items(out_placements)) if isinstance(p, Layout | NamedSharding)]
        given = named[0].mesh if mesh is None and named else mesh
        where = concrete_mesh(resolve_mesh(given, *jax.tree.leaves(args, is_leaf=is_whole), what="local_map"))  # type: ignore[arg-type]
        operands = [_Operand(i, arg, p, where) for i, (arg, p) in enumerate(zip(args, ins, strict=True))]
        return _run(fun, operands, out_placements, where)

    return mapped


def _run(fun: Callable[..., Any], operands: Sequence[_Operand], out_placements: Any, mesh: AnyMesh) -> Any:
    one = _is_one(out_placements)
    layouts = [_layout(p, mesh, "out_placements") for p in ([out_placements] if one else out_placements)]

    def body(blocks: Any) -> Any:
        result = fun(*(o.local(b) for o, b in zip(operands, blocks, strict=True)))
        if one:
            return _stacked(result, layouts[0])
        if not isinstance(result, tuple | list) or len(result) != len(layouts):
            got = f"{len(result)}" if isinstance(result, tuple | list) else f"one of type {type(result).__name__}"
            raise ValueError(f"local_map: out_placements speaks of {len(layouts)} results, but fun returned {got}")
        return tuple(_stacked(r, layout) for r, layout in zip(result, layouts, strict=True))

    axes = frozenset(mesh.axis_names) - manual_axes()
    arrays = [o.arrays for o in operands]
    if axes:
        # A spec may name fewer dims than a result has, so nothing need be known of what fun returns.
        specs = [_out_spec(layout) for layout in layouts]
        body = jax.shard_map(
            body,
            mesh=mesh,  # type: ignore[arg-type]
            axis_names=set(axes),
            in_specs=([o.specs for o in operands],),
            out_specs=specs[0] if one else tuple(specs),
        )
    result = body(arrays)
    if one:
        return _labelled(result, layouts[0])
    return tuple(_labelled(r, layout) for r, layout in zip(result, layouts, strict=True))


class _Operand:
    """One argument: the arrays of it that enter the region, how they do, and how they look there."""

    def __init__(self, position: int, arg: Any, placements: Any, mesh: AnyMesh):
        name = f"argument {position}"
        self.layout = _layout(placements, mesh, name)
        leaves, self.tree = jax.tree.flatten(arg, is_leaf=is_whole)
        self.static: dict[int, Any] = {}
        self.arrays: list[Any] = []
        self.specs: list[PartitionSpec] = []
        for i, leaf in enumerate(leaves):
            if placements is None and not isinstance(leaf, jax.Array | np.ndarray | PartialArray | Padded):
                self.static[i] = leaf
            else:
                array, spec = enter(_block(leaf, name), self.layout, name, "local_map")
                self.arrays.append(array)
                self.specs.append(spec)

    def local(self, blocks: Sequence[Any]) -> Any:
        """The argument that fun gets."""
        lead = len(self.layout.partial_axes)
        left = iter(blocks)
        leaves = []
        for i in range(len(blocks) + len(self.static)):
            leaf = self.static[i] if i in self.static else next(left)
            leaves.append(leaf.reshape(leaf.shape[lead:]) if lead else leaf)
        return jax.tree.unflatten(self.tree, leaves)


def _block(x: Any, name: str) -> Any:
    """What fun can tell the meaning of: nothing of padded blocks."""
    if isinstance(x, Padded):
        raise TypeError(
            f"local_map: {name} is an sk.Padded of shape {x.shape}, and fun couldn't tell what of its block counts; "
            "pass its .array (padded blocks) and the sizes that fun needs"
        )
    if isinstance(x, PartialArray) and x.logical_shape is not None:
        raise TypeError(
            f"local_map: {name} is {x!r}, padded to {x.stack.shape[len(x.layout.partial_axes) :]}, and fun couldn't "
            "tell what of its block counts; sk.reshard it to placements that divide its shape"
        )
    return x


def _layout(placements: Any, mesh: AnyMesh, name: str) -> Layout:
    layout = Layout(mesh, {} if placements is None else placements)
    manual = manual_axes()
    taken = {
        n: p
        for n, p in zip(mesh.axis_names, layout.placements, strict=True)
        if n in manual and not isinstance(p, Replicate)
    }
    if taken:
        raise ValueError(
            f"local_map: {name} has placements {taken} on mesh axes that are manual here (inside jax.shard_map), where "
            "a value is one device's already; leave these axes out"
        )
    layout.reduce  # noqa: B018  # refuses two kinds
    return layout


def _out_spec(layout: Layout) -> PartitionSpec:
    negative = [p for p in layout.placements if isinstance(p, Shard) and p.dim < 0]
    if negative:
        raise ValueError(
            f"local_map: out_placements has {negative[0]}, but how many dims the result has is known only when fun has "
            "run; count from the front"
        )
    cuts = layout.dim_axes()
    return layout.stack_spec(max(cuts, default=-1) + 1)


def _stacked(result: Any, layout: Layout) -> Any:
    """A result as it leaves the region: contributions with a leading dim a Partial axis."""
    lead = len(layout.partial_axes)

    def one(x: Any) -> Any:
        x = jnp.asarray(x)
        layout.dim_axes(x.ndim)  # refuses dims it doesn't have
        return x.reshape((1,) * lead + x.shape)

    return jax.tree.map(one, result)


def _labelled(result: Any, layout: Layout) -> Any:
    return jax.tree.map(lambda x: PartialArray(x, layout), result) if layout.partial_axes else result


def _is_one(placements: Any) -> bool:
    """Whether these are placements, and not a sequence of them."""
    if placements is None or isinstance(placements, PartitionSpec | NamedSharding | Layout | Mapping):
        return True
    if not isinstance(placements, tuple | list):
        raise TypeError(
            f"local_map takes placements, or a tuple of them (one entry an argument or result), got {placements!r}"
        )
    return bool(placements) and all(isinstance(p, Placement) for p in placements)


def _items(placements: Any) -> Sequence[Any]:
    return [placements] if _is_one(placements) else placements


def _per_item(placements: Any, count: int, name: str, what: str) -> list[Any]:
    if _is_one(placements):
        return [placements] * count
    if len(placements) != count:
        raise ValueError(
            f"local_map: {name} has {len(placements)} entries for {count} {what}; give one each (None: as it is), or "
            "placements once, for all"
        )
    return list(placements)
