"""Ring attention, what each device does: keys and values travel, queries stay.

Liu et al., https://arxiv.org/abs/2310.01889. At step ``t`` device ``i`` has the keys and values of device ``i - t``,
and sends them on while it uses them. Backward goes round once more, the other way: scores are made anew, and the
gradients of keys and values follow them, adding up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from shardkit import scopes
from shardkit.attention.region import Operands
from shardkit.attention.softmax import finish, wide
from shardkit.attention.sweep import (
    Pairs,
    Rows,
    Sweep,
    from_tiles,
    lay_pairs,
    to_tiles,
    unlay_pairs,
    zeros_wide,
)
from shardkit.attention.tiles import all_tiles, columns_after, columns_before, lower_tiles
from shardkit.attention.travel import BACKWARD, FORWARD, around, came_from, in_turn, pack, send_on, unpack
from shardkit.spatial.exchange import AxisName, clear_tail


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static part of a call.

    Attributes:
      axis_name, shards: the ring; of one device it's attention without communication.
      sweep: how a device's rows meet a block of columns.
      causal: rows see columns up to their own place.
      q_size: rows that count, over all blocks.
    """

    axis_name: AxisName
    shards: int
    sweep: Sweep
    causal: bool
    q_size: int

    @property
    def zigzag(self) -> bool:
        return self.sweep.rows.parts == 2

    def forward(self, index: Any, operands: Operands) -> tuple[Array, tuple[Array, ...]]:
        """(this device's result ``[..., q, heads, e]``, what backward needs beside it)."""
        query, key, value = self._cleared(index, operands.query, operands.key, operands.value)
        rows, cols = self.sweep.rows, self.sweep.cols
        pairs = self._pairs(operands, key.shape[-2])
        q = to_tiles(_grouped(query, key.shape[-2]), -4, rows)
        k, v = to_tiles(key, -3, cols), to_tiles(value, -3, cols)
        state = self._forward_step(0, index, q, k, v, pairs, self.sweep.start(q, v))

        def step(number: Any, carry: Any, first: bool, last: bool) -> Any:
            packed, state = in_turn(*carry)
            after = packed if last else send_on(packed, self.axis_name, self.shards, FORWARD)
            return after, self._forward_step(number, index, q, *unpack(packed), pairs, state)

        if self.shards > 1:
            packed = send_on(pack(k, v), self.axis_name, self.shards, FORWARD)
            _, state = around(self.shards, step, (packed, state))
        result, logsum = finish(state)
        if operands.mask is not None:
            mean = self._total(value.astype(result.dtype).sum(-3)) / self.sweep.kv_size
            result = jnp.where(jnp.isposinf(logsum)[..., None], mean[..., :, None, None, :], result)
        result = from_tiles(jnp.moveaxis(result, -2, -4), -4, rows)
        logsum = from_tiles(logsum, -1, rows)
        return _merged(result).astype(operands.value.dtype), (logsum.reshape(*logsum.shape[:-3], -1, logsum.shape[-1]),)

    def saved(self, operands: Operands, out: Array, extra: tuple[Array, ...]) -> tuple[Operands, Array | None, Any]:
        """What is kept for backward."""
        return operands, out, extra

    def backward(
        self, index: Any, operands: Operands, out: Array | None, extra: tuple[Array, ...], cotangent: Array
    ) -> tuple[Array, Array, Array, Array | None]:
        """Gradients of (query, key, value, bias): of this device's blocks; of bias, what its rows add."""
        assert out is not None
        query, key, value = self._cleared(index, operands.query, operands.key, operands.value)
        rows, cols, kv_heads = self.sweep.rows, self.sweep.cols, key.shape[-2]
        cotangent = clear_tail(cotangent, self.q_size, self.shards, index, cotangent.ndim - 3)
        pairs = self._pairs(operands, kv_heads)
        dtype = wide(query.dtype)
        logsum = extra[0]
        logsum = logsum.reshape(*logsum.shape[:-2], kv_heads, -1, logsum.shape[-1])
        delta = (cotangent.astype(dtype) * out.astype(dtype)).sum(-1)  # [..., q, heads]
        delta = jnp.moveaxis(delta, -2, -1).reshape(logsum.shape)
        split = _grouped(cotangent, kv_heads)
        mine = Rows(
            query=to_tiles(_grouped(query, kv_heads), -4, rows),
            cotangent=to_tiles(split, -4, rows),
            logsum=to_tiles(logsum, -1, rows),
            delta=to_tiles(delta, -1, rows),
        )
        k, v = to_tiles(key, -3, cols), to_tiles(value, -3, cols)
        zeros = zeros_wide(k), zeros_wide(v)
        sums = zeros_wide(mine.query), *zeros, None if pairs.bias is None else zeros_wide(pairs.bias)

        def step(number: Any, carry: Any, first: bool, last: bool) -> Any:
            packed, sums, for_query, for_bias = in_turn(*carry)
            after = packed if last else send_on(packed, self.axis_name, self.shards, BACKWARD)
            if not first:
                sums = send_on(sums, self.axis_name, self.shards, BACKWARD)
            start = for_query, *zeros, for_bias
            for_query, for_key, for_value, for_bias = self._backward_step(
                number, index, mine, *unpack(packed), pairs, start
            )
            return after, tuple(a + b for a, b in zip(sums, pack(for_key, for_value), strict=True)), for_query, for_bias

        # The part of a device's own rows stays at home; the rest makes n - 1 steps, the last one back home.
        if self.shards > 1:
            packed = send_on(pack(k, v), self.axis_name, self.shards, BACKWARD)
        for_query, for_key, for_value, for_bias = self._backward_step(0, index, mine, k, v, pairs, sums)
        if self.shards > 1:
            carry = packed, pack(*zeros), for_query, for_bias
            _, others, for_query, for_bias = around(self.shards, step, carry)
            others = unpack(send_on(others, self.axis_name, self.shards, BACKWARD))
            for_key, for_value = for_key + others[0], for_value + others[1]
        for_query = _merged(from_tiles(for_query, -4, rows))
        for_key, for_value = from_tiles(for_key, -3, cols), from_tiles(for_value, -3, cols)
        for_bias = unlay_pairs(for_bias, rows, cols, self.shards)
        if operands.mask is not None:
            dead = jnp.moveaxis(jnp.isposinf(logsum), -1, -3)[..., None]
            spread = self._total(jnp.where(dead, split.astype(dtype), 0).sum((-4, -2))) / self.sweep.kv_size
            for_value = for_value + spread[..., None, :, :]
        for_query, for_key, for_value = self._cleared(index, for_query, for_key, for_value)
        return (
            for_query.astype(query.dtype),
            for_key.astype(key.dtype),
            for_value.astype(value.dtype),
            None if for_bias is None or operands.bias is None else for_bias.astype(operands.bias.dtype),
        )

    def _forward_step(self, number: Any, index: Any, q: Any, k: Any, v: Any, pairs: Pairs, state: Any) -> Any:
        return self._step(
            number,
            FORWARD,
            index,
            state,
            lambda table, block, triangular, state: self.sweep.forward(table, block, triangular, q, k, v, pairs, state),
        )

    def _backward_step(self, number: Any, index: Any, rows: Rows, k: Any, v: Any, pairs: Pairs, sums: Any) -> Any:
        return self._step(
            number,
            BACKWARD,
            index,
            sums,
            lambda table, block, triangular, sums: self.sweep.backward(
                table, block, triangular, rows, k, v, pairs, sums
            ),
        )

    def _step(self, number: Any, by: int, index: Any, carry: Any, run: Any) -> Any:
        """The tiles of one step, and only those of which a causal mask leaves something."""
        rows, cols = self.sweep.rows, self.sweep.cols
        if isinstance(number, int) and number == 0:
            table = lower_tiles(rows, cols) if self.causal else all_tiles(rows, cols)
            return run(table, index, self.causal, carry)
        block = came_from(index, number, self.shards, by)
        if not self.causal:
            return run(all_tiles(rows, cols), block, False, carry)
        earlier = block < index
        if self.zigzag:
            # Equally many tiles either way.
            before, after = jnp.asarray(columns_before(rows, cols)), jnp.asarray(columns_after(rows, cols))
            return run(jnp.where(earlier, before, after).astype(jnp.int32), block, False, carry)
        return lax.cond(earlier, lambda c: run(all_tiles(rows, cols), block, False, c), lambda c: c, carry)

    def _pairs(self, operands: Operands, kv_heads: int) -> Pairs:
        rows, cols = self.sweep.rows, self.sweep.cols
        return Pairs(*(lay_pairs(x, kv_heads, rows, cols, self.shards) for x in operands[3:]))

    def _cleared(self, index: Any, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        """Zeros in what pads the sequence: times a weight of 0 it may not be NaN."""
        kv_size = self.sweep.kv_size
        return (
            clear_tail(query, self.q_size, self.shards, index, query.ndim - 3),
            clear_tail(key, kv_size, self.shards, index, key.ndim - 3),
            clear_tail(value, kv_size, self.shards, index, value.ndim - 3),
        )

    def _total(self, x: Array) -> Array:
        if self.shards == 1:
            return x
        with scopes.scope(scopes.ATTENTION):
            return lax.psum(x, self.axis_name)


def _grouped(x: Array, kv_heads: int) -> Array:
    """``[..., heads, d]`` as ``[..., kv_heads, heads of each, d]``."""
    return x.reshape(*x.shape[:-2], kv_heads, x.shape[-2] // kv_heads, x.shape[-1])


def _merged(x: Array) -> Array:
    """The inverse."""
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
