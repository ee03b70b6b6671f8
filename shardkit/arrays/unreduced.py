"""JAX's own ``unreduced`` arrays to ``PartialArray`` and back: the same buffers under another name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._compat import partition_spec, spec_entries
from shardkit.arrays.partial import PartialArray
from shardkit.meshes import manual_axes, no_ambient_mesh
from shardkit.placements import Layout, layout_of
from shardkit.static import Static


def to_unreduced(partial: PartialArray) -> jax.Array:
    """A ``PartialArray`` as one of JAX's ``unreduced`` arrays; nothing is communicated.

    Differentiable for sums. A max or min, which only newer JAX can name, must be concrete: JAX has no operation
    that makes one under ``jit``.

    Args:
      partial: on a mesh whose axes are all Explicit, and not padded.

    Returns:
      An array of the shape of the value, whose ``sharding.spec.unreduced`` has the Partial axes (JAX's documentation:
      https://docs.jax.dev/en/latest/301/sharding-ad.html).

    Raises:
      ValueError: an Auto mesh, a kind that this JAX can't say, a padded array, a call inside a manual region.
      TypeError: not a ``PartialArray``.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1}, axis_types="explicit")
      >>> x = sk.from_local([jnp.zeros(3, "int32")], {"dp": sk.Partial()}, mesh)
      >>> sorted(sk.to_unreduced(x).sharding.spec.unreduced)
      ['dp']
    """
    if not isinstance(partial, PartialArray):
        raise TypeError(f"to_unreduced takes an sk.PartialArray, got {type(partial).__name__}")
    _refuse_manual("to_unreduced")
    layout, lead = partial.layout, len(partial.layout.partial_axes)
    if any(t != AxisType.Explicit for t in layout.mesh.axis_types):
        raise ValueError(
            f"to_unreduced: JAX has unreduced arrays on Explicit mesh axes only, and this mesh is {layout.mesh}; make "
            'it with sk.make_mesh(..., axis_types="explicit"), or reduce first: sk.reshard(x, ...)'
        )
    if partial.logical_shape is not None:
        raise ValueError(
            f"to_unreduced: {partial!r} is padded to {partial.stack.shape[lead:]}, which a jax.Array can't say; "
            "sk.reshard it to placements that divide its shape first"
        )
    ndim = partial.ndim
    spec = layout.spec_for(ndim)
    if layout.reduce != "sum":
        return _rewrapped(partial, spec)

    if layout.mesh.size == 1:
        # JAX can't lower a shard_map with an unreduced result on one device (0.10 - 0.12); there it is a mere name.
        whole = jax.sharding.reshard(partial.stack, NamedSharding(layout.mesh, PartitionSpec()))
        return jax.sharding.reshard(whole.reshape(partial.shape), NamedSharding(layout.mesh, spec))

    return _namer(layout, ndim)(partial.stack)


@functools.lru_cache(1024)
def _namer(layout: Layout, ndim: int) -> Callable[..., Any]:
    """The program from stacked contributions to an unreduced array; op by op, JAX can't run its pcast."""
    lead = len(layout.partial_axes)

    def body(stack: Any) -> Any:
        return lax.pcast(stack.reshape(stack.shape[lead:]), layout.partial_axes, to="unreduced")

    ins, outs = layout.stack_spec(ndim), layout.spec_for(ndim)
    return jax.jit(jax.shard_map(body, mesh=layout.mesh, in_specs=ins, out_specs=outs))


def _rewrapped(partial: PartialArray, spec: PartitionSpec) -> jax.Array:
    stack, lead, mesh = partial.stack, len(partial.layout.partial_axes), partial.layout.mesh
    if isinstance(stack, Tracer) or not isinstance(mesh, Mesh):
        raise ValueError(
            f"to_unreduced: under jit and grad JAX can only make unreduced sums, not a {partial.layout.reduce}; "
            "call it outside, or reduce first: sk.reshard(x, ...)"
        )
    with no_ambient_mesh():
        blocks = [s.data.reshape(s.data.shape[lead:]) for s in stack.addressable_shards]
    return jax.make_array_from_single_device_arrays(partial.shape, NamedSharding(mesh, spec), blocks)


