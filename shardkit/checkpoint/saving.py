"""One checkpoint written: its contents made, orbax set to work, and its errors told in ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from shardkit.checkpoint.describing import describe, to_json
from shardkit.checkpoint.digests import digest_of_text
from shardkit.checkpoint.errors import CheckpointError
from shardkit.checkpoint.slots import take_apart
from shardkit.checkpoint.steps import newest_whole
from shardkit.checkpoint.writing import Save, stored_arrays
from shardkit.hosts import agree

FORMAT = 1


def contents_of(tree: Any, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is to be known of a tree, as JSON can hold it, and its arrays by name.

    Raises:
      TypeError: a value that no checkpoint can hold.
      ValueError: two values of one name.
    """
    slots, _ = take_apart(tree)
    leaves = [describe(slot) for slot in slots]
    for slot, description in zip(slots, leaves, strict=True):
        if description["kind"] == "state":
            description["value"] = to_json(slot.value.get_state())
        elif description["kind"] not in ("array", "key"):
            description["value"] = to_json(slot.value)
        try:
            json.dumps(description)
        except TypeError as error:
            raise TypeError(f"{'/'.join(slot.path)}: its state can't be written as JSON: {error}") from None
    about = {"format": FORMAT, "step": step, "jax": jax.__version__, "processes": jax.process_count()}
    return about | {"leaves": leaves}, stored_arrays(slots, leaves)


def start(
    writer: ocp.AsyncCheckpointer, path: Any, tree: Any, step: int, before: Callable[[Any], None] | None, force: bool
) -> None:
    """Copy a tree from the devices and begin to write it. Every process calls it.

    Raises:
      CheckpointError: it can't be written, or the one before it could not.
    """
    if not force and (path / str(step)).exists():
        raise CheckpointError(
            f"{path} holds step {step} already; nothing was written. Go on from its newest step, give another folder, "
            "or write over it (force=True, or overwrite=True of sk.save)"
        )
    contents, arrays = contents_of(tree, step)
    names = [{key: d.get(key) for key in ("path", "kind", "dtype", "shape")} for d in contents["leaves"]]
    agree(f"checkpoint of {path}", {"step": step, "path": str(path), "tree": digest_of_text(json.dumps(names))})
    with told(path):
        writer.save(path / str(step), args=Save(arrays, contents, before), force=force)


@contextlib.contextmanager
def told(path: Any) -> Iterator[None]:
    """Errors of the file system and of orbax, as one that says what is still there."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        previous = _newest(path)
        rest = f"the newest whole one there is step {previous}" if previous is not None else "there is no whole one yet"
        raise CheckpointError(
            f"a checkpoint could not be written to {path}: {_words(error)}; nothing of it is kept, {rest}",
            previous=previous,
        ) from error


def _newest(path: Any) -> int | None:
    try:
        return newest_whole(path)
    except OSError:
        return None


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} ..."
