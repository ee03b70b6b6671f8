"""Taking a call into the manual region its mesh axis needs, and its derivative likewise.

The derivative is ours, and given outside the region: what backward needs are results of the region like any other,
so that AD works where the region is nested in another too, and nothing is computed twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from shardkit import scopes
from shardkit._compat import spec_entries
from shardkit.attention.sweep import vary_alike
from shardkit.placements import entry_names
from shardkit.spatial.operands import Cut, index_operands, read_indices


class Operands(NamedTuple):
    """The operands of attention, or one thing for each (specs, say).

    ``query [..., q, heads, d]``, ``key [..., s, kv_heads, d]``, ``value [..., s, kv_heads, e]``; the others
    ``[..., heads or 1, q or 1, s or 1]`` or None: ``bias`` is added to scores, where ``mask`` is False nothing is seen,
    where ``keep`` is False dropout drops.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    keep: Any = None


class Kernel(Protocol):
    """What a device does with its blocks. Hashable: it keys a compilation cache."""

    def forward(self, index: Any, operands: Operands) -> tuple[Array, tuple[Array, ...]]: ...

    def saved(self, operands: Operands, out: Any, extra: Any) -> tuple[Operands, Any, Any]: ...

    def backward(
        self, index: Any, operands: Operands, out: Array | None, extra: tuple[Array, ...], cotangent: Array
    ) -> tuple[Array, Array, Array, Array | None]: ...


@dataclasses.dataclass(frozen=True)
class Region:
    """The static part of a call.

    Attributes:
      kernel: what a device does.
      cut: how the mesh axis cuts the sequence.
      mesh: the mesh.
      axis_names: the mesh axes that the region makes manual; none where we are in one already.
      specs: of the operands as they enter.
      out: of the result.
      extra: of what else backward needs.
    """

    kernel: Any
    cut: Cut
    mesh: Any
    axis_names: frozenset[str]
    specs: Operands
    out: PartitionSpec
    extra: tuple[PartitionSpec, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(region: Region, operands: Operands) -> Array:
    """The result of the region's kernel. Operands are placed as its specs say, and vary over the same outer axes."""
    return _forward(region, operands)[0]


def _forward(region: Region, operands: Operands) -> tuple[Array, Any]:
    if not region.axis_names:
        (operands,) = vary_alike(operands, over=frozenset(region.cut.axes))
        out, extra = region.kernel.forward(_index(region, ()), operands)
        return out, region.kernel.saved(operands, out, extra)

    def body(operands: Operands, *where: Any) -> Any:
        (operands,) = vary_alike(operands, over=region.axis_names)
        return region.kernel.forward(_index(region, where), operands)

    out, extra = _mapped(region, body, (region.specs,), (region.out, region.extra))(operands)
    return out, region.kernel.saved(operands, out, extra)


def _backward(region: Region, saved: Any, cotangent: Array) -> tuple[Operands]:
    if not region.axis_names:
        found = region.kernel.backward(_index(region, ()), *saved, cotangent)
        return (Operands(*found),)
    specs = region.kernel.saved(region.specs, region.out, region.extra)
    wanted = region.specs[:4]

    def body(saved: Any, cotangent: Array, *where: Any) -> Any:
        saved, cotangent = vary_alike(saved, cotangent, over=region.axis_names)
        found = region.kernel.backward(_index(region, where), *saved, cotangent)
        return tuple(
            None if x is None else _summed(x, region.axis_names, s) for x, s in zip(found, wanted, strict=True)
        )

    found = _mapped(region, body, (specs, region.out), tuple(wanted))(saved, cotangent)
    return (Operands(*found),)


attend.defvjp(_forward, _backward)


def _mapped(region: Region, body: Any, in_specs: Any, out_specs: Any) -> Any:
    where, where_specs = index_operands({0: region.cut}, [0], region.mesh)
    mapped = jax.shard_map(
        body,
        mesh=region.mesh,
        in_specs=(*in_specs, *where_specs),
        out_specs=out_specs,
        axis_names=set(region.axis_names),
    )
    return lambda *operands: mapped(*operands, *where)


def _index(region: Region, where: Any) -> Any:
    return read_indices({0: region.cut}, [0], where)[0]


def _summed(x: Array, axis_names: frozenset[str], spec: PartitionSpec) -> Array:
    """A gradient of an operand that some devices share: the sum of theirs."""
    kept = {n for entry in spec_entries(spec) for n in entry_names(entry)}
    shared = tuple(sorted(axis_names - kept))
    if not shared:
        return x
    with scopes.scope(scopes.REDUCTION):
        return lax.psum(x, shared)
