"""Which placements belong to which array of a call, and which arguments aren't arrays at all."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardkit.arrays import Padded, PartialArray
from shardkit.arrays.partial import is_whole
from shardkit.placements import AnyMesh, Layout, Placement, layout_of
from shardkit.reshard.regions import same_place

INFERRED = "inferred"


def is_placements(x: Any) -> bool:
    """Whether this says where one array is, rather than being a pytree of such."""
    if x is None or isinstance(x, str | PartitionSpec | NamedSharding | Layout):
        return True
    if isinstance(x, Mapping) and type(x) is dict:
        return all(isinstance(p, Placement) for p in x.values())  # {}: replicated on every axis
    return isinstance(x, list | tuple) and bool(x) and all(isinstance(p, Placement) for p in x)


def spread(prefix: Any, tree: Any, name: str) -> list[Any]:
    """One entry a leaf, from placements given for whole branches.

    Args:
      prefix: placements, or a pytree of them that is a prefix of ``tree``. None: nothing is said.
      tree: the arguments or results.
      name: of what is placed, for the message.

    Raises:
      ValueError: it is no prefix.
    """

    def bad(x: Any) -> str:
        return (
            f"partition: {name} has {x!r} where placements belong: a sequence in mesh-axis order, a mapping by axis "
            "name, a PartitionSpec, a NamedSharding, or None"
        )

    def misfit(given: str, wanted: str) -> str:
        return (
            f"partition: {name} doesn't match the tree it speaks of: given are {given}, wanted {wanted} (* for each "
            "array); give placements once for a whole branch, or a tree of the same structure"
        )

    return spread_over(prefix, tree, bad, misfit)


def spread_over(prefix: Any, tree: Any, bad: Callable[[Any], str], misfit: Callable[[str, str], str]) -> list[Any]:
    """The same, with words of one's own for what is no placements, and for structures that don't match."""
    if is_placements(prefix):
        return [prefix] * len(jax.tree.leaves(tree, is_leaf=is_whole))
    leaves, treedef = jax.tree.flatten(prefix, is_leaf=is_placements)
    for x in leaves:
        if not is_placements(x):
            raise TypeError(bad(x))
    try:
        branches = treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as err:
        raise ValueError(misfit(*map(_shown, (treedef, jax.tree.structure(tree, is_leaf=is_whole))))) from err
    return [x for x, branch in zip(leaves, branches, strict=True) for _ in jax.tree.leaves(branch, is_leaf=is_whole)]


def _shown(treedef: Any) -> str:
    """A structure as one writes it: "{'a': *, 'b': (*, *)}"."""
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


@dataclasses.dataclass(frozen=True)
class Static:
    """An argument, or part of one, that isn't an array."""

    value: Any


