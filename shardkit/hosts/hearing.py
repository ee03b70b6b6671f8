"""What was heard of other processes, and how long ago by a clock that doesn't count the time this one slept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardkit.hosts.verdict import Heard, Said


class Hearing:
    """Keeps what others say. Pure: it's told what time it is.

    A process that was stopped for a while (SIGSTOP, a suspended machine, no turn on a busy one) would find everybody
    else silent. So no look counts for more than ``longest`` seconds after the one before.
    """

    def __init__(self, others: Iterable[int], now: float, longest: float):
        self._looked, self._longest, self._time = now, longest, 0.0
        self._said: dict[int, Said | None] = dict.fromkeys(others)
        self._changed = dict.fromkeys(self._said, 0.0)

    def look(self, now: float) -> None:
        """Time goes on."""
        self._time += min(max(now - self._looked, 0.0), self._longest)
        self._looked = now

    def hear(self, said: Mapping[int, Said]) -> None:
        """Others said something, which may be what they said before."""
        for process, new in said.items():
            if process not in self._said:
                continue
            old = self._said[process]
            if old is None or new.beat != old.beat:
                self._changed[process] = self._time
                self._said[process] = new

    def heard(self) -> dict[int, Heard]:
        """What is known of each."""
        return {p: Heard(said, self._time - self._changed[p]) for p, said in self._said.items()}
