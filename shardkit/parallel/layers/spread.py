"""Batch norms of a batch that several devices share: in a loss of ``sk.value_and_grad`` each has its part.

On one device the statistics are those of the whole batch, so they are averaged over the axes that cut it, and a model
has the same loss on any mesh.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax import numpy as jnp

from shardkit.optim.batch import batch_cut


def spread_over(layer: Any, frozen: bool | None, mask: Any = None) -> Any:
    """The mesh axes to average a batch norm's statistics over.

    Args:
      layer: of nnx or linen.
      frozen: it takes running averages, no statistics.
      mask: that it's called with.

    Returns:
      Its own ``axis_name``, else the axes that cut the batch; None where there are none.

    Raises:
      NotImplementedError: a mask, with which parts of the batch count differently.
    """
    if frozen or layer.axis_name is not None:
        return layer.axis_name
    axes = tuple(batch_cut())
    if axes and mask is not None:
        raise NotImplementedError(
            f"BatchNorm with a mask in sk.value_and_grad over {axes}: devices count different numbers of elements, "
            "whose means can't be averaged; use jax.value_and_grad in the step (sk.shard_optimizer takes its gradients)"
        )
    return axes or None


def averaged(mean: Any, var: Any, axes: Any, fast_variance: bool) -> tuple[Any, Any]:
    """Mean and variance of the whole batch from those of equal parts, in one all-reduce or, more exactly, in two."""
    if fast_variance:
        both = lax.pmean(jnp.stack([mean, var + _abs_squared(mean)]), axes)
        return both[0], jnp.maximum(jnp.real(both[1]) - _abs_squared(both[0]), 0)
    whole = lax.pmean(mean, axes)
    return whole, lax.pmean(var + _abs_squared(mean - whole), axes)


def _abs_squared(x: Any) -> Any:
    return jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else x * x
