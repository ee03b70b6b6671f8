"""Activations on their way into layers that devices share out: one copy a device, made once for all such layers.

A column layer's input is the same on all devices of an axis, and its gradient is the sum of what they each compute.
Here the copies are dim 0 of an array ("one device, one row"), so that making it moves nothing, and its transpose is the
sum. Query, key and value layers that read one input share one such array: their gradients are added up on each device,
and one all-reduce serves the three.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit import scopes
from shardkit._compat import varying_axes
from shardkit.placements import entry_names
from shardkit.spatial.operands import explicit_axes


def varying(x: Any, axis: str) -> Any:
    """``x`` with a type that says it varies over a manual axis."""
    return x if axis in varying_axes(x) else lax.pcast(x, axis, to="varying")


def enter_once(x: Any, axis: str, entries: Sequence[Any], dim: int | None, mesh: Mesh | AbstractMesh) -> Any:
    """``[devices of the axis, *x.shape]``, cut over dim 0: each device's copy.

    Args:
      x: the activations.
      axis: a mesh axis that isn't manual.
      entries: how other axes cut ``x``: Explicit ones, and those that the region takes over.
      dim: the dim of ``x`` that the axis cuts before it enters (it's put together then), if any.
      mesh: of the axis.
    """
    return once(x, (_enter, axis, tuple(entries), dim, mesh), lambda x: _enter(axis, tuple(entries), dim, mesh, x))


_made: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}


def once(x: Any, what: tuple[Any, ...], make: Any) -> Any:
    """``make(x)``, the same object for the same tracer, as long as that lives.

    Args:
      x: a value. What isn't being traced is made anew.
      what: says what is made; hashable.
      make: makes it.
    """
    if not isinstance(x, Tracer):
        return make(x)
    key, state = (id(x), *what), jex_core.get_opaque_trace_state(convention="nnx")
    found = _made.get(key)
    if found is not None and found[0]() is x and found[1] == state:
        return found[2]
    made = make(x)
    _made[key] = (weakref.ref(x, functools.partial(_forget, _made, key)), state, made)
    return made


def _forget(made: dict[tuple[Any, ...], Any], key: tuple[Any, ...], _: Any) -> None:
    made.pop(key, None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _enter(axis: str, entries: tuple[Any, ...], dim: int | None, mesh: Any, x: Any) -> Any:
    typed = explicit_axes(mesh)
    names = {n for entry in entries for n in entry_names(entry)}
    before = list(entries)
    if dim is not None:
        before[dim] = (*entry_names(entries[dim]), axis)
    if typed:
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*before)))

    def body(block):
        if dim is None:
            return varying(block, axis)[None]
        with scopes.scope(scopes.RESHARD):
            return lax.all_gather(block, axis, axis=dim, tiled=True)[None]

    # Linear, so that reverse mode has nothing to carry out of the region.
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=PartitionSpec(*before),
        out_specs=PartitionSpec(axis, *entries),
        axis_names={axis, *typed, *names},
    )(x)
