"""Pooling over whole dims: a local reduction, then one all-reduce of the small result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardkit import scopes
from shardkit.spatial.exchange import Index
from shardkit.spatial.operands import as_array
from shardkit.spatial.pooling.reduce_window import identity
from shardkit.spatial.reduction import Reduction, reduce_dims

REDUCTIONS = ("mean", "sum", "max", "min")


def ring_global_pool(
    x: Any,
    reduce: str = "mean",
    axis: int | Sequence[int] | None = None,
    *,
    spatial_axes: Mapping[Any, Any],
    keepdims: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    """Mean, sum, maximum or minimum over dims that are sharded in space, as ``jnp`` has them.

    Every device reduces its own elements (those of padded tails excluded), and one all-reduce of the
    small result combines them. A maximum's gradient is shared equally by all elements that attain it,
    wherever they are, as in ``jnp.max``.

    Args:
      x: an array or ``sk.Padded``, channels last; inside a manual region this device's block.
      reduce: "mean", "sum", "max" or "min".
      axis: array dims to reduce; by default all between the first and the last.
      spatial_axes: which mesh axis cuts which array dim, ``{"sp": 2}`` or ``{"sp": "W"}``.
      keepdims: keep reduced dims with size 1.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      The result, of the dtype ``jnp`` gives it (16-bit means and sums are computed in float32), replicated
      over the reduced mesh axes. Dims that are cut but not reduced stay cut; where one of them doesn't
      divide and the mesh is Explicit, a ``Padded``.

    Raises:
      ValueError: an unknown reduction, a dim out of range or given twice, nothing to reduce.
      TypeError: a maximum or minimum of complex numbers.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> x = jnp.arange(8.0).reshape(1, 2, 4, 1)
      >>> sk.ring_global_pool(x, "max", spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": 1}))
      Array([[7.]], dtype=float32)
    """
    what = "ring_global_pool"
    x = as_array(x)
    if reduce not in REDUCTIONS:
        raise ValueError(f"{what}: reduce={reduce!r} is unknown; use one of {REDUCTIONS}")
    if axis is None:
        if x.ndim < 3:
            raise ValueError(
                f"{what}: shape {tuple(x.shape)} has no dims between the first (batch) and the last (features); "
                "say which to reduce with axis="
            )
        axis = tuple(range(1, x.ndim - 1))
    local = _Extreme(reduce == "max") if reduce in ("max", "min") else _Sum(reduce == "mean")
    (out,) = reduce_dims(
        local, x, axis, spatial_axes=spatial_axes, keepdims=keepdims, mesh=mesh, what=what, verb="reduce"
    )
    return out


@dataclasses.dataclass(frozen=True)
class _Sum:
    mean: bool

    def __call__(self, reduction: Reduction, at: Sequence[Index], block: Array) -> tuple[Array]:
        scalar = jax.ShapeDtypeStruct((1,), block.dtype)
        dtype = jax.eval_shape(jnp.mean if self.mean else jnp.sum, scalar).dtype
        wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
        x = reduction.clear(block, at).astype(wide)
        total = reduction.psum(x.sum(reduction.axis, keepdims=True))
        return ((total / reduction.count if self.mean else total).astype(dtype),)


@dataclasses.dataclass(frozen=True)
class _Extreme:
    largest: bool

    def __call__(self, reduction: Reduction, at: Sequence[Index], block: Array) -> tuple[Array]:
        if jnp.issubdtype(block.dtype, jnp.complexfloating):
            raise TypeError(f"ring_global_pool: complex numbers ({np.dtype(block.dtype)}) have no order to pool by")
        fill = identity(lax.max if self.largest else lax.min, block.dtype)
        return (extreme(self.largest, reduction, reduction.clear(block, at, fill)),)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def extreme(largest: bool, reduction: Reduction, x: Array) -> Array:
    local = (jnp.max if largest else jnp.min)(x, reduction.axis, keepdims=True)
    if not reduction.axis_names:
        return local
    with scopes.scope(scopes.REDUCTION):
        if x.dtype == np.bool_:  # pmax of booleans: as bytes
            return _combine(largest, reduction, local.astype(np.int8)).astype(np.bool_)
        return _combine(largest, reduction, local)


def _combine(largest: bool, reduction: Reduction, x: Array) -> Array:
    combine = functools.partial(lax.pmax if largest else lax.pmin, axis_name=reduction.axis_names)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return combine(x)
    # A NaN wins, as in jnp.max; an all-reduce may drop it, so the same one carries a flag too.
    lost = x != x
    both = combine(jnp.stack([x, jnp.where(lost, 1 if largest else -1, 0).astype(x.dtype)]))
    return jnp.where(both[1] != 0, jnp.asarray(jnp.nan, x.dtype), both[0])


@extreme.defjvp
def _extreme_jvp(largest: bool, reduction: Reduction, primals: Any, tangents: Any) -> Any:
    """As jnp: the mean of the tangents of all elements that attain the extreme. pmax has no rule of its own."""
    (x,), (dx,) = primals, tangents
    out = extreme(largest, reduction, x)
    attains = (x == out).astype(out.dtype)
    count = reduction.psum(attains.sum(reduction.axis, keepdims=True))
    return out, reduction.psum((dx * attains).sum(reduction.axis, keepdims=True)) / count
