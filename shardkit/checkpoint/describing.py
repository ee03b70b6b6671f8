"""What a checkpoint says of each value, and in what a tree differs from it. No arrays are touched."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit.arrays import PartialArray
from shardkit.checkpoint.slots import Path, Slot, has_state, name_of

Description = dict[str, Any]  # as it stands in JSON

_SCALARS = (bool, int, float, complex, str, bytes)


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
    if isinstance(x, _SCALARS):
        return {"path": list(slot.path), "kind": type(x).__name__}
    if has_state(x):
        return {"path": list(slot.path), "kind": "state"}
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(
            f"{name} is of type {type(x).__name__}; a checkpoint holds arrays, numbers, text, keys of jax.random, and "
            "objects with get_state and set_state"
        )
    dtype = x.dtype
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key and np.dtype(dtype).kind in "OUSMm":
        raise TypeError(
            f"{name} is an array of dtype {dtype}; a checkpoint holds numbers, booleans and jax.random keys"
        )
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    if getattr(spec, "unreduced", None):
        raise TypeError(f"{name} is unreduced over {sorted(spec.unreduced)}; reduce it first (sk.reshard)")  # type: ignore[union-attr]
    made_by = {"impl": str(jax.random.key_impl(x))} if is_key and isinstance(x, jax.Array) else {}
    return {
        "path": list(slot.path),
        "kind": "key" if is_key else "array",
        "dtype": str(dtype),
        **made_by,
        "shape": list(slot.shape or ()),
        "layout": slot.layout,
        "held": list(x.shape),
        "spec": None if spec is None else str(spec),
    }


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


def to_json(x: Any) -> Any:
    """A scalar, text, bytes or a state, as JSON can hold it."""
    if isinstance(x, bytes):
        return {"base64": base64.b64encode(x).decode()}
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    return x


def from_json(x: Any) -> Any:
    """The reverse of ``to_json``."""
    if isinstance(x, dict) and set(x) == {"base64"}:
        return base64.b64decode(x["base64"])
    if isinstance(x, dict) and set(x) == {"complex"}:
        return complex(*x["complex"])
    return x
