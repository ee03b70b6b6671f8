"""`dynamic_loss_scale`: the loss is scaled so that short floats keep small gradients, and the scale finds itself."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardkit.arrays import PartialArray, is_unreduced, is_whole
from shardkit.optim.described import cast
from shardkit.optim.norms import all_finite


class LossScaleState(NamedTuple):
    """State of ``dynamic_loss_scale``.

    Attributes:
      scale: what the loss is to be multiplied by, a float32 scalar.
      good_steps: finite steps since the scale changed last.
      skipped: steps left out so far.
      inner: the state of the optimizer within.

    Example:
      >>> import jax.numpy as jnp, optax, shardkit as sk
      >>> state = sk.dynamic_loss_scale(optax.sgd(0.1), initial_scale=8.0).init(jnp.ones(2))
      >>> isinstance(state, sk.LossScaleState), float(state.scale), int(state.skipped)
      (True, 8.0, 0)
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner: Any


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    initial_scale: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer for gradients of ``scale * loss``, where the largest scale is sought that nothing overflows at.

    Gradients are divided by the scale, and ``tx`` runs on them. If one of them is infinite or NaN the step is left out:
    updates are zero, the state of ``tx`` stays as it was bit for bit, and the scale is divided by ``factor``. After
    ``growth_interval`` finite steps in a row it's multiplied by it. Whether gradients are finite is one scalar of
    reduced gradients, so that a step is left out on every device or on none.

    Put it inside ``sk.shard_optimizer``, which reduces gradients first: dividing each device's contribution would lose
    the small ones again. ``tx`` is to be all the rest, clipping too, which else would see scaled gradients. It sees
    float32 in place of shorter floats: its state is kept in float32, and updates come back as such
    (``optax.apply_updates`` gives them the dtype of the parameters). Extra arguments are handed on as they are.

    The algorithm is that of P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2
    (https://arxiv.org/abs/1710.03740).

    Args:
      tx: any optax transformation.
      initial_scale: the scale of the first step.
      growth_interval: so many finite steps in a row before the scale grows.
      factor: by which it grows and shrinks; powers of two round nothing.
      min_scale, max_scale: its bounds.

    Returns:
      A transformation whose state is a ``LossScaleState``; ``sk.loss_scale`` finds the scale in it.

    Raises:
      ValueError: bounds that aren't ``0 < min_scale <= initial_scale <= max_scale``, a factor of 1 or less, an
        interval below 1.
      TypeError: in ``update``, gradients that aren't reduced.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardkit as sk
      >>> tx = sk.dynamic_loss_scale(optax.sgd(0.5), initial_scale=8.0)
      >>> params = jnp.ones(2)
      >>> state = tx.init(params)
      >>> grads = jax.grad(lambda p: sk.loss_scale(state) * jnp.sum(p))(params)
      >>> updates, state = tx.update(grads, state, params)
      >>> updates.tolist(), float(sk.loss_scale(state))
      ([-0.5, -0.5], 8.0)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), state, params)
      >>> updates.tolist(), float(sk.loss_scale(state))
      ([0.0, 0.0], 4.0)
    """
    _check(initial_scale, growth_interval, factor, min_scale, max_scale)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> LossScaleState:
        zero = jnp.zeros((), jnp.int32)
        return LossScaleState(jnp.asarray(initial_scale, jnp.float32), zero, zero, tx.init(_widen(params)))

    def update(grads: Any, state: LossScaleState, params: Any = None, **extra: Any) -> tuple[Any, LossScaleState]:
        _check_reduced(grads)
        finite = all_finite(grads)
        unscaled = jax.tree.map(lambda g: g / state.scale if _is_inexact(g) else g, _widen(grads))
        # Both ways are computed and one is taken: a step that is left out is rare, and what runs under a condition the
        # compiler can't overlap with the rest.
        updates, inner = tx.update(unscaled, state.inner, None if params is None else _widen(params), **extra)
        grown = state.good_steps + 1 >= growth_interval
        larger = jnp.where(grown, jnp.minimum(state.scale * factor, max_scale), state.scale)
        smaller = jnp.maximum(state.scale / factor, min_scale)
        return jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates), LossScaleState(
            scale=jnp.where(finite, larger, smaller).astype(state.scale.dtype),
            good_steps=jnp.where(finite & ~grown, state.good_steps + 1, 0).astype(state.good_steps.dtype),
            skipped=jnp.where(finite, state.skipped, optax.safe_increment(state.skipped)),
            inner=jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner),
        )

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def loss_scale(state: Any) -> jax.Array:
    """The current scale, out of the state of an optimizer that has a ``dynamic_loss_scale`` in it.

    Args:
      state: of ``sk.shard_optimizer``, ``optax.chain`` or another, however deep the scale is in it.

    Returns:
      A float32 scalar, to multiply the loss by.

    Raises:
      ValueError: there's none in it, or several.

    Example:
      >>> import jax.numpy as jnp, optax, shardkit as sk
      >>> tx = optax.chain(sk.dynamic_loss_scale(optax.adam(1e-3)), optax.scale(0.5))
      >>> float(sk.loss_scale(tx.init(jnp.ones(2))))
      32768.0
    """
    found = _scales(state)
    if len(found) != 1:
        raise ValueError(
            f"loss_scale found {len(found) or 'no'} LossScaleState in the optimizer's state; use it with one "
            "sk.dynamic_loss_scale(tx) in the optimizer"
        )
    return found[0]


def _scales(state: Any) -> list[jax.Array]:
    own = [x for x in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(x)]
    return [scale for x in own for scale in (x.scale, *_scales(x.inner))]


def _is_state(x: Any) -> bool:
    return isinstance(x, LossScaleState)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _widen(tree: Any) -> Any:
    """Shorter floats as float32, in which small values survive the division by a scale."""

    def widen(x: Any) -> Any:
        dtype = jnp.result_type(x)
        short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return cast(x, jnp.float32) if short else x

    return jax.tree.map(widen, tree)


def _check_reduced(grads: Any) -> None:
    for x in jax.tree.leaves(grads, is_leaf=is_whole):
        if isinstance(x, PartialArray) or is_unreduced(x):
            raise TypeError(
                f"dynamic_loss_scale needs reduced gradients, but got {x!r}; put it inside: "
                "sk.shard_optimizer(sk.dynamic_loss_scale(tx), stage), or sk.reduce_gradients first"
            )


def _check(initial: float, interval: int, factor: float, low: float, high: float) -> None:
    if not 0 < low <= initial <= high < math.inf:
        raise ValueError(
            f"dynamic_loss_scale needs 0 < min_scale <= initial_scale <= max_scale, all finite, but got "
            f"min_scale={low}, initial_scale={initial}, max_scale={high}"
        )
    if not 1 < factor < math.inf:
        raise ValueError(f"dynamic_loss_scale: factor={factor} must be finite and greater than 1, as 2.0 is")
    if interval != int(interval) or interval < 1:
        raise ValueError(f"dynamic_loss_scale: growth_interval={interval} must be a whole number of steps, at least 1")
