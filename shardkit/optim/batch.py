"""How the arguments of a loss enter each device: which leaves the batch axes cut, and by which dim."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.placements import AnyMesh, entry_names


def read_batch_axes(batch_axes: str | Sequence[str] | Mapping[str, int], mesh: AnyMesh) -> dict[str, int]:
    """The dim of batch leaves that each axis cuts, in mesh-axis order.

    Args:
      batch_axes: axis names, which all cut dim 0, or a mapping from names to dims.
      mesh: the mesh.

    Raises:
      ValueError: no axis, one that the mesh doesn't have, a negative dim.
    """
    if isinstance(batch_axes, str):
        batch_axes = (batch_axes,)
    given = dict(batch_axes) if isinstance(batch_axes, Mapping) else dict.fromkeys(batch_axes, 0)
    unknown = [name for name in given if name not in mesh.axis_names]
    if unknown or not given:
        raise ValueError(
            f"batch_axes={batch_axes!r}: name at least one of the mesh's axes {tuple(mesh.axis_names)}"
            + (f"; {unknown} are none of them" if unknown else "")
        )
    if any(not isinstance(dim, int) or dim < 0 for dim in given.values()):
        raise ValueError(f"batch_axes={batch_axes!r}: dims count from the front, 0 is the first")
    return {name: given[name] for name in mesh.axis_names if name in given}


# What layers read of it is traced into jitted and checkpointed functions, of which JAX keeps the traces: it's part of
# their key.
_trace = jax.make_user_context(None)
_cut: contextvars.ContextVar[Mapping[str, int] | None] = contextvars.ContextVar("shardkit_batch_cut", default=None)


def batch_cut() -> Mapping[str, int]:
    """Which dim of the batch each mesh axis cuts, within a loss of ``value_and_grad``; nothing outside of one."""
    return _cut.get() or {}


@contextlib.contextmanager
def cutting(axes: Mapping[str, int]) -> Generator[None]:
    """What ``batch_cut`` gives while a loss is traced.

    Example:
      >>> with cutting({"dp": 0}):
      ...     print(batch_cut())
      {'dp': 0}
    """
    token = _cut.set(axes)
    try:
        with _trace(tuple(axes.items())):
            yield
    finally:
        _cut.reset(token)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of an argument.

    Attributes:
      kind: "batch" (cut by the batch axes), "whole" (every device has all of it), "key" (a random key, another for each
        device and microbatch) or "static" (no array).
      spec: how it enters.
      sliced: microbatches cut its dim 0.
    """

    kind: str
    spec: PartitionSpec = dataclasses.field(default_factory=PartitionSpec)
    sliced: bool = False


def read_leaf(x: Any, axes: Mapping[str, int], mesh: AnyMesh, microbatches: int) -> Leaf:
    """What becomes of one leaf of a batch argument.

    Raises:
      ValueError: a size that the axes, times the microbatches in dim 0, don't divide.
    """
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return Leaf("static")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.ndim == 0:
        return Leaf("key")
    if x.ndim == 0:
        return Leaf("whole")
    names: dict[int, list[str]] = {0: []} if axes and microbatches > 1 else {}
    for name, dim in axes.items():
        if dim < x.ndim:
            names.setdefault(dim, []).append(name)
    for dim, cutting in names.items():
        parts = int(np.prod([mesh.shape[n] for n in cutting])) * (microbatches if dim == 0 else 1)
        if x.shape[dim] % parts:
            old = x.dtype == np.uint32 and x.shape == (2,)
            hint = " (if it's a random key, make it with jax.random.key)" if old else ""
            times = f" times {microbatches} microbatches" if dim == 0 and microbatches > 1 else ""
            raise ValueError(
                f"a batch leaf of shape {x.shape} has {x.shape[dim]} elements in dim {dim}, which mesh axes {cutting} "
                f"of size {parts // (microbatches if dim == 0 else 1)}{times} do not divide; pad the batch (and weigh "
                f"the loss: return (sum, count)), or take another size{hint}"
            )
    entries = [tuple(names.get(d, ())) or None for d in range(x.ndim)]
    return Leaf("batch", PartitionSpec(*entries), 0 in names and microbatches > 1)


def entering(x: Any, spec: PartitionSpec, names: Sequence[str], mesh: AnyMesh) -> Any:
    """An array where the region expects it: on Explicit axes types say where it is, and other axes stay as they are."""
    if AxisType.Explicit not in mesh.axis_types:
        return x
    own = jax.typeof(x).sharding
    have = list(spec_entries(own.spec)) if not own.mesh.empty else []
    have += [None] * (x.ndim - len(have))
    want = list(spec_entries(spec))
    want += [None] * (x.ndim - len(want))
    entries = []
    for asked, found in zip(want, have, strict=True):
        axes = entry_names(asked) + tuple(n for n in entry_names(found) if n not in names)
        entries.append(axes or None)
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))
