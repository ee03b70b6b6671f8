"""`run`: a program in several processes of this machine, from start to end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from shardkit.hosts.watching import STATUS
from shardkit.launch import calling, environment, ports
from shardkit.launch.children import Children
from shardkit.launch.results import Result, RunTimeoutError, describe

# Seconds from SIGTERM to SIGKILL. After a failure the others mostly hang in a collective, where they hear no signal;
# after a signal from outside they may be saving a checkpoint.
FAILURE_GRACE = 2.0
SIGNAL_GRACE = 30.0

# Seconds for the cause to end, too, where the watch has ended a process because of another.
_CAUSE_GRACE = 5.0


def run(
    command: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    processes: int = 2,
    devices_per_process: int | None = None,
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    port: int | None = None,
    timeout: float | None = None,
    grace: float | None = None,
    capture: bool = False,
    forward_signals: bool = False,
) -> Result:
    """Runs a program in several processes of this machine, which find each other by ``sk.initialize()``.

    When one fails the others are stopped: by SIGTERM, then SIGKILL. When this call ends, in whatever way, none is left;
    not even if this process itself is killed.

    Args:
      command: a Python script, or the words of a command. If the first is a script (``.py``), this Python runs it.
      processes: how many.
      devices_per_process: simulated CPU devices of each. None: each has what it finds; of several GPUs, one each.
      env: variables to set in the environment of the processes, besides those of this one. None for one removes it.
      cwd: where they run. None: here.
      port: of the coordinator, on the loopback. None: one that's free.
      timeout: seconds until all are killed. None: they may take any time.
      grace: seconds from SIGTERM to SIGKILL. None: 2 after a failure, 30 after a signal was forwarded.
      capture: keeps what they write for the result, byte for byte; else it's written to ``sys.stdout`` and
        ``sys.stderr``, each line with the number of its process before it.
      forward_signals: SIGINT, SIGTERM and SIGHUP to this process go on to all of them (a second SIGINT kills them).
        Only in a program's main thread. Else a KeyboardInterrupt kills them.

    Returns:
      How each ended. ``run(...).check()`` raises if one failed.

    Raises:
      ValueError: not a positive number of processes or devices, an empty command, no such port.
      FileNotFoundError: no such script or program.
      shardkit.launch.PortTakenError: something listens at the port that was asked for.
      shardkit.launch.RunTimeoutError: it took longer than ``timeout``; says who still ran, and what was written.

    Example:
      >>> import sys
      >>> from shardkit.launch import run
      >>> program = "import os; print('process', os.environ['SHARDKIT_PROCESS_ID'])"
      >>> result = run([sys.executable, "-c", program], processes=2, capture=True)
      >>> result.check().processes[1].stdout
      'process 1\\n'
    """
    words = _words(command, cwd)
    for what, number in {"processes": processes, "devices_per_process": devices_per_process}.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{what} must be a positive number, such as 2; got {number!r}")
    until = None if timeout is None else time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(ports.reserve(port))
        address = f"{ports.LOOPBACK}:{held.getsockname()[1]}"
        uncalled = stack.enter_context(calling.expected())
        environments = [
            environ(environment.Told(address, processes, process, devices_per_process), env, uncalled)
            for process in range(processes)
        ]
        # Before the first process: a signal that comes as they start must not leave them behind.
        signals = stack.enter_context(_caught() if forward_signals else contextlib.nullcontext([]))
        children = stack.enter_context(Children(words, environments, cwd=cwd, write=None if capture else _write))
        first, forwarded = _attend(children, signals, until, grace)
        children.drain()
        late = forwarded is None and first is None and bool(children.running)
        result = Result(children.ended(), first, forwarded, calling.was_called(uncalled))
    if late:
        ran = ", ".join(
            describe(ended).removesuffix(" still ran") for ended in result.processes if ended.status is None
        )
        text = f"after {timeout:g} s {ran} of {processes} still ran; all were killed"
        raise RunTimeoutError(f"{text}. Written so far:\n{result.written()}" if capture else text, result)
    return result


def environ(
    told: environment.Told, changes: Mapping[str, str | None] | None = None, uncalled: str | None = None
) -> dict[str, str]:
    """The environment of one process: that of this one, with who it is, the file of its run, and the changes.

    Simulated devices: scripts that look at devices before `initialize` get them, too.
    """
    found = dict(os.environ)
    found.pop(environment.DEVICES, None)
    found.pop(environment.UNCALLED, None)  # of a launcher around this one
    if uncalled is not None:
        found[environment.UNCALLED] = uncalled
    if told.devices is not None:
        found.setdefault("JAX_PLATFORMS", "cpu")
        found["JAX_NUM_CPU_DEVICES"] = str(told.devices)
        if told.devices > 1 and "NPROC" not in found:
            # With fewer threads XLA before 0.12 may hang where many programs are under way (shardkit.cli.known_bad).
            found.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * told.devices)))
    found.setdefault("PYTHONUNBUFFERED", "1")
    found |= environment.variables(told)
    for name, value in (changes or {}).items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def _words(command: Sequence[str | os.PathLike[str]] | str | os.PathLike[str], cwd: str | os.PathLike[str] | None):
    words = [os.fspath(word) for word in ([command] if isinstance(command, str | os.PathLike) else command)]
    if not words:
        raise ValueError('the command is empty: give a script and its arguments, such as ["train.py", "--steps", "10"]')
    if not words[0].endswith(".py"):
        return words
    script = Path(cwd or ".", words[0])
    if not script.is_file():
        raise FileNotFoundError(f"there's no script {str(script)!r}")
    return [sys.executable, *words]


def _attend(
    children: Children, signals: list[int], until: float | None, grace: float | None
) -> tuple[int | None, int | None]:
    """Until all have ended, or time is up: who failed first, and which signal was forwarded."""
    forwarded: int | None = None
    kill_at: float | None = None
    failed_at: float | None = None
    failed: list[int] = []
    interrupts = 0
    while children.running:
        ended = children.wait()
        if kill_at is None:  # what they end with later is our doing
            failed += [process for process in ended if children.statuses[process]]
        now = time.monotonic()
        failed_at = now if failed and failed_at is None else failed_at
        while signals:
            number = signals.pop(0)
            interrupts += number == signal.SIGINT
            if kill_at is None:
                forwarded, kill_at = number, now + (SIGNAL_GRACE if grace is None else grace)
            children.send(signal.SIGKILL if interrupts > 1 else number)
        if failed_at is not None and kill_at is None:
            known = any(children.statuses[process] != STATUS for process in failed)
            if known or now >= failed_at + _CAUSE_GRACE:
                kill_at = now + (FAILURE_GRACE if grace is None else grace)
                children.send(signal.SIGTERM)
        if kill_at is not None and now >= kill_at:
            children.send(signal.SIGKILL)
        elif until is not None and now >= until:
            break
    if kill_at is not None:
        children.send(signal.SIGKILL, to_ended=True)  # what they have started, and left behind
    if forwarded is not None or not failed:
        return None, forwarded
    return _cause(failed, children.statuses), None


def _cause(failed: Sequence[int], statuses: Mapping[int, int]) -> int:
    """Of those that failed, in that order, the first that the watch didn't end because of another."""
    return next((process for process in failed if statuses[process] != STATUS), failed[0])


@contextlib.contextmanager
def _caught() -> Generator[list[int]]:
    """The signals to this process, as they come."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: came.append(got)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(process: int, name: str, line: str) -> None:
    stream = sys.stdout if name == "stdout" else sys.stderr
    # In one piece: two processes' lines are never mixed.
    stream.write(f"[{process}] {line}\n")
    stream.flush()
