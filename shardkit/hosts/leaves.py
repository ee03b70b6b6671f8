"""The leaves of a pytree as processes have to agree on them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from shardkit.arrays import Padded, PartialArray


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf and its path; ``Padded``, ``PartialArray`` and None are leaves."""
    found, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is None or isinstance(x, Padded | PartialArray)
    )
    return [(jax.tree_util.keystr(path) or "the value itself", leaf) for path, leaf in found]


def array_of(leaf: Any) -> Any:
    """The array that a leaf is or stands for."""
    if isinstance(leaf, Padded):
        return leaf.array
    return leaf.stack if isinstance(leaf, PartialArray) else leaf


def logical_shape(leaf: Any) -> tuple[int, ...]:
    """The sizes of its array that count."""
    if isinstance(leaf, Padded):
        return leaf.logical_shape
    if isinstance(leaf, PartialArray) and leaf.logical_shape is not None:
        return (*leaf.stack.shape[: leaf.stack.ndim - len(leaf.logical_shape)], *leaf.logical_shape)
    return tuple(array_of(leaf).shape)


def describe(leaf: Any) -> str:
    """Type, shape, placement: what has to be the same in all processes, for all of them to run the same program."""
    if isinstance(leaf, PartialArray):
        waits = f"{leaf.layout.reduce} over {', '.join(leaf.layout.partial_axes)}"
        return f"PartialArray ({waits}) for {list(leaf.shape)}: {describe(leaf.stack)}"
    if isinstance(leaf, Padded):
        return f"Padded for {list(leaf.logical_shape)}: {describe(leaf.array)}"
    if isinstance(leaf, jax.Array):
        weak = " (weak)" if leaf.aval.weak_type else ""
        return f"{leaf.dtype}{list(leaf.shape)}{weak}{_placed(leaf)}"
    if isinstance(leaf, np.ndarray | np.generic):
        return f"NumPy {leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def _placed(array: jax.Array) -> str:
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        kinds = " ".join(dict.fromkeys(kind.name for kind in mesh.axis_types))
        placed = f", {sharding.spec} on {kinds} {dict(mesh.shape)}"
        # Devices of one process's own differ in every process, as they should.
        local = array.is_fully_addressable
        return placed + ("" if local else f" of devices {_devices([d.id for d in mesh.devices.flat])}")
    return ", on one device" if isinstance(sharding, SingleDeviceSharding) else f", {type(sharding).__name__}"


def _devices(ids: list[int]) -> str:
    """Runs of consecutive numbers, as meshes mostly are."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1][1:] = [number]
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in ((run[0], run[-1]) for run in runs))
