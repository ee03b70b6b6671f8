"""Arrays into zigzag order and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from shardkit import scopes
from shardkit.attention.order import check_zigzag, zigzag_sends
from shardkit.placements import AnyMesh
from shardkit.spatial.block_op import At, read_operand, run_block_op
from shardkit.spatial.exchange import AxisName, permute


def to_zigzag(x: Any, *, axis: str | tuple[str, ...], dim: int = 1, mesh: AnyMesh | None = None) -> Any:
    """A sequence in contiguous order, put in zigzag order: two permutes of half a block each.

    A causal mask leaves each device equal work then. Where a model has several layers of causal attention, do this
    once, to its tokens (and positions, and targets), and give the layers ``order="zigzag"``.

    Args:
      x: an array with the sequence in ``dim``; inside a manual region of ``axis`` this device's block.
      axis: the mesh axis that cuts the sequence.
      dim: the array dim, 1 for ``[batch, length, ...]``.
      mesh: else that of ``x``, else the ambient one.

    Returns:
      An array of the same shape, cut over ``axis``: device ``i`` of ``n`` holds chunks ``i`` and ``2n - 1 - i``.

    Raises:
      ValueError: ``2n`` doesn't divide the length, an unknown axis or dim, no mesh.

    Source of the order: "The Llama 3 Herd of Models", section 3.3.2, https://arxiv.org/abs/2407.21783.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> n = jax.device_count()
      >>> x = sk.to_zigzag(jnp.arange(4 * n), axis="sp", dim=0, mesh=sk.make_mesh({"sp": n}))
      >>> tuple(x.tolist()) == sk.zigzag_order(4 * n, n)
      True
    """
    return _moved(x, axis, dim, mesh, False, "to_zigzag")


def from_zigzag(x: Any, *, axis: str | tuple[str, ...], dim: int = 1, mesh: AnyMesh | None = None) -> Any:
    """The inverse of ``to_zigzag``: the sequence in contiguous order again.

    Args:
      x: an array with the sequence in ``dim``; inside a manual region of ``axis`` this device's block.
      axis: the mesh axis that cuts the sequence.
      dim: the array dim, 1 for ``[batch, length, ...]``.
      mesh: else that of ``x``, else the ambient one.

    Returns:
      An array of the same shape, cut over ``axis`` in contiguous blocks.

    Raises:
      ValueError: twice the devices don't divide the length, an unknown axis or dim, no mesh.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> n = jax.device_count()
      >>> mesh, order = sk.make_mesh({"sp": n}), jnp.array(sk.zigzag_order(2 * n, n))
      >>> sk.from_zigzag(order, axis="sp", dim=0, mesh=mesh).tolist() == list(range(2 * n))
      True
    """
    return _moved(x, axis, dim, mesh, True, "from_zigzag")


def _moved(x: Any, axis: Any, dim: int, mesh: AnyMesh | None, back: bool, what: str) -> Any:
    operand = read_operand(x, {axis: dim}, mesh, letters={}, mixed=(dim,), what=what)
    ((dim, cut),) = operand.cuts.items()
    check_zigzag(cut.size, cut.shards, what)
    op = Reorder(dim, cut.axis_name, cut.shards, back)
    return run_block_op(op, operand, operand.shape, mixed=(dim,), what=what)


@dataclasses.dataclass(frozen=True)
class Reorder:
    """What a device does: its block's halves to their places, or back."""

    dim: int
    axis_name: AxisName
    shards: int
    back: bool

    def __call__(self, at: At, block: Array) -> Array:
        if self.shards == 1:
            return block
        halves = jnp.split(block, 2, axis=self.dim)
        even = at[self.dim] % 2 == 0
        sends = zigzag_sends(self.shards)
        with scopes.scope(scopes.ATTENTION):
            if self.back:
                halves = [jnp.where(even, halves[0], halves[1]), jnp.where(even, halves[1], halves[0])]
                homes = [tuple((b, a) for a, b in pairs) for pairs in sends]
                return lax.concatenate(
                    [permute(h, self.axis_name, p) for h, p in zip(halves, homes, strict=True)], self.dim
                )
            first, second = (permute(h, self.axis_name, p) for h, p in zip(halves, sends, strict=True))
            early, late = jnp.where(even, first, second), jnp.where(even, second, first)
            return lax.concatenate([early, late], self.dim)
