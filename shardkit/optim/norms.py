"""Global norms over trees whose leaves live in different ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from shardkit import scopes
from shardkit._compat import varying_axes
from shardkit.arrays import Padded, PartialArray, is_whole
from shardkit.meshes import manual_axes


def global_norm(tree: Any) -> jax.Array:
    """The square root of the sum of all squares, as ``optax.tree.norm`` has it on one device.

    Partial leaves are reduced first (their parts' squares don't add up to the square of the sum), those of sharded
    leaves are summed over exactly the axes that cut them, replicated leaves count once. Outside manual regions this is
    so because arrays are whole there; inside, a leaf whose type varies over a manual axis is one device's part.

    Args:
      tree: of arrays, ``Padded`` and ``PartialArray``.

    Returns:
      A scalar, the same on every device; 0 for a tree without leaves.

    Raises:
      ValueError: inside ``jax.shard_map(..., check_vma=False)``, where types don't tell parts from copies.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> float(sk.global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
      5.0
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_whole)
    return _in_one_program(_norm, leaves) if leaves else jnp.zeros(())


def _norm(leaves: Sequence[Any]) -> jax.Array:
    leaves = [_whole(x) for x in leaves]
    manual = manual_axes()
    if not manual:
        return jnp.sqrt(sum(_squares(x) for x in leaves))
    _check_types(manual)
    # One sum for all leaves that are cut by the same axes.
    parts: dict[tuple[str, ...], Any] = {}
    for x in leaves:
        axes = tuple(sorted(varying_axes(x) & manual))
        parts[axes] = parts.get(axes, 0) + _squares(x)
    with scopes.scope(scopes.REDUCTION):
        return jnp.sqrt(sum(lax.psum(value, axes) if axes else value for axes, value in parts.items()))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm`` for updates of any placement; Partial ones come out reduced.

    Updates whose norm (``sk.global_norm``) is larger are multiplied by ``max_norm / norm``: R. Pascanu, T. Mikolov,
    Y. Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, https://arxiv.org/abs/1211.5063.

    Args:
      max_norm: the largest global norm of the updates that is left as it is.

    Returns:
      An ``optax.GradientTransformation`` without state.

    Raises:
      ValueError: in ``update``, inside ``jax.shard_map(..., check_vma=False)``.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> tx = sk.clip_by_global_norm(1.0)
      >>> updates, _ = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init({"w": jnp.zeros(2)}))
      >>> [round(x, 4) for x in updates["w"].tolist()]
      [0.6, 0.8]
    """

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def clipped(leaves: Sequence[Any]) -> list[Any]:
        reduced = [x.reduce() if isinstance(x, PartialArray) else x for x in leaves]
        norm = global_norm(reduced)
        # As optax does it: exact where the norm is small enough.
        small = norm < max_norm
        return jax.tree.map(lambda x: jnp.where(small, x, (x / norm.astype(x.dtype)) * max_norm), reduced)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, structure = jax.tree.flatten(updates, is_leaf=is_whole)
        return jax.tree.unflatten(structure, _in_one_program(clipped, leaves)), state

    return optax.GradientTransformation(init, update)


def all_finite(tree: Any) -> jax.Array:
    """Whether no leaf has an infinity or NaN, on any device.

    Of a Partial leaf it's the reduced value that counts, which may overflow where no contribution does.

    Args:
      tree: of arrays, ``Padded`` and ``PartialArray``; integers and bools are finite.

    Returns:
      A bool scalar, the same on every device.

    Raises:
      ValueError: inside ``jax.shard_map(..., check_vma=False)``, where types don't tell parts from copies.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> bool(sk.all_finite([jnp.ones(3), jnp.array([jnp.nan])]))
      False
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_whole)
    return _in_one_program(_finite, leaves) if leaves else jnp.array(True)


def _finite(leaves: Sequence[Any]) -> jax.Array:
    leaves = [x for x in map(_whole, leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not leaves:
        return jnp.array(True)
    bad = _total([jnp.any(~jnp.isfinite(x)).astype(jnp.int32) for x in leaves], leaves)
    return bad == 0


def _in_one_program(fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """``fun`` of leaves, eagerly compiled as a whole.

    One by one its operations would be some hundred programs with collectives, more than XLA before 0.12 can have under
    way on simulated devices (``shardkit.cli.known_bad``).
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(leaves)):
        return fun(leaves)
    return jax.jit(fun)(leaves)


def _total(counts: Sequence[jax.Array], leaves: Sequence[jax.Array]) -> jax.Array:
    manual = manual_axes()
    if not manual:
        return sum(counts[1:], counts[0])
    _check_types(manual)
    axes = tuple(sorted(frozenset().union(*(varying_axes(x) for x in leaves)) & manual))
    total = sum(counts[1:], counts[0])
    with scopes.scope(scopes.REDUCTION):
        return lax.psum(total, axes) if axes else total


def _check_types(manual: Collection[str]) -> None:
    """Refuses a region whose types don't say what varies: a part would be taken for the whole."""
    if not varying_axes(lax.pcast(jnp.zeros(()), tuple(sorted(manual)), to="varying")):
        raise ValueError(
            "global_norm, clip_by_global_norm and all_finite can't tell parts from copies inside "
            "jax.shard_map(..., check_vma=False); leave check_vma on, or call them outside"
        )


def _whole(x: Any) -> jax.Array:
    if isinstance(x, PartialArray):
        x = x.reduce()
    return x.value if isinstance(x, Padded) else jnp.asarray(x)


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.real(x) ** 2 + jnp.imag(x) ** 2) if jnp.iscomplexobj(x) else jnp.sum(x * x)
