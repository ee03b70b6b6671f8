"""One checkpoint written: its contents made, orbax set to work, and its errors told in ours."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from shardkit.checkpoint.describing import Description, describe
from shardkit.checkpoint.errors import CheckpointError
from shardkit.checkpoint.json_values import to_json
from shardkit.checkpoint.slots import Slot, name_of, take_apart
from shardkit.checkpoint.steps import claim, newest_whole
from shardkit.checkpoint.together import CHANNEL, together
from shardkit.checkpoint.writing import Save, stored_arrays
from shardkit.hosts import ProcessMismatchError, agree, exchange
from shardkit.hosts.digests import digest_of_text

FORMAT = 1

_MEET = "the processes of one job must call sk.initialize() first, to write together"


def start(
    writer: ocp.AsyncCheckpointer, path: Any, tree: Any, step: int, before: Callable[[Any], None] | None, force: bool
) -> Any:
    """Copy a tree from the devices and begin to write it. Every process calls it.

    Returns:
      The folder that it will be in: that of the step, or where there's one already, one to be renamed when it's whole.

    Raises:
      CheckpointError: it can't be written, or the one before it could not.
    """
    agree(CHANNEL, {"path": str(path), "step": step})
    directory = path / str(step)
    is_there = exchange(CHANNEL, directory.exists())[0]
    if is_there and not force:
        text = (
            f"{path} holds step {step} already; nothing was written. Go on from its newest step, give another folder, "
            "or write over it: sk.save takes overwrite=True, Checkpointer.save takes force=True"
        )
        if jax.process_count() == 1:
            text += f". If another process of this job wrote it: {_MEET}"
        raise CheckpointError(text)
    with together(f"saving to {directory}"):
        claim(directory, writer)
        slots, leaves = described(tree)
    own = _agreed(slots, leaves)
    _gather_states(leaves)
    with together(f"saving to {directory}"):
        arrays = stored_arrays(slots, leaves, own)
        if jax.process_count() > 1 and jax.process_index() == 0:
            with told(path):
                _try_to_write(path)
    about = {"format": FORMAT, "step": step, "jax": jax.__version__, "processes": jax.process_count()}
    if is_there:
        directory = path / f"{step}.new"
    with told(path):
        writer.save(directory, args=Save(arrays, about | {"leaves": leaves}, before), force=is_there)
    return directory


def described(tree: Any) -> tuple[list[Slot], list[Description]]:
    """The slots of a tree, and what is to be known of them, as JSON can hold it.

    Raises:
      TypeError: a value that no checkpoint can hold.
      ValueError: two values of one name.
    """
    slots, _ = take_apart(tree)
    leaves = [describe(slot) for slot in slots]
    for slot, description in zip(slots, leaves, strict=True):
        if description["kind"] in ("array", "key"):
            continue
        state = description["kind"] == "state"
        try:
            description["value"] = to_json(slot.value.get_state() if state else slot.value)
        except TypeError as error:
            raise TypeError(
                f"{name_of(slot.path)}: its get_state() has {error} in it; a checkpoint holds numbers, text, bytes, "
                "None, NumPy arrays, and lists, tuples and dicts of them"
            ) from None
    return slots, leaves


def _agreed(slots: Sequence[Slot], leaves: Sequence[Description]) -> set[int]:
    """Refuses trees that aren't the same in all processes. A state may be each process's own.

    Returns:
      Which arrays are each process's own: on its devices, in all of them. The others are on a mesh of all of them.
    """
    if jax.process_count() == 1:
        return set()
    facts = [{k: d[k] for k in ("path", "kind", "dtype", "shape") if k in d} for d in leaves]
    for fact, d in zip(facts, leaves, strict=True):
        if d["kind"] not in ("array", "key", "state"):
            fact["value"] = d["value"]
    arrays = [i for i, slot in enumerate(slots) if isinstance(slot.value, jax.Array)]
    said = exchange(
        CHANNEL,
        [digest_of_text(json.dumps(facts)), [i for i in arrays if slots[i].value.is_fully_addressable]],
    )
    if len({digest for digest, _ in said}) > 1:
        named = {name_of(f.pop("path")): " ".join(map(str, f.values())) for f in facts}
        agree("the tree to save", dict(sorted(named.items())))
        raise ProcessMismatchError("the tree to save: processes have its values in different orders")
    return set(arrays).intersection(*(here for _, here in said))


def _gather_states(leaves: list[Description]) -> None:
    """Where each process has a state of its own, as readers of different records have, all of them are kept."""
    states = [d for d in leaves if d["kind"] == "state"]
    if not states:
        return
    said = exchange(CHANNEL, [d["value"] for d in states])
    for d, values in zip(states, zip(*said, strict=True), strict=True):
        if len({json.dumps(value) for value in values}) > 1:  # nothing else has one NaN equal another
            del d["value"]
            d["values"] = list(values)


def _try_to_write(path: Any) -> None:
    """Whether files can be made there, while no other process waits for them yet."""
    path.mkdir(parents=True, exist_ok=True)
    probe = path / ".shardkit-probe"
    probe.write_text("")
    probe.unlink()


@contextlib.contextmanager
def told(path: Any, doing: str = "a checkpoint could not be written to") -> Generator[None]:
    """Errors of the file system and of orbax, as one that says what is still there."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        previous = _newest(path)
        rest = f"the newest whole one there is step {previous}" if previous is not None else "there is no whole one yet"
        if _is_anothers_doing(error, path):
            who = f"to which another process writes, too: {_MEET}, and each job needs a folder of its own"
            text = f"{doing} {path}, {who}; {rest}. What was noticed: {_words(error)}"
        else:
            text = f"{doing} {path}: {_words(error)}; {rest}"
        raise CheckpointError(text, previous=previous) from error


def _is_anothers_doing(error: Exception, path: Any) -> bool:
    """Whether what was there isn't any more, or the reverse, in a folder that is: no job finds that which is alone."""
    if isinstance(error, OSError):
        moved = isinstance(error, FileNotFoundError | FileExistsError) or error.errno == errno.ENOTEMPTY
    else:
        # Of tensorstore; of orbax, whose list of the arrays is gone or another's.
        moved = str(error).startswith(("NOT_FOUND:", "FAILED_PRECONDITION:", "No ArrayMetadata found"))
    try:
        return moved and path.is_dir()
    except OSError:
        return False


def _newest(path: Any) -> int | None:
    try:
        return newest_whole(path)
    except OSError:
        return None


def _words(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(" [tensorstore_spec=")[0]
    text = re.split(r" But input PyTree contains| [^ ]*ParamInfo\(", text, maxsplit=1)[0]  # of orbax, for its makers
    text = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1", text).rstrip(".:")
    return text if len(text) <= 400 else f"{text[:400]} ..."
