"""Activations on their way into layers that devices share out: one copy a device, made once for all such layers.

A column layer's input is the same on all devices of an axis, and its gradient is the sum of what they each compute.
Here the copies are dim 0 of an array ("one device, one row"), so that making it moves nothing, and its transpose is the
sum. Query, key and value layers that read one input share one such array: their gradients are added up on each device,
and one all-reduce serves the three.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Generator, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit import scopes
from shardkit.meshes import platform_of
from shardkit.placements import entry_names
from shardkit.spatial.operands import explicit_axes
from shardkit.varying import varying


def sum_dtype(dtype: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The dtype that devices add up in.

    XLA on CPU adds short floats in float32 anyway, and stops the process when it makes that of a sum in a region that
    leaves other axes to it.
    """
    short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if short and platform_of(mesh) == "cpu" else dtype


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


_kept: contextvars.ContextVar[dict[tuple[Any, ...], tuple[Any, Any, Any]] | None] = contextvars.ContextVar(
    "kept", default=None
)


@contextlib.contextmanager
def remembering() -> Generator[None]:
    """Within the outermost of these ``once`` remembers: traced values, which mustn't outlive the call they're of."""
    token = _kept.set({}) if _kept.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _kept.reset(token)


def once(x: Any, what: tuple[Any, ...], make: Any) -> Any:
    """``make(x)``, the same object for the same tracer, while ``remembering``.

    Args:
      x: a value. What isn't being traced is made anew.
      what: says what is made; hashable.
      make: makes it.
    """
    kept = _kept.get()
    if kept is None or not isinstance(x, Tracer):
        return make(x)
    key, state = (id(x), *what), jex_core.get_opaque_trace_state(convention="nnx")
    found = kept.get(key)
    if found is not None and found[0] is x and found[1] == state:
        return found[2]
    made = make(x)
    kept[key] = (x, state, made)
    return made


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _enter(axis: str, entries: tuple[Any, ...], dim: int | None, mesh: Any, x: Any) -> Any:
    typed = explicit_axes(mesh)
    names = {n for entry in entries for n in entry_names(entry)}
    before = list(entries)
    if dim is not None:
        before[dim] = (*entry_names(entries[dim]), axis)
    if typed:
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*before)))

    wide = sum_dtype(x.dtype, mesh)

    def body(block: Any) -> Any:
        block = block.astype(wide)  # its gradient is added up in this dtype
        if dim is None:
            return varying(block, (axis,))[None].astype(x.dtype)
        with scopes.scope(scopes.RESHARD):
            return lax.all_gather(block, axis, axis=dim, tiled=True)[None].astype(x.dtype)

    # Linear, so that reverse mode has nothing to carry out of the region.
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=PartitionSpec(*before),
        out_specs=PartitionSpec(axis, *entries),
        axis_names={axis, *typed, *names},
    )(x)
