"""What a checkpoint says of each value, and in what a tree differs from it. No arrays are touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh

from shardkit.arrays import PartialArray
from shardkit.checkpoint.slots import Path, Slot, has_state, name_of

Description = dict[str, Any]  # as it stands in JSON

_SCALARS = (bool, int, float, complex, str, bytes)  # the first that fits: True is an int, too
# What orbax and tensorstore write.
_DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)


def describe(slot: Slot) -> Description:
    """What is to be known of a value to read it again.

    Raises:
      TypeError: a value that no checkpoint can hold.
    """
    x, name = slot.value, name_of(slot.path)
    if isinstance(x, PartialArray):
        raise TypeError(
            f"{name} is a PartialArray, which waits for a reduction; save sk.unshard(x), or reduce it first"
        )
    kind = scalar_kind(x)
    if kind is not None:
        return {"path": list(slot.path), "kind": kind.__name__}
    if has_state(x):
        return {"path": list(slot.path), "kind": "state"}
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(
            f"{name} is of type {type(x).__name__}; a checkpoint holds arrays, numbers, text, keys of jax.random, and "
            "objects with get_state and set_state"
        )
    if isinstance(x, Tracer):
        raise TypeError(
            f"{name} is traced, and has no value yet: save and restore outside jit and other transformations"
        )
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; save its data and its mask, x.data and x.mask")
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    dtype = str(x.dtype) if is_key else _dtype_name(x.dtype)
    if not is_key and dtype not in _DTYPES:
        raise TypeError(
            f"{name} is an array of dtype {x.dtype}; a checkpoint holds jax.random keys and {', '.join(_DTYPES)}"
        )
    if not _has_part_here(x):
        raise TypeError(
            f"{name} has no part on the devices of process {jax.process_index()}, which orbax can't write or read; put "
            "it on a mesh with devices of every process"
        )
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    if getattr(spec, "unreduced", None):
        raise TypeError(f"{name} is unreduced over {sorted(spec.unreduced)}; reduce it first (sk.reshard)")  # type: ignore[union-attr]
    made_by = {"impl": str(jax.random.key_impl(x))} if is_key and isinstance(x, jax.Array) else {}
    return {
        "path": list(slot.path),
        "kind": "key" if is_key else "array",
        "dtype": dtype,
        **made_by,
        "shape": list(slot.shape or ()),
        "layout": slot.layout,
        "held": list(x.shape),
        "spec": None if spec is None else str(spec),
    }


def _has_part_here(x: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return sharding is None or abstract or jax.process_count() == 1 or bool(sharding.addressable_devices)


def scalar_kind(x: Any) -> type | None:
    """Of which plain type a number, text or bytes is; an enumeration's members are of their values'."""
    return None if isinstance(x, np.generic) else next((kind for kind in _SCALARS if isinstance(x, kind)), None)


def _dtype_name(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype).newbyteorder("="))  # in whichever order its bytes are
    except TypeError:  # another library's
        return str(dtype)


def differences(stored: Sequence[Description], wanted: Sequence[Description], *, partial: bool) -> list[str]:
    """A line for everything in which a target differs from what is stored.

    Args:
      stored: of the checkpoint.
      wanted: of the target.
      partial: what the checkpoint has beyond the target is no difference.
    """
    have, want = _by_path(stored), _by_path(wanted)
    lines = [
        f"  {name_of(path)}: not in the checkpoint; the target has {words(d)}"
        for path, d in want.items()
        if path not in have
    ]
    if not partial:
        lines += [
            f"  {name_of(p)}: not in the target; the checkpoint has {words(d)}"
            for p, d in have.items()
            if p not in want
        ]
    for path, d in want.items():
        if path in have and (says := _difference(have[path], d)):
            lines.append(f"  {name_of(path)}: {says}")
    return lines


def words(d: Mapping[str, Any]) -> str:
    """A description in a few words: ``float32[8, 3]``, ``int``."""
    return f"{d['dtype']}{d['shape']}" if d["kind"] in ("array", "key") else d["kind"]


def _difference(stored: Description, wanted: Description) -> str | None:
    kinds, is_array = (stored["kind"], wanted["kind"]), stored["kind"] in ("array", "key")
    if kinds[0] != kinds[1] or (is_array and (stored["dtype"], stored["shape"]) != (wanted["dtype"], wanted["shape"])):
        return f"{words(stored)} in the checkpoint, {words(wanted)} in the target"
    return None


def _by_path(found: Sequence[Description]) -> dict[Path, Description]:
    return {tuple(d["path"]): d for d in found}
