"""The steps in a folder of checkpoints: which there are, which are whole, and deleting old ones."""

from __future__ import annotations

import contextlib
import glob
import itertools
import operator
import os
import re
import weakref
from collections.abc import Iterable
from typing import Any

from shardkit.checkpoint.digests import LIST, missing_files, read_list
from shardkit.checkpoint.errors import CheckpointError

CONTENTS = "shardkit.json"
TEMPORARY = ".orbax-checkpoint-tmp"
DELETED = ".deleted"
NEW = ".new"  # whole, and to take the place of one that is there
_MARKS = (CONTENTS, LIST, "_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_LEFTOVER = re.compile(rf"(\d+)({re.escape(NEW)})?({re.escape(TEMPORARY)}|{re.escape(DELETED)})?")

# What this program is writing, and who writes it, who takes it along if nobody closes it.
_writers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def folder(path: str | os.PathLike[str]) -> Any:
    """A path, local or of a cloud's, as one kind of object; ``~`` is the user's home."""
    from etils import epath  # with orbax, which is long to import

    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ValueError(f"path={path!r}: give the folder of the checkpoints as text or pathlib.Path")
    return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


def folder_to_write(path: str | os.PathLike[str]) -> Any:
    """The same, of a folder that is to be written to.

    Raises:
      ValueError: orbax would lose arrays below such a name, which it takes for a pattern.
    """
    found = folder(path)
    if glob.escape(os.fspath(found)).count("[[]"):
        raise ValueError(f"path={os.fspath(path)!r}: orbax can't write below a folder with '[' in its name; rename it")
    return found


def checked_step(step: Any) -> int:
    """A step as a Python integer.

    Raises:
      ValueError: it's none.
    """
    return _integer("step", step, 0, "")


def checked_count(name: str, count: Any, otherwise: str = "") -> int:
    """A number of steps or checkpoints as a Python integer.

    Raises:
      ValueError: it's none; ``otherwise`` says what else may be given.
    """
    return _integer(name, count, 1, otherwise)


def _integer(name: str, given: Any, least: int, otherwise: str) -> int:
    try:
        number = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name}={given!r}: give an integer, {least} or more{otherwise}")
    return number


def steps_in(path: Any) -> list[int]:
    """The steps that are there, whole or not, ascending."""
    if not path.is_dir():
        return []
    return sorted(int(entry.name) for entry in path.iterdir() if _is_step(entry.name) and entry.is_dir())


def _is_step(name: str) -> bool:
    return name.isdecimal() and name.isascii() and (name == "0" or not name.startswith("0"))


def _is_ours(directory: Any) -> bool:
    """Whether a folder was a checkpoint, or a part of one: it may be anything that has a number for its name."""
    return any((directory / name).exists() for name in _MARKS)


def is_whole(path: Any, step: int | str) -> bool:
    """Whether all files of a checkpoint are there. Their contents aren't read."""
    try:
        listed = read_list(path / str(step))
        return CONTENTS in listed and not missing_files(path / str(step), listed)
    except (ValueError, OSError):
        return False


def newest_whole(path: Any, below: int | None = None) -> int | None:
    """The newest step whose files are all there; only steps below ``below``, if given."""
    candidates = [step for step in steps_in(path) if below is None or step < below]
    return next((step for step in reversed(candidates) if is_whole(path, step)), None)


def located(path: str | os.PathLike[str]) -> tuple[Any, int | None]:
    """The folder of checkpoints that a path means, and the step, if it means one.

    Raises:
      CheckpointError: there's no checkpoint.
    """
    here = folder(path)
    if not here.exists():
        raise CheckpointError(
            f"there is no checkpoint at {here}: nothing is there; give the path that sk.save was given"
        )
    if not here.is_dir():
        raise CheckpointError(f"{here} is a file; a checkpoint is a folder, the path that sk.save was given")
    if _is_step(here.name) and _is_ours(here):
        return here.parent, int(here.name)
    if not steps_in(here):
        inside = sorted(entry.name for entry in here.iterdir())
        shown = ", ".join(inside[:8]) + (", ..." if len(inside) > 8 else "")
        unfinished = any(name.endswith(TEMPORARY) for name in inside)
        raise CheckpointError(
            f"{here} holds no checkpoint: no folder named by a step in it, "
            + ("only one that was never finished" if unfinished else f"but {shown or 'nothing at all'}")
        )
    return here, None


def claim(directory: Any, writer: Any) -> None:
    """Say that a checkpoint is being written, so that nothing of it is taken for a leftover.

    Raises:
      CheckpointError: it's being written by another.
    """
    if _writers.setdefault(os.fspath(directory), writer) is not writer:
        raise CheckpointError(
            f"{directory} is being written already, by another sk.Checkpointer or sk.save of this process"
        )


def release(directory: Any, writer: Any) -> None:
    """The reverse of ``claim``, if it's this one's."""
    if _writers.get(os.fspath(directory)) is writer:
        del _writers[os.fspath(directory)]


def delete_old(path: Any, keep: int) -> None:
    """Delete all but the newest ``keep`` whole checkpoints, and what is left of older ones that aren't whole."""
    steps = steps_in(path)
    whole = list(itertools.islice((step for step in reversed(steps) if is_whole(path, step)), keep))
    if len(whole) == keep:
        for step in steps:
            if step < whole[-1] and _is_ours(path / str(step)):
                with contextlib.suppress(FileNotFoundError):  # another was faster
                    _delete(path / str(step))


def delete_leftovers(path: Any) -> None:
    """Delete what saves and deletions that were cut short have left, apart from what this program is writing."""
    finish_replacing(path)
    for entry in list(path.iterdir()):
        found = _LEFTOVER.fullmatch(entry.name)
        if found and entry.name != found[1] and os.fspath(path / found[1]) not in _writers:
            with contextlib.suppress(OSError):  # it's in nobody's way
                _remove(entry)


def replace(path: Any, step: int) -> None:
    """Put a new checkpoint in the place of the one that was there."""
    if (path / str(step)).exists():
        _delete(path / str(step), within=lambda: (path / f"{step}{NEW}").rename(path / str(step)))
    else:
        (path / f"{step}{NEW}").rename(path / str(step))


def finish_replacing(path: Any) -> None:
    """Do what a job that ended before ``replace``, or within it, did not."""
    if not path.is_dir():
        return
    for entry in list(path.iterdir()):
        step = entry.name.removesuffix(NEW)
        is_new = step != entry.name and _is_step(step) and os.fspath(path / step) not in _writers
        if is_new and is_whole(path, entry.name):
            replace(path, int(step))


def put_aside(path: Any, steps: Iterable[int]) -> None:
    """Give damaged checkpoints a name under which they're in nobody's way, for someone to look at."""
    for step in steps:
        aside = path / f"{step}.damaged"
        if aside.exists():
            _remove(aside)
        (path / str(step)).rename(aside)


def _delete(directory: Any, within: Any = None) -> None:
    # Under another name first: cut short, it must not look like a checkpoint.
    gone = directory.parent / f"{directory.name}{DELETED}"
    if gone.exists():
        _remove(gone)
    directory.rename(gone)
    if within is not None:
        within()
    _remove(gone)


def _remove(entry: Any) -> None:
    # What a link points to isn't this folder's.
    if os.path.islink(os.fspath(entry)) or not entry.is_dir():
        entry.unlink()
    else:
        entry.rmtree()
