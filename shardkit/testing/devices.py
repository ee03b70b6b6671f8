"""Simulated devices, and meshes of every size and shape over them to run tests on."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardkit.meshes import ambient_mesh, make_mesh


def simulate_devices(count: int) -> None:
    """Makes JAX see so many CPU devices: call it in ``conftest.py``, before anything uses JAX.

    Accelerators are left out, unless JAX was told which platforms to use (``JAX_PLATFORMS``).

    Args:
      count: number of devices.

    Raises:
      RuntimeError: JAX has started with another number of devices, or on another platform.
      TypeError, ValueError: not a positive number.

    Example:
      >>> import jax
      >>> from shardkit import testing
      >>> testing.simulate_devices(jax.device_count())  # as many as there are: nothing to do
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"simulate_devices takes a number of devices, such as 8; got {count!r}")
    if count < 1:
        raise ValueError(f"simulate_devices needs at least one device; got {count}")
    before = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        # JAX refuses a change once it has started, which nothing else says without starting it.
        jax.config.update("jax_num_cpu_devices", -1 if before == count else count)
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as err:
        if jax.default_backend() == "cpu" and jax.device_count() == count:
            return
        raise RuntimeError(
            f"simulate_devices({count}) came too late: JAX has already started, with {jax.device_count()} "
            f"{jax.default_backend()} device(s). Call it at the top of conftest.py, before any import or line that "
            "makes an array or asks for devices"
        ) from err
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


def meshes(
    axes: Sequence[str] = ("dp",),
    *,
    devices: Iterable[int] = (1, 2, 4, 8),
    axis_types: str | Sequence[str] = ("auto", "explicit"),
    every: bool = False,
) -> tuple[Mesh, ...]:
    """Meshes over the first 1, 2, 4 and 8 devices, to parametrize a test with.

    ``@pytest.mark.parametrize("mesh", testing.meshes(("dp", "sp")), ids=testing.mesh_id)``

    Args:
      axes: the axis names: one for 1-D meshes, two for 2-D ones, and so on.
      devices: the numbers of devices; those that aren't there are left out (one device always is).
      axis_types: "auto", "explicit", or both.
      every: all ways to split the devices over the axes. Else those that make as many axes as possible larger than
        one: 8 devices over two axes are (2, 4) and (4, 2), without (1, 8) and (8, 1).

    Returns:
      The meshes, small ones first.

    Raises:
      ValueError: no axes, one named twice, a number of devices below 1, an unknown axis type.
      TypeError: one string for the axes.

    Example:
      >>> import jax
      >>> from shardkit import testing
      >>> [testing.mesh_id(mesh) for mesh in testing.meshes(("dp", "sp"), devices=[1])]
      ['dp1-sp1', 'dp1-sp1-explicit']
    """
    if isinstance(axes, str):
        raise TypeError(f"meshes takes a sequence of axis names, such as ({axes!r},); got the string {axes!r}")
    names = tuple(axes)
    if not names or len(set(names)) < len(names):
        raise ValueError(f'meshes needs axis names that differ, such as ("dp", "sp"); got {names}')
    counts = sorted(set(devices))
    if not counts or counts[0] < 1:
        raise ValueError(f"meshes needs positive numbers of devices, such as (1, 2, 4, 8); got {counts}")
    kinds = (axis_types,) if isinstance(axis_types, str) else tuple(axis_types)
    known = jax.device_count()
    return tuple(
        make_mesh(dict(zip(names, sizes, strict=True)), axis_types=kind, devices=jax.devices()[:count])
        for count in counts
        if count <= known
        for sizes in splits(count, len(names), every=every)
        for kind in kinds
    )


def splits(count: int, ways: int, *, every: bool = False) -> list[tuple[int, ...]]:
    """How a number is the product of others, in order.

    Args:
      count: the number.
      ways: of how many numbers.
      every: all; else only those with the fewest ones.

    Example:
      >>> splits(8, 2), splits(8, 2, every=True)
      ([(2, 4), (4, 2)], [(1, 8), (2, 4), (4, 2), (8, 1)])
    """
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    found = [sizes for sizes in itertools.product(divisors, repeat=ways) if math.prod(sizes) == count]
    fewest = min(sizes.count(1) for sizes in found)
    return [sizes for sizes in found if every or sizes.count(1) == fewest]


def mesh_id(mesh: Any) -> str | None:
    """A readable id of a mesh, for pytest: "dp2-sp4", with "-explicit" (or "-mixed") where axes are.

    Args:
      mesh: a ``Mesh`` or ``AbstractMesh``, or anything else that a test is parametrized with.

    Returns:
      The id; None for what is no mesh, so that pytest makes one of its own.

    Example:
      >>> import shardkit as sk
      >>> from shardkit import testing
      >>> testing.mesh_id(sk.make_mesh({"dp": 1, "sp": 1})), testing.mesh_id("not a mesh")
      ('dp1-sp1', None)
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        return None
    sizes = "-".join(f"{name}{size}" for name, size in mesh.shape.items())
    kinds = {kind.name.lower() for kind in mesh.axis_types}
    return sizes + ("" if kinds == {"auto"} else f"-{kinds.pop() if len(kinds) == 1 else 'mixed'}")


def entered(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """``with entered(mesh):`` sets an Explicit mesh, which eager operations on its arrays need.

    Args:
      mesh: one with Explicit axes is set (``jax.set_mesh``) unless another is; an Auto one, or None, changes nothing.

    Returns:
      A context manager.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from shardkit import testing
      >>> mesh = sk.make_mesh({"dp": 1}, axis_types="explicit")
      >>> x = sk.shard_tensor(jnp.arange(4.0), {"dp": sk.Shard(0)}, mesh)
      >>> with testing.entered(mesh):
      ...     float(jnp.sum(x + 1))
      10.0
    """
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit and ambient_mesh() is None else contextlib.nullcontext()  # type: ignore[arg-type]