def from_unreduced(array: jax.Array) -> PartialArray:
    """One of JAX's ``unreduced`` arrays as a ``PartialArray``; nothing is communicated.

    Linear, and its own gradient: the cotangent of each contribution goes back to the device that holds it.

    Args:
      array: a ``jax.Array`` that is unreduced over some mesh axes.

    Returns:
      A ``PartialArray`` of the same shape and dtype.

    Raises:
      ValueError: no axis of the array is unreduced, a call inside a manual region.
      TypeError: not a ``jax.Array``.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1}, axis_types="explicit")
      >>> x = sk.from_local([jnp.zeros(3, "int32")], {"dp": sk.Partial()}, mesh)
      >>> sk.from_unreduced(sk.to_unreduced(x))
      PartialArray(int32[3], dp=Partial('sum'))
    """
    if not isinstance(array, jax.Array):
        raise TypeError(f"from_unreduced takes a jax.Array, got {type(array).__name__}")
    _refuse_manual("from_unreduced")
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else array.sharding
    spec = getattr(sharding, "spec", None)
    if not getattr(spec, "unreduced", None):
        raise ValueError(
            f"from_unreduced: no mesh axis of this array is unreduced, it lives at {spec if spec else sharding}; "
            "a whole value becomes Partial with sk.reshard"
        )
    layout = layout_of(array).resolved(array.ndim)
    return PartialArray(linear_call(_stacked, _back, Static(layout), array), layout)


def is_unreduced(x: Any) -> bool:
    """Whether this is one of JAX's ``unreduced`` arrays."""
    if not isinstance(x, jax.Array):
        return False
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
    return bool(getattr(getattr(sharding, "spec", None), "unreduced", None))


# JAX won't let an unreduced value become a varying one (pcast), so its type isn't checked on the way (check_vma=False).
# Reverse-mode through that would add up the cotangents of all devices, hence the transpose of our own: "reduced" is
# JAX's type for the cotangent of an unreduced value, and each device keeps its own block of it.


def _stacked(static: Static, array: Any) -> jax.Array:
    return _stacker(static.value, array.ndim)(array)


def _back(static: Static, stack: Any) -> jax.Array:
    layout = static.value
    ndim = stack.ndim - len(layout.partial_axes)
    stack = jax.sharding.reshard(stack, NamedSharding(layout.mesh, layout.stack_spec(ndim)))
    return _unstacker(layout, ndim)(stack)


@functools.lru_cache(1024)
def _stacker(layout: Layout, ndim: int) -> Callable[..., Any]:
    lead = (1,) * len(layout.partial_axes)

    def body(x: Any) -> Any:
        return x.reshape(lead + x.shape)

    ins, outs = layout.spec_for(ndim), layout.stack_spec(ndim)
    return jax.jit(jax.shard_map(body, mesh=layout.mesh, in_specs=ins, out_specs=outs, check_vma=False))


@functools.lru_cache(1024)
def _unstacker(layout: Layout, ndim: int) -> Callable[..., Any]:
    lead, spec = len(layout.partial_axes), layout.stack_spec(ndim)
    own = partition_spec(spec_entries(spec)[lead:], (), "", layout.partial_axes)

    def body(stack: Any) -> Any:
        return stack.reshape(stack.shape[lead:])

    return jax.jit(jax.shard_map(body, mesh=layout.mesh, in_specs=spec, out_specs=own, check_vma=False))


def _refuse_manual(what: str) -> None:
    if manual_axes():
        raise ValueError(
            f"{what} takes whole arrays, but mesh axes {sorted(manual_axes())} are manual here (inside jax.shard_map); "
            'call it outside, or use lax.pcast(x, axes, to="unreduced")'
        )
