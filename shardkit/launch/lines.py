"""Bytes of a process as lines that can be mixed with those of others."""

from __future__ import annotations

# A line longer than this is printed in pieces, so that a program that never ends its line can't fill the memory.
LONGEST = 1 << 20


class Lines:
    """Takes bytes as they come and gives whole lines, without their ends.

    A progress bar returns to the start of its line and writes it anew (a carriage return). On a terminal of its own
    each state replaces the one before; here others write between, so a state becomes a line, but at most one every
    ``interval`` seconds; those between are left out. What stands when the line ends is always given.
    """

    def __init__(self, interval: float = 1.0):
        self._held = b""
        self._interval = interval
        self._shown = -float("inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that are complete with these bytes.

        Args:
          data: what came.
          now: a clock's seconds.

        Example:
          >>> lines = Lines()
          >>> lines.feed(b"one\\ntw", 0.0), lines.feed(b"o\\r\\n10%\\r20%\\r30%\\n", 0.0)
          ([b'one'], [b'two', b'20%', b'30%'])
        """
        *whole, self._held = (self._held + data).split(b"\n")
        found = []
        for line in whole:
            found += self._states(line.removesuffix(b"\r"), now)
        # The last byte may be half of a line's end.
        states, mark, rest = self._held[:-1].rpartition(b"\r")
        if mark:
            self._held = rest + self._held[-1:]
            found += self._passing(states.split(b"\r"), now)
        while len(self._held) > LONGEST:
            found.append(self._held[:LONGEST])
            self._held = self._held[LONGEST:]
        return found

    def rest(self) -> list[bytes]:
        """What is left when no more comes: a last line without an end."""
        line, self._held = self._held.rstrip(b"\r").rpartition(b"\r")[2], b""
        return [line] if line else []

    def _states(self, line: bytes, now: float) -> list[bytes]:
        *passing, last = line.split(b"\r")
        return [*self._passing(passing, now), last]

    def _passing(self, states: list[bytes], now: float) -> list[bytes]:
        seen = [state for state in states if state.strip()]
        if not seen or now - self._shown < self._interval:
            return []
        self._shown = now
        return [seen[-1]]
