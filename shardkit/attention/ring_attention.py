"""``ring_attention``: attention over a sequence that is cut over devices; keys and values travel."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardkit.attention.call import Call, entries_of, head_parts, read_call
from shardkit.attention.order import balancing_pays, check_zigzag, zigzag_order
from shardkit.attention.region import Operands, Region
from shardkit.attention.ring import Ring
from shardkit.attention.run import Plan, drawn_shape, region_axes, run_plan, size_one
from shardkit.attention.softmax import Rule
from shardkit.attention.sweep import Sweep
from shardkit.attention.tiles import tiling
from shardkit.attention.zigzag import from_zigzag, to_zigzag
from shardkit.placements import AnyMesh
from shardkit.spatial.operands import explicit_axes

_BALANCE = ("auto", True, False)


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis: str | tuple[str, ...],
    causal: bool = False,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    order: str = "contiguous",
    balance: bool | str = "auto",
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    dtype: Any = None,
    precision: Any = None,
    mesh: AnyMesh | None = None,
) -> Any:
    """Exact softmax attention with the sequence cut over a mesh axis; keys and values go round the ring.

    A device keeps its queries. In ``n - 1`` steps it sees the keys and values of all others, each block sent on while
    the one before is used. Memory a device is O(length / n), backward too: query, key, value, result and one number
    a row and head are kept, and scores only ever exist tile by tile. Backward goes round once more.

    Each of ``n`` devices receives ``(n - 1) / n`` of keys and values forward; backward the same again, and their
    gradients in float32. Keys and values travel with their own heads, however many of query share one. They travel
    as one array, in ``n - 1`` permutes, where their shapes agree; else in twice as many.

    Args:
      query: ``[batch..., q_length, heads, head_dim]``, an array or an ``sk.Padded``; inside a manual region of ``axis``
        this device's block.
      key, value: ``[batch..., kv_length, kv_heads, head_dim]``, where kv_heads divides heads; value may have another
        head_dim.
      axis: the mesh axis that cuts the sequences. Others stay with the compiler: batch cut over "dp" or heads over "tp"
        stay so.
      causal: a row sees the columns up to its own place, in whatever ``order``. Blocks of which nothing is seen are
        skipped.
      scale: of the scores; None: ``1 / sqrt(head_dim)``.
      bias: is added to scores, broadcastable to ``[batch..., heads, q_length, kv_length]``; differentiable. A device
        takes its rows. Inside a manual region of ``axis``: those rows, with all columns.
      mask: where it is False (or 0) nothing is seen; like bias. A row that sees nothing gets the mean of all values, as
        in ``jax.nn.dot_product_attention`` and Flax.
      order: the order in which all sequences are: "contiguous", or "zigzag" (``sk.to_zigzag``). In the former a causal
        mask leaves the last device with twice the mean work, and the others wait for it.
      balance: for ``causal=True`` in contiguous order: go through zigzag order, moving query, key, value and result
        (half a block a permute, two for each, backward too). True, False, or "auto": if the sequence is long enough,
        ``(n - 1) * length / n >= 16384``, and there is neither bias, mask nor dropout.
      dropout_rng, dropout_rate, broadcast_dropout: dropout of the weights, those that Flax drops for this key: one
        matrix ``[q_length, kv_length]`` for all of the batch and heads, or one for each. A device holds its rows of it,
        a byte each. Not inside a manual region of ``axis``. The mean of a row that sees nothing isn't dropped.
      dtype: of the operands; None: the common one. Softmax and sums are in float32 at least.
      precision: of matrix products, as in ``jax.numpy.einsum``.
      mesh: else that of the arrays, else the ambient one.

    Returns:
      ``[batch..., q_length, heads, head_dim of value]``, cut over ``axis`` as query is; a ``Padded`` if query is one.
      Lengths that ``n`` doesn't divide are padded and masked; on Explicit axes such a query must be a ``Padded``.

    Raises:
      ValueError: shapes that don't fit, causal with different lengths, an unknown axis or order, a length that zigzag
        order can't cut, a placement on Explicit axes that attention can't keep, dropout without a key.
      TypeError: a traced scale, an integer bias or operands, an axis that is no name.

    Reverse mode only: no ``jvp``. Source: Liu et al., https://arxiv.org/abs/2310.01889.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> n = jax.device_count()
      >>> x = jax.random.normal(jax.random.key(0), (2, 8 * n, 4, 16))
      >>> y = sk.ring_attention(x, x, x, axis="sp", causal=True, mesh=sk.make_mesh({"sp": n}))
      >>> bool(jnp.allclose(y, jax.nn.dot_product_attention(x, x, x, is_causal=True), atol=1e-5))
      True
      >>> y.sharding.shard_shape(y.shape)  # a device's block
      (2, 8, 4, 16)
    """
    what = "ring_attention"
    call = read_call(
        query,
        key,
        value,
        axis=axis,
        causal=causal,
        scale=scale,
        bias=bias,
        mask=mask,
        order=order,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        dtype=dtype,
        precision=precision,
        mesh=mesh,
        what=what,
    )
    if balance not in _BALANCE:
        raise ValueError(f'{what}: balance={balance!r} is unknown; use "auto", True or False')
    if not _balanced(call, balance):
        return _run(call)
    moved: dict[str, Any] = {"axis": call.query_cut.axis_name, "mesh": call.mesh}
    length = query.ndim - 3
    q, k, v = (to_zigzag(x, dim=length, **moved) for x in call.operands[:3])
    pairs = [_pairs_in_zigzag(call, x) for x in call.operands[3:]]
    call.operands, call.zigzag = Operands(q, k, v, *pairs), True
    return from_zigzag(_run(call), dim=length, **moved)


def _balanced(call: Call, balance: bool | str) -> bool:
    cut = call.query_cut
    if not call.causal or call.zigzag or cut.shards == 1 or balance is False:
        return False
    if balance is True:
        check_zigzag(cut.size, cut.shards, "ring_attention(balance=True)")
        if call.dropout is not None:
            raise ValueError(
                "ring_attention: balance=True and dropout: what is dropped is drawn in the order given; give "
                'sequences in order="zigzag", or leave balance out'
            )
        return not call.padded
    plain = call.dropout is None and call.operands.bias is None and call.operands.mask is None
    return plain and not call.padded and cut.size % (2 * cut.shards) == 0 and balancing_pays(cut.block, cut.shards)


def _pairs_in_zigzag(call: Call, x: Any) -> Any:
    if x is None:
        return None
    cut = call.query_cut
    if x.shape[-2] > 1:
        x = to_zigzag(x, axis=cut.axis_name, dim=x.ndim - 2, mesh=call.mesh)
    if x.shape[-1] > 1:
        x = jnp.take(x, jnp.asarray(zigzag_order(call.kv_cut.size, cut.shards)), axis=-1)
    return x


def _run(call: Call) -> Any:
    query_cut, kv_cut, operands = call.query_cut, call.kv_cut, call.operands
    shards = query_cut.shards
    batch, heads, kv_cut_too = entries_of(call)
    parts = head_parts(call, heads)
    repeat = math.lcm(call.kv_heads, parts) // call.kv_heads if kv_cut_too else 1
    name = query_cut.axis_name
    pair_entries = [*batch, heads, name, None]
    drawn = drawn_shape(call)
    kv_spec = PartitionSpec(*batch, name, heads if kv_cut_too else None, None)
    query_spec = PartitionSpec(*batch, name, heads, None)
    specs = Operands(
        query_spec,
        kv_spec,
        kv_spec,
        *(
            None if shape is None else size_one(shape, pair_entries)
            for shape in (*(None if x is None else x.shape for x in operands[3:5]), drawn)
        ),
    )
    split = 2 if call.zigzag and call.causal else 1
    kernel = Ring(
        axis_name=name,
        shards=shards,
        sweep=Sweep(
            rule=Rule(call.scale, 1 - call.dropout[1] if call.dropout else 1.0, call.precision),
            rows=tiling(query_cut.block, split),
            cols=tiling(kv_cut.block, split),
            kv_size=kv_cut.size,
        ),
        causal=call.causal,
        q_size=query_cut.size,
    )
    region = Region(
        kernel=kernel,
        cut=query_cut,
        mesh=call.mesh,
        axis_names=region_axes(call.mesh, query_cut),
        specs=specs,
        out=query_spec,
        extra=(PartitionSpec(*batch, heads, name),),
    )
    plan = Plan(
        region=region,
        dtype=call.dtype,
        repeat=repeat,
        rows=query_cut.block * (1 if call.manual else shards),
        cols=kv_cut.block * (1 if call.manual else shards),
        pair_rows=query_cut.block * (1 if call.manual else shards),
        pair_cols=kv_cut.block * shards,
        split_heads=(),
        drawn=drawn,
        keep_prob=kernel.sweep.rule.keep_prob,
        place=bool(explicit_axes(call.mesh)) and not call.manual,
    )
    return run_plan(plan, call, query_cut.block if call.manual else query_cut.size)
