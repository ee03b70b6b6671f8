"""`watch`: ends the job, and says because of whom, where a process is dead or stuck and the others would wait for ever.

Each process says how it is through the coordination service, from a thread; process 0 hears them all and decides. The
others only watch over process 0, so that traffic grows with the number of processes and not with its square. Two
threads a process: the first talks with the service and may wait long for an answer (when process 0 is stopped,
minutes), the second never waits for anything but time.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import jax

from shardkit.hosts.frames import where
from shardkit.hosts.hearing import Hearing
from shardkit.hosts.marks import last_mark
from shardkit.hosts.service import client_of, service
from shardkit.hosts.verdict import NORMALLY, Heard, Said, Verdict, failed, judge

# The exit status of processes that the watch ends: EX_TEMPFAIL of sysexits.h, "try again later".
STATUS = 75
STUCK_TIMEOUT = 1800.0
# JAX's own patience is 100 s (heartbeat_timeout_seconds); it then aborts all without saying where they were.
DEAD_TIMEOUT = 60.0

_SAID = "shardkit/watch/said/"
_JUDGE = "shardkit/watch/judge/"  # process 0's words, and the verdict

# How many dead_timeouts a process that has ended waits for the others; then it's JAX that waits.
_PATIENCE = 5

_current: list[Watch] = []


def watch(
    stuck_timeout: float | None = STUCK_TIMEOUT,
    dead_timeout: float = DEAD_TIMEOUT,
    interval: float = 1.0,
    *,
    process: int | None = None,
    processes: int | None = None,
) -> Watch | None:
    """Watches over the processes of this job from now on; ``sk.initialize`` calls it in all of them.

    When one is dead (killed, stopped, its machine lost), has failed (ended by an exception), or is stuck (no
    ``sk.progress`` from it while others wait, or from anybody), all processes write on stderr which one it is, where
    each was, and their own traceback, and end with exit status 75. Nothing is judged stuck before the first mark.

    Where process 0 is killed JAX is faster: it ends the others from C++ as soon as the connection closes, with a
    message about the leader task, and status 134 (SIGABRT).

    A process that ends waits for the others before JAX does, for up to five times ``dead_timeout``. One that ends with
    another status than 0 by ``sys.exit`` can't be told from one that has done its work.

    Args:
      stuck_timeout: seconds without progress. None: as long as it takes. Work that takes longer must call
        ``sk.progress`` within. It has to be the same in all processes, as the following.
      dead_timeout: seconds of silence; and how long others may go on after one failed. A library that holds Python's
        lock for so long looks dead. More than JAX's ``heartbeat_timeout_seconds`` is of no use.
      interval: seconds between two signs of life.
      process, processes: which one this is, of how many. None: JAX is asked, which starts its devices.

    Returns:
      The watch, to be closed; None in a process alone.

    Raises:
      ValueError: a time that isn't positive, a ``dead_timeout`` of less than three intervals, only one of ``process``
        and ``processes``.

    Example:
      >>> from shardkit.hosts import watch
      >>> watch(stuck_timeout=3600)  # a process alone: nothing to watch
    """
    for name, seconds in {"stuck_timeout": stuck_timeout, "dead_timeout": dead_timeout, "interval": interval}.items():
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name} must be a positive number of seconds; got {seconds!r}")
    if dead_timeout < 3 * interval:
        raise ValueError(
            f"dead_timeout must be at least three intervals, so that a late word is no death; got {dead_timeout:g} s, "
            f"and an interval of {interval:g} s"
        )
    if (process is None) != (processes is None):
        raise ValueError("give both process and processes, or neither")
    client = service() if processes is None else client_of(processes)
    if client is None:
        return None
    process = jax.process_index() if process is None else process
    processes = jax.process_count() if processes is None else processes
    while _current:
        _current[0].close()
    started = Watch(client, process, processes, stuck_timeout, dead_timeout, interval)
    _current.append(started)
    return started


class Watch:
    """Two threads that watch over the other processes, and say to them how this one is.

    Started by ``shardkit.hosts.watch``.

    Example:
      >>> from shardkit.hosts import Watch, watch
      >>> started = watch(stuck_timeout=3600)
      >>> started is None or isinstance(started, Watch)  # None: a process alone
      True
    """

    def __init__(
        self,
        client: Any,
        process: int,
        processes: int,
        stuck_timeout: float | None,
        dead_timeout: float,
        interval: float,
    ):
        self._client, self._process, self._processes = client, process, processes
        self._stuck_timeout, self._dead_timeout, self._interval = stuck_timeout, dead_timeout, interval
        self._started = time.monotonic()
        self._pid = os.getpid()
        self._beat = 0
        self._ended: tuple[str, float] | None = None  # how, and when
        self._said_so = threading.Event()
        self._hurry = threading.Event()
        self._closed = threading.Event()
        self._over = threading.Event()  # all have ended
        self._last = threading.Event()
        self._ending = threading.Lock()
        self._lock = threading.Lock()
        others = range(1, processes) if process == 0 else (0,)
        self._hearing = Hearing(others, self._started, 3 * interval)
        self._threads = [
            threading.Thread(target=self._run, args=[self._talk], name="shardkit-talk", daemon=True),
            threading.Thread(target=self._run, args=[self._look], name="shardkit-watch", daemon=True),
            threading.Thread(target=self._end_late, name="shardkit-end", daemon=True),
        ]
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._say()  # at once, so that one that dies early has a name
        self._hurry.set()
        atexit.register(self._leave)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the watch in this process. The others take it for ended, and wait for it no more."""
        if not self._closed.is_set():
            self._say_ended(NORMALLY)
        self._stop()

    def _stop(self) -> None:
        """Before Python ends, or it would tear a thread out of a call to the service: C++ aborts at that."""
        self._closed.set()
        self._last.set()
        self._hurry.set()
        for thread in self._threads:
            thread.join(2 * self._interval)
        atexit.unregister(self._leave)
        if self in _current:
            _current.remove(self)

    def _leave(self) -> None:
        """This process ends: the others hear of it, and it waits for them here, where it can still be told the verdict.

        JAX would wait for them, too, but in C++. If process 0 failed, the others end as well, by what it says rather
        than by JAX's abort when the service is gone.
        """
        if self._ending.locked():  # the main thread came free by the end of another process
            time.sleep(30)
        if os.getpid() != self._pid:  # a copy of this process, which has no such threads
            return
        try:
            if not self._gone():
                how = _how()
                self._say_ended(how)
                if how == NORMALLY:
                    self._over.wait(_PATIENCE * self._dead_timeout)
                elif self._process == 0:
                    self._take_along()
        finally:
            self._stop()

    def _say_ended(self, how: str) -> None:
        """By the thread that talks: an answer may never come, and isn't waited for long."""
        self._ended = (how, time.monotonic())
        self._hurry.set()
        self._said_so.wait(min(2 * self._interval, 2.0))

    def _take_along(self) -> None:
        """Process 0 failed. Of that it may be the cause that another is dead, which takes some time to be known."""
        pause = 3 * self._interval
        while not self._gone():
            time.sleep(pause)
            with self._lock:
                others = self._hearing.heard()
            if not any(h.runs and h.silent > 2 * self._interval for h in others.values()):
                self._tell(failed(0, {0: Heard(self._own()), **others}))
                _flush()
                os._exit(1)  # as Python ends after an exception; JAX would wait for the others
            pause = self._interval

    def _run(self, work: Any) -> None:
        while not self._gone():
            with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, ValueError):
                # What goes wrong with the service shows by silence: it's no time to be noisy while one shuts down.
                work()

    def _gone(self) -> bool:
        return self._closed.is_set() or sys.is_finalizing() or not jax.distributed.is_initialized()

    def _talk(self) -> None:
        """Says how this process is, and hears others."""
        # Those that have ended wait for nothing else.
        pause = self._interval if self._ended is None else min(self._interval, max(0.05, 0.001 * self._processes))
        if self._hurry.wait(pause):
            self._hurry.clear()
        if self._gone():
            return
        ended = self._ended is not None
        self._say()
        if ended:
            self._said_so.set()
        found = dict(self._client.key_value_dir_get(_SAID if self._process == 0 else _JUDGE))
        words = {key.rpartition("/")[2]: text for key, text in found.items()}
        verdict, over = words.pop("verdict", None), words.pop("over", None) is not None
        with self._lock:
            self._hearing.hear({int(p): Said(**json.loads(text)) for p, text in words.items()})
        if self._process == 0:
            heard = self._hearing.heard().values()
            if ended and all(h.said and h.said.ended == NORMALLY for h in heard):
                self._client.key_value_set(f"{_JUDGE}over", "", allow_overwrite=True)
                self._over.set()
        elif over:
            self._over.set()
        if verdict is not None:
            told = json.loads(verdict)
            self._end(Verdict(told["kind"], tuple(told["named"]), told["text"]))

    def _say(self) -> None:
        key = f"{_JUDGE}0" if self._process == 0 else f"{_SAID}{self._process}"
        self._client.key_value_set(key, json.dumps(dataclasses.asdict(self._own())), allow_overwrite=True)

    def _look(self) -> None:
        """Decides whether the job can go on."""
        self._closed.wait(self._interval)
        with self._lock:
            self._hearing.look(time.monotonic())
            heard = self._hearing.heard()
        if self._process == 0:
            found = judge(
                {0: Heard(self._own()), **heard}, stuck_timeout=self._stuck_timeout, dead_timeout=self._dead_timeout
            )
        else:
            found = judge(
                {self._process: Heard(self._own()), **heard}, stuck_timeout=None, dead_timeout=self._dead_timeout
            )
            # Anything else is for process 0 to say, which has heard all.
            found = found if found and found.kind == "dead" else None
        if found is not None and not self._gone():
            self._end(found)

    def _own(self) -> Said:
        """How this process is."""
        now, mark = time.monotonic(), last_mark()
        self._beat += 1
        return Said(
            beat=self._beat,
            host=socket.gethostname(),
            pid=os.getpid(),
            marks=mark.count if mark else 0,
            last=str(mark) if mark else "",
            quiet=now - max(mark.at if mark else 0.0, self._started),
            where=where(sys._current_frames().get(threading.main_thread().ident or 0)),  # pyright: ignore[reportPrivateUsage]
            ended=self._ended[0] if self._ended else "",
            ended_for=now - self._ended[1] if self._ended else 0.0,
        )

    def _end(self, found: Verdict) -> None:
        """Ends this process, whose main thread may be where no signal reaches it."""
        if not self._ending.acquire(blocking=False):
            return
        self._last.set()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        _write(
            f"shardkit: {found.text}\nshardkit: so process {self._process} ends, with exit status {STATUS}. "
            f"Its main thread was here (most recent call last):\n{stack}"
        )
        if self._process == 0:
            self._tell(found)
        _flush()
        os._exit(STATUS)

    def _end_late(self) -> None:
        """The end, where words get stuck in a full pipe, or in a stream whose lock is held.

        A thread like the others from the start: Python 3.12 starts none while it ends.
        """
        self._last.wait()
        if not self._closed.wait(10 + 2 * self._interval):
            os._exit(STATUS)

    def _tell(self, verdict: Verdict) -> None:
        """Process 0 to all others, which have to hear it before the service ends with process 0."""
        with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError, ValueError):
            text = json.dumps(dataclasses.asdict(verdict))
            self._client.key_value_set(f"{_JUDGE}verdict", text, allow_overwrite=True)
            time.sleep(2 * self._interval + 0.5)


def _how() -> str:
    """How this process ends, as far as Python says: a status given to sys.exit isn't known."""
    error = getattr(sys, "last_value", None)
    if error is None or sys.flags.interactive or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return NORMALLY  # at a prompt an exception is no end
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else text[:197] + "..."
    return f"by {type(error).__name__}" + (f": {text}" if text else "")


def _flush() -> None:
    """What the program wrote and Python still holds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _write(text: str) -> None:
    """Past Python's own stderr, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
