"""Mean and variance over dims that are sharded: sums and counts, never a mean of means."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from shardkit.spatial.exchange import Index
from shardkit.spatial.operands import as_array
from shardkit.spatial.reduction import Reduction, reduce_dims


def moments(
    x: Any,
    axis: int | Sequence[int],
    *,
    spatial_axes: Mapping[Any, Any],
    keepdims: bool = False,
    dtype: Any = None,
    fast_variance: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
) -> tuple[Any, Any]:
    """Mean and variance of an array sharded in space, as batch, instance and group norms need them.

    Every device adds up its own elements (those of padded tails excluded), one all-reduce adds the
    sums, and the totals are divided by the number of logical elements. With ``fast_variance`` that
    one all-reduce carries both sums, and ``var = E[|x|^2] - |E[x]|^2``, clipped at zero; otherwise the
    variance is of the differences to the mean, in a second all-reduce. Both forms are those of Flax's
    norms (``use_fast_variance``); the norms are batch (https://arxiv.org/abs/1502.03167), layer
    (https://arxiv.org/abs/1607.06450) and group norm (https://arxiv.org/abs/1803.08494).

    Args:
      x: an array or ``sk.Padded``; inside a manual region this device's block.
      axis: array dims to reduce.
      spatial_axes: which mesh axis cuts which array dim, ``{"sp": 2}``; "D", "H", "W" name the dims of
        a channels-last array (``...DHWC``).
      keepdims: keep reduced dims with size 1.
      dtype: at least this precision is used; never below float32.
      fast_variance: True: one all-reduce; False: two, and less rounding where the mean is large.
      mesh: else the mesh of ``x``, else the ambient one.

    Returns:
      (mean, var), of the shape of ``x`` without the reduced dims, replicated over the reduced mesh axes.
      Dims that are cut but not reduced stay cut; where one of them doesn't divide and the mesh is Explicit,
      they are ``Padded``.

    Raises:
      ValueError: a dim out of range or given twice, no element to average, a block of a Padded whose
        place in the whole isn't known.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mean, var = sk.moments(jnp.arange(6.0).reshape(1, 6, 1), (0, 1), spatial_axes={"sp": 1},
      ...                        mesh=sk.make_mesh({"sp": 1}))
      >>> float(mean[0])
      2.5
    """
    x = as_array(x)
    dtype = jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32)
    mean, var = reduce_dims(
        _Moments(dtype, fast_variance),
        x,
        axis,
        spatial_axes=spatial_axes,
        keepdims=keepdims,
        mesh=mesh,
        what="moments",
        verb="average",
    )
    return mean, var


@dataclasses.dataclass(frozen=True)
class _Moments:
    dtype: Any
    fast_variance: bool

    def __call__(self, reduction: Reduction, at: Sequence[Index], block: Array) -> tuple[Array, Array]:
        def total(values: Array) -> Array:
            return values.sum(reduction.axis, keepdims=True)

        # Cleared before anything else, too: a NaN in a tail would come back through the derivative of its square.
        x = reduction.clear(block.astype(self.dtype), at)
        if self.fast_variance:
            first, second = total(x), total(abs_squared(x))
            both = reduction.psum(jnp.stack([first, second.astype(first.dtype)]))
            mean, square = both[0] / reduction.count, jnp.real(both[1]) / reduction.count
            return mean, jnp.maximum(square - abs_squared(mean), 0)
        mean = reduction.psum(total(x)) / reduction.count
        squares = reduction.clear(abs_squared(x - mean), at)
        return mean, reduction.psum(total(squares)) / reduction.count


def abs_squared(x: Array) -> Array:
    """``|x|^2``, real also of complex numbers."""
    return jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else x * x
