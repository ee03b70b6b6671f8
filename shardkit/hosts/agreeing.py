"""`exchange` and `agree`: what each process says, told to all, before any device has to wait for another."""

from __future__ import annotations

import collections
import itertools
import json
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardkit.hosts.service import service, timed_out
from shardkit.hosts.words import processes

# How long a process may be behind the others, in seconds: compiling the same program can take minutes.
TIMEOUT = 600.0

_GAVE_UP = ""  # said by one that waits no longer; as good as never said

_rounds: collections.defaultdict[str, itertools.count[int]] = collections.defaultdict(itertools.count)


class ProcessMismatchError(ValueError):
    """Processes of one program said different things.

    Example:
      >>> import shardkit as sk
      >>> try:
      ...     sk.check_same({"x": 1}, "the batch")  # a process alone: nobody differs
      ... except sk.ProcessMismatchError as error:
      ...     print("not the same everywhere:", error)
    """


class MissingProcessError(TimeoutError):
    """A process didn't come to where the others wait for it.

    Example:
      >>> import shardkit as sk
      >>> try:
      ...     sk.check_same({"x": 1}, "the batch")  # a process alone: nobody is missed
      ... except sk.MissingProcessError as error:
      ...     print("restart the job:", error)
    """


def exchange(channel: str, said: Any, *, timeout: float = TIMEOUT) -> list[Any]:
    """What each process says, in the order of processes.

    Every process must call it, equally often on each channel; channels are apart from each other, so that threads may
    have their own. It's no collective: devices have no part in it.

    Args:
      channel: a name.
      said: anything that JSON can hold.
      timeout: how long to wait for the others, in seconds.

    Returns:
      A list with one entry a process, the one of this process among them, as JSON gives it back.

    Raises:
      MissingProcessError: in every process that came; it names those that didn't.
      TypeError: something that JSON can't hold.

    Example:
      >>> from shardkit.hosts import exchange
      >>> exchange("greeting", "hello")  # a process alone
      ['hello']
    """
    client = service()
    if client is None:
        return [json.loads(json.dumps(said))]
    number, count, mine = next(_rounds[channel]), jax.process_count(), jax.process_index()
    # Quoted: a channel's keys must not lie within another's, which deletes its own.
    channel_keys = f"shardkit/exchange/{urllib.parse.quote(channel, safe='')}"
    here = f"{channel_keys}/{number}"
    client.key_value_set(f"{here}/said/{mine}", json.dumps(said))
    # One reads them all and tells the others, so that the traffic grows with their number and not with its square.
    if mine == 0:
        until = time.monotonic() + timeout
        found = [_read(client, f"{here}/said/{p}", until - time.monotonic()) for p in range(count)]
        client.key_value_set(f"{here}/all", json.dumps(found))
        if number > 1:  # whoever has come to the last round has read the one before it
            client.key_value_delete(f"{channel_keys}/{number - 2}/")
    else:
        text = _read(client, f"{here}/all", timeout * 1.1 + min(timeout, 5))
        found: list[str | None] = [None] if text is None else json.loads(text)
        if text is None:  # process 0 may come later, and must not go on as if this one were still here
            client.key_value_set(f"{here}/said/{mine}", _GAVE_UP, allow_overwrite=True)
    missing = [p for p, text in enumerate(found) if not text]
    if missing:
        raise MissingProcessError(
            f"{channel}: waited {timeout:.0f} s for {processes(missing)}, which did not come; {processes([mine])} "
            "did. It may have ended, be stuck or late, or call other things or in another order: see its output"
        )
    return [json.loads(text) for text in found if text]


def agree(channel: str, facts: Mapping[str, Any], *, timeout: float = TIMEOUT) -> None:
    """Refuses to go on where processes don't say the same, in all of them alike.

    Args:
      channel: what it's about, as the error names it.
      facts: that must be the same everywhere, by name; anything that JSON can hold.
      timeout: how long to wait for the others, in seconds.

    Raises:
      ProcessMismatchError: it names the processes that differ from most, and in what.
      MissingProcessError: a process didn't come.

    Example:
      >>> from shardkit.hosts import agree
      >>> agree("images", {"shape": [8, 32, 32, 3]})  # one process agrees with itself
    """
    said = exchange(channel, dict(facts), timeout=timeout)
    lines = differences(said)
    if lines:
        raise ProcessMismatchError(f"{channel}: processes differ, before anything was sent:\n" + "\n".join(lines))


def differences(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each fact that isn't the same in all: who says what, those that differ from most first."""
    lines = []
    for name in dict.fromkeys(itertools.chain.from_iterable(said)):
        groups: dict[str, list[int]] = {}
        for process, facts in enumerate(said):
            text = json.dumps(facts[name]) if name in facts else "nothing"
            groups.setdefault(text, []).append(process)
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda item: len(item[1]))
            lines.append(f"  {name}: " + "; ".join(f"{processes(who)}: {text}" for text, who in ordered))
    return lines


def _read(client: Any, key: str, seconds: float) -> str | None:
    """What stands there once it does; None if it doesn't in time."""
    try:
        return client.blocking_key_value_get(key, max(1, round(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if timed_out(error):
            return None
        raise
