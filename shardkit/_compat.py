"""Differences between supported JAX versions, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

try:
    from jax.sharding import UnreducedKind  # type: ignore[attr-defined]
except ImportError:  # jax 0.10: unreduced can only mean a sum
    UnreducedKind = None

try:
    from jax.experimental.hijax import register_hitype
    from jax.interpreters.xla import canonicalize_dtype_handlers
except ImportError:  # a JAX without them refuses such values in jax.lax, in words of its own
    register_hitype = canonicalize_dtype_handlers = None


def spec_entries(spec: PartitionSpec) -> tuple[Any, ...]:
    """One entry a dim. Iterating a spec that carries ``unreduced`` axes is refused by newer versions."""
    partitions = getattr(spec, "partitions", None)
    return tuple(spec) if partitions is None else tuple(partitions)


def unreduced_kind(spec: PartitionSpec) -> str:
    """Which reduction the ``unreduced`` axes of a spec wait for."""
    kind = getattr(spec, "unreduced_kind", None)
    return "sum" if kind is None else kind.name


def unreduced_kinds() -> tuple[str, ...]:
    """The reductions that this JAX can name in a spec."""
    return ("sum",) if UnreducedKind is None else tuple(kind.name for kind in UnreducedKind)


def partition_spec(entries: Sequence[Any], unreduced: Collection[str], kind: str, reduced: Collection[str]):
    """A spec with ``unreduced`` axes waiting for reduction ``kind``, one of ``unreduced_kinds()``."""
    extra: dict[str, Any] = {}
    if unreduced:
        extra["unreduced"] = set(unreduced)
        if UnreducedKind is not None:
            extra["unreduced_kind"] = UnreducedKind[kind]
    if reduced:
        extra["reduced"] = set(reduced)
    return PartitionSpec(*entries, **extra)


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which a value's type says it varies (none where check_vma is off)."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Of a ``scan`` equation's parameters: how many of its inputs are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def made_manual(params: Mapping[str, Any]) -> Any:
    """Of a ``shard_map`` equation's parameters: the mesh axes that it makes manual."""
    return params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]


def arrays_in_lax(kind: type, array_of: Callable[[Any], jax.Array]) -> None:
    """Has ``jax.lax`` take values of a type by the array that ``array_of`` makes of them.

    ``__jax_array__`` does so in ``jax.numpy`` alone, while derivatives of ``jax.nn`` are written in ``jax.lax``.
    """
    if register_hitype is not None and canonicalize_dtype_handlers is not None:
        register_hitype(kind, lambda x: jax.typeof(array_of(x)))
        canonicalize_dtype_handlers[kind] = array_of  # before any trace sees it, so derivatives flow
