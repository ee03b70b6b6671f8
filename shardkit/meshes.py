"""Meshes: making one, and finding the one a call should use."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import operator
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardkit.placements import Layout

_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}


def make_mesh(
    axes: Mapping[str, int],
    *,
    axis_types: str | AxisType | Mapping[str, str | AxisType] = "auto",
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh from axis names and sizes.

    Args:
      axes: size of each axis, major first. One size may be -1: whatever devices are left.
      axis_types: "auto" (the compiler places values; Flax models run unchanged), "explicit"
        (placements are part of the types), or a mapping by axis name.
      devices: the devices to use; by default all (the first ones, if the sizes need fewer), in the
        order that ``jax.make_mesh`` finds best for the hardware.

    Returns:
      A ``jax.sharding.Mesh``.

    Raises:
      ValueError: no axes, a size below 1, more than one -1, sizes that don't fit the devices, an unknown axis type.
      TypeError: axes that are no mapping.

    Example:
      >>> import shardkit as sk
      >>> dict(sk.make_mesh({"dp": 1, "sp": 1}).shape)
      {'dp': 1, 'sp': 1}
    """
    available = len(devices) if devices is not None else jax.device_count()
    alone = _launched_alone()
    sizes = fill_sizes(axes, available, f"; {alone}" if alone else "")
    needed = math.prod(sizes.values())
    if needed > available:
        cure = alone or (
            f'on a CPU, simulate them with jax.config.update("jax_num_cpu_devices", {needed}) before JAX is first used'
        )
        raise ValueError(f"mesh {dict(axes)} needs {needed} devices, but there are {available}; {cure}")
    if devices is not None and needed != available:
        raise ValueError(f"mesh {dict(axes)} needs {needed} devices, but {available} were given in devices=")
    types = axis_types_of(axis_types, tuple(sizes))
    names, shape = tuple(sizes), tuple(sizes.values())
    try:
        return jax.make_mesh(shape, names, axis_types=types, devices=devices)
    except NotImplementedError:
        # No way to give each axis whole dims of a TPU's torus (16 x 16 as 128 x 2): some are split between axes.
        chosen = jax.devices()[:needed] if devices is None else devices
        order = mesh_utils.create_device_mesh(shape, chosen, allow_split_physical_axes=True)
        return Mesh(order, names, axis_types=types)


def _launched_alone() -> str | None:
    """What to do in a process that our launcher started as one of several, and that sees its own devices alone."""
    processes = os.environ.get("SHARDKIT_NUM_PROCESSES", "1")
    if processes == "1" or jax.distributed.is_initialized():
        return None
    return (
        f"this process is one of {processes} that python -m shardkit.launch started, and isn't connected to the "
        "others: call sk.initialize() first in the script, before JAX is used"
    )


def fill_sizes(axes: Mapping[str, int], available: int, reason: str = "") -> dict[str, int]:
    """Sizes of the axes of a mesh, checked, with -1 filled in.

    Args:
      axes: as given by the user.
      available: the devices that a size of -1 shares in.
      reason: of there being so few, if one is known: the end of the error that says so.

    Raises:
      TypeError, ValueError: as ``make_mesh``; but sizes may come to more than the devices available.

    Example:
      >>> fill_sizes({"dp": 2, "sp": -1}, 8)
      {'dp': 2, 'sp': 4}
    """
    if not axes:
        raise ValueError('make_mesh needs at least one axis, e.g. make_mesh({"dp": -1})')
    if not isinstance(axes, Mapping):
        raise TypeError(f'make_mesh takes a mapping of axis name to size, e.g. {{"dp": 2}}, got {axes!r}')
    bad = {name: size for name, size in axes.items() if not _is_size(size)}
    if bad:
        raise ValueError(f"mesh axis sizes must be positive integers, or -1 for the rest; got {bad}")
    sizes = {name: operator.index(size) for name, size in axes.items()}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"only one mesh axis can be -1, got {free}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if available % fixed:
            raise ValueError(
                f"{available} devices can't be split into {dict(axes)}: the fixed axes take {fixed}, which does "
                f"not divide {available}{reason}"
            )
        sizes[free[0]] = available // fixed
    return sizes


