"""The blocks that devices hold: taking an array apart (``to_local``) and putting one together (``from_local``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from shardkit.arrays.kinds import check_dtype
from shardkit.arrays.padded import Padded, pad_to
from shardkit.arrays.partial import PartialArray
from shardkit.meshes import concrete_mesh, no_ambient_mesh, resolve_mesh
from shardkit.placements import Layout, Placements, axes_size


def to_local(x: Any) -> list[jax.Array]:
    """The blocks of ``x`` on this process's devices, in mesh order; nothing moves.

    Args:
      x: a ``jax.Array``, ``Padded`` (whose tail blocks come with their padding), or ``PartialArray`` (each device's
        contribution).

    Returns:
      One single-device array a device; a replicated array gives equal ones.

    Raises:
      ValueError: a traced array.
      TypeError: anything else.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = sk.shard_tensor(jnp.arange(4), {"sp": sk.Shard(0)}, sk.make_mesh({"sp": 1}))
      >>> [b.shape for b in sk.to_local(x)]
      [(4,)]
    """
    array = x.array if isinstance(x, Padded) else x.stack if isinstance(x, PartialArray) else x
    if isinstance(array, Tracer):
        raise ValueError("to_local needs a concrete array; inside jit use jax.shard_map to see blocks")
    if not isinstance(array, jax.Array):
        raise TypeError(f"to_local takes a jax.Array, sk.Padded or sk.PartialArray, got {type(x).__name__}")
    blocks = {shard.device: shard.data for shard in array.addressable_shards}
    if isinstance(x, PartialArray):
        lead = len(x.layout.partial_axes)
        with no_ambient_mesh():
            blocks = {device: block.reshape(block.shape[lead:]) for device, block in blocks.items()}
    if isinstance(array.sharding, NamedSharding):
        devices: Any = array.sharding.mesh.devices
        return [blocks[d] for d in devices.flat if d in blocks]
    return list(blocks.values())


def from_local(
    shards: Sequence[Any] | Callable[[dict[str, int]], Any],
    placements: Placements | Layout,
    mesh: Mesh | None = None,
    *,
    global_shape: Sequence[int] | None = None,
) -> Any:
    """One array of what each device holds; nothing is communicated.

    Args:
      shards: one array a device, in mesh order (``mesh.devices.flat``); with several processes only those of this
        process's devices are looked at, the others may be None. Or a function from ``{axis name: index}`` to that
        device's array, called for this process's devices.
      placements: any form that ``sk.Layout`` takes. Along Partial axes each device brings a contribution, along
        Replicate axes the same values: that they are the same isn't checked.
      mesh: else the mesh of a ``Layout``/``NamedSharding``, or the ambient one.
      global_shape: needed where sharded dims don't divide. Each shard then has the padded block's shape
        (``ceil(size / n)``), or exactly its piece, short or empty at the end: 5 over 4 devices is 2, 2, 1, 0.

    Returns:
      A ``jax.Array``; a ``PartialArray`` where an axis is Partial; a ``Padded`` (or a ``PartialArray`` with a
      ``logical_shape``) where a dim of ``global_shape`` doesn't divide.

    Raises:
      ValueError: a wrong number of shards, shapes or dtypes that disagree, a global shape that doesn't fit, a mesh
        without devices, a tracer, Partials of two kinds.
      TypeError: the dtype doesn't have the reduction; ``shards`` is neither a sequence nor a function.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1, "sp": 1})
      >>> sk.from_local(lambda index: jnp.full((2, 3), index["dp"]), {"sp": sk.Shard(1)}, mesh).shape
      (2, 3)
    """
    if isinstance(placements, Layout | NamedSharding) and mesh is None:
        mesh = placements.mesh  # type: ignore[assignment]
    where = concrete_mesh(resolve_mesh(mesh, what="from_local"))
    if not isinstance(where, Mesh):
        raise ValueError(
            f"from_local needs the devices themselves, but mesh {dict(where.shape)} is abstract (or this is in jit); "
            "pass a jax.sharding.Mesh, and inside jit use sk.local_map"
        )
    layout = Layout(where, placements)
    held = _held(shards, where)
    _check_alike(held, where)
    first = next(iter(held.values()))
    layout = layout.resolved(first.ndim)
    if layout.reduce is not None:
        check_dtype(layout.reduce, first.dtype, "from_local")
    parts = {d: axes_size(where, axes) for d, axes in layout.dim_axes(first.ndim).items()}
    if global_shape is None:
        shape = _even_shape(held, parts, where)
    else:
        if not isinstance(global_shape, Sequence):
            raise TypeError(f"from_local: global_shape is a tuple of sizes, got {global_shape!r}")
        shape = tuple(global_shape)
        held = _padded_blocks(held, layout, shape)
    padded = layout.padded_shape(shape)
    array = _assemble(held, layout, padded)
    logical = None if padded == shape else shape
    if layout.partial_axes:
        return PartialArray(array, layout, logical)
    return array if logical is None else Padded(array, logical)


Held = Mapping[int, Any]  # position in mesh.devices.flat -> that device's array


def _held(shards: Any, mesh: Mesh) -> dict[int, Any]:
    """This process's shards by position on the mesh."""
    here = [p for p, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    if not here:
        raise ValueError(f"from_local: no device of mesh {dict(mesh.shape)} belongs to this process")
    if callable(shards):
        found = {p: shards(_index(p, mesh)) for p in here}
    else:
        if isinstance(shards, (str, Mapping)) or not (hasattr(shards, "__len__") and hasattr(shards, "__getitem__")):
            raise TypeError(
                "from_local takes a sequence of arrays in mesh order, or a function from {axis name: index} to one, "
                f"got {type(shards).__name__}"
            )
        if len(shards) != mesh.devices.size:
            raise ValueError(
                f"from_local got {len(shards)} shards for the {mesh.devices.size} devices of mesh {dict(mesh.shape)}; "
                "give one a device in mesh order (mesh.devices.flat; None for devices of other processes)"
            )
        found = {p: shards[p] for p in here}
    for position, shard in found.items():
        if shard is None:
            raise ValueError(f"from_local: the shard of {_name(position, mesh)} is None, but this process owns it")
        if isinstance(shard, Tracer):
            raise ValueError("from_local needs concrete arrays; inside jit use sk.local_map")
    return {p: s if isinstance(s, jax.Array) else np.asarray(s) for p, s in found.items()}


def _index(position: int, mesh: Mesh) -> dict[str, int]:
    place = np.unravel_index(position, mesh.devices.shape)
    return {name: int(i) for name, i in zip(mesh.axis_names, place, strict=True)}


def _name(position: int, mesh: Mesh) -> str:
    return f"device {position} {_index(position, mesh)}"


def _check_alike(held: Held, mesh: Mesh) -> None:
    """One rank and one dtype."""
    start, first = next(iter(held.items()))
    for position, shard in held.items():
        if (shard.ndim, shard.dtype) != (first.ndim, first.dtype):
            raise ValueError(
                f"from_local: the shard of {_name(position, mesh)} is {shard.dtype}{list(shard.shape)}, but that of "
                f"{_name(start, mesh)} is {first.dtype}{list(first.shape)}; all need one dtype and one rank"
            )


def _even_shape(held: Held, parts: Mapping[int, int], mesh: Mesh) -> tuple[int, ...]:
    start, first = next(iter(held.items()))
    for position, shard in held.items():
        if shard.shape != first.shape:
            raise ValueError(
                f"from_local: the shard of {_name(position, mesh)} has shape {tuple(shard.shape)}, but that of "
                f"{_name(start, mesh)} has {tuple(first.shape)}; make them equal, or say global_shape= for a dim that "
                "doesn't divide"
            )
    return tuple(size * parts.get(d, 1) for d, size in enumerate(first.shape))


def _padded_blocks(held: Held, layout: Layout, shape: tuple[int, ...]) -> dict[int, Any]:
    """The shards, each filled with zeros up to the block."""
    mesh: Any = layout.mesh
    ndim = next(iter(held.values())).ndim
    if len(shape) != ndim:
        raise ValueError(f"from_local: global_shape={shape} has {len(shape)} dims, but the shards have {ndim}")
    block = layout.local_shape(shape, uneven="pad")
    filled = {}
    for position, shard in held.items():
        piece = _piece(layout, shape, block, _index(position, mesh))
        if tuple(shard.shape) not in (block, piece):
            raise ValueError(
                f"from_local: the shard of {_name(position, mesh)} has shape {tuple(shard.shape)}; of global_shape="
                f"{shape} it holds {piece}" + ("" if piece == block else f", or padded {block}")
            )
        filled[position] = _fill(shard, block)
    return filled


def _piece(layout: Layout, shape: tuple[int, ...], block: tuple[int, ...], index: Mapping[str, int]) -> tuple[int, ...]:
    """The part of its block that counts on one device: full, short or empty."""
    piece = list(shape)
    for dim, axes in layout.dim_axes(len(shape)).items():
        place = 0
        for axis in axes:
            place = place * layout.mesh.shape[axis] + index[axis]
        piece[dim] = min(max(shape[dim] - place * block[dim], 0), block[dim])
    return tuple(piece)


def _fill(shard: Any, block: tuple[int, ...]) -> Any:
    if isinstance(shard, jax.Array):
        with no_ambient_mesh():
            return pad_to(shard, block)
    return np.pad(shard, [(0, new - old) for new, old in zip(block, shard.shape, strict=True)])


def _assemble(held: Held, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    mesh: Any = layout.mesh
    lead = len(layout.partial_axes)
    sharding = NamedSharding(mesh, layout.stack_spec(len(shape)))
    blocks = [jax.device_put(s, mesh.devices.flat[p]) for p, s in held.items()]  # stays where it is, if it's there
    if lead:
        with no_ambient_mesh():
            blocks = [jnp.reshape(b, (1,) * lead + b.shape) for b in blocks]
    sizes = tuple(mesh.shape[a] for a in layout.partial_axes)
    return jax.make_array_from_single_device_arrays(sizes + shape, sharding, blocks)
