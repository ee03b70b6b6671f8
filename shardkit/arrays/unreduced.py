"""JAX's own ``unreduced`` arrays to ``PartialArray`` and back: the same buffers under another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._compat import partition_spec, spec_entries
from shardkit.arrays.partial import PartialArray
from shardkit.meshes import manual_axes
from shardkit.placements import Layout, layout_of


def to_unreduced(partial: PartialArray) -> jax.Array:
    """A ``PartialArray`` as one of JAX's ``unreduced`` arrays; nothing is communicated.

    Differentiable for sums. A max or min, which only newer JAX can name, must be concrete: JAX has no operation
    that makes one under ``jit``.

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

    def body(stack: Any) -> Any:
        return lax.pcast(stack.reshape(stack.shape[lead:]), layout.partial_axes, to="unreduced")

    stack_spec = layout.stack_spec(ndim)
    # Under jit: op by op, JAX can't run a pcast to unreduced.
    return jax.jit(jax.shard_map(body, mesh=layout.mesh, in_specs=stack_spec, out_specs=spec))(partial.stack)


def _rewrapped(partial: PartialArray, spec: PartitionSpec) -> jax.Array:
    stack, lead, mesh = partial.stack, len(partial.layout.partial_axes), partial.layout.mesh
    if isinstance(stack, Tracer) or not isinstance(mesh, Mesh):
        raise ValueError(
            f"to_unreduced: under jit and grad JAX can only make unreduced sums, not a {partial.layout.reduce}; "
            "call it outside, or reduce first: sk.reshard(x, ...)"
        )
    blocks = [s.data.reshape(s.data.shape[lead:]) for s in stack.addressable_shards]
    return jax.make_array_from_single_device_arrays(partial.shape, NamedSharding(mesh, spec), blocks)


def from_unreduced(array: jax.Array) -> PartialArray:
    """One of JAX's ``unreduced`` arrays as a ``PartialArray``; nothing is communicated.

    Linear, and its own gradient: the cotangent of each contribution goes back to the device that holds it.

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
    return PartialArray(linear_call(_stacked, _back, _Static(layout), array), layout)


@jax.tree_util.register_static
class _Static:
    """A layout where JAX expects a pytree of arrays."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.layout == other.layout

    def __hash__(self) -> int:
        return hash(self.layout)


# JAX won't let an unreduced value become a varying one (pcast), so its type isn't checked on the way (check_vma=False).
# Reverse-mode through that would add up the cotangents of all devices, hence the transpose of our own: "reduced" is
# JAX's type for the cotangent of an unreduced value, and each device keeps its own block of it.


def _stacked(static: _Static, array: Any) -> jax.Array:
    layout, lead = static.layout, len(static.layout.partial_axes)
    return _relabelled(
        lambda x: x.reshape((1,) * lead + x.shape), layout, layout.spec_for(array.ndim), layout.stack_spec(array.ndim)
    )(array)


def _back(static: _Static, stack: Any) -> jax.Array:
    layout, lead = static.layout, len(static.layout.partial_axes)
    spec = layout.stack_spec(stack.ndim - lead)
    own = partition_spec(spec_entries(spec)[lead:], (), "", layout.partial_axes)
    stack = jax.sharding.reshard(stack, NamedSharding(layout.mesh, spec))
    return _relabelled(lambda s: s.reshape(s.shape[lead:]), layout, spec, own)(stack)


def _relabelled(body: Callable, layout: Layout, in_specs: PartitionSpec, out_specs: PartitionSpec) -> Callable:
    return jax.jit(jax.shard_map(body, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def _refuse_manual(what: str) -> None:
    if manual_axes():
        raise ValueError(
            f"{what} takes whole arrays, but mesh axes {sorted(manual_axes())} are manual here (inside jax.shard_map); "
            'call it outside, or use lax.pcast(x, axes, to="unreduced")'
        )