def _is_size(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and (value == -1 or value >= 1)


def axis_types_of(given: Any, names: tuple[str, ...]) -> tuple[AxisType, ...]:
    """One ``AxisType`` an axis, from any of the forms that ``make_mesh`` takes."""

    def one(value: Any) -> AxisType:
        if isinstance(value, AxisType):
            return value
        if value not in _AXIS_TYPES:
            raise ValueError(f"axis type {value!r} is unknown; use one of {sorted(_AXIS_TYPES)}")
        return _AXIS_TYPES[value]

    if isinstance(given, Mapping):
        unknown = [n for n in given if n not in names]
        if unknown:
            raise ValueError(f"axis_types names {unknown}, but the axes are {names}")
        return tuple(one(given.get(name, "auto")) for name in names)
    return (one(given),) * len(names)


def sub_mesh(mesh: Mesh, **index: int) -> Mesh:
    """The devices at fixed positions of some axes, as a mesh over the other axes.

    Args:
      mesh: the whole mesh.
      **index: the position, from 0, on each axis that is to go, by its name.

    Returns:
      A ``jax.sharding.Mesh`` over the axes that are left, of the types they had.

    Raises:
      ValueError: an axis or a position that the mesh doesn't have, or no axis is left.

    Example:
      >>> import shardkit as sk
      >>> sk.sub_mesh(sk.make_mesh({"stage": 1, "dp": 1}), stage=0).axis_names
      ('dp',)
    """
    devices, names, types = mesh.devices, list(mesh.axis_names), list(mesh.axis_types)
    for name, position in index.items():
        if name not in names:
            raise ValueError(f"the mesh has no axis {name!r}; it has {tuple(mesh.axis_names)}")
        axis = names.index(name)
        if not 0 <= position < devices.shape[axis]:
            raise ValueError(f"axis {name!r} has size {devices.shape[axis]}, so there's no position {position}")
        devices = devices.take(position, axis=axis)
        del names[axis], types[axis]
    if not names:
        raise ValueError("a sub-mesh keeps at least one axis")
    return Mesh(devices, tuple(names), axis_types=tuple(types))


def ambient_mesh() -> Mesh | AbstractMesh | None:
    """The mesh set by ``jax.set_mesh`` (or of the enclosing shard_map), if any."""
    abstract = jax.sharding.get_abstract_mesh()
    return None if abstract.empty else abstract


def no_ambient_mesh() -> contextlib.AbstractContextManager[Any]:
    """Under ``jax.set_mesh`` JAX refuses operations on single-device arrays; an empty mesh lifts that."""
    if ambient_mesh() is None:
        return contextlib.nullcontext()
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def concrete_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The devices behind an abstract mesh, where it's the ambient one and we're outside jit; else the mesh itself."""
    if isinstance(mesh, Mesh):
        return mesh
    try:
        ambient = jax.sharding.get_mesh()
    except ValueError:  # under jit, where no device may be named
        return mesh
    return ambient if not ambient.empty and ambient.abstract_mesh == mesh else mesh


def manual_axes() -> frozenset[str]:
    """Mesh axes that an enclosing shard_map has already made manual here."""
    abstract = jax.sharding.get_abstract_mesh()
    return frozenset(() if abstract.empty else abstract.manual_axes)


@functools.lru_cache(256)
def holds_arrays(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices are real: of a mesh that is only described (``sk.target_mesh``, abstract) they aren't."""
    if not isinstance(mesh, Mesh):
        return False
    device = mesh.devices.flat[0]
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:  # no such platform here
        return False


def check_holds_arrays(mesh: Mesh | AbstractMesh, what: str) -> None:
    """Refuses values for devices that are only described.

    Raises:
      ValueError: what to give instead.
    """
    if isinstance(mesh, Mesh) and not holds_arrays(mesh):
        raise ValueError(
            f"{what}: the devices of mesh {dict(mesh.shape)} are only described (sk.target_mesh) and hold no values; "
            "give shapes, jax.ShapeDtypeStruct(shape, dtype), which come back with their shardings"
        )


def mesh_of(x: Any) -> Mesh | AbstractMesh | None:
    """The mesh an array lives on, where it says so."""
    if not isinstance(x, jax.Array):
        layout = getattr(x, "layout", None)
        if isinstance(layout, Layout):  # PartialArray: even a traced one may know its devices
            return layout.mesh if isinstance(layout.mesh, Mesh) else mesh_of(x.stack) or layout.mesh
        inner = getattr(x, "array", None)  # Padded
        if inner is not None:
            return mesh_of(inner)
    if isinstance(x, Tracer):
        sharding = jax.typeof(x).sharding
        mesh = getattr(sharding, "mesh", None)
        return None if mesh is None or mesh.empty else mesh
    sharding = getattr(x, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def platform_of(mesh: AbstractMesh | Mesh) -> str:
    """ "cpu", "gpu", "tpu", ... of a mesh, concrete or abstract."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    device = getattr(mesh, "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


_stand_in: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("stand_in", default=None)


@contextlib.contextmanager
def standing_in(mesh: Mesh | None) -> Generator[None]:
    """Functions of this library that are bound to a mesh of the same axes take ``mesh``, to be compiled for it."""
    token = _stand_in.set(mesh)
    try:
        yield
    finally:
        _stand_in.reset(token)


def or_stand_in(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh, or the one that stands in for those of its axes."""
    other = _stand_in.get()
    if other is None or set(mesh.axis_names) != set(other.axis_names):
        return mesh
    # Abstract: JAX keeps traces by that, so that one for a kind of devices must not name some of them.
    return other.abstract_mesh


def resolve_mesh(mesh: Mesh | AbstractMesh | None, *values: Any, what: str) -> Mesh | AbstractMesh:
    """The mesh a function should use: its argument, else its arrays', else the ambient one.

    Inside a shard_map the ambient (abstract) mesh knows which axes are manual, so it wins over a
    concrete mesh of the same axes.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{what}: mesh must be a jax.sharding.Mesh (sk.make_mesh makes one), got {mesh!r}")
    if isinstance(mesh, Mesh) and mesh.size and not hasattr(mesh.devices.flat[0], "platform"):
        raise TypeError(
            f"{what}: mesh must hold devices, as sk.make_mesh({dict(mesh.shape)}) makes it; this jax.sharding.Mesh was "
            f"made of {type(mesh.devices.flat[0]).__name__}s"
        )
    ambient = ambient_mesh()
    if ambient is not None and ambient.manual_axes:
        if mesh is not None and dict(mesh.shape) != dict(ambient.shape):
            raise ValueError(
                f"{what}: mesh={dict(mesh.shape)} was given inside a shard_map over mesh {dict(ambient.shape)}; "
                "leave mesh out there"
            )
        return ambient
    if mesh is not None:
        return or_stand_in(mesh)
    for value in values:
        found = mesh_of(value)
        if found is not None:
            return or_stand_in(found)
    if ambient is not None:
        return ambient
    raise ValueError(
        f"{what} found no mesh: not in mesh=, not on its array arguments (place them with sk.shard_tensor), and "
        "none is ambient (jax.set_mesh(mesh))"
    )
