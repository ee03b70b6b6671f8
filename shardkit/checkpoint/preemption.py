"""Whether this job is asked to end: SIGTERM, which schedulers send some time before they kill."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Any

from shardkit.hosts.service import service


class Preemption:
    """Watches for SIGTERM from its making on.

    With several processes JAX's preemption service agrees on a step at which all of them stop, whichever was told.
    A single process has a handler of its own, which keeps SIGTERM from ending it at once; it's made in the main thread,
    as Python wants it, and one made in another thread hears of SIGTERM only while one of the main thread is there.
    """

    def __init__(self) -> None:
        self._told = False
        if service() is None:
            _listen(self)

    def tell(self) -> None:
        """What SIGTERM says."""
        self._told = True

    def reached(self, step: int) -> bool:
        """Whether to stop after this step. Every process asks after every step, once."""
        if not self._told and service() is not None:
            from jax.experimental import multihost_utils

            self._told = multihost_utils.reached_preemption_sync_point(step)
        return self._told

    def close(self) -> None:
        """Give SIGTERM back to whom it belonged, once nobody listens any more."""
        _listeners.discard(self)
        if not _listeners and _in_main_thread() and signal.getsignal(signal.SIGTERM) is _hear:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if _before[0] is None else _before[0])


# One handler for all: they end in any order, and one that nobody closed must not keep SIGTERM to itself.
_listeners: weakref.WeakSet[Preemption] = weakref.WeakSet()
_before: list[Any] = [None]  # the handler that was there
_busy = [False]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _listen(one: Preemption) -> None:
    _listeners.add(one)
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is not _hear:
        _before[0] = signal.signal(signal.SIGTERM, _hear)


def _hear(number: int, frame: Any) -> None:
    if _busy[0]:  # a handler set after this one, which hands on to it, may by now be the one before it
        return
    _busy[0] = True
    try:
        for one in list(_listeners):
            one.tell()
        if callable(_before[0]):
            _before[0](number, frame)
        elif not _listeners and _before[0] is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
    finally:
        _busy[0] = False
