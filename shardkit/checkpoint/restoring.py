"""One checkpoint read: looked for, checked, compared with the target, and only then put into it."""

from __future__ import annotations

import json
import os
from typing import Any

import jax

from shardkit.checkpoint.describing import Description, describe, differences, from_json
from shardkit.checkpoint.digests import LIST, damaged_files, missing_files, read_list, unlisted_files
from shardkit.checkpoint.errors import CheckpointError
from shardkit.checkpoint.reading import read_arrays
from shardkit.checkpoint.slots import take_apart
from shardkit.checkpoint.steps import CONTENTS, is_whole, located, newest_whole, steps_in
from shardkit.hosts import agree, exchange

_SHOWN = 20


def restore_step(
    path: str | os.PathLike, target: Any, step: int | None, *, partial: bool, verify: bool
) -> tuple[Any, int]:
    """The tree of a checkpoint, as the target has it, and its step.

    Raises:
      CheckpointError: there's none, it's damaged, or the target differs from it.
    """
    folder, own = located(path)
    if own is not None and step not in (None, own):
        raise CheckpointError(f"{path} is the checkpoint of step {own}, and step={step} was asked for; give its folder")
    step = _chosen(folder, own if step is None else step)
    agree(f"restoring from {folder}", {"step": step})
    directory = folder / str(step)
    stored = _checked(folder, step, verify)
    slots, build = take_apart(target)
    wanted = [describe(slot) for slot in slots]
    lines = differences(stored, wanted, partial=partial)
    if lines:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise CheckpointError(
            f"{directory} and the target differ:\n"
            + "\n".join(lines[:_SHOWN] + more)
            + "\nNothing was restored. Make the target as the saved tree was"
            + ("" if partial else ", or give partial=True to leave unread what only the checkpoint has")
        )
    by_path = {tuple(d["path"]): d for d in stored}
    arrays = [
        (by_path[slot.path], slot) for slot, d in zip(slots, wanted, strict=True) if d["kind"] in ("array", "key")
    ]
    found = read_arrays(directory, arrays, stored)
    values = []
    for slot, description in zip(slots, wanted, strict=True):
        if description["kind"] == "state":
            slot.value.set_state(from_json(by_path[slot.path]["value"]))
            values.append(slot.value)
        elif slot.path in found:
            values.append(found[slot.path])
        else:
            values.append(from_json(by_path[slot.path]["value"]))
    return build(values), step


def _chosen(folder: Any, step: int | None) -> int:
    """The step to read. Which is the newest isn't for each process to say by itself: files appear when they like."""
    there = steps_in(folder)
    if step is None:
        step = exchange(f"newest in {folder}", there[-1])[0]
    if step not in there:
        shown = ", ".join(map(str, there[-8:]))
        raise CheckpointError(f"{folder} holds no step {step}; there are {shown}", previous=newest_whole(folder))
    return step


def _checked(folder: Any, step: int, verify: bool) -> list[Description]:
    """What the checkpoint says of its values, once its files are found to be what was written.

    Processes share the reading, and all refuse alike.
    """
    directory = folder / str(step)
    trouble: list[str] = []
    listed: dict[str, str] = {}
    try:
        listed = read_list(directory)
    except ValueError as error:
        trouble = [str(error)]
    if listed and CONTENTS not in listed:
        trouble = [f"{CONTENTS} is not in the list of files"]
    trouble += [f"{name} is missing" for name in missing_files(directory, listed)]
    if listed:
        trouble += [f"{name} is there, but {LIST} doesn't list it" for name in unlisted_files(directory, listed)]
    if verify and not trouble:
        here = sorted(listed)[jax.process_index() :: jax.process_count()]
        damaged = damaged_files(directory, {name: listed[name] for name in here})
        trouble = [f"{name} does not hold what was written" for name in damaged]
    said = exchange(f"checking {directory}", trouble)
    trouble = list(dict.fromkeys(line for lines in said for line in lines))
    if trouble:
        _refuse(folder, step, trouble)
    return json.loads((directory / CONTENTS).read_text())["leaves"]


def _refuse(folder: Any, step: int, trouble: list[str]) -> None:
    file = trouble[0].partition(" ")[0]
    others = [s for s in reversed(steps_in(folder)) if s != step and is_whole(folder, s)]
    previous = next((s for s in others if s < step), others[0] if others else None)
    offer = (
        "there is no other whole one"
        if previous is None
        else f"step {previous} is whole: restore it with step={previous}"
    )
    more = f" (and {len(trouble) - 5} more)" if len(trouble) > 5 else ""
    raise CheckpointError(
        f"the checkpoint {folder / str(step)} is damaged: {'; '.join(trouble[:5])}{more}. "
        f"Nothing was restored; {offer}",
        file=folder / str(step) / file,
        previous=previous,
    )
