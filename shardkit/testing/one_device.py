"""``on_one_device``: a function on whole arrays, all of them on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardkit.arrays import Padded
from shardkit.arrays.partial import is_whole
from shardkit.meshes import ambient_mesh, concrete_mesh, mesh_of, no_ambient_mesh
from shardkit.placements import Layout
from shardkit.reshard import unshard
from shardkit.spmd import Partitioned
from shardkit.testing.held import read, reduced


def on_one_device(fun: Callable[..., Any], *, keep_axes: bool = False) -> Callable[..., Any]:
    """The oracle: ``fun`` with its arguments put together on one device.

    Arguments may be placed anyhow. An ``sk.Padded`` enters as its logical value, an ``sk.PartialArray`` (or JAX's
    ``unreduced``) as its reduction. They are copies: ``fun`` may donate them.

    Args:
      fun: any function of pytrees of arrays. Of an ``sk.partition``ed one, the function that was partitioned is run.
      keep_axes: whether arguments that were on a mesh are on a mesh of the same axes, each of size 1, with the same
        placements: for a function that names axes (``sk.ring_conv(..., spatial_axes={"sp": "W"})``). Else they're
        plain arrays and no mesh is set, so that it can't name any.

    Returns:
      A function of the same arguments.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from shardkit import testing
      >>> x = sk.shard_tensor(jnp.arange(3), {"dp": sk.Shard(0)}, sk.make_mesh({"dp": 1}), uneven="pad")
      >>> testing.on_one_device(lambda x: x[::-1])(x).tolist()
      [2, 1, 0]
    """
    if isinstance(fun, Partitioned):
        fun, keep_axes = fun.__wrapped__, False  # type: ignore[attr-defined]

    @functools.wraps(fun)
    def whole(*args: Any, **kwargs: Any) -> Any:
        small = _shrunk(the_mesh(args, kwargs)) if keep_axes else None
        device = small.devices.flat[0] if small is not None else jax.local_devices()[0]
        with _around(small):
            args, kwargs = jax.tree.map(lambda x: _placed(x, small, device), (args, kwargs), is_leaf=is_whole)
            with _hint(small):
                return fun(*args, **kwargs)

    return whole


def the_mesh(*trees: Any) -> Mesh | None:
    """The mesh that arrays are on, else the ambient one."""
    found = (mesh_of(x) for x in jax.tree.leaves(trees, is_leaf=is_whole))
    mesh = next((m for m in found if isinstance(m, Mesh)), None)
    if mesh is not None or ambient_mesh() is None:
        return mesh
    ambient = concrete_mesh(ambient_mesh())  # type: ignore[arg-type]
    return ambient if isinstance(ambient, Mesh) else None


def _shrunk(mesh: Mesh | None) -> Mesh | None:
    if mesh is None:
        return None
    device = np.array(mesh.local_devices[:1], object).reshape((1,) * len(mesh.axis_names))
    return Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)


def _placed(x: Any, mesh: Mesh | None, device: Any) -> Any:
    if not (isinstance(x, jax.Array) or is_whole(x)):
        return x
    x = reduced(x)
    array = x.array if isinstance(x, Padded) else x
    where = device
    if mesh is not None and isinstance(array.sharding, NamedSharding):
        where = NamedSharding(mesh, Layout(array.sharding.mesh, array.sharding).spec_for(array.ndim))
    # By way of the host: device_put to a device leaves Explicit axes in an array's type (jax 0.10 to 0.12).
    if not array.is_fully_addressable:
        x = array = unshard(x).addressable_data(0)
    numbers = read(x).assembled()
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.device_put(
            jax.random.wrap_key_data(jax.numpy.asarray(numbers), impl=jax.random.key_impl(array)), where
        )
    return jax.device_put(numbers, where, may_alias=False)


@contextlib.contextmanager
def _around(mesh: Mesh | None) -> Generator[None]:
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    if mesh is None:
        inside = no_ambient_mesh()
    else:
        inside = jax.set_mesh(mesh) if explicit or ambient_mesh() is not None else contextlib.nullcontext()
    with inside:
        yield


@contextlib.contextmanager
def _hint(mesh: Mesh | None) -> Generator[None]:
    try:
        yield
    except Exception as err:
        where = "as plain arrays, without a mesh" if mesh is None else f"on a mesh {dict(mesh.shape)} of one device"
        err.add_note(
            f"shardkit.testing was running the function on one device, {where}, to have something to compare with. If "
            "it can't run there (a mesh or shardings are fixed in it), give a function that can: reference=..."
        )
        raise
