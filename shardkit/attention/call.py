"""Reading and checking the arguments of a call; nothing has moved yet."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from shardkit.arrays import Padded
from shardkit.attention.order import ORDERS, ZIGZAG, check_zigzag
from shardkit.attention.region import Operands
from shardkit.meshes import manual_axes, resolve_mesh
from shardkit.placements import AnyMesh, axes_size, entry_names
from shardkit.spatial.operands import Cut, as_array, axis_entries, explicit_axes


@dataclasses.dataclass
class Call:
    """A call, read and checked.

    Attributes:
      operands: arrays as they are held; bias and mask with as many dims as the scores. ``keep`` isn't made yet.
      query_cut, kv_cut: how the sequences are cut.
      mesh: the mesh in use.
      padded: query was a Padded, so the result will be one.
      causal, zigzag, scale, dtype, precision: as given, or what stands for None.
      dropout: (key, rate, broadcast), or None.
      what: the caller, for messages.
    """

    operands: Operands
    query_cut: Cut
    kv_cut: Cut
    mesh: AnyMesh
    padded: bool
    causal: bool
    zigzag: bool
    scale: float
    dtype: Any
    precision: Any
    dropout: tuple[Any, float, bool] | None
    what: str

    @property
    def manual(self) -> bool:
        return self.query_cut.manual

    @property
    def batch(self) -> tuple[int, ...]:
        return self.operands.query.shape[:-3]

    @property
    def heads(self) -> int:
        return self.operands.query.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.operands.key.shape[-2]


def read_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis: Any,
    causal: bool,
    scale: float | None,
    bias: Any,
    mask: Any,
    order: str,
    dropout_rng: Any,
    dropout_rate: float,
    broadcast_dropout: bool,
    dtype: Any,
    precision: Any,
    mesh: AnyMesh | None,
    what: str,
) -> Call:
    """The call, checked. Raises what the public functions say."""
    query, key, value = as_array(query), as_array(key), as_array(value)
    mesh = resolve_mesh(mesh, query, key, value, what=what)
    axes = _read_axis(axis, mesh, what)
    _check_shapes(query.shape, key.shape, value.shape, what)
    query_array, query_cut = _cut(query, "query", axes, mesh, what)
    key_array, kv_cut = _cut(key, "key", axes, mesh, what)
    value_array, value_cut = _cut(value, "value", axes, mesh, what)
    if value_cut != kv_cut or value_array.shape[-3] != key_array.shape[-3]:
        raise ValueError(
            f"{what}: key and value must be padded alike, got {key_array.shape} for {kv_cut.size} elements of the "
            f"sequence and {value_array.shape} for {value_cut.size}"
        )
    if causal and query_cut.size != kv_cut.size:
        raise ValueError(
            f"{what}: causal=True needs as many queries as keys, got lengths {query_cut.size} and {kv_cut.size}; "
            "for another alignment give a mask"
        )
    if order not in ORDERS:
        raise ValueError(f"{what}: order={order!r} is unknown; use one of {ORDERS}")
    if order == ZIGZAG:
        check_zigzag(query_cut.size, query_cut.shards, what)
        check_zigzag(kv_cut.size, kv_cut.shards, what)
    arrays = Operands(query_array, key_array, value_array)
    rows = query_array.shape[-3] if query_cut.manual else query_cut.size
    scores = (*query.shape[:-3], query.shape[-2], rows, kv_cut.size)
    bias = _read_pairs(bias, "bias", scores, what)
    mask = _read_pairs(mask, "mask", scores, what)
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"{what}: bias is added to the scores and must be of a float dtype, got {bias.dtype}")
    dtype = jnp.result_type(query_array, key_array, value_array) if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{what}: attention is computed in a float dtype, got {dtype}; convert query, key and value")
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    elif not isinstance(scale, numbers.Real) or isinstance(scale, Tracer):
        raise TypeError(f"{what}: scale must be a number, got {scale!r}; multiply query by a traced one")
    call = Call(
        operands=arrays._replace(bias=bias, mask=None if mask is None else mask.astype(bool)),
        query_cut=query_cut,
        kv_cut=kv_cut,
        mesh=mesh,
        padded=isinstance(query, Padded),
        causal=bool(causal),
        zigzag=order == ZIGZAG and query_cut.shards > 1,
        scale=float(scale),
        dtype=dtype,
        precision=precision,
        dropout=_read_dropout(dropout_rng, dropout_rate, broadcast_dropout, query_cut.manual, what),
        what=what,
    )
    _check_uneven(call)
    return call


def _read_axis(axis: Any, mesh: AnyMesh, what: str) -> tuple[str, ...]:
    axes = (axis,) if isinstance(axis, str) else axis
    if not isinstance(axes, tuple | list) or not axes or not all(isinstance(a, str) for a in axes):
        raise TypeError(f'{what}: axis names the mesh axis that cuts the sequence, for example "sp"; got {axis!r}')
    unknown = [a for a in axes if a not in mesh.axis_names]
    if unknown:
        raise ValueError(f"{what}: axis names {unknown}, but the mesh has {tuple(mesh.axis_names)}")
    if len(set(axes)) < len(axes) or list(axes) != sorted(axes, key=mesh.axis_names.index):
        raise ValueError(f"{what}: axis={axis!r} must name each mesh axis once, in the order of {mesh.axis_names}")
    return tuple(axes)


def _check_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], what: str) -> None:
    shapes = f"query {query}, key {key}, value {value}"
    if len(query) < 3 or len(key) != len(query) or len(value) != len(query):
        raise ValueError(
            f"{what}: query, key and value are [batch..., length, heads, head_dim], equally many dims, got {shapes}"
        )
    if not query[:-3] == key[:-3] == value[:-3]:
        raise ValueError(f"{what}: batch dims must be equal, got {shapes}")
    if key[-3] != value[-3] or key[-2] != value[-2]:
        raise ValueError(f"{what}: key and value must have the same length and heads, got {shapes}")
    if query[-1] != key[-1]:
        raise ValueError(f"{what}: query and key must have the same head_dim, got {shapes}")
    if not key[-2] or query[-2] % key[-2]:
        raise ValueError(
            f"{what}: the heads of query must be a multiple of those of key and value (each is then shared by several "
            f"of query), got {query[-2]} and {key[-2]}"
        )
    if 0 in query or 0 in key or 0 in value:
        raise ValueError(f"{what}: empty operands, got {shapes}")


def _cut(x: Any, name: str, axes: tuple[str, ...], mesh: AnyMesh, what: str) -> tuple[Any, Cut]:
    """What is held of an operand, and how its sequence is cut."""
    shards = axes_size(mesh, axes)
    inside = [a in manual_axes() for a in axes]
    if any(inside) and not all(inside):
        raise ValueError(f"{what}: of the mesh axes {axes}, only some are manual here; make all of them manual")
    manual = all(inside)
    dim = x.ndim - 3
    if not isinstance(x, Padded):
        return x, Cut(axes, shards, x.shape[dim] * (shards if manual else 1), manual)
    cut = Cut(axes, shards, x.logical_shape[dim], manual)
    held = cut.block * (1 if manual else shards)
    expected = (*x.logical_shape[:dim], held, *x.logical_shape[dim + 1 :])
    if x.array.shape != expected:
        raise ValueError(
            f"{what}: {name} is a Padded that holds {x.array.shape} of {x.logical_shape}; the sequence alone may be "
            f"padded, to {shards} blocks of {cut.block}"
        )
    return x.array, cut


def _read_pairs(x: Any, name: str, scores: tuple[int, ...], what: str) -> Any:
    if x is None:
        return None
    x = as_array(x)
    if isinstance(x, Padded):
        raise TypeError(f"{what}: {name} must be an array of the logical shape, got a Padded")
    shape = (1,) * (len(scores) - x.ndim) + tuple(x.shape)
    if len(shape) != len(scores) or any(a not in (1, b) for a, b in zip(shape, scores, strict=True)):
        raise ValueError(
            f"{what}: {name} must be broadcastable to [batch..., heads, q_length, kv_length] = {scores}"
            f"{' (here: the rows of this device, all columns)' if manual_axes() else ''}, got {tuple(x.shape)}"
        )
    return x.reshape(shape)


def _read_dropout(rng: Any, rate: float, broadcast: bool, manual: bool, what: str) -> tuple[Any, float, bool] | None:
    if isinstance(rate, Tracer) or not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
        raise ValueError(f"{what}: dropout_rate must be a number in [0, 1), got {rate!r}")
    if not rate:
        return None
    if rng is None:
        raise ValueError(f"{what}: dropout_rate={rate} needs dropout_rng=, a random key")
    if manual:
        raise ValueError(
            f"{what}: dropout is drawn for the whole matrix of scores, of which a device inside a manual region of the "
            "axis knows only its rows; call it outside, or with dropout_rate=0"
        )
    return rng, float(rate), bool(broadcast)


def _check_uneven(call: Call) -> None:
    """An array of a typed mesh axis can't say that its last block is short."""
    cut = call.query_cut
    if cut.manual or call.padded or not set(cut.axes) & set(explicit_axes(call.mesh)):
        return
    if cut.size % cut.shards:
        raise ValueError(
            f"{call.what}: {cut.shards} devices don't divide the q_length {cut.size}, and a result on Explicit mesh "
            'axes can\'t say so; give query as sk.shard_tensor(query, placements, uneven="pad"), or pad it'
        )


