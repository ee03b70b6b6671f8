"""How an array enters a region whose code works on blocks: where it's said to be, or not at all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.arrays.padded import Padded
from shardkit.arrays.partial import PartialArray
from shardkit.arrays.placing import constrain, describe, misplaced, same_layout
from shardkit.arrays.unreduced import from_unreduced, is_unreduced
from shardkit.placements import Layout


def enter(x: Any, layout: Layout, name: str, what: str) -> tuple[Any, PartitionSpec]:
    """The array as a ``shard_map`` takes it, and its spec there.

    Args:
      x: an array, a ``Padded`` (its padded blocks enter), a ``PartialArray`` (its stack does).
      layout: where it's said to be.
      name: of the argument.
      what: the function that asks; its messages start with it.

    Raises:
      ValueError: it lives elsewhere; a size that doesn't divide.
      TypeError: a Partial placement for a plain array or the reverse.
    """
    if isinstance(x, PartialArray) or layout.partial_axes:
        return _partial(x, layout, name, what)
    shape = x.shape if isinstance(x, Padded) else np.shape(x)
    layout = layout.resolved(len(shape))
    if isinstance(x, Padded):
        x = _padded(x, layout, name, what)
    else:
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        layout.local_shape(shape)  # refuses sizes that don't divide
    spec = layout.stack_spec(len(shape))
    where = misplaced(x, layout.mesh, spec)
    if where is not None:
        raise ValueError(
            f"{what} moves nothing: {name} of shape {shape} lives at {describe(where)}, but in_placements "
            f"{list(layout.placements)} say {spec} on mesh {dict(layout.mesh.shape)}; sk.reshard it first"
        )
    if isinstance(x, Tracer):
        fixed = jax.typeof(x).sharding.mesh
        return (constrain(x, layout.mesh, spec) if fixed.empty else x), spec
    if isinstance(layout.mesh, Mesh):
        return jax.device_put(x, NamedSharding(layout.mesh, spec)), spec
    return constrain(jnp.asarray(x), layout.mesh, spec), spec


def _padded(x: Padded, layout: Layout, name: str, what: str) -> jax.Array:
    wanted = layout.padded_shape(x.logical_shape)
    if x.array.shape != wanted:
        raise ValueError(
            f"{what} moves nothing: {name} is an sk.Padded of shape {x.shape}, padded to {x.array.shape}, but "
            f"in_placements {list(layout.placements)} need {wanted}; sk.reshard it first"
        )
    return x.array


def _partial(x: Any, layout: Layout, name: str, what: str) -> tuple[Any, PartitionSpec]:
    if is_unreduced(x):
        x = from_unreduced(x)
    if not isinstance(x, PartialArray):
        raise TypeError(
            f"{what}: {name} is stated {list(layout.placements)}, but it is a whole value ({type(x).__name__}); "
            "give it contributions with sk.reshard or sk.from_local first"
        )
    layout = layout.resolved(np.ndim(x.stack) - len(x.layout.partial_axes))
    if not same_layout(x.layout, layout):
        raise ValueError(
            f"{what} moves nothing: {name} is {x!r}, but in_placements say {list(layout.placements)} on mesh "
            f"{dict(layout.mesh.shape)}; sk.reshard it first"
        )
    return x.stack, layout.stack_spec(x.ndim)
