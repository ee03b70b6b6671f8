"""An orbax handler that writes named arrays, what is to be known of them, and the digests of all files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from shardkit.checkpoint.describing import Description
from shardkit.checkpoint.digests import (
    AFTERWARDS,
    LIST,
    digests_of,
    files_below,
    from_text,
    to_text,
)
from shardkit.checkpoint.slots import Path, Slot, name_of
from shardkit.checkpoint.steps import CONTENTS
from shardkit.hosts import exchange
from shardkit.hosts.agreeing import TIMEOUT
from shardkit.hosts.digests import digest_of_array, digest_of_text
from shardkit.hosts.words import processes

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
        futures, failed = [], None
        try:
            if jax.process_index() == 0:
                if args.before is not None:
                    args.before(directory)
                (directory / CONTENTS).write_text(json.dumps(args.contents, indent=1))
            if args.tree:
                futures = await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(args.tree)) or []
        except Exception as error:
            if jax.process_count() == 1:
                raise
            failed = error  # told by the future, for which the other processes wait
        return [_Written(futures, directory, args.tree, failed)]

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


class _Written(ocp.Future):
    """The end of this process's writing, and of the others': an error of one is one of all.

    Each process reads its own large files again for their digests, not one process those of all.
    """

    def __init__(self, futures: Sequence[ocp.Future], directory: Any, tree: Any, failed: Exception | None):
        self._futures, self._directory, self._tree, self._failed = futures, directory, tree, failed

    def result(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else time.monotonic() + timeout
        failed, own = self._failed, {}
        try:
            if failed is None:
                for one in self._futures:
                    one.result(None if timeout is None else max(0.0, until - time.monotonic()))
                if jax.process_count() > 1:
                    own = self._digests()
        except Exception as error:
            failed = error
        self._tree = None  # the copies aren't needed any more
        words = None if failed is None else f"{type(failed).__name__}: {failed}"
        # A thread's own channel: it may come later than what the program says meanwhile.
        left = min(TIMEOUT, max(1.0, until - time.monotonic()))
        said = exchange(f"writing to {self._directory.parent}", [words, digest_of_text(to_text(own))], timeout=left)
        if failed is not None:
            raise failed
        failures = [(process, text) for process, (text, _) in enumerate(said) if text is not None]
        if failures:
            raise RuntimeError(f"{processes([process for process, _ in failures])} failed: {failures[0][1]}")
        if len({digest for _, digest in said}) > 1:
            self._refuse(own)

    def _digests(self) -> dict[str, str]:
        number = jax.process_index()
        mine = self._directory / f"ocdbt.process_{number}"
        if mine.is_dir():
            # These have names of their own and are never written again; the rest may be, when all is put together.
            names = [f"{mine.name}/{name}" for name in files_below(mine) if name.startswith("d/")]
            (self._directory / f"{_OWN}{number}").write_text(to_text(digests_of(self._directory, names)))
        found = jax.tree_util.tree_flatten_with_path(self._tree)[0]
        names = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in found]
        return {
            name: digest_of_array(x) for name, (_, x) in zip(names, found, strict=True) if isinstance(x, np.ndarray)
        }

    def _refuse(self, own: dict[str, str]) -> None:
        """Only the first process's are written. Which differ isn't worth sending before it's known that some do."""
        said = exchange(f"values written to {self._directory.parent}", own)
        names = [name for name in own if len({one.get(name) for one in said}) > 1]
        raise ValueError(
            f"processes hold different values of {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}: NumPy's "
            "arrays and those of a process's own devices must be the same in all. Put them together as one array on a "
            "mesh, or save what is each process's own by an object with get_state and set_state"
        )


def storable(slot: Slot, own: bool) -> Any:
    """The array that orbax is to write; what must not change afterwards is copied.

    Args:
      slot: of the tree.
      own: whether it's an array of this process's devices, of which the others have their own.

    Raises:
      ValueError: it was deleted.
    """
    x = slot.value
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(
            f"{name_of(slot.path)} was deleted, by being donated to a jit most likely; save what came out of that"
        )
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not isinstance(x, jax.Array):
        return np.array(x, np.asarray(x).dtype.newbyteorder("="))
    if jax.process_count() == 1:
        # On a CPU the host's array may be the device's own memory, which the next step writes over; orbax copies from
        # other devices, and from several, itself.
        own = len(x.sharding.device_set) == 1 and next(iter(x.sharding.device_set)).platform == "cpu"
    return np.array(x) if own else x


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


def stored_arrays(
    slots: Sequence[Slot], descriptions: Sequence[Description], own: Collection[int] = ()
) -> dict[str, Any]:
    """The arrays to be written. Empty ones need no bytes.

    Args:
      slots: of the tree.
      descriptions: of the slots.
      own: the numbers of those that are on each process's own devices.
    """
    arrays = [
        (slot.path, storable(slot, i in own))
        for i, (slot, d) in enumerate(zip(slots, descriptions, strict=True))
        if d["kind"] in ("array", "key") and is_written(d)
    ]
    return nested(arrays)


def is_written(description: Description) -> bool:
    """Whether an array has elements, which is to say bytes in the checkpoint."""
    return 0 not in description["held"]
