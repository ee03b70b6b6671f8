"""``all_to_all_attention``: attention over a sequence that is cut over devices; heads are exchanged for rows."""

from __future__ import annotations

import math
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec

from shardkit.attention.all_to_all import AllToAll, own_pairs
from shardkit.attention.call import Call, entries_of, head_parts, read_call
from shardkit.attention.order import CONTIGUOUS
from shardkit.attention.region import Operands, Region
from shardkit.attention.ring import Ring
from shardkit.attention.run import Plan, drawn_shape, region_axes, run_plan, size_one
from shardkit.attention.softmax import Rule
from shardkit.attention.sweep import Sweep
from shardkit.attention.tiles import tiling
from shardkit.placements import AnyMesh, entry_names
from shardkit.spatial.operands import explicit_axes, free_axes


def all_to_all_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis: str | tuple[str, ...],
    causal: bool = False,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    dtype: Any = None,
    precision: Any = None,
    mesh: AnyMesh | None = None,
) -> Any:
    """Exact softmax attention with the sequence cut over a mesh axis; heads are exchanged for rows, and back.

    One all-to-all gives each of ``n`` devices the whole sequence of ``heads / n`` heads, one takes the result back;
    backward likewise. (Where key and value have another length, or value another head_dim, query has an exchange of its
    own.) Each device receives ``(n - 1) / n`` of its part of query, key, value and result: with as many heads of keys
    as of queries, ``n / 2`` times less than ``ring_attention``, and causal work is equal on all devices. But ``n`` has
    to divide the heads. Scores only exist tile by tile, so memory a device is O(length / n).

    Where other mesh axes are left to the compiler, an exchange is ``n - 1`` permutes of the same bytes: XLA would
    gather the operands of an all-to-all along them.

    With fewer heads of keys and values than ``n`` divides, each is repeated as often as it takes.

    Args:
      query: ``[batch..., q_length, heads, head_dim]``, an array or an ``sk.Padded``; inside a manual region of ``axis``
        this device's block.
      key, value: ``[batch..., kv_length, kv_heads, head_dim]``, where kv_heads divides heads; value may have another
        head_dim.
      axis: the mesh axis that cuts the sequences.
      causal: a row sees the columns up to its own place.
      scale: of the scores; None: ``1 / sqrt(head_dim)``.
      bias: is added to scores, broadcastable to ``[batch..., heads, q_length, kv_length]``; differentiable. A device
        takes all rows, of its heads. With one row of heads for all, every device holds all of it. Inside a manual
        region of ``axis`` it's given the device's rows, with all columns, and exchanged.
      mask: where it is False (or 0) nothing is seen; like bias. A row that sees nothing gets the mean of all values.
      dropout_rng, dropout_rate, broadcast_dropout: dropout of the weights, those that Flax drops for this key: one
        matrix ``[q_length, kv_length]`` for all of the batch and heads, of which a device holds all, a byte each; or
        one for each. Not inside a manual region of ``axis``.
      dtype: of the operands; None: the common one. Softmax and sums are in float32 at least.
      precision: of matrix products, as in ``jax.numpy.einsum``.
      mesh: else that of the arrays, else the ambient one.

    Returns:
      ``[batch..., q_length, heads, head_dim of value]``, cut over ``axis`` as query is; a ``Padded`` if query is one.

    Raises:
      ValueError: heads that ``n`` doesn't divide, shapes that don't fit, causal with different lengths, an unknown
        axis, a placement on Explicit axes that attention can't keep, dropout without a key.
      TypeError: a traced scale, an integer bias or operands, an axis that is no name.

    Reverse mode only: no ``jvp``. Source: Jacobs et al. (DeepSpeed-Ulysses), https://arxiv.org/abs/2309.14509.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> n = jax.device_count()
      >>> x = jax.random.normal(jax.random.key(0), (2, 8 * n, 2 * n, 16))
      >>> y = sk.all_to_all_attention(x, x, x, axis="sp", causal=True, mesh=sk.make_mesh({"sp": n}))
      >>> bool(jnp.allclose(y, jax.nn.dot_product_attention(x, x, x, is_causal=True), atol=1e-5))
      True
      >>> y.sharding.shard_shape(y.shape) == (2, 8, 2 * n, 16)  # a device's block
      True
    """
    call = read_call(
        query,
        key,
        value,
        axis=axis,
        causal=causal,
        scale=scale,
        bias=bias,
        mask=mask,
        order=CONTIGUOUS,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        dtype=dtype,
        precision=precision,
        mesh=mesh,
        what="all_to_all_attention",
    )
    return _run(call)


def _run(call: Call) -> Any:
    query_cut, kv_cut = call.query_cut, call.kv_cut
    shards, name = query_cut.shards, query_cut.axis_name
    batch, heads, _ = entries_of(call)
    parts = head_parts(call, heads)
    if call.heads % (parts * shards):
        others = f" that {entry_names(heads)} leave of {call.heads}" if parts > 1 else ""
        raise ValueError(
            f"{call.what}: {shards} devices along {name!r} don't divide the {call.heads // parts} heads{others}; use "
            "ring_attention, which needs no such number"
        )
    kv_heads = math.lcm(call.kv_heads, parts * shards)
    manual = call.manual
    pairs = list(call.operands[3:])
    if manual:
        index = lax.axis_index(name)
        pairs = [own_pairs(x, name, shards, kv_heads, index) for x in pairs]
    call.operands = Operands(*call.operands[:3], *pairs)
    drawn = drawn_shape(call)
    split = () if manual else (kv_heads // shards, shards, call.heads // kv_heads)
    shapes = [None if x is None else x.shape for x in (*pairs[:2],)] + [drawn]

    def pair_spec(shape: tuple[int, ...] | None) -> PartitionSpec | None:
        if shape is None:
            return None
        middle = split if shape[-3] > 1 else (1, 1, 1)
        return size_one((*shape[:-3], *middle, *shape[-2:]), [*batch, heads, name, None, None, None])

    rows = PartitionSpec(*batch, name, heads, None)
    specs = Operands(rows, rows, rows, *(None if manual else pair_spec(s) for s in shapes))
    both = (*entry_names(heads), *query_cut.axes)
    columns = PartitionSpec(*batch, None, both, None)
    whole = Ring(
        axis_name=None,
        shards=1,
        sweep=Sweep(
            rule=Rule(call.scale, 1 - call.dropout[1] if call.dropout else 1.0, call.precision),
            rows=tiling(query_cut.block * shards),
            cols=tiling(kv_cut.block * shards),
            kv_size=kv_cut.size,
        ),
        causal=call.causal,
        q_size=query_cut.size,
    )
    names = region_axes(call.mesh, query_cut)
    region = Region(
        kernel=AllToAll(name, shards, whole, by_permutes=bool(free_axes(call.mesh, set(names)))),
        cut=query_cut,
        mesh=call.mesh,
        axis_names=names,
        specs=specs,
        out=rows,
        extra=(columns, columns, columns, columns, PartitionSpec(*batch, both, None)),
    )
    held = 1 if manual else shards
    plan = Plan(
        region=region,
        dtype=call.dtype,
        repeat=kv_heads // call.kv_heads,
        rows=query_cut.block * held,
        cols=kv_cut.block * held,
        pair_rows=query_cut.block * shards,
        pair_cols=kv_cut.block * shards,
        split_heads=split,
        drawn=drawn,
        keep_prob=whole.sweep.rule.keep_prob,
        place=bool(explicit_axes(call.mesh)) and not manual,
    )
    return run_plan(plan, call, query_cut.block if manual else query_cut.size)
