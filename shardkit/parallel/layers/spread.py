"""Batch norms of a batch that several devices share: in a loss of ``sk.value_and_grad`` each has its part.

On one device the statistics are those of the whole batch, so they are averaged over the axes that cut it, and a model
has the same loss on any mesh.
"""

from __future__ import annotations

import contextlib
from typing import Any

from jax import lax
from jax import numpy as jnp

from shardkit._compat import varying_axes
from shardkit.optim.batch import batch_cut
from shardkit.parallel.layers.operands import array_of
from shardkit.parallel.layers.setting import setting
from shardkit.spatial.moments import abs_squared
from shardkit.varying import varying


def read_call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool | None, Any]:
    """Input, whether running averages are taken, and mask of a call of a batch norm, or of a class made of one.

    What stands where Flax's arguments do, or has their names, is taken for these.
    """
    x, *others = args or (kwargs.get("x"),)
    given = others[0] if others else kwargs.get("use_running_average")
    return x, layer.use_running_average if given is None else given, kwargs.get("mask")


def spread_over(layer: Any, x: Any, frozen: bool | None, mask: Any = None) -> Any:
    """The axes to average a batch norm's statistics over.

    Args:
      layer: of nnx or linen.
      x: its input.
      frozen: it takes running averages, no statistics.
      mask: that it's called with.

    Returns:
      Its own ``axis_name``, and the axes that cut the batch, of those that ``x`` isn't the same along; None where there
      are none.

    Raises:
      NotImplementedError: a mask, with which parts of the batch count differently.
    """
    own = layer.axis_name
    if frozen or (own is not None and layer.axis_index_groups is not None):
        return own
    names = () if own is None else _names(own)
    varies = varying_axes(array_of(x))
    more = tuple(axis for axis in batch_cut() if axis not in names and axis in varies)
    if mask is not None and any(lax.axis_size(axis) > 1 for axis in more):
        raise NotImplementedError(
            f"BatchNorm with a mask in sk.value_and_grad over {more}: devices count different numbers of elements, "
            "whose means can't be averaged; use jax.value_and_grad in the step (sk.shard_optimizer takes its gradients)"
        )
    return (*names, *more) if more else own


def averaging(layer: Any, x: Any, frozen: bool | None, mask: Any) -> contextlib.AbstractContextManager[None]:
    """Flax's own batch norm averages its statistics over these axes meanwhile."""
    return setting(layer, "axis_name", spread_over(layer, x, frozen, mask))


def averaged(mean: Any, var: Any, axes: Any, fast_variance: bool) -> tuple[Any, Any]:
    """Mean and variance of the whole batch from those of equal parts, in one all-reduce or, more exactly, in two.

    In float32 at least. (XLA on CPU stops at sums of shorter floats beside an Auto axis: cast what comes back to the
    devices, for derivatives are summed there, by ``on_parts``.)

    Args:
      mean, var: of the part.
      axes: an axis, or several. Along batch axes that cut no more than what the part's own have been reduced over, they
        are the same already.
      fast_variance: ``E[|x|^2] - |E[x]|^2``.
    """
    names = tuple(axis for axis in _names(axes) if axis not in batch_cut() or axis in varying_axes(mean))
    if not names:
        return mean, var
    mean, var = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (mean, var))
    if fast_variance:
        both = lax.pmean(jnp.stack([mean, var + abs_squared(mean)]), names)
        return both[0], jnp.maximum(jnp.real(both[1]) - abs_squared(both[0]), 0)
    whole = lax.pmean(mean, names)
    return whole, lax.pmean(var + abs_squared(mean - whole), names)


def on_parts(statistic: Any, x: Any, dtype: Any) -> Any:
    """A statistic of the whole batch, on each device for its part ``x``, in a dtype."""
    return varying(statistic, sorted(varying_axes(array_of(x)) & {*batch_cut()})).astype(dtype)


def _names(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)
