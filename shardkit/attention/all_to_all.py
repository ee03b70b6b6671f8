"""Attention by two all-to-alls, what each device does: from a part of the sequence to a part of the heads, and back.

Jacobs et al. (DeepSpeed-Ulysses), https://arxiv.org/abs/2309.14509. Heads are viewed as ``(kv_heads / n, n, heads of
each)``, and a device takes its place in the middle one: keys stay with their queries, and heads that another mesh axis
cuts in contiguous parts stay so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardkit import scopes
from shardkit.attention.region import Operands
from shardkit.attention.ring import Ring
from shardkit.spatial.exchange import AxisName, permute


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """The static part of a call.

    Attributes:
      axis_name, shards: the devices that exchange.
      whole: attention over the whole sequence, on one device.
      by_permutes: exchange by ``n - 1`` permutes of the same bytes. XLA gathers the operands of an all-to-all along
        mesh axes that are left to it (jax 0.10 - 0.12), those of a permute it doesn't.
    """

    axis_name: AxisName
    shards: int
    whole: Ring
    by_permutes: bool = False

    def forward(self, index: Any, operands: Operands) -> tuple[Array, tuple[Array, ...]]:
        """(this device's rows of the result, what backward needs: its heads of all operands)."""
        query, key, value = self._exchange_all(index, *operands[:3], to_heads=True)
        mine = Operands(query, key, value, *(_merged_pairs(x, query.ndim) for x in operands[3:]))
        out, (logsum,) = self.whole.forward(0, mine)
        kv_heads = key.shape[-2]
        rows = _joined(self._exchange(index, _split(out, kv_heads), to_heads=False))
        return rows, (query, key, value, out, logsum)

    def saved(self, operands: Operands, out: Any, extra: Any) -> tuple[Operands, Any, Any]:
        """What is kept for backward: heads of the whole sequence, in place of the operands."""
        return operands._replace(query=None, key=None, value=None), None, extra

    def backward(
        self, index: Any, operands: Operands, out: Array | None, extra: tuple[Array, ...], cotangent: Array
    ) -> tuple[Array, Array, Array, Array | None]:
        """Gradients of (query, key, value, bias)."""
        query, key, value, result, logsum = extra
        kv_heads = key.shape[-2]
        cotangent = self._exchange(index, _split(cotangent, kv_heads * self.shards, self.shards), to_heads=True)
        cotangent = cotangent.reshape(result.shape)
        mine = Operands(query, key, value, *(_merged_pairs(x, query.ndim) for x in operands[3:]))
        *found, for_bias = self.whole.backward(0, mine, result, (logsum,), cotangent)
        for_query, for_key, for_value = self._exchange_all(index, *found, to_heads=False)
        if for_bias is not None and operands.bias is not None:
            for_bias = for_bias.reshape(operands.bias.shape)
        return for_query, for_key, for_value, for_bias

    def _exchange_all(
        self, index: Any, query: Array, key: Array, value: Array, to_heads: bool
    ) -> tuple[Array, Array, Array]:
        """``[..., rows, heads, d]`` to ``[..., all rows, heads / n, d]``, or back; in one exchange if shapes allow."""
        kv_heads, parts = key.shape[-2], self.shards if to_heads else 1
        q, k, v = (_split(x, kv_heads, parts) for x in (query, key, value))
        group = q.shape[-2]
        if query.shape[-3] == key.shape[-3] and key.shape == value.shape:
            both = self._exchange(index, lax.concatenate([q, k, v], q.ndim - 2), to_heads)
            q, k, v = jnp.split(both, (group, group + 1), axis=-2)
        else:
            q = self._exchange(index, q, to_heads)
            both = self._exchange(index, lax.concatenate([k, v], k.ndim - 1), to_heads)
            k, v = jnp.split(both, (key.shape[-1],), axis=-1)
        return _joined(q), _joined(k), _joined(v)

    def _exchange(self, index: Any, x: Array, to_heads: bool) -> Array:
        """``[..., rows, kv_heads / n, n, g, d]`` to ``[..., all rows, kv_heads / n, 1, g, d]``, or back."""
        if self.shards == 1:
            return x
        rows, place = x.ndim - 5, x.ndim - 3
        split, joined = (place, rows) if to_heads else (rows, place)
        with scopes.scope(scopes.ATTENTION):
            if self.by_permutes:
                return _exchanged(x, self.axis_name, self.shards, split, joined, index)
            return lax.all_to_all(x, self.axis_name, split, joined, tiled=True)


def _exchanged(x: Array, axis_name: AxisName, shards: int, split: int, joined: int, index: Any) -> Array:
    """``lax.all_to_all(..., tiled=True)`` by permutes."""
    pieces = jnp.moveaxis(x.reshape(*x.shape[:split], shards, -1, *x.shape[split + 1 :]), split, 0)
    others = np.arange(shards, dtype=np.int32)
    pieces = jnp.take(pieces, (index + others) % shards, axis=0)  # number t is for the device t places on
    got = [pieces[0]]
    for t in range(1, shards):
        got.append(permute(pieces[t], axis_name, tuple((i, (i + t) % shards) for i in range(shards))))
    x = jnp.moveaxis(jnp.take(jnp.stack(got), (index - others) % shards, axis=0), 0, joined)
    return x.reshape(*x.shape[:joined], -1, *x.shape[joined + 2 :])


def own_pairs(x: Array | None, axis_name: AxisName, shards: int, kv_heads: int, index: Any) -> Array | None:
    """In a manual region: ``[..., heads or 1, own rows or 1, columns]`` as all rows of this device's heads."""
    if x is None or shards == 1:
        return x
    with scopes.scope(scopes.ATTENTION):
        if x.shape[-3] == 1:
            return x if x.shape[-2] == 1 else lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)
        split = x.reshape(*x.shape[:-3], kv_heads // shards, shards, -1, *x.shape[-2:])
        place, rows = split.ndim - 4, split.ndim - 2
        if split.shape[rows] == 1:
            mine = lax.dynamic_index_in_dim(split, index, place)
        else:
            mine = lax.all_to_all(split, axis_name, place, rows, tiled=True)
    return mine.reshape(*mine.shape[:-5], -1, *mine.shape[-2:])


def _split(x: Array, kv_heads: int, shards: int = 1) -> Array:
    """``[..., heads, d]`` as ``[..., kv_heads / n, n, heads of each, d]``."""
    return x.reshape(*x.shape[:-2], kv_heads // shards, shards, x.shape[-2] // kv_heads, x.shape[-1])


def _joined(x: Array) -> Array:
    """The inverse of ``_split``."""
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def _merged_pairs(x: Array | None, ndim: int) -> Array | None:
    """``[..., kv_heads / n, 1, heads of each, rows, columns]`` as ``[..., heads / n, rows, columns]``."""
    return x if x is None or x.ndim == ndim else x.reshape(*x.shape[:-5], -1, *x.shape[-2:])
