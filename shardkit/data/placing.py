"""From blocks in a process's memory to arrays on the mesh; nothing is communicated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardkit.data import parts
from shardkit.data.cuts import cut_of, owners_of
from shardkit.meshes import check_holds_arrays, no_ambient_mesh
from shardkit.placements import Layout

BlockOf = Callable[[parts.Block], np.ndarray]


def put(arrays: Sequence[tuple[Layout, tuple[int, ...], BlockOf]]) -> list[jax.Array]:
    """Global arrays from the blocks of this process's devices, all sent off in one go.

    Args:
      arrays: of each its layout (which knows its rank), the sizes of a block, and a function that gives a block. What
        it gives must be nobody else's: devices of the host use the same memory where they can.
    """
    sent: list[Any] = []
    devices: list[Any] = []
    counts = []
    for layout, _, block_of in arrays:
        mesh: Any = layout.mesh
        check_holds_arrays(mesh, "shard_batch")
        mine = _mine(mesh)
        blocks = cut_of(layout).blocks
        made = {block: block_of(block) for block in dict.fromkeys(blocks[p] for p in mine)}
        sent += [made[blocks[p]] for p in mine]
        devices += [mesh.devices.flat[p] for p in mine]
        counts.append(len(mine))
    with no_ambient_mesh():
        on_devices = iter(jax.device_put(sent, devices))
    found = []
    for (layout, sizes, _), count in zip(arrays, counts, strict=True):
        given = cut_of(layout)
        shape = tuple(size * n for size, n in zip(sizes, given.counts, strict=True))
        sharding = NamedSharding(layout.mesh, layout.spec_for(len(shape)))  # type: ignore[arg-type]
        blocks = [next(on_devices) for _ in range(count)]
        found.append(jax.make_array_from_single_device_arrays(shape, sharding, blocks))
    return found


def _mine(mesh: Mesh) -> list[int]:
    me = jax.process_index()
    return [position for position, process in enumerate(owners_of(mesh)) if process == me]
