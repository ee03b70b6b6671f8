"""Putting a whole array onto a mesh, and taking it back whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import Padded, pad_shape, pad_to
from shardkit.meshes import mesh_of, resolve_mesh
from shardkit.placements import Layout, Placements, axes_size, uneven_error


def shard_tensor(
    x: Any,
    placements: Placements | Layout,
    mesh: Mesh | None = None,
    *,
    uneven: str = "error",
) -> Any:
    """Place an array on a mesh.

    Args:
      x: an array (NumPy or JAX, or a tracer inside jit). A ``Padded`` is placed by its logical value.
      placements: any form that ``sk.Layout`` takes.
      mesh: else the mesh of a ``Layout``/``NamedSharding``, of ``x``, or the ambient one.
      uneven: what to do with a dim its mesh axes don't divide: "error", or "pad" to get an
        ``sk.Padded`` (with "pad" the result is a ``Padded`` even where the sizes divide).

    Returns:
      A ``jax.Array`` with the NamedSharding of ``placements``, or a ``Padded``.

    Raises:
      ValueError: sizes that don't divide (names the dim, the sizes and ``uneven="pad"``), dim out of
        range, unknown axis, a Partial placement (a whole value holds no contributions).

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> sk.shard_tensor(jnp.ones((2, 6)), {"sp": sk.Shard(1)}, mesh).sharding.spec
      PartitionSpec(None, 'sp')
    """
    if uneven not in ("error", "pad"):
        raise ValueError(f'uneven={uneven!r} is unknown; use "error" or "pad"')
    if isinstance(placements, Layout | NamedSharding) and mesh is None:
        mesh = placements.mesh  # type: ignore[assignment]
    mesh = resolve_mesh(mesh, x, what="shard_tensor")  # type: ignore[assignment]
    layout = Layout(mesh, placements)
    if layout.partial_axes:
        raise ValueError(
            f"shard_tensor places whole values, but the placements are Partial over {layout.partial_axes}; "
            "use Shard or Replicate there"
        )
    if isinstance(x, Padded):
        x = x.value
    if not hasattr(x, "shape"):
        x = jax.numpy.asarray(x)
    shape = tuple(x.shape)
    parts = {}
    for dim, axes in layout.dim_axes(len(shape)).items():
        parts[dim] = axes_size(mesh, axes)
        if shape[dim] % parts[dim] and uneven == "error":
            raise uneven_error(dim, shape, axes, parts[dim])
    spec = layout.spec_for(len(shape))
    padded = pad_shape(shape, parts)
    if isinstance(mesh, Mesh) and not isinstance(x, jax.core.Tracer):
        sharding = NamedSharding(mesh, spec)
        # Under jit the whole padded array never exists on one device; device_put needs even shapes.
        array = jax.device_put(x, sharding) if padded == shape else _pad_and_place(x, padded, sharding)
    else:
        array = place_traced(pad_to(x, padded), mesh, spec)
    return Padded(array, shape) if uneven == "pad" else array


@functools.cache
def _padder(shape: tuple[int, ...], sharding: NamedSharding):
    return jax.jit(lambda x: place_traced(pad_to(x, shape), sharding.mesh, sharding.spec), out_shardings=sharding)


def _pad_and_place(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    source = mesh_of(x)
    if source is not None and source != sharding.mesh or source is None and isinstance(x, jax.Array):
        # jit refuses arguments committed to other devices; the host or one device is a fine source.
        x = jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return _padder(shape, sharding)(x)


def place_traced(x: Any, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Inside a traced function: constrain on Auto axes, reshard on Explicit ones."""
    sharding = NamedSharding(mesh, spec)
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def unshard(x: Any) -> jax.Array:
    """The whole array on every device of its mesh (or as it is, where it is on one device).

    Args:
      x: a ``jax.Array`` or ``Padded``.

    Returns:
      An array of the logical shape, replicated.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = sk.shard_tensor(jnp.arange(5), {"sp": sk.Shard(0)}, sk.make_mesh({"sp": 1}), uneven="pad")
      >>> sk.unshard(x).shape
      (5,)
    """
    array = x.array if isinstance(x, Padded) else x
    mesh = mesh_of(array)
    if mesh is not None:
        if isinstance(array, jax.core.Tracer):
            array = place_traced(array, mesh, PartitionSpec(*[None] * array.ndim))
        else:
            array = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*[None] * array.ndim)))  # type: ignore[arg-type]
    return Padded(array, x.logical_shape).value if isinstance(x, Padded) else array
