"""The steps in a folder of checkpoints: which there are, which are whole, and deleting old ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from shardkit.checkpoint.digests import missing_files, read_list
from shardkit.checkpoint.errors import CheckpointError

CONTENTS = "shardkit.json"
TEMPORARY = ".orbax-checkpoint-tmp"
DELETED = ".deleted"


def folder(path: str | os.PathLike) -> Any:
    """A path, local or of a cloud's, as one kind of object."""
    from etils import epath  # with orbax, which is long to import

    found = epath.Path(path)
    return found if "://" in os.fspath(path) else epath.Path(os.path.abspath(os.fspath(path)))


def steps_in(path: Any) -> list[int]:
    """The steps that are there, whole or not, ascending."""
    if not path.is_dir():
        return []
    return sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdecimal() and entry.is_dir())


def is_whole(path: Any, step: int) -> bool:
    """Whether all files of a checkpoint are there. Their contents aren't read."""
    try:
        listed = read_list(path / str(step))
    except (ValueError, OSError):
        return False
    return CONTENTS in listed and not missing_files(path / str(step), listed)


def newest_whole(path: Any, below: int | None = None) -> int | None:
    """The newest step whose files are all there; only steps below ``below``, if given."""
    candidates = [step for step in steps_in(path) if below is None or step < below]
    return next((step for step in reversed(candidates) if is_whole(path, step)), None)


def located(path: str | os.PathLike) -> tuple[Any, int | None]:
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
    if here.name.isdecimal() and (here / CONTENTS).exists():
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


def delete_old(path: Any, keep: int) -> None:
    """Delete all but the newest ``keep`` whole checkpoints, and what is left of older ones that aren't whole."""
    steps = steps_in(path)
    whole = [step for step in reversed(steps) if is_whole(path, step)][:keep]
    if len(whole) == keep:
        for step in steps:
            if step < whole[-1]:
                _delete(path / str(step))


def delete_leftovers(path: Any, but: str) -> None:
    """Delete what saves and deletions that were cut short have left, apart from the entry of that name."""
    for entry in path.iterdir():
        stem = entry.name.removesuffix(TEMPORARY).removesuffix(DELETED)
        if entry.name not in (stem, but) and stem.isdecimal():
            entry.rmtree(missing_ok=True)


def put_aside(path: Any, steps: Iterable[int]) -> None:
    """Give damaged checkpoints a name under which they're in nobody's way, for someone to look at."""
    for step in steps:
        aside = path / f"{step}.damaged"
        if aside.exists():
            aside.rmtree()
        (path / str(step)).rename(aside)


def _delete(directory: Any) -> None:
    # Under another name first: cut short, it must not look like a checkpoint.
    gone = directory.parent / f"{directory.name}{DELETED}"
    if gone.exists():
        gone.rmtree()
    directory.rename(gone)
    gone.rmtree()