@dataclasses.dataclass
class Call:
    """The arguments of one call.

    Attributes:
      arrays: the leaves that are arrays.
      names: of each, for messages and the printed program.
      layouts: where each is said to be.
      donated: whether each may be overwritten.
      tree: the structure of (args, kwargs).
      statics: by position among all leaves, what isn't an array.
    """

    arrays: list[Any]
    names: list[str]
    layouts: list[Layout]
    donated: list[bool]
    tree: Any
    statics: tuple[tuple[int, Any], ...]

    def rebuild(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these in place of the arrays."""
        left, fixed = iter(values), dict(self.statics)
        leaves = [fixed[i] if i in fixed else next(left) for i in range(len(values) + len(fixed))]
        return jax.tree.unflatten(self.tree, leaves)

    @property
    def key(self) -> Any:
        """Calls of equal keys have the same program."""
        types = tuple((tuple(a.shape), a.dtype, a.weak_type) for a in map(abstract, self.arrays))
        kinds = tuple(type(a) if is_whole(a) else None for a in self.arrays)
        return self.tree, self.statics, types, kinds, tuple(self.layouts)


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """What tracing needs to know of an array: its logical shape."""
    if isinstance(x, Padded | PartialArray):
        return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)
    dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
    return jax.ShapeDtypeStruct(shape_of(x), dtype, weak_type=_weak(x))


def shape_of(x: Any) -> tuple[int, ...]:
    """The logical shape of anything that counts as an array."""
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def _weak(x: Any) -> bool:
    return bool(getattr(x, "weak_type", isinstance(x, bool | int | float | complex)))


def is_array(x: Any) -> bool:
    """What is traced; all else is a static argument."""
    return is_whole(x) or hasattr(x, "shape") or isinstance(x, bool | int | float | complex | np.generic)


def read_call(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_placements: Any,
    mesh: AnyMesh,
    static: frozenset[int],
    donate: frozenset[int],
) -> Call:
    """What a call hands to the program.

    Args:
      fun: the user's.
      args, kwargs: of the call. A keyword that names a positional parameter is taken for that.
      in_placements: once for all arguments, or one entry an argument (missing ones: as the arrays are).
      mesh: the mesh.
      static, donate: positions of arguments.

    Raises:
      ValueError: more entries than arguments; a size that doesn't divide; placements that don't match.
      TypeError: something that isn't placements.
    """
    args, kwargs = _positional(fun, args, kwargs)
    static, donate = (_counted(given, len(args), name) for given, name in ((static, "static"), (donate, "donate")))
    tree_of = (args, kwargs)
    leaves, tree = (
        jax.tree.flatten_with_path(tree_of, is_leaf=is_whole)[0],
        jax.tree.structure(tree_of, is_leaf=is_whole),
    )
    said: list[Any] = []
    listed = _per_argument(in_placements, len(args))
    for i, arg in enumerate(args):
        said += spread(None if i in static else listed[i], arg, f"in_placements of argument {i}")
    once = is_placements(in_placements) or not isinstance(in_placements, tuple | list)
    said += [in_placements if once else None] * (len(leaves) - len(said))  # those given by name alone
    call = Call([], [], [], [], tree, ())
    statics = []
    for at, ((path, leaf), given) in enumerate(zip(leaves, said, strict=True)):
        position = path[1].idx if path[0].idx == 0 else None
        if position in static or not is_array(leaf):
            statics.append((at, leaf))
            continue
        name = _name(fun, path)
        call.arrays.append(leaf)
        call.names.append(name)
        call.layouts.append(_layout(leaf, given, mesh, name))
        call.donated.append(position in donate)
    call.statics = tuple(statics)
    return call


def _counted(given: frozenset[int], count: int, name: str) -> frozenset[int]:
    """Positions from the front."""
    bad = sorted(i for i in given if not -count <= i < count)
    if bad:
        raise ValueError(f"partition: {name}_argnums has {bad}, but the call has {count} positional arguments")
    return frozenset(i % count for i in given)


def _positional(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs  # the call itself will say what is wrong
    return bound.args, bound.kwargs


def _per_argument(in_placements: Any, count: int) -> list[Any]:
    if is_placements(in_placements) or not isinstance(in_placements, tuple | list):
        return [in_placements] * count
    if len(in_placements) > count:
        raise ValueError(
            f"partition: in_placements has {len(in_placements)} entries for {count} positional arguments; give one "
            "each (None: as the arrays are), or placements once, for all"
        )
    return [*in_placements, *[None] * (count - len(in_placements))]


def _layout(x: Any, given: Any, mesh: AnyMesh, name: str) -> Layout:
    shape = shape_of(x)
    if isinstance(given, str):
        raise ValueError(f"partition: in_placements of {name} is {given!r}; say where it is, or None: as the array is")
    if given is None:
        layout = _own(x, mesh, name)
    else:
        try:
            layout = Layout(getattr(given, "mesh", mesh), given).resolved(len(shape))
        except ValueError as err:
            raise ValueError(f"partition: {name} of shape {shape}: {err}") from err
    layout.reduce  # noqa: B018  # two kinds are refused before anything else is
    if not isinstance(x, Padded) and not (isinstance(x, PartialArray) and x.logical_shape is not None):
        try:
            layout.local_shape(shape)
        except ValueError as err:
            raise ValueError(f"partition: {name}: {err}") from err
    return layout


def _own(x: Any, mesh: AnyMesh, name: str) -> Layout:
    """Where an array says it is (on a mesh of its own, maybe); whole on every device if it says nothing."""
    ndim = len(shape_of(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        found = Layout(x.sharding.mesh, x.sharding) if isinstance(x.sharding, NamedSharding) else None
    else:
        try:
            found = layout_of(x)
        except ValueError:
            found = None
        if found is None and ndim and isinstance(x, Tracer):
            raise ValueError(
                f"partition: under jax.jit, on Auto mesh axes, only the compiler knows where {name} is; say it in "
                "in_placements, or call the partitioned function outside jit (it's jitted itself)"
            )
    if found is None:
        return Layout(mesh, {}).resolved(ndim)
    return (found.on(mesh) if same_place(found.mesh, mesh) else found).resolved(ndim)


def _name(fun: Callable[..., Any], path: Any) -> str:
    """``w['kernel']``, as the function calls it, for people."""
    (_, first, *rest) = path
    if path[0].idx == 1:
        return f"{first.key}{jax.tree_util.keystr(tuple(rest))}"
    return f"{_parameter(fun, first.idx)}{jax.tree_util.keystr(tuple(rest))}"


def _parameter(fun: Callable[..., Any], position: int) -> str:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = parameters[position : position + 1]
    if plain and plain[0].kind in (plain[0].POSITIONAL_ONLY, plain[0].POSITIONAL_OR_KEYWORD):
        return plain[0].name
    return f"args[{position}]"
