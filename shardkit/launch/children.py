"""Processes of this machine: started, watched, their output passed on line by line, and ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from shardkit.launch import guard
from shardkit.launch.lines import Lines
from shardkit.launch.results import Ended

# How often it's seen whether a process has ended, in seconds; output wakes it at once.
_INTERVAL = 0.05

# Seconds for what is left in the pipes of processes that have ended, where something they started holds them open.
_DRAIN = 0.5


class Children:
    """Processes that are started together and end together: none of them is left when the ``with`` block is.

    Each has a process group of its own, so that what it starts in turn can be ended with it, and so that a Ctrl-C of
    the terminal reaches it only through whoever forwards it.

    Args:
      command: the words of the command, of every process.
      environments: the environment of each process.
      cwd: where they run. None: here.
      write: called with a process, "stdout" or "stderr", and a whole line. None: what they write is kept instead.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        cwd: str | os.PathLike[str] | None = None,
        write: Callable[[int, str, str], None] | None = None,
    ):
        self._command, self._environments, self._cwd, self._write = list(command), environments, cwd, write
        self._started: list[subprocess.Popen[bytes]] = []
        self._status: dict[int, int] = {}
        self._kept: dict[tuple[int, str], list[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Children:
        try:
            # It must outlive a signal to this process's group, hence a session of its own.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for process, environment in enumerate(self._environments):
                self._start(process, environment)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def running(self) -> list[int]:
        """Those that have not ended."""
        return [process for process in range(len(self._started)) if process not in self._status]

    @property
    def statuses(self) -> Mapping[int, int]:
        """Of those that have ended: the exit status, or the negative number of the signal that killed it."""
        return self._status

    def wait(self) -> list[int]:
        """Passes output on for a moment; who has ended meanwhile, in the order of processes."""
        if self.running:
            self._pump(_INTERVAL)
        ended = [process for process in self.running if self._ended(process)]
        if ended:
            self._pump(0)  # what they said last comes before anything that's said about them
        return ended

    def send(self, number: int, *, to_ended: bool = False) -> None:
        """A signal to the process groups.

        Args:
          number: the signal.
          to_ended: also to what's left of the groups of processes that have ended.
        """
        for process, popen in enumerate(self._started):
            if to_ended or process not in self._status:
                # Nobody else has this number: a process that ended keeps it until _end asks for its status.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(popen.pid, number)

    def drain(self) -> None:
        """Passes on what processes that have ended left in their pipes."""
        until = time.monotonic() + _DRAIN
        while self._selector.get_map() and time.monotonic() < until:
            self._pump(_INTERVAL)
        for key in list(self._selector.get_map().values()):
            self._close(key)

    def ended(self) -> tuple[Ended, ...]:
        """How each has ended, and what it wrote if that was kept."""
        return tuple(
            Ended(process, self._status.get(process), self._text(process, "stdout"), self._text(process, "stderr"))
            for process in range(len(self._started))
        )

    def _start(self, process: int, environment: Mapping[str, str]) -> None:
        popen = subprocess.Popen(
            self._command,
            env=dict(environment),
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._started.append(popen)
        self._tell_guard(str(popen.pid))
        for name in ("stdout", "stderr"):
            pipe: IO[bytes] = getattr(popen, name)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (process, name, Lines()))

    def _pump(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            process, name, lines = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self._close(key)
            elif self._write is None:
                self._kept.setdefault((process, name), []).append(data)
            else:
                self._pass_on(process, name, lines.feed(data, time.monotonic()))

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
        process, name, lines = key.data
        self._pass_on(process, name, lines.rest())

    def _pass_on(self, process: int, name: str, lines: list[bytes]) -> None:
        for line in lines:
            if self._write is not None:
                self._write(process, name, line.decode(errors="replace"))

    def _ended(self, process: int) -> bool:
        # It's only looked at: until its status is taken, its number can't become another process's.
        found = os.waitid(os.P_PID, self._started[process].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return False
        self._status[process] = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return True

    def _text(self, process: int, name: str) -> str:
        return b"".join(self._kept.get((process, name), [])).decode(errors="replace")

    def _tell_guard(self, word: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed; nothing is lost but its help
                self._guard.stdin.write(f"{word}\n".encode())
                self._guard.stdin.flush()

    def _end(self) -> None:
        if self.running:
            self.send(signal.SIGKILL, to_ended=True)
        for process, popen in enumerate(self._started):
            self._status.setdefault(process, popen.wait())
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._tell_guard("done")
        if self._guard is not None:
            if self._guard.stdin is not None:
                self._guard.stdin.close()
            self._guard.wait()
