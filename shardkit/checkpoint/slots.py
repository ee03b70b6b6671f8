"""A tree taken apart into named slots, and put together again from other values.

Names are those of the plain program: what sharding adds to a tree (wrapped optimizer states, padding, rows) leaves no
trace in them, so that a checkpoint of the one fits the other.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core.meta import AxisMetadata

from shardkit.arrays import Padded, PartialArray
from shardkit.optim.placed_optimizer import PlacedState
from shardkit.optim.shard_optimizer import ShardedState
from shardkit.optim.stored import FlatShard

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One value of a tree.

    Attributes:
      path: its name, in parts.
      value: an array, a scalar, text, an object that has a state, or the description of an array.
      shape: that an array stands for.
      layout: how it's held: "plain", "padded" after its end in some dims, or "flat", as one padded row.
    """

    path: Path
    value: Any
    shape: tuple[int, ...] | None = None
    layout: str = "plain"


Build = Callable[[Iterator[Any]], Any]  # takes its values from the iterator, in the order of the slots


def take_apart(tree: Any) -> tuple[list[Slot], Callable[[Sequence[Any]], Any]]:
    """The slots of a tree, and what makes a tree like it from other values in their order.

    Modules and objects that have a state are changed in place, and are in the new tree themselves.

    Raises:
      ValueError: two values of one name.
    """
    slots, build = _tree(tree, (), _Seen(in_place=True))
    twice = [path for path, n in collections.Counter(slot.path for slot in slots).items() if n > 1]
    if twice:
        raise ValueError(f"two values of the tree have one name, {name_of(twice[0])!r}; rename a key")
    return slots, lambda values: build(iter(values))


def name_of(path: Sequence[str]) -> str:
    """A path as people read it."""
    return "/".join(path) or "the tree itself"


def has_state(x: Any) -> bool:
    """Whether this is an object that hands out what it needs to go on from here, as iterators over data do."""
    return (
        not isinstance(x, type) and callable(getattr(x, "get_state", None)) and callable(getattr(x, "set_state", None))
    )


def _is_special(x: Any) -> bool:
    whole = (Padded, PartialArray, FlatShard, ShardedState, PlacedState, AxisMetadata, nnx.Variable, nnx.Pytree)
    return isinstance(x, whole) or has_state(x)


class _Seen:
    """What was met on the way: variables that modules share have the name of the first place, and one value."""

    def __init__(self, in_place: bool, variables: dict[int, list[Any]] | None = None):
        self.in_place = in_place  # modules are changed, not made anew
        self.variables = {} if variables is None else variables


def _tree(tree: Any, path: Path, seen: _Seen) -> tuple[list[Slot], Build]:
    return _children(tree, path, _is_special, seen)


def _children(tree: Any, path: Path, is_leaf: Any, seen: _Seen) -> tuple[list[Slot], Build]:
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    parts = [_one(x, path + _names(keys), seen) for keys, x in found]
    slots = [slot for those, _ in parts for slot in those]
    return slots, lambda values: structure.unflatten([build(values) for _, build in parts])


def _one(x: Any, path: Path, seen: _Seen) -> tuple[list[Slot], Build]:
    if isinstance(x, ShardedState):
        rows = dict(x.shapes.value)
        slots, build = _tree(x.inner, path, seen)
        slots = [dataclasses.replace(s, shape=rows[i], layout="flat") if i in rows else s for i, s in enumerate(slots)]
        return slots, lambda values: x._replace(inner=build(values))
    if isinstance(x, PlacedState):
        slots, build = _tree(x.inner, path, seen)
        return slots, lambda values: x._replace(inner=build(values))
    if isinstance(x, FlatShard):
        return [Slot(path, x.flat, x.shape, "flat")], lambda values: dataclasses.replace(x, flat=next(values))
    if isinstance(x, Padded):
        slot = Slot(path, x.array, tuple(x.logical_shape), "padded")
        return [slot], lambda values: dataclasses.replace(x, array=next(values))
    if isinstance(x, nnx.Variable):
        return _variable(x, path, seen)
    if isinstance(x, nnx.Pytree):
        return _module(x, path, seen)
    if isinstance(x, AxisMetadata):
        return _boxed(x, path, seen)
    shape = tuple(x.shape) if hasattr(x, "shape") else None
    return [Slot(path, x, shape)], next


def _variable(x: nnx.Variable[Any], path: Path, seen: _Seen) -> tuple[list[Slot], Build]:
    if id(x) in seen.variables:
        new = seen.variables[id(x)]
        return [], lambda values: new[0]
    new = seen.variables[id(x)] = []
    slots, build = _tree(x.get_raw_value(), path, seen)

    def replace(values: Iterator[Any]) -> Any:
        new[:] = [x.replace(build(values))]
        return new[0]

    return slots, replace


def _boxed(x: AxisMetadata[Any], path: Path, seen: _Seen) -> tuple[list[Slot], Build]:
    """What ``flax.linen`` puts around a parameter leaves no trace in its name."""
    content, structure = jax.tree.flatten(x, is_leaf=lambda inner: inner is not x)
    parts = [_tree(inner, path, seen) for inner in content]
    slots = [slot for those, _ in parts for slot in those]
    return slots, lambda values: structure.unflatten([build(values) for _, build in parts])


def _module(module: Any, path: Path, seen: _Seen) -> tuple[list[Slot], Build]:
    within = _Seen(in_place=False, variables=seen.variables)
    if jax.tree_util.all_leaves([module]):  # one that isn't a pytree
        slots, build = _tree(nnx.state(module), path, within)

        def update(values: Iterator[Any]) -> Any:
            nnx.update(module, build(values))
            return module

        return slots, update
    slots, build = _children(module, path, lambda x: x is not module and _is_special(x), within)

    def change(values: Iterator[Any]) -> Any:
        new = build(values)
        if not seen.in_place:
            return new
        nnx.update(module, nnx.state(new))
        return module

    return slots, change


def _names(keys: Sequence[Any]) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
