"""Local response normalization of arrays sharded in space."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardkit.spatial.block_op import At, channels_last_letters
from shardkit.spatial.exchange import clear_tail
from shardkit.spatial.operands import as_array
from shardkit.spatial.pooling.reduce_window import WindowReduction
from shardkit.spatial.pooling.window_args import read_call
from shardkit.spatial.windows import Window


def ring_local_response_norm(
    x: Any,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
    *,
    axis: int | Sequence[int] = -1,
    spatial_axes: Mapping[Any, Any],
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    """``x / (k + alpha * mean(x**2 over neighbours))**beta``: neighbours compete.

    Source: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet Classification with Deep Convolutional Neural Networks",
    NIPS 2012, section 3.3 (which adds up where this takes the mean).

    The mean is over ``size`` elements in each dim of ``axis``, ``size // 2`` of them before an element and
    ``(size - 1) // 2`` after it, zeros beyond the ends, and always divides by ``size**len(axis)``; along channels
    that is ``torch.nn.LocalResponseNorm``, whose ``alpha`` is divided by ``size`` too. Along a sharded dim thin
    halos travel; along channels nothing does.

    Args:
      x: an array or ``sk.Padded``, channels last; inside a manual region this device's block.
      size: neighbours along each dim of ``axis``, the element itself among them.
      alpha, beta, k: the numbers of the formula.
      axis: array dims to look along, the channels by default.
      spatial_axes: which mesh axis cuts which array dim, ``{"sp": 2}`` or ``{"sp": "W"}``.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      An array of the shape and dtype of ``x``, sharded as it is; of a ``Padded`` a ``Padded``.

    Raises:
      ValueError: a size below 1, a dim out of range or given twice, an empty dim.
      TypeError: integers.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> sk.ring_local_response_norm(jnp.ones((1, 2, 3)), 3, alpha=3.0, beta=1.0, spatial_axes={"sp": "W"},
      ...                          mesh=sk.make_mesh({"sp": 1}))[0, 0]
      Array([0.33333334, 0.25      , 0.33333334], dtype=float32)
    """
    what = "ring_local_response_norm"
    x = as_array(x)
    try:
        size = operator.index(size)
    except TypeError:
        raise ValueError(f"{what}: size={size!r} must be an integer, of at least 1") from None
    if size < 1:
        raise ValueError(f"{what}: size={size} must be at least 1")
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"{what}: x holds {x.dtype}; cast it to a floating dtype first")
    given = tuple(operator.index(d) for d in ((axis,) if isinstance(axis, int | np.integer) else tuple(axis)))
    if not given or any(not -x.ndim <= d < x.ndim for d in given):
        raise ValueError(f"{what}: axis={axis} must name dims of an array with {x.ndim} dims")
    dims = {d % x.ndim for d in given}
    if len(dims) != len(given):
        raise ValueError(f"{what}: axis={axis} names a dim twice")

    def windows_of(sizes: Sequence[int]) -> list[Window]:
        return [
            Window(s, size, 1, size // 2, (size - 1) // 2) if d in dims else Window(s, 1) for d, s in enumerate(sizes)
        ]

    call = read_call(
        x,
        windows_of,
        dict.fromkeys(range(x.ndim), "zeros"),
        spatial_axes=spatial_axes,
        mesh=mesh,
        letters=channels_last_letters(x.ndim),
        what=what,
    )
    cuts = tuple((d, c.size, c.shards) for d, c in call.operand.cuts.items())
    total = WindowReduction(call.dims, lax.add)
    return call.run(_ResponseNorm(total, size ** len(dims), float(alpha), float(beta), float(k), cuts))


@dataclasses.dataclass(frozen=True)
class _ResponseNorm:
    total: WindowReduction
    count: int
    alpha: float
    beta: float
    k: float
    cuts: tuple[tuple[int, int, int], ...]  # (dim, size, shards)

    def __call__(self, at: At, block: Array) -> Array:
        # Tails must not only be left out of the sums: a NaN there, or a zero below the power, would come back
        # through the derivative.
        def cleared(x: Array, fill: float) -> Array:
            for dim, size, shards in self.cuts:
                x = clear_tail(x, size, shards, at[dim], dim, fill)
            return x

        x = cleared(block, 0)
        squares = x * jnp.conj(x) if jnp.iscomplexobj(x) else x * x
        scale = self.k + self.alpha * (self.total(at, squares) / self.count)
        return x / cleared(scale, 1) ** self.beta
