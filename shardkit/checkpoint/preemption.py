"""Whether this job is asked to end: SIGTERM, which schedulers send some time before they kill."""

from __future__ import annotations

import signal
import threading
from typing import Any

from shardkit.hosts.service import service


class Preemption:
    """Watches for SIGTERM from its making on.

    With several processes JAX's preemption service agrees on a step at which all of them stop, whichever was told.
    A single process has a handler of its own, which keeps SIGTERM from ending it at once.
    """

    def __init__(self) -> None:
        self._told = False
        self._before: Any = None
        self._ours = service() is None and threading.current_thread() is threading.main_thread()
        if self._ours:
            self._before = signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        self._told = True
        if callable(self._before):
            self._before(number, frame)

    def reached(self, step: int) -> bool:
        """Whether to stop after this step. Every process asks after every step, once."""
        if not self._told and service() is not None:
            from jax.experimental import multihost_utils

            self._told = multihost_utils.reached_preemption_sync_point(step)
        return self._told

    def close(self) -> None:
        """Give SIGTERM back to whom it belonged."""
        if self._ours and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
        self._ours = False
