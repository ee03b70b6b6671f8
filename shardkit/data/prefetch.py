"""A thread that makes items ahead of who takes them."""

from __future__ import annotations

import atexit
import collections
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from shardkit.data.telling import talks

# How long closing waits for the thread, in seconds; one that's in slow code of the user ends when it returns.
_WAIT = 2.0
# The same as Python ends, for one that says goodbye to other processes.
_LONGEST = 75.0


class Shelf:
    """Room for items between two threads. Closing it frees whoever waits; what lies there is dropped."""

    def __init__(self, room: int):
        self._room = room
        self._items: collections.deque[Any] = collections.deque()
        self._last: list[BaseException | None] = []  # once there's nothing to come: why
        self._closed = False
        # Reentrant: the garbage collector may close the shelf in a thread that's just using it.
        self._changed = threading.Condition(threading.RLock())

    def is_open(self) -> bool:
        return not self._closed

    def wait_for_room(self) -> bool:
        """Before an item is made, so that no more exist than there's room for; False once it's closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._room)
            return not self._closed

    def put(self, item: Any) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
            self._changed.notify_all()

    def finish(self, why: BaseException | None) -> None:
        """No more items, as an error or the end came."""
        with self._changed:
            self._last.append(why)
            self._changed.notify_all()

    def take(self) -> Any:
        """The next item; or the error, or StopIteration, that came in its place."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._last or self._closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            why = self._last[0] if self._last else None
        if why is None:
            raise StopIteration
        raise why

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class Ahead:
    """An iterator over what a generator gives, which a thread runs up to ``room`` items ahead."""

    def __init__(self, items: Generator[Any, None, None], shelf: Shelf, name: str):
        self._shelf = shelf
        # The thread knows the shelf and the generator only, so that it ends when nobody holds this any more.
        self._thread = threading.Thread(target=_fill, args=(items, shelf, _x64_here()), name=name, daemon=True)
        weakref.finalize(self, shelf.close)
        _close_at_exit(self)
        self._thread.start()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        return self._shelf.take()

    def talks(self) -> bool:
        """Whether the thread waits for other processes."""
        return talks(self._thread)

    def close(self, wait: float | None = None) -> None:
        """Ends the thread, and waits a little until it has."""
        self._shelf.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_WAIT if wait is None else wait)


def _x64_here() -> bool:
    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)


def _fill(items: Generator[Any, None, None], shelf: Shelf, x64: bool) -> None:
    why: BaseException | None = None
    try:
        with jax.enable_x64(x64), contextlib.closing(items):  # settings of JAX go by thread
            while shelf.wait_for_room():
                try:
                    item = next(items)
                except StopIteration:
                    return
                shelf.put(item)
                del item
    except BaseException as error:  # SystemExit of a user's code, too: who takes must not wait for ever
        why = error
    finally:
        shelf.finish(why)


_open: weakref.WeakSet[Ahead] = weakref.WeakSet()
_registered: list[bool] = []


def _close_at_exit(ahead: Ahead) -> None:
    """Ends threads while Python and JAX still work.

    Registered late, so that it runs before JAX leaves the coordination service: a thread must not wait there then.
    """
    _open.add(ahead)
    if not _registered:
        _registered.append(True)
        atexit.register(_close_all)


def _close_all() -> None:
    left = list(_open)
    for ahead in left:
        ahead.close(wait=0)
    start = time.monotonic()
    for ahead in left:
        ahead.close(wait=max(0, start + _WAIT - time.monotonic()))
    # Python can't leave while a thread is in the service's code: coming back from it then aborts the process. JAX waits
    # for the others at its end anyway, unless an exception ends this process, of which the others should hear soon.
    while any(ahead.talks() for ahead in left) and not hasattr(sys, "last_type"):
        if time.monotonic() > start + _LONGEST:
            break
        time.sleep(0.01)
