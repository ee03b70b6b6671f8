"""The halo exchange by itself, for code written inside ``shard_map``."""

from __future__ import annotations

import operator

from jax import Array, lax

from shardkit.meshes import manual_axes
from shardkit.spatial.exchange import clear_tail, cut_span, join, receive
from shardkit.spatial.windows import PADDING_MODES, block_size, shard_halo


def halo_exchange(
    x: Array,
    axis_name: str | tuple[str, ...],
    dim: int,
    before: int,
    after: int,
    *,
    mode: str = "zeros",
    size: int | None = None,
) -> Array:
    """Extend this device's block by elements of its neighbours. Call it inside ``shard_map``.

    With blocks of ``b`` elements, shard ``i`` gets elements ``[i*b - before, (i+1)*b + after)`` of the
    dim, continued over both ends as ``mode`` says. Halos wider than a block take several hops. The
    gradient is the reverse exchange with addition. Source: R. Hewett, T. Grady, "A Linear Algebraic
    Approach to Model Parallelism in Deep Learning", https://arxiv.org/abs/2006.03108.

    Args:
      x: this device's block, of any shape; ``b`` elements in ``dim``.
      axis_name: the mesh axis (or axes, major first) that cuts the dim; must be manual here.
      dim: the array dim, negative counts from the last.
      before, after: elements to add on either side, >= 0.
      mode: "zeros", "circular", "reflect" (edge not repeated) or "replicate".
      size: logical elements of the dim over all shards, where blocks are padded; by default every
        block is full. Elements of the padded tail never reach a result or a gradient.

    Returns:
      The block with ``before + after`` more elements in ``dim``.

    Raises:
      ValueError: called outside shard_map, an axis that isn't manual, sizes that don't fit.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = sk.make_mesh({"sp": 1})  # the neighbour around the ring is the device itself
      >>> f = lambda b: sk.halo_exchange(b, "sp", 0, 1, 1, mode="circular")
      >>> jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("sp"), out_specs=P("sp")))(jnp.arange(3))
      Array([2, 0, 1, 2, 0], dtype=int32)
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    missing = [n for n in names if n not in manual_axes()]
    if missing:
        raise ValueError(
            f"halo_exchange works on blocks inside jax.shard_map, but mesh axis {missing} is not manual here "
            f"(manual axes: {sorted(manual_axes())}); call it in a function under jax.shard_map(..., "
            f"axis_names={{{', '.join(map(repr, names))}}}), or use sk.ring_conv, which does that itself"
        )
    if mode not in PADDING_MODES:
        raise ValueError(f"halo_exchange: mode={mode!r} is unknown; use one of {PADDING_MODES}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"halo_exchange: dim={dim} is out of range for a block with {x.ndim} dims")
    before, after = operator.index(before), operator.index(after)
    if before < 0 or after < 0:
        raise ValueError(f"halo_exchange: before={before} and after={after} must not be negative; slice instead")
    dim %= x.ndim
    axis = names[0] if len(names) == 1 else names
    shards = lax.axis_size(axis)
    block = x.shape[dim]
    size = block * shards if size is None else operator.index(size)
    if size < 1 or block_size(size, shards) != block:
        raise ValueError(
            f"halo_exchange: size={size} over {shards} shards makes blocks of {block_size(max(size, 0), shards)} "
            f"elements, but the block has {block} in dim {dim}; pad each block to ceil(size / shards)"
        )
    if mode == "reflect" and max(before, after) >= size > 1:
        raise ValueError(f"halo_exchange: reflect needs halos ({before}, {after}) narrower than the size {size}")
    exchange = shard_halo(size, shards, before, after, mode)
    index = lax.axis_index(axis)
    x = clear_tail(x, size, shards, index, dim)
    line = join(x, receive(x, exchange, axis, index, dim), exchange, index, dim)
    return cut_span(line, exchange, index, dim)
