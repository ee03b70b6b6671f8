"""Work that each process does by itself, which fails in all of them or in none."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from shardkit.checkpoint.errors import CheckpointError
from shardkit.hosts import exchange
from shardkit.hosts.words import processes

CHANNEL = "checkpoints"  # one for all: what differs is told, and isn't waited for


@contextlib.contextmanager
def together(doing: str) -> Generator[None]:
    """An error within, in whichever process, is raised in all: none goes on to wait for one that failed.

    Args:
      doing: what for, as the error of the other processes has it.

    Raises:
      CheckpointError: in processes that did not fail themselves.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    said = exchange(CHANNEL, None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    who = [process for process, text in enumerate(said) if text is not None]
    if who:
        raise CheckpointError(f"{doing} failed in {processes(who)}, so nothing was done here: {said[who[0]]}")
