"""Arithmetic on stacked contributions: a plain value meets each of them, or only one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.arrays.placing import constrain, keep_axes, mesh_here
from shardkit.meshes import manual_axes
from shardkit.placements import AnyMesh, Layout


def combine(
    op: Callable[..., Any], layout: Layout, stack: Any, value: Any, *, neutral: int, once: bool, swapped: bool = False
) -> jax.Array:
    """``op(contribution, value)`` for every contribution; no communication if ``value`` is replicated or placed so.

    Args:
      op: elementwise, of two arguments.
      layout: of the stack.
      stack: the contributions, one leading dim a Partial axis.
      value: broadcastable to a contribution, or to its logical part (the rest is filled with ``neutral``).
      neutral: the right operand that changes nothing under ``op``.
      once: only the contribution at index 0 of every Partial axis meets ``value``, the others ``neutral``.
      swapped: ``op(value, contribution)``.
    """
    run = functools.partial(_combine, op, layout, neutral, once, swapped)
    # Eagerly one program, so that nothing but the result exists. Within a manual region there's a program already.
    return run(stack, value) if manual_axes() else _jitted(op, layout, stack.ndim, neutral, once, swapped)(stack, value)


@functools.lru_cache(maxsize=512)
def _jitted(op: Callable[..., Any], layout: Layout, ndim: int, neutral: int, once: bool, swapped: bool):
    del ndim  # layouts are equal whatever rank they are made for
    return jax.jit(functools.partial(_combine, op, layout, neutral, once, swapped))


def _combine(op: Callable[..., Any], layout: Layout, neutral: int, once: bool, swapped: bool, stack: Any, value: Any):
    mesh = mesh_here(layout.mesh)
    lead = len(layout.partial_axes)
    spec = layout.stack_spec(stack.ndim - lead)
    value = _spread(jnp.asarray(value), stack.shape, lead, neutral, mesh, spec)
    if once:
        chosen = _first(layout.partial_axes, stack.shape, mesh, spec)
        value = jnp.where(chosen, value, jnp.full_like(value, neutral))
    return constrain(op(value, stack) if swapped else op(stack, value), mesh, spec)


def _spread(value: Any, shape: tuple[int, ...], lead: int, neutral: int, mesh: AnyMesh, spec: PartitionSpec):
    """``value`` at the place of every contribution: each device cuts what is its own."""
    inner = shape[len(shape) - value.ndim :]
    padding = [(0, 0 if held == 1 else new - held) for new, held in zip(inner, value.shape, strict=True)]
    if any(after for _, after in padding):
        value = jnp.pad(value, padding, constant_values=neutral)
    entries = spec_entries(spec)[len(shape) - value.ndim :]
    own = PartitionSpec(*(e if size > 1 else None for e, size in zip(entries, value.shape, strict=True)))
    value = constrain(value, mesh, own)
    dims = tuple(range(len(shape) - value.ndim, len(shape)))
    return lax.broadcast_in_dim(value, shape, dims, **_out_sharding(mesh, spec))


def _first(axes: tuple[str, ...], shape: tuple[int, ...], mesh: AnyMesh, spec: PartitionSpec) -> Any:
    """True in the contribution at index 0 of every axis. An iota and not a constant: XLA cuts it for free."""
    manual = manual_axes()
    chosen = jnp.array(True)
    for dim, axis in enumerate(axes):
        if axis in manual:
            chosen = chosen & (lax.axis_index(axis) == 0)
        elif shape[dim] > 1:
            index = lax.broadcasted_iota(jnp.int32, shape, dim, **_out_sharding(mesh, spec))
            chosen = chosen & (index == 0)
    return chosen


def _out_sharding(mesh: AnyMesh, spec: PartitionSpec) -> dict[str, Any]:
    if AxisType.Explicit not in mesh.axis_types:
        return {}
    return {"out_sharding": jax.sharding.NamedSharding(mesh, keep_axes(spec, mesh, AxisType.Explicit))}
