"""The rows of a device against one block of columns, tile by tile: nothing the size of the block's scores exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardkit._compat import varying_axes
from shardkit.attention.softmax import Rule, State, absorb, scores, tile_gradients, wide
from shardkit.attention.tiles import Tiling
from shardkit.varying import varying

T = TypeVar("T")


class Pairs(NamedTuple):
    """What belongs to a row and a column, ``[..., K, g, rows, columns of all blocks]``; sizes of 1 are broadcast.

    Attributes:
      bias: is added to scores.
      mask: False where a row may not see a column.
      keep: False where dropout drops a weight.
    """

    bias: Array | None
    mask: Array | None
    keep: Array | None


class Rows(NamedTuple):
    """What backward knows of rows, in tiles (leading dim)."""

    query: Array
    cotangent: Array
    logsum: Array
    delta: Array


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The static part: how a device's rows meet a block of columns.

    Attributes:
      rule: how scores are made.
      rows, cols: the tiles of a block.
      kv_size: columns that count, over all blocks; the last ones may be short of it.
    """

    rule: Rule
    rows: Tiling
    cols: Tiling
    kv_size: int

    def start(self, query: Array, value: Array) -> State:
        """The state of all rows before any column. Operands in tiles."""
        count, *batch, rows, kv_heads, group, _ = query.shape
        shape = (count, *batch, kv_heads, group, rows)
        dtype, like = wide(query.dtype), varying_axes(query)
        return State(
            _full(shape, -jnp.inf, dtype, like),
            _full(shape, 0, dtype, like),
            _full((*shape, value.shape[-1]), 0, dtype, like),
        )

    def forward(
        self,
        table: Any,
        block: Any,
        triangular: bool,
        query: Array,
        key: Array,
        value: Array,
        pairs: Pairs,
        state: State,
    ) -> State:
        """The state after the tiles of ``table`` of block number ``block``."""

        def one(r: Any, c: Any, state: State) -> State:
            found, keep, _, v = self._scores(r, c, block, triangular, _at(query, r), key, value, pairs)
            new = absorb(self.rule, State(*(_at(x, r) for x in state)), found, v, keep)
            return State(*(lax.dynamic_update_index_in_dim(x, y, r, 0) for x, y in zip(state, new, strict=True)))

        return _through(table, one, state)

    def backward(
        self,
        table: Any,
        block: Any,
        triangular: bool,
        rows: Rows,
        key: Array,
        value: Array,
        pairs: Pairs,
        sums: tuple[Array, Array, Array, Array | None],
    ) -> tuple[Array, Array, Array, Array | None]:
        """Gradients of (query, key, value, bias) after the tiles of ``table``, added to ``sums``."""

        def one(r: Any, c: Any, sums: Any) -> Any:
            for_query, for_key, for_value, for_bias = sums
            q = _at(rows.query, r)
            found, keep, k, v = self._scores(r, c, block, triangular, q, key, value, pairs)
            new = tile_gradients(
                self.rule, q, k, v, found, keep, _at(rows.logsum, r), _at(rows.cotangent, r), _at(rows.delta, r)
            )
            if for_bias is not None:
                for_bias = self._add_pairs(for_bias, new.scores, r, c, block)
            return (
                _add_at(for_query, new.query, r),
                _add_at(for_key, new.key, c),
                _add_at(for_value, new.value, c),
                for_bias,
            )

        return _through(table, one, sums)

    def _scores(
        self, r: Any, c: Any, block: Any, triangular: bool, query: Array, key: Array, value: Array, pairs: Pairs
    ) -> tuple[Array, Array | None, Array, Array]:
        """(scores, what dropout keeps, keys, values) of a tile."""
        k, v = _at(key, c), _at(value, c)
        bias, mask, keep = (None if x is None else self._pair(x, r, c, block) for x in pairs)
        column = lax.broadcasted_iota(np.int32, (self.rows.tile, self.cols.tile), 1)
        if triangular:
            row = lax.broadcasted_iota(np.int32, (self.rows.tile, self.cols.tile), 0)
            mask = _both(mask, column + c * self.cols.tile <= row + r * self.rows.tile)
        limit = self._limit(c, block)
        if limit is not None:
            mask = _both(mask, column < limit)
        return scores(self.rule, query, k, bias, mask), keep, k, v

    def _limit(self, c: Any, block: Any) -> Any:
        """Columns of the tile that count, where that may be fewer than it has."""
        first = lax.rem(jnp.asarray(c, np.int32), np.int32(self.cols.tiles)) * self.cols.tile
        if self.kv_size % self.cols.length:
            return jnp.minimum(self.cols.part, self.kv_size - block * self.cols.length) - first
        return self.cols.part - first if self.cols.padded else None

    def _place(self, shape: tuple[int, ...], r: Any, c: Any, block: Any) -> tuple[list[Any], list[int]]:
        """Where in ``Pairs`` a tile lies: (start, size) of each dim."""
        start: list[Any] = [np.int32(0)] * len(shape)
        size = list(shape)
        if shape[-2] > 1:
            start[-2], size[-2] = jnp.asarray(r * self.rows.tile, np.int32), self.rows.tile
        if shape[-1] > 1:
            start[-1] = jnp.asarray((block * self.cols.count + c) * self.cols.tile, np.int32)
            size[-1] = self.cols.tile
        return start, size

    def _pair(self, x: Array, r: Any, c: Any, block: Any) -> Array:
        return lax.dynamic_slice(x, *self._place(x.shape, r, c, block))

    def _add_pairs(self, total: Array, new: Array, r: Any, c: Any, block: Any) -> Array:
        start, size = self._place(total.shape, r, c, block)
        summed = tuple(d for d, (n, s) in enumerate(zip(new.shape, size, strict=True)) if s == 1 and n > 1)
        new = new.sum(summed, keepdims=True) if summed else new
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, size) + new, start)


