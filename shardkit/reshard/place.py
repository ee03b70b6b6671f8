"""Putting a whole array onto a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.arrays import Padded, pad_to
from shardkit.arrays.placing import constrain
from shardkit.meshes import check_holds_arrays, concrete_mesh, manual_axes, mesh_of, resolve_mesh
from shardkit.placements import Layout, Placements


def shard_tensor(
    x: Any,
    placements: Placements | Layout,
    mesh: Mesh | None = None,
    *,
    uneven: str = "error",
) -> Any:
    """Place an array on a mesh.

    Args:
      x: an array (NumPy or JAX, or a tracer inside jit). A ``Padded`` is placed by its logical value. A
        ``jax.ShapeDtypeStruct`` stays one, with its sharding: so arrays are described on ``sk.target_mesh``.
      placements: any form that ``sk.Layout`` takes.
      mesh: else the mesh of a ``Layout``/``NamedSharding``, of ``x``, or the ambient one.
      uneven: what to do with a dim its mesh axes don't divide: "error", or "pad" to get an
        ``sk.Padded`` (with "pad" the result is a ``Padded`` even where the sizes divide).

    Returns:
      A ``jax.Array`` with the NamedSharding of ``placements``, or a ``Padded``.

    Raises:
      ValueError: sizes that don't divide (names the dim, the sizes and ``uneven="pad"``), dim out of
        range, unknown axis, a Partial placement (a whole value holds no contributions), an axis that is
        manual here, values for a mesh that is only described.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"sp": 1})
      >>> sk.shard_tensor(jnp.ones((2, 6)), {"sp": sk.Shard(1)}, mesh).sharding.spec
      P(None, 'sp')
    """
    if uneven not in ("error", "pad"):
        raise ValueError(f'uneven={uneven!r} is unknown; use "error" or "pad"')
    if isinstance(placements, Layout | NamedSharding) and mesh is None:
        mesh = placements.mesh  # type: ignore[assignment]
    where = concrete_mesh(resolve_mesh(mesh, x, what="shard_tensor"))
    layout = Layout(where, placements)
    if layout.partial_axes:
        raise ValueError(
            f"shard_tensor places whole values, but the placements are Partial over {layout.partial_axes}; use Shard "
            "or Replicate there, then sk.reshard (or sk.from_local, if you have contributions)"
        )
    taken = [a for axes in layout.dim_axes(np.ndim(x)).values() for a in axes if a in manual_axes()]
    if taken:
        raise ValueError(
            f"shard_tensor places whole arrays, but mesh axes {taken} are manual here (inside jax.shard_map), where a "
            "value is one device's block; call it outside, and let in_specs cut"
        )
    if isinstance(x, Padded):
        x = x.value
    if not hasattr(x, "shape"):
        x = jax.numpy.asarray(x)
    shape = tuple(x.shape)
    layout.local_shape(shape, uneven=uneven)  # refuses what doesn't divide
    spec = layout.spec_for(len(shape))
    padded = layout.padded_shape(shape)
    array: Any
    if isinstance(x, jax.ShapeDtypeStruct):
        array = x.update(shape=padded, sharding=NamedSharding(where, spec))
    elif isinstance(where, Mesh) and not isinstance(x, Tracer):
        check_holds_arrays(where, "shard_tensor")
        sharding = NamedSharding(where, spec)
        if isinstance(x, np.ndarray) and shape != padded:
            # From the host each device is sent its own block only.
            x = np.pad(x, [(0, new - old) for new, old in zip(padded, shape, strict=True)])
        array = jax.device_put(x, sharding) if x.shape == padded else _pad_and_place(x, padded, sharding)
        if isinstance(array, Tracer):  # a constant under jit, which device_put leaves to the compiler
            array = constrain(array, where, spec)
    else:
        array = constrain(pad_to(x, padded), where, spec)
    return Padded(array, shape) if uneven == "pad" else array


@functools.lru_cache(1024)
def _padder(shape: tuple[int, ...], sharding: NamedSharding):
    return jax.jit(lambda x: constrain(pad_to(x, shape), sharding.mesh, sharding.spec), out_shardings=sharding)


def _pad_and_place(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    source = mesh_of(x)
    if isinstance(x, jax.Array) and source != sharding.mesh:
        # jit refuses arguments committed to other devices; the host or one device is a fine source.
        x = jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return _padder(shape, sharding)(x)
