"""`progress`: a process says that it gets on."""

from __future__ import annotations

import dataclasses
import itertools
import time


@dataclasses.dataclass(frozen=True)
class Mark:
    """The last that was said, and how often something was."""

    count: int
    what: str
    number: int | None
    at: float

    def __str__(self) -> str:
        return self.what if self.number is None else f"{self.what} {self.number}"


_count = itertools.count(1)
_last: list[Mark | None] = [None]


def progress(what: str, number: int | None = None) -> None:
    """Says that this process gets on, for the watch that ends a job in which one is stuck.

    ``sk.shard_dataloader`` says so for each batch, and ``sk.Checkpointer`` for each checkpoint. Call it in a loop that
    uses neither, and within work that may take longer than the watch's ``stuck_timeout``. All processes must call it
    alike: one that has made fewer marks than others is taken for the one they wait for. It costs about a
    microsecond, and sends nothing by itself.

    Args:
      what: what got done.
      number: which one.

    Example:
      >>> import shardkit.hosts
      >>> for step in range(3):
      ...     shardkit.hosts.progress("step", step)
    """
    _last[0] = Mark(next(_count), what, number, time.monotonic())


def last_mark() -> Mark | None:
    """The last that was said."""
    return _last[0]
