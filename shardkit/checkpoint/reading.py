"""Arrays of a checkpoint read to where a target has them, whatever mesh they were written from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardkit.checkpoint.describing import Description
from shardkit.checkpoint.errors import CheckpointError
from shardkit.checkpoint.slots import Path, Slot, name_of
from shardkit.checkpoint.writing import arrays_handler, is_written, nested
from shardkit.meshes import no_ambient_mesh


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one array is read.

    Attributes:
      shape: that is read: from the start of what is stored; zeros beyond its end.
      dtype: of what is stored.
      sharding: where to; None: into this process's memory.
      finish: makes the target's array of it.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    finish: Callable[[Any], Any]


def plans(pairs: Sequence[tuple[Description, Slot]]) -> dict[Path, Reading]:
    """How arrays are to be read, by path.

    Args:
      pairs: what is stored, and the slot of the target that it goes to. Their shapes agree.

    Raises:
      ValueError: a target's mesh has no devices.
    """
    return {slot.path: _plan(description, slot) for description, slot in pairs}


def read_arrays(directory: Any, how_to: dict[Path, Reading], stored: Sequence[Description]) -> dict[Path, Any]:
    """What the slots are to hold, by path.

    Args:
      directory: of the checkpoint.
      how_to: of ``plans``.
      stored: all that the checkpoint holds.

    Raises:
      CheckpointError: orbax can't read them.
    """
    with no_ambient_mesh():  # targets may be on others
        return _read_arrays(directory, how_to, stored)


def _read_arrays(directory: Any, how_to: dict[Path, Reading], stored: Sequence[Description]) -> dict[Path, Any]:
    unwritten = {tuple(d["path"]) for d in stored if d["kind"] in ("array", "key") and not is_written(d)}
    found = {path: reading.finish(_nothing(reading)) for path, reading in how_to.items() if path in unwritten}
    wanted = {path: reading for path, reading in how_to.items() if path not in unwritten}
    if wanted:
        # All that is there must be named; what isn't wanted isn't read.
        names = [tuple(d["path"]) for d in stored if d["kind"] in ("array", "key") and is_written(d)]
        item = nested([(path, 0 if path in wanted else ocp.PLACEHOLDER) for path in names])
        how = nested([(path, _argument(wanted.get(path))) for path in names])
        try:
            with ocp.Checkpointer(arrays_handler()) as reader:
                tree = reader.restore(directory, args=ocp.args.PyTreeRestore(item=item, restore_args=how))
        except (OSError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            raise CheckpointError(
                f"the arrays of {directory} could not be read, and nothing was restored: {text[:400]}"
            ) from error
        for path, reading in wanted.items():
            found[path] = reading.finish(_at(tree, path))
    return found


def _argument(reading: Reading | None) -> ocp.RestoreArgs:
    if reading is None or reading.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=reading.sharding, global_shape=reading.shape, strict=False)


def _at(tree: Any, path: Path) -> Any:
    for key in _keys(path):
        tree = tree[key]
    return tree


def _keys(path: Path) -> list[str]:
    inner = nested([(path, None)])
    keys = []
    while isinstance(inner, dict):
        ((key, inner),) = inner.items()
        keys.append(key)
    return keys


def _plan(stored: Description, slot: Slot) -> Reading:
    x = slot.value
    sharding = getattr(x, "sharding", None)
    held, logical, flat = tuple(x.shape), tuple(stored["shape"]), (stored["layout"] == "flat", slot.layout == "flat")
    if stored["kind"] == "key":
        return _keys_plan(stored, slot)
    if not isinstance(sharding, NamedSharding):
        return Reading(tuple(stored["held"]), x.dtype, None, lambda found: _at_home(_cropped(found, logical, held), x))
    mesh, spec = _auto(sharding.mesh, slot), sharding.spec
    there = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
    if flat[0] == flat[1]:
        return Reading(held, x.dtype, there, lambda found: _labelled(found, sharding))
    if flat[0]:  # a row, which becomes the array: read in equal parts
        total = math.prod(mesh.shape.values())
        size = -(-math.prod(logical) // total) * total
        parts = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return Reading(
            (size,), x.dtype, parts, lambda found: _labelled(_from_row(found, logical, held, there), sharding)
        )
    whole = NamedSharding(mesh, PartitionSpec())
    return Reading(logical, x.dtype, whole, lambda found: _labelled(_to_row(found, held, there), sharding))


def _keys_plan(stored: Description, slot: Slot) -> Reading:
    x, sharding = slot.value, getattr(slot.value, "sharding", None)
    made, impl = jax.random.wrap_key_data, stored["impl"]
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    if not isinstance(sharding, NamedSharding):
        return Reading(data.shape, data.dtype, None, lambda found: _at_home(made(jnp.asarray(found), impl=impl), x))
    there = NamedSharding(_auto(sharding.mesh, slot), sharding.spec)
    wrap = jax.jit(lambda found: made(found, impl=impl), out_shardings=sharding)
    return Reading(
        data.shape, data.dtype, there, lambda found: wrap(_labelled(found, NamedSharding(sharding.mesh, there.spec)))
    )


def _cropped(found: Any, logical: tuple[int, ...], held: tuple[int, ...]) -> np.ndarray:
    """An array in this process's memory, as the target holds it."""
    found = np.asarray(found)
    if found.ndim != len(logical):  # a row
        found = found.ravel()[: math.prod(logical)].reshape(logical)
    found = found[tuple(slice(0, size) for size in logical)]
    if len(held) != len(logical):
        found = found.ravel()
    if found.shape == held:
        return found
    return np.pad(found, [(0, new - old) for new, old in zip(held, found.shape, strict=True)])