# --- laying operands out in tiles ----------------------------------------------------------------------------


def pad_parts(x: Array, dim: int, side: Tiling, blocks: int = 1) -> Array:
    """Zeros at the end of each part of ``blocks`` blocks, so that tiles divide it."""
    if not side.padded:
        return x
    dim %= x.ndim
    split = x.reshape(*x.shape[:dim], blocks * side.parts, side.part, *x.shape[dim + 1 :])
    widths = [(0, side.tiles * side.tile - side.part if d == dim + 1 else 0) for d in range(split.ndim)]
    return jnp.pad(split, widths).reshape(*x.shape[:dim], blocks * side.laid, *x.shape[dim + 1 :])


def crop_parts(x: Array, dim: int, side: Tiling, blocks: int = 1) -> Array:
    """The inverse of ``pad_parts``."""
    if not side.padded:
        return x
    dim %= x.ndim
    split = x.reshape(*x.shape[:dim], blocks * side.parts, side.tiles * side.tile, *x.shape[dim + 1 :])
    kept = lax.slice_in_dim(split, 0, side.part, axis=dim + 1)
    return kept.reshape(*x.shape[:dim], blocks * side.length, *x.shape[dim + 1 :])


def to_tiles(x: Array, dim: int, side: Tiling) -> Array:
    """Tiles as the leading dim."""
    dim %= x.ndim
    x = pad_parts(x, dim, side)
    x = x.reshape(*x.shape[:dim], side.count, side.tile, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def from_tiles(x: Array, dim: int, side: Tiling) -> Array:
    """The inverse: ``dim`` counts without the leading one."""
    dim %= x.ndim - 1
    x = jnp.moveaxis(x, 0, dim)
    x = x.reshape(*x.shape[:dim], side.laid, *x.shape[dim + 2 :])
    return crop_parts(x, dim, side)


def lay_pairs(x: Array | None, kv_heads: int, rows: Tiling, cols: Tiling, blocks: int) -> Array | None:
    """``[..., heads or 1, rows, columns]`` as ``Pairs`` has it."""
    if x is None:
        return None
    heads = x.shape[-3]
    group = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    x = x.reshape(*x.shape[:-3], *group, *x.shape[-2:])
    x = pad_parts(x, -2, rows) if x.shape[-2] > 1 else x
    return pad_parts(x, -1, cols, blocks) if x.shape[-1] > 1 else x


def unlay_pairs(x: Array | None, rows: Tiling, cols: Tiling, blocks: int) -> Array | None:
    """The inverse."""
    if x is None:
        return None
    x = crop_parts(x, -2, rows) if x.shape[-2] > 1 else x
    x = crop_parts(x, -1, cols, blocks) if x.shape[-1] > 1 else x
    return x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])


# --- small things --------------------------------------------------------------------------------------------


def zeros_wide(x: Array) -> Array:
    """Zeros to add gradients of ``x`` to."""
    return _full(x.shape, 0, wide(x.dtype), varying_axes(x))


def _full(shape: tuple[int, ...], value: float, dtype: Any, names: frozenset[str]) -> Array:
    return varying(jnp.full(shape, value, dtype), sorted(names))


def _through(table: Any, one: Callable[[Any, Any, T], T], carry: T) -> T:
    """``one`` for each (row, column) of the table, in a loop if there are several."""
    if isinstance(table, tuple):
        if not table:
            return carry
        if len(table) == 1:
            ((r, c),) = table
            return one(r, c, carry)
        table = jnp.asarray(np.asarray(table, np.int32))
    if table.shape[0] == 1:
        return one(table[0, 0], table[0, 1], carry)
    return lax.scan(lambda carry, at: (one(at[0], at[1], carry), None), carry, table)[0]


def _at(x: Array, i: Any) -> Array:
    return x[i] if isinstance(i, int) else lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _add_at(total: Array, new: Array, i: Any) -> Array:
    if total.shape[0] == 1:
        return total + new[None]
    return lax.dynamic_update_index_in_dim(total, _at(total, i) + new, i, 0)


def _both(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


def vary_alike(*trees: Any, over: frozenset[str] = frozenset()) -> Any:
    """Values whose types vary over the same manual axes: all that one of them, or ``over``, names."""
    names = sorted(over.union(*(varying_axes(x) for x in jax.tree.leaves(trees))))
    return jax.tree.map(lambda x: varying(x, names), trees)
