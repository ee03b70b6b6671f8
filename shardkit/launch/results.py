"""How processes ended, and in words."""

from __future__ import annotations

import dataclasses
import signal


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process of a run ended.

    Attributes:
      process: its number.
      status: its exit status; the negative number of the signal that killed it; None if it still ran.
      stdout: what it wrote to the output stream, if that was captured.
      stderr: what it wrote to the error stream, if that was captured.

    Example:
      >>> from shardkit.launch import Ended
      >>> Ended(1, 0, stdout="done\\n").status
      0
    """

    process: int
    status: int | None
    stdout: str = ""
    stderr: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """How all processes of a run ended; ``shardkit.launch.run`` returns it.

    Attributes:
      processes: in their order.
      first_failure: the one that failed first, after which the others were stopped. None if none did.
      signal: the one that was forwarded to them. None if none was.
      called: whether any of them called ``sk.initialize()``; where none has, each ran for itself.

    Example:
      >>> import sys
      >>> from shardkit.launch import run
      >>> result = run([sys.executable, "-c", "print('here')"], processes=2, capture=True)
      >>> result.status, result.first_failure, [ended.stdout for ended in result.processes]
      (0, None, ['here\\n', 'here\\n'])
      >>> result.called
      False
    """

    processes: tuple[Ended, ...]
    first_failure: int | None = None
    signal: int | None = None
    called: bool = True

    @property
    def status(self) -> int:
        """What a launcher ends with: 0, the status of the first failure, or 128 and the number of a signal."""
        if self.first_failure is not None:
            return exit_status(self.processes[self.first_failure].status or 0)
        if self.signal is not None and any(ended.status for ended in self.processes):
            return 128 + self.signal
        return 0

    def check(self) -> Result:
        """This result, if all ended well.

        Raises:
          ProcessFailedError: one didn't. It says which, and what all have written.
        """
        if self.status:
            raise ProcessFailedError(f"{self.summary()}\n{self.written()}".rstrip(), self)
        return self

    @property
    def warning(self) -> str | None:
        """One line: that several were never one program, even where one failed. None if they were, or may have been."""
        count = len(self.processes)
        if self.called or count == 1 or (self.status and self.first_failure is None):
            return None
        if self.status:
            return (
                f"none of the {count} processes had called sk.initialize() by then: where a script doesn't call it "
                "first, each process runs all of the program for itself"
            )
        return (
            f"none of the {count} processes called sk.initialize(), so that each ran all of the program for itself "
            "(unless they were connected in another way): call it first in the script, or start one process"
        )

    def summary(self) -> str:
        """One line: who failed, or that none did."""
        if self.first_failure is not None:
            return describe(self.processes[self.first_failure])
        if self.status:
            return f"stopped by {signal_name(self.status - 128)}"
        return f"{len(self.processes)} processes ended well"

    def written(self) -> str:
        """What all of them have written, each line with the number of its process."""
        return "".join(
            f"[{ended.process}] {line}\n"
            for ended in self.processes
            for line in (ended.stdout + ended.stderr).splitlines()
        )


class ProcessFailedError(RuntimeError):
    """A process of a run failed, as ``Result.check()`` found. Its ``result`` says how all of them ended.

    Example:
      >>> import sys
      >>> from shardkit.launch import ProcessFailedError, run
      >>> try:
      ...     run([sys.executable, "-c", "raise SystemExit(3)"], processes=1, capture=True).check()
      ... except ProcessFailedError as error:
      ...     error.result.status
      3
    """

    def __init__(self, message: str, result: Result):
        super().__init__(message)
        self.result = result


class RunTimeoutError(TimeoutError):
    """A run took longer than the ``timeout`` of ``shardkit.launch.run(...)``.

    Its ``result`` says which processes had ended, and what all have written.

    Example:
      >>> import sys
      >>> from shardkit.launch import RunTimeoutError, run
      >>> try:
      ...     _ = run([sys.executable, "-c", "import time; time.sleep(60)"], processes=1, timeout=0.2, capture=True)
      ... except RunTimeoutError as error:
      ...     error.result.processes[0].status is None
      True
    """

    def __init__(self, message: str, result: Result):
        super().__init__(message)
        self.result = result


def exit_status(status: int) -> int:
    """The status with which a shell tells that of a process, which may have been killed.

    Example:
      >>> exit_status(3), exit_status(-9)
      (3, 137)
    """
    return 128 - status if status < 0 else status


def describe(ended: Ended) -> str:
    """How a process ended, in words.

    Example:
      >>> describe(Ended(2, -9)), describe(Ended(0, 3))
      ('process 2 was killed by signal 9 (SIGKILL)', 'process 0 ended with exit status 3')
    """
    if ended.status is None:
        return f"process {ended.process} still ran"
    if ended.status < 0:
        return f"process {ended.process} was killed by signal {-ended.status} ({signal_name(-ended.status)})"
    return f"process {ended.process} ended with exit status {ended.status}"


def signal_name(number: int) -> str:
    """Such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
