"""Parameters in a short dtype, updated through long copies that the optimizer keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardkit.optim.described import cast, is_described


class MasterWeightsState(NamedTuple):
    """State of ``master_weights``.

    Attributes:
      master: the parameters in the long dtype.
      inner: the state of the optimizer within.

    Example:
      >>> import jax.numpy as jnp, optax, shardkit as sk
      >>> state = sk.master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16))
      >>> state.master.dtype.name
      'float32'
    """

    master: Any
    inner: Any


def master_weights(tx: optax.GradientTransformation, dtype: Any = jnp.float32) -> optax.GradientTransformationExtraArgs:
    """An optimizer for parameters of a shorter dtype, which works on copies in a longer one.

    Small updates add up in the copies, where a bfloat16 parameter would round each of them away. Inside
    ``sk.shard_optimizer`` the copies are sharded like all state: with bfloat16 parameters and gradients, Adam and n
    devices, 4 + 12 / n bytes a parameter. ``gather_dtype`` there may be the parameters' own: what a rounded update
    leaves undone the next one makes up for. Wrappers that may leave a step out (``optax.apply_if_finite``) belong
    inside.

    Source: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1, https://arxiv.org/abs/1710.03740.

    Args:
      tx: any optax transformation.
      dtype: of the copies; leaves that aren't floating point, or are as long already, are as they are.

    Returns:
      A transformation that needs ``params`` in ``update``. Its updates are what takes the parameters to the copies,
      in ``dtype``; ``optax.apply_updates`` rounds once.

    Raises:
      ValueError: ``update`` without ``params``.

    Example:
      >>> import jax.numpy as jnp, optax, shardkit as sk
      >>> tx = sk.master_weights(optax.sgd(0.001))
      >>> w = jnp.ones(2, jnp.bfloat16)
      >>> state = tx.init(w)
      >>> for _ in range(8):  # each step is less than what bfloat16 tells from one
      ...     updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, w)
      ...     w = optax.apply_updates(w, updates)
      >>> w.tolist(), [round(x, 4) for x in state.master.tolist()]
      ([0.9921875, 0.9921875], [0.992, 0.992])
    """
    tx = optax.with_extra_args_support(tx)

    def long(tree: Any) -> Any:
        def one(x: Any) -> Any:
            x = x if is_described(x) else jnp.asarray(x)
            wider = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(dtype).bits > jnp.finfo(x.dtype).bits
            return cast(x, dtype) if wider else x

        return jax.tree.map(one, tree)

    def init(params: Any) -> MasterWeightsState:
        master = long(params)
        return MasterWeightsState(master, tx.init(master))

    def update(updates: Any, state: MasterWeightsState, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("master_weights: update needs the parameters; call update(grads, state, params)")
        updates, inner = tx.update(long(updates), state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        return jax.tree.map(lambda m, p: m - p.astype(m.dtype), master, params), MasterWeightsState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]
