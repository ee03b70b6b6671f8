"""From a checked call to its result: padding, placing, the region, and back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from shardkit.arrays import Padded, crop_to, pad_to
from shardkit.attention.call import Call, repeated
from shardkit.attention.region import Operands, Region, attend
from shardkit.attention.sweep import vary_alike
from shardkit.spatial.operands import Cut, explicit_axes


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a call, outside its region.

    Attributes:
      region: the region.
      dtype: in which query, key and value enter.
      repeat: how often each head of keys and values is repeated.
      rows, cols: sizes of the padded sequences as the region takes them; in a manual region those of a block.
      pair_rows, pair_cols: those of padded bias, mask and keep.
      split_heads: (kv heads / n, n, heads of each) that heads of bias, mask and keep are viewed as; () leaves them.
      drawn, keep_prob: the shape in which dropout is drawn, and how likely a weight is kept; None without.
      place: Explicit axes: operands must be placed by us, in_specs only assert.
    """

    region: Region
    dtype: Any
    repeat: int
    rows: int
    cols: int
    pair_rows: int
    pair_cols: int
    split_heads: tuple[int, ...]
    drawn: tuple[int, ...] | None
    keep_prob: float
    place: bool


def run_plan(plan: Plan, call: Call, q_length: int) -> Any:
    """The result: an array of ``q_length`` rows, or a Padded where query was one."""
    key = None if call.dropout is None else call.dropout[0]
    out = _run(plan, call.operands, key)
    shape = (*out.shape[:-3], q_length, *out.shape[-2:])
    if call.padded:
        logical = (*out.shape[:-3], call.query_cut.size, *out.shape[-2:])
        return Padded(out, logical)
    return out if out.shape == shape else crop_to(out, shape)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(plan: Plan, operands: Operands, dropout_key: Any) -> Array:
    query, key, value, bias, mask, _ = operands
    query, key, value = (x.astype(plan.dtype) for x in (query, key, value))
    key, value = repeated(key, plan.repeat), repeated(value, plan.repeat)
    keep = None
    if plan.drawn is not None:
        keep = jax.random.bernoulli(dropout_key, plan.keep_prob, plan.drawn)
    operands = Operands(
        query=_padded(query, plan.rows, -3),
        key=_padded(key, plan.cols, -3),
        value=_padded(value, plan.cols, -3),
        **{n: _paired(plan, x) for n, x in (("bias", bias), ("mask", mask), ("keep", keep))},
    )
    if plan.place:
        mesh = plan.region.mesh
        operands = Operands(
            *(
                None if x is None else jax.sharding.reshard(x, NamedSharding(mesh, s))
                for x, s in zip(operands, plan.region.specs, strict=True)
            )
        )
    over = frozenset() if plan.region.axis_names else frozenset(plan.region.cut.axes)
    (operands,) = vary_alike(operands, over=over)
    return attend(plan.region, operands)


def _padded(x: Array, size: int, dim: int) -> Array:
    shape = list(x.shape)
    shape[dim] = size
    return pad_to(x, tuple(shape))


def _paired(plan: Plan, x: Array | None) -> Array | None:
    if x is None:
        return None
    x = _padded(x, plan.pair_rows, -2) if x.shape[-2] > 1 else x
    x = _padded(x, plan.pair_cols, -1) if x.shape[-1] > 1 else x
    if plan.split_heads:
        heads = (1,) * len(plan.split_heads) if x.shape[-3] == 1 else plan.split_heads
        x = x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])
    return x


def drawn_shape(call: Call) -> tuple[int, ...] | None:
    """The shape of what dropout keeps, as Flax draws it."""
    if call.dropout is None:
        return None
    pair = (call.query_cut.size, call.kv_cut.size)
    if call.dropout[2]:
        return (1,) * (len(call.batch) + 1) + pair
    return (*call.batch, call.heads, *pair)


def region_axes(mesh: Any, cut: Cut) -> frozenset[str]:
    """The mesh axes that a region makes manual: the sequence's, and all that are Explicit."""
    return frozenset() if cut.manual else frozenset(cut.axes) | frozenset(explicit_axes(mesh))


def size_one(shape: tuple[int, ...], entries: list[Any]) -> PartitionSpec:
    """A spec of these entries, but for dims of size 1, which are broadcast."""
    return PartitionSpec(*(e if s > 1 else None for s, e in zip(shape, entries, strict=True)))
