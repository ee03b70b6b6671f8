"""Where parameters live, and what is known from it of gradients, updates and state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardkit.arrays import PartialArray, from_unreduced, is_unreduced
from shardkit.arrays.placing import constrain
from shardkit.optim.stored import FlatShard, is_leaf, known_layout, said_layout, said_leaves, shape_of
from shardkit.optim.targets import state_layout
from shardkit.placements import AnyMesh, Layout, Partial


@dataclasses.dataclass(frozen=True)
class Home:
    """Where one parameter lives.

    Attributes:
      path: its path in the tree.
      shape: as a model sees it.
      spec: where it lives, on any mesh of these axes.
      flat: it's kept as a padded flat shard.
    """

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    spec: PartitionSpec
    flat: bool

    def layout(self, mesh: AnyMesh) -> Layout:
        """Of the parameter on a mesh."""
        return Layout(mesh, self.spec).resolved(len(self.shape))


def homes_of(params: Any, mesh: AnyMesh, said: Any) -> tuple[Home, ...]:
    """The home of each parameter, in tree order.

    Args:
      params: the tree.
      mesh: the mesh.
      said: a tree that says where they live; None: they do, and are replicated where they can't.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
    shapes = [shape_of(x) for _, x in found]
    if said is None:
        layouts = [known_layout(x, mesh) for _, x in found]
    else:
        leaves = said_leaves(said, structure, "shard_optimizer")
        layouts = [said_layout(x, mesh, len(shape)) for x, shape in zip(leaves, shapes, strict=True)]
    return tuple(
        Home(named_path(path), shape, layout.spec_for(len(shape)), isinstance(x, FlatShard))
        for (path, x), shape, layout in zip(found, shapes, layouts, strict=True)
    )


def named_path(path: Sequence[Any]) -> tuple[Any, ...]:
    """A path without what a Flax variable adds to it: nnx hands its optimizers states with and without."""
    return tuple(path[:-1] if path and path[-1] == jax.tree_util.GetAttrKey("value") else path)


def places_beside(homes: tuple[Home, ...], axis: str | None, mesh: AnyMesh) -> Callable[[Sequence[Any], Any], Layout]:
    """Where a leaf (its path, itself) of state or updates lives: beside the parameter it stands for, else by shape.

    ``axis`` is the one that shards it on top of that, if any.
    """
    named = {home.path: home for home in homes}

    def place(path: Sequence[Any], x: Any) -> Layout:
        # It stands for a parameter if that's how its path ends, and the shapes agree.
        path = named_path(path)
        ends = (named.get(path[start:]) for start in range(len(path) + 1))
        home = next((h for h in ends if h is not None and h.shape == tuple(x.shape)), None)
        layout = Layout(mesh, {}).resolved(x.ndim) if home is None else home.layout(mesh)
        return layout if axis is None else state_layout(layout, x.shape, axis)

    return place


def labelled(x: Any, home: Layout) -> Any:
    """A gradient, known to be cut as its parameter is: under ``jit`` on Auto axes only the compiler knows that."""
    if is_unreduced(x):
        x = from_unreduced(x)
    if not isinstance(x, PartialArray):
        return x
    if x.logical_shape is not None:
        return x.reduce().value
    own = x.layout.on(home.mesh).resolved(x.ndim)
    waits = {name: p for name, p in zip(own.mesh.axis_names, own.placements, strict=True) if isinstance(p, Partial)}
    layout = home.but(waits)
    if layout == own:
        return x
    # Contributions are one array for the compiler: where axes cut it that it doesn't wait for is its to change.
    return PartialArray(constrain(x.stack, layout.mesh, layout.stack_spec(x.ndim)), layout)


def check_match(grads: Any, homes: tuple[Home, ...]) -> None:
    """Refuses gradients of other parameters.

    Raises:
      ValueError: which one is the first that doesn't fit.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_leaf)
    given = [(named_path(path), shape_of(x)) for path, x in leaves]
    known = [(home.path, home.shape) for home in homes]
    if given != known:
        odd = next(iter([g for g in given if g not in known] + [k for k in known if k not in given]), None)
        where = f", at {jax.tree_util.keystr(odd[0])!r} of shape {odd[1]}" if odd else ""
        raise ValueError(
            f"shard_optimizer: the gradients don't match the parameters that its state was made for{where}; give a "
            "gradient for every parameter, of its shape (gradients of each example can't be reduced)"
        )
