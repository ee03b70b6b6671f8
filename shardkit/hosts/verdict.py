"""Who of several processes is dead or stuck: decided from what each last said, by arithmetic alone."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from shardkit.hosts.words import processes

NORMALLY = "normally"  # how a process ended that didn't fail


@dataclasses.dataclass(frozen=True)
class Said:
    """What a process says of itself, time and again.

    Attributes:
      beat: a number that grows each time.
      host, pid: where it runs.
      marks: how often it said that it made progress.
      last: what it said the last time.
      quiet: seconds since then, or since it began to be watched.
      where: where its main thread is.
      ended: "" while it runs; then "normally", or with which exception.
      ended_for: seconds since then.
    """

    beat: int
    host: str
    pid: int
    marks: int = 0
    last: str = ""
    quiet: float = 0.0
    where: str = ""
    ended: str = ""
    ended_for: float = 0.0


@dataclasses.dataclass(frozen=True)
class Heard:
    """What was last heard of a process.

    Attributes:
      said: None if it never said anything.
      silent: seconds since it last said something new.
    """

    said: Said | None
    silent: float = 0.0

    @property
    def runs(self) -> bool:
        return self.said is None or not self.said.ended

    @property
    def quiet(self) -> float:
        return self.silent + (self.said.quiet if self.said else 0.0)

    @property
    def marks(self) -> int:
        return self.said.marks if self.said else 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """That a job can't go on.

    Attributes:
      kind: "dead", "failed" or "stuck".
      named: the processes whose fault it is.
      text: all of it in words.
    """

    kind: str
    named: tuple[int, ...]
    text: str


def judge(
    heard: Mapping[int, Heard],
    *,
    stuck_timeout: float | None,
    dead_timeout: float,
) -> Verdict | None:
    """Whether the job can't go on, and because of whom.

    Dead: one that didn't end was silent for ``dead_timeout``. Failed: one ended with an exception, and that is so long
    ago, or all others have ended. Stuck: once there were marks, one that had made some made none for ``stuck_timeout``
    and is behind others; or none made any for that long: then those behind, else those elsewhere than most, else all.

    Args:
      heard: what was last heard, by process.
      stuck_timeout: seconds; None: nobody is ever stuck.
      dead_timeout: seconds.
    """
    running = {p: h for p, h in heard.items() if h.runs}
    if dead := [p for p, h in running.items() if h.silent >= dead_timeout]:
        silent = min(heard[p].silent for p in dead)
        return _verdict("dead", dead, f"not heard of for {silent:.0f} s", heard)
    fallen = [p for p, h in heard.items() if h.said and h.said.ended not in ("", NORMALLY)]
    # One that is late may be dead, and why the other failed: that will be known soon.
    late = any(h.silent >= dead_timeout / 2 for h in running.values())
    long_ago = any(h.said.ended_for + h.silent >= dead_timeout for p in fallen if (h := heard[p]).said)
    if fallen and (not running or (long_ago and not late)):
        return _verdict("failed", fallen, "ended by an exception, while others go on or wait for it", heard)
    if stuck_timeout is not None and (stuck := _stuck(heard, running, stuck_timeout)):
        seconds = min(heard[p].quiet for p in stuck if p in running)
        return _verdict("stuck", stuck, f"no progress for {seconds:.0f} s", heard)
    return None


def failed(process: int, heard: Mapping[int, Heard]) -> Verdict:
    """That a process ended by an exception, and takes the others with it."""
    return _verdict("failed", [process], "ended by an exception", heard)


def _stuck(heard: Mapping[int, Heard], running: Mapping[int, Heard], timeout: float) -> list[int]:
    """The processes that are stuck."""
    most = max((h.marks for h in heard.values()), default=0)
    if not most or not running:
        return []
    # Marks may be one process's own affair: those who never made any say nothing by their silence.
    behind = [p for p, h in running.items() if 0 < h.marks < most and h.quiet >= timeout]
    if behind:
        return behind
    if any(h.quiet < timeout for h in running.values()):
        return []
    if behind := [p for p, h in running.items() if h.marks < most]:
        return behind
    places = collections.Counter(h.said.where for h in running.values() if h.said)
    place, number = places.most_common(1)[0]
    elsewhere = [p for p, h in running.items() if h.said is None or h.said.where != place]
    return elsewhere if elsewhere and number > len(running) / 2 else list(running)


def _verdict(kind: str, named: Sequence[int], why: str, heard: Mapping[int, Heard]) -> Verdict:
    """The verdict in words: first who, then where all are."""
    state = "of each" if kind == "stuck" and len(named) == len(heard) else ""
    who = processes(named) if len(named) > 1 else _name(named[0], heard[named[0]])
    headline = {
        "dead": f"{who} {_are(named)} dead: {why}. Killed, stopped or cut off; or a library held Python's lock "
        "all that time (then give a larger dead_timeout)",
        "failed": f"{who} failed: {why}",
        "stuck": f"{who} {_are(named)} stuck: {why}{state and ' ' + state}. If that was work, call sk.progress(...) "
        "within it, or give a larger stuck_timeout",
    }[kind]
    others = [p for p in sorted(heard) if p not in named]
    return Verdict(kind, tuple(named), "\n".join([headline, *_states(named, heard), *_states(others, heard)]))


def _are(named: Sequence[int]) -> str:
    return "are" if len(named) > 1 else "is"


def _name(process: int, heard: Heard) -> str:
    return f"process {process}" + (f" ({heard.said.host}, pid {heard.said.pid})" if heard.said else "")


def _states(named: Sequence[int], heard: Mapping[int, Heard], most: int = 8) -> list[str]:
    """A line for each state that processes are in."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for p in named:
        said = heard[p].said
        alike.setdefault(("",) if said is None else (said.marks, said.last, said.where, said.ended), []).append(p)
    lines = []
    for group in list(alike.values())[:most]:
        who = ", ".join(_name(p, heard[p]) for p in group[:3]) + (f" and {len(group) - 3} more" if group[3:] else "")
        lines.append(f"  {who}: {_state(heard[group[0]])}")
    return lines + ([f"  and {len(alike) - most} more such lines"] if len(alike) > most else [])


def _state(heard: Heard) -> str:
    said = heard.said
    if said is None:
        return "never heard of since it was connected"
    marks = (
        f"{said.marks} marks of progress, the last {said.last!r} {heard.quiet:.0f} s ago" if said.marks else "no marks"
    )
    if said.ended:
        return f"ended {said.ended} {said.ended_for + heard.silent:.0f} s ago; {marks}"
    return f"at {said.where}; {marks}" if said.where else marks