def entries_of(call: Call) -> tuple[list[Any], Any, bool]:
    """On Explicit axes, what else is cut: (entries of the batch dims, of the heads, whether those of keys are, too).

    Taken from the types of query, else of key and value, which then follow.

    Raises:
      ValueError: a placement that attention can't keep.
    """
    batch: list[Any] = [None] * len(call.batch)
    typed = set(explicit_axes(call.mesh))
    if not typed:
        return batch, None, False
    heads: Any = None
    used = set(call.query_cut.axes)
    for name in ("query", "key", "value"):
        found = axis_entries(getattr(call.operands, name))
        length, head, features = found[-3:]
        other = set(entry_names(length)) - set(call.query_cut.axes)
        if other or features is not None:
            where = f"its sequence, over {sorted(other)}" if other else f"head_dim, over {entry_names(features)}"
            raise ValueError(
                f"{call.what}: {name} is cut along {where}, which attention can't keep; reshard it first "
                f"(the sequence is cut over {call.query_cut.axis_name!r})"
            )
        for dim, entry in enumerate(found[:-3]):
            if batch[dim] is None and entry is not None and not set(entry_names(entry)) & used:
                batch[dim] = entry
                used |= set(entry_names(entry))
        free = head is not None and not set(entry_names(head)) & used
        if heads is None and free and call.heads % axes_size(call.mesh, entry_names(head)) == 0:
            heads = head
            used |= set(entry_names(head))
        taken = set(call.query_cut.axes) & {n for e in (*found[:-3], head) for n in entry_names(e)}
        if taken:
            raise ValueError(
                f"{call.what}: {name} is cut along other dims than its sequence over {sorted(taken)}; reshard it first"
            )
    parts = axes_size(call.mesh, entry_names(heads))
    return batch, heads, call.kv_heads > 1 or parts == 1


def head_parts(call: Call, heads: Any) -> int:
    """Devices that cut the heads."""
    return axes_size(call.mesh, entry_names(heads))


def repeated(x: Any, times: int) -> Any:
    """Each head of ``[..., heads, d]`` so many times, one after another."""
    if times == 1:
        return x
    wide = jnp.broadcast_to(x[..., :, None, :], (*x.shape[:-1], times, x.shape[-1]))
    return wide.reshape(*x.shape[:-2], x.shape[-2] * times, x.shape[-1])
