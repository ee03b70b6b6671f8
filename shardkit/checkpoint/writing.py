"""An orbax handler that writes named arrays, what is to be known of them, and the digests of all files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from shardkit.checkpoint.describing import Description
from shardkit.checkpoint.digests import AFTERWARDS, LIST, digests_of, files_below, from_text, to_text
from shardkit.checkpoint.slots import Path, Slot
from shardkit.checkpoint.steps import CONTENTS

# Ours within a folder of arrays: what is kept there and no more than that is read by other tools, too.
_OWN = "digests.process_"


def arrays_handler() -> ocp.PyTreeCheckpointHandler:
    """What reads and writes the arrays: a plain orbax tree, which orbax alone can read too."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


class Handler(ocp.AsyncCheckpointHandler):
    """Writes a checkpoint's folder; orbax renames it once it's whole."""

    def __init__(self) -> None:
        self._arrays = arrays_handler()

    async def async_save(self, directory: Any, args: Save) -> list[ocp.Future]:  # type: ignore[override]
        """Copies the arrays from the devices; what it returns writes them."""
        if args.before is not None and jax.process_index() == 0:
            args.before(directory)
        if jax.process_index() == 0:
            (directory / CONTENTS).write_text(json.dumps(args.contents, indent=1))
        futures = await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(args.tree)) if args.tree else []
        return [_Digested(futures or [], directory)]

    def save(self, *args: Any, **keywords: Any) -> None:
        raise NotImplementedError("saves go through async_save")

    def restore(self, *args: Any, **keywords: Any) -> Any:
        raise NotImplementedError("shardkit.checkpoint.reading restores")

    def finalize(self, directory: Any) -> None:
        """In the first process, when all have written: the list of digests."""
        if (directory / "_METADATA").exists():
            self._arrays.finalize(directory)
        digests: dict[str, str] = {}
        for name in files_below(directory):
            if name.startswith(_OWN):
                digests |= from_text((directory / name).read_text())
                (directory / name).unlink()
        there = [n for n in files_below(directory) if n not in AFTERWARDS]
        digests = {n: d for n, d in digests.items() if n in there}
        digests |= digests_of(directory, [n for n in there if n not in digests])
        (directory / LIST).write_text(to_text(digests))

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(Handler, for_save=True)
class Save(ocp.args.CheckpointArgs):
    """What is to be saved.

    Attributes:
      tree: arrays, by name.
      contents: what is to be known of them, as JSON can hold it.
      before: called in the first process, with the folder that is being written.
    """

    def __init__(self, tree: Any, contents: Any, before: Any = None):
        self.tree, self.contents, self.before = tree, contents, before


@ocp.args.register_with_handler(Handler, for_restore=True)
class _Restore(ocp.args.CheckpointArgs):
    """Orbax asks for one of these from every handler."""


class _Digested(ocp.Future):
    """The end of this process's writing. Each process reads its own large files again, not one process those of all."""

    def __init__(self, futures: Sequence[ocp.Future], directory: Any):
        self._futures, self._directory = futures, directory

    def result(self, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        for one in self._futures:
            one.result(None if until is None else max(0.0, until - time.monotonic()))
        number = jax.process_index()
        mine = self._directory / f"ocdbt.process_{number}"
        if jax.process_count() > 1 and mine.is_dir():
            # These have names of their own and are never written again; the rest may be, when all is put together.
            names = [f"{mine.name}/{name}" for name in files_below(mine) if name.startswith("d/")]
            (self._directory / f"{_OWN}{number}").write_text(to_text(digests_of(self._directory, names)))


def storable(slot: Slot) -> Any:
    """The array that orbax is to write; what must not change afterwards is copied."""
    x = slot.value
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not isinstance(x, jax.Array):
        return np.array(x)
    lives_here = x.is_fully_addressable and (jax.process_count() > 1 or len(x.sharding.device_set) == 1)
    return np.array(x) if lives_here else x


def nested(named: Sequence[tuple[Path, Any]]) -> dict[str, Any]:
    """Values by path, as dicts in dicts whose keys suit the names that orbax makes of them."""
    tree: dict[str, Any] = {}
    for path, x in named:
        *above, last = [key_of(part) for part in path] or [key_of("")]
        here = tree
        for part in above:
            here = here.setdefault(part, {})
        here[last] = x
    return tree


def key_of(part: str) -> str:
    """A part of a path as a key: without what separates keys in names, and never empty."""
    return part.replace("%", "%25").replace(".", "%2E").replace("/", "%2F") or "%"


def stored_arrays(slots: Sequence[Slot], descriptions: Sequence[Description]) -> dict[str, Any]:
    """The arrays to be written. Empty ones need no bytes."""
    arrays = [
        (slot.path, storable(slot))
        for slot, d in zip(slots, descriptions, strict=True)
        if d["kind"] in ("array", "key") and is_written(d)
    ]
    return nested(arrays)


def is_written(description: Description) -> bool:
    """Whether an array has elements, which is to say bytes in the checkpoint."""
    return 0 not in description["held"]
