"""One checkpoint read: looked for, checked, compared with the target, and only then put into it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator, Sequence
from typing import Any

import jax

from shardkit.checkpoint.describing import Description, describe, differences, scalar_kind
from shardkit.checkpoint.digests import LIST, damaged_files, missing_files, read_list, unlisted_files
from shardkit.checkpoint.errors import CheckpointError
from shardkit.checkpoint.json_values import from_json
from shardkit.checkpoint.reading import plans, read_arrays
from shardkit.checkpoint.saving import FORMAT
from shardkit.checkpoint.slots import Slot, name_of, take_apart
from shardkit.checkpoint.steps import CONTENTS, checked_step, is_whole, located, newest_whole, steps_in
from shardkit.checkpoint.together import CHANNEL, together
from shardkit.hosts import agree, exchange

_SHOWN = 20


def restore_step(
    path: str | os.PathLike[str], target: Any, step: int | None, *, partial: bool, verify: bool
) -> tuple[Any, int]:
    """The tree of a checkpoint, as the target has it, and its step.

    Raises:
      CheckpointError: there's none, it's damaged, or the target differs from it.
    """
    doing = f"restoring from {os.fspath(path)}"
    with together(doing):
        folder, step = _looked_for(path, step)
    agree(CHANNEL, {"path": str(folder), "step": step})
    step = _chosen(folder, step, doing)
    directory = folder / str(step)
    _check_files(folder, step, verify)
    with together(doing):
        stored = _contents(directory)
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
        given = [by_path[slot.path] for slot in slots]
        plain = {slot.path: _value(d, slot) for d, slot in zip(given, slots, strict=True) if not _is_array(d)}
        how_to = plans([(d, slot) for d, slot in zip(given, slots, strict=True) if _is_array(d)])
    found = plain | read_arrays(directory, how_to, stored)
    with _states_as_before([slot.value for slot, d in zip(slots, wanted, strict=True) if d["kind"] == "state"]):
        with together(doing):
            for slot, description in zip(slots, wanted, strict=True):
                if description["kind"] == "state":
                    slot.value.set_state(found[slot.path])
                    found[slot.path] = slot.value
        return build([found[slot.path] for slot in slots]), step


def _looked_for(path: str | os.PathLike[str], step: Any) -> tuple[Any, int | None]:
    folder, own = located(path)
    step = None if step is None else checked_step(step)
    if own is not None and step not in (None, own):
        raise CheckpointError(f"{path} is the checkpoint of step {own}, and step={step} was asked for; give its folder")
    return folder, own if step is None else step


def _chosen(folder: Any, step: int | None, doing: str) -> int:
    """The step to read. Which is the newest isn't for each process to say by itself: files appear when they like."""
    there = exchange(CHANNEL, steps_in(folder))[0]
    with together(doing):
        if step is None and there:
            step = there[-1]
        if step is None or step not in there:
            shown = ", ".join(map(str, there[-8:])) or "none any more"
            asked = "step" if step is None else f"step {step}"
            raise CheckpointError(f"{folder} holds no {asked}; there are {shown}", previous=newest_whole(folder))
    return step


def _check_files(folder: Any, step: int, verify: bool) -> None:
    """Refuses a checkpoint whose files aren't what was written.

    Processes share the reading, and all refuse alike.
    """
    directory = folder / str(step)
    trouble: list[str] = []
    try:
        listed = read_list(directory)
        if CONTENTS not in listed:
            trouble.append(f"{CONTENTS} is not in the list of files")
        trouble += [f"{name} is missing" for name in missing_files(directory, listed)]
        trouble += [f"{name} is there, but {LIST} doesn't list it" for name in unlisted_files(directory, listed)]
        if not trouble:
            # What is to be known of the arrays is small, and read by every process.
            here = sorted(listed)[jax.process_index() :: jax.process_count()] if verify else []
            damaged = damaged_files(directory, {name: listed[name] for name in {CONTENTS, *here}})
            trouble = [f"{name} does not hold what was written" for name in damaged]
    except ValueError as error:
        trouble = [str(error)]
    except OSError as error:  # deleted meanwhile, by a job that keeps the newest
        trouble = [f"{LIST} can't be read: {error}"]
    said = exchange(CHANNEL, trouble)
    trouble = list(dict.fromkeys(line for lines in said for line in lines))
    if trouble:
        _refuse(folder, step, trouble)


def _refuse(folder: Any, step: int, trouble: list[str]) -> None:
    file = trouble[0].partition(" ")[0]
    others = [s for s in reversed(steps_in(folder)) if s != step and is_whole(folder, s)]
    others = exchange(CHANNEL, others)[0]
    previous = next((s for s in others if s < step), others[0] if others else None)
    if not (folder / str(step)).exists():
        raise CheckpointError(_gone(folder / str(step)), previous=previous)
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


def _gone(directory: Any) -> str:
    return (
        f"{directory} was deleted while it was read, most likely by a job that keeps the newest; nothing was restored. "
        "Restore again, which takes the newest"
    )


def _contents(directory: Any) -> list[Description]:
    """What the checkpoint says of its values."""
    try:
        contents = json.loads((directory / CONTENTS).read_text())
    except OSError as error:
        raise CheckpointError(_gone(directory) if not directory.exists() else str(error)) from error
    if contents["format"] > FORMAT:
        raise CheckpointError(
            f"{directory} is of format {contents['format']}, of a newer shardkit; this one reads up to {FORMAT}"
        )
    return contents["leaves"]


def _is_array(description: Description) -> bool:
    return description["kind"] in ("array", "key")


def _value(stored: Description, slot: Slot) -> Any:
    """A scalar, text, or this process's state, as it's stored."""
    if "values" in stored:
        values = stored["values"]
        if len(values) != jax.process_count():
            raise CheckpointError(
                f"{name_of(slot.path)}: each of the {len(values)} processes that saved it had a state of its own, "
                f"which {jax.process_count()} can't take over. Leave it out of sk.restore's target, with partial=True"
            )
        return from_json(values[jax.process_index()])
    value, kind = from_json(stored["value"]), scalar_kind(slot.value)
    # An enumeration's member is one again.
    return value if stored["kind"] == "state" or type(slot.value) is kind else type(slot.value)(value)


@contextlib.contextmanager
def _states_as_before(objects: Sequence[Any]) -> Generator[None]:
    """Objects of which one could not be set have the states that they had."""
    before = [one.get_state() for one in objects]
    try:
        yield
    except BaseException:
        for one, state in zip(objects, before, strict=True):
            with contextlib.suppress(Exception):  # the error that is on its way says more
                one.set_state(state)
        raise
