"""Moving blocks between devices that no one mesh holds together."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardkit.placements import Layout
from shardkit.static import Static

Box = tuple[tuple[int, int], ...]  # begin and end in each dim


def transfer(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The same values on other devices: each receives what it lacks of its block, and no more.

    Args:
      x: an array; its dims may be padded beyond ``shape``.
      shape: logical shape.
      sharding: where to; dims it doesn't divide are padded with zeros.

    Raises:
      ValueError: under jit, whose programs run on one set of devices; or devices of another process.
    """
    return _transfer(x, shape, sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _transfer(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    if isinstance(x, Tracer):
        raise ValueError(
            f"reshard: from mesh {_mesh_text(x)} to {dict(sharding.mesh.shape)} on other devices, or in another "
            "order, under jit; one compiled program runs on one set of devices, so call sk.reshard between two jitted "
            "functions"
        )
    ours = jax.process_index()
    far = sorted({d.process_index for d in sharding.device_set | x.sharding.device_set} - {ours})
    if far:
        raise ValueError(
            f"reshard: process {ours} can't address the devices of processes {far}, between which the array would "
            "move; make both meshes over the same devices in the same order, or load the array where it's needed "
            "(sk.from_local)"
        )
    return _moved(x, shape, sharding)


def _forward(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding):
    return _transfer(x, shape, sharding), Static(x.sharding)


def _backward(shape: tuple[int, ...], sharding: NamedSharding, source: Static, cotangent: jax.Array):
    return (_transfer(cotangent, shape, source.value),)


_transfer.defvjp(_forward, _backward)


def _mesh_text(x: Any) -> str:
    mesh = jax.typeof(x).sharding.mesh
    return "the compiler's" if mesh.empty else str(dict(mesh.shape))


def _moved(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    holders: dict[Box, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        holders.setdefault(_box(shard.index, shape), []).append(shard.data)
    padded = Layout(sharding.mesh, sharding).padded_shape(shape)
    turns = {box: itertools.cycle(range(len(held))) for box, held in holders.items()}
    blocks = []
    for device, index in sharding.addressable_devices_indices_map(padded).items():
        wanted = _box(index, padded)
        block = tuple(high - low for low, high in wanted)
        pieces = []
        for box, held in holders.items():
            common = tuple(
                (max(a, c), min(b, d, size)) for (a, b), (c, d), size in zip(box, wanted, shape, strict=True)
            )
            if any(low >= high for low, high in common):
                continue
            near = [data for data in held if data.device == device]
            data = near[0] if near else held[next(turns[box])]
            cut = tuple(slice(low - at, high - at) for (low, high), (at, _) in zip(common, box, strict=True))
            piece = data if tuple(s.stop - s.start for s in cut) == data.shape else data[cut]
            pieces.append((common, jax.device_put(piece, device)))
        if len(pieces) == 1 and pieces[0][1].shape == block:
            blocks.append(pieces[0][1])
            continue
        out = jnp.zeros(block, x.dtype, device=device)
        for common, piece in pieces:
            at = tuple(slice(low - w, high - w) for (low, high), (w, _) in zip(common, wanted, strict=True))
            out = out.at[at].set(piece)
        blocks.append(out)
    return jax.make_array_from_single_device_arrays(padded, sharding, blocks)


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))