def _at_home(found: Any, x: Any) -> Any:
    """An array that no mesh holds, as the target's is: NumPy's, or on its device."""
    if isinstance(x, np.generic):
        return x.dtype.type(found)
    if isinstance(x, np.ndarray):
        return np.asarray(found, x.dtype)
    sharding = getattr(x, "sharding", None)
    pinned = sharding is not None and (not isinstance(sharding, SingleDeviceSharding) or getattr(x, "committed", True))
    return jax.device_put(found, sharding) if pinned else jnp.asarray(found)


def _nothing(reading: Reading) -> Any:
    """What an array without elements, of which nothing was written, is read as."""
    nothing = np.zeros(reading.shape, reading.dtype)
    if reading.sharding is None:
        return nothing
    return jax.make_array_from_callback(reading.shape, reading.sharding, lambda index: nothing[index])


def _auto(mesh: Any, slot: Slot) -> Mesh:
    """The same devices with Auto axes, which is what orbax restores to."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"{name_of(slot.path)}: the target's mesh is abstract, {dict(mesh.shape)}; "
            "give a sharding on a mesh of devices"
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _labelled(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same blocks under the target's own sharding, axis types and all."""
    if x.sharding == sharding and x.sharding.mesh.axis_types == sharding.mesh.axis_types:  # type: ignore[union-attr]
        return x
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, [s.data for s in x.addressable_shards], dtype=x.dtype
    )


def _from_row(row: jax.Array, logical: tuple[int, ...], held: tuple[int, ...], there: NamedSharding) -> jax.Array:
    def shape(row: jax.Array) -> jax.Array:
        return _padded(row[: math.prod(logical)].reshape(logical), held)

    return _run(shape, row, there)


def _to_row(x: jax.Array, held: tuple[int, ...], there: NamedSharding) -> jax.Array:
    return _run(lambda x: _padded(x.ravel(), held), x, there)


def _run(fun: Callable[[jax.Array], jax.Array], x: jax.Array, there: NamedSharding) -> jax.Array:
    with jax.set_mesh(there.mesh):  # type: ignore[arg-type]  # an ambient mesh of the caller's may have other axis types
        return jax.jit(fun, out_shardings=there)(x)


def _padded(x: jax.Array, held: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, new - old) for new, old in zip(held, x.shape, strict=True)])
