"""What processes tell each other: facts, or why one of them can't go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from shardkit.hosts import MissingProcessError, ProcessMismatchError, exchange

T = TypeVar("T")

_talking: set[int] = set()


def ask(channel: str, said: Any, **options: Any) -> list[Any]:
    """``exchange``, known to ``talks``."""
    _talking.add(threading.get_ident())
    try:
        return exchange(channel, said, **options)
    finally:
        _talking.discard(threading.get_ident())


def talks(thread: threading.Thread) -> bool:
    """Whether a thread is waiting for other processes' words, within the coordination service's own code."""
    return thread.ident in _talking and thread.is_alive()


def tell(
    channel: str, work: Callable[[], T], words: Callable[[T], Mapping[str, Any]], *, check: bool
) -> tuple[T, list[dict[str, Any]] | None]:
    """What ``work`` gives here, and what every process says of what it gave there.

    An error is told too: the others needn't wait for a process that has failed, and all fail alike.

    Args:
      channel: of ``exchange``; all processes call this equally often on it.
      work: what may fail here.
      words: about its result, for the others.
      check: False to tell nothing.

    Returns:
      The result, and the words of all in the order of processes; None for those where nothing was told.

    Raises:
      ProcessMismatchError: another process failed; where it failed, its own error.
    """
    if not check or jax.process_count() == 1:
        return work(), None
    try:
        result = work()
        facts = dict(words(result))
    except Exception as error:
        tell_error(channel, error)
        raise
    everyone = ask(channel, facts)
    refuse_failed(everyone, channel)
    return result, everyone


def tell_error(channel: str, error: Exception) -> None:
    """Tells the others of an error here, in place of facts; whoever doesn't come to hear it must not hide it."""
    with contextlib.suppress(MissingProcessError, jax.errors.JaxRuntimeError):
        ask(channel, {"error": f"{type(error).__name__}: {error}"})


def refuse_failed(everyone: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raises where a process said that it failed."""
    failed = [f"  process {p}: {said['error']}" for p, said in enumerate(everyone) if "error" in said]
    if failed:
        raise ProcessMismatchError(f"{what}: not every process could go on:\n" + "\n".join(failed))
