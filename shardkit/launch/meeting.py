"""All processes come together before JAX connects them, so that one that's missing, or too many, is named.

JAX's own service can't be asked who has come, and it ends processes from C++ (jax 0.10 and 0.12): when one is missing,
all abort without saying which; a second process of one number aborts all of a job that runs; where the port is taken,
process 0 crashes, or shares it with another job. So process 0 first listens on the coordinator's port itself, and the
others say there who they are. When all are there it closes the port, and JAX's service takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import socket
import time
from typing import Any

from shardkit.hosts import MissingProcessError, ProcessMismatchError
from shardkit.launch import ports

_LONGEST = 1 << 16  # bytes of a message
_MARK = b'{"shardkit"'  # how a word of process 0 begins
_KINDS = {"missing": MissingProcessError, "mismatch": ProcessMismatchError}


@dataclasses.dataclass(frozen=True)
class Card:
    """What a process says of itself.

    Attributes:
      process: which one it is.
      processes: how many it was told there are.
      jax: its version.
      host: the name of its machine.
      pid: its number there.
    """

    process: int
    processes: int
    jax: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"


@dataclasses.dataclass
class _Guest:
    connection: socket.socket
    said: bytes = b""
    card: Card | None = None


def meet(address: str, card: Card, *, bind: str | None = None, timeout: float) -> None:
    """Returns when all processes have come.

    Args:
      address: the coordinator's, host and port.
      card: who this is; process 0 is the one that the others come to.
      bind: host and port where process 0 listens. None: all addresses of its machine.
      timeout: seconds to wait for all.

    Raises:
      MissingProcessError: not all came; it names those that didn't.
      ProcessMismatchError: one was told another number of processes, has another JAX, or is there already.
      PortTakenError: in process 0: something listens there.
    """
    if card.process == 0:
        _receive(ports.listen(*ports.split(bind)) if bind else ports.listen("", ports.split(address)[1]), card, timeout)
    else:
        _come(address, card, timeout)


def objection(card: Card, own: Card, there: dict[int, Card]) -> str | None:
    """Why a process that came can't take part; None if it can."""
    if card.processes != own.processes:
        return (
            f"{card} was told of {card.processes} processes, {own} of {own.processes}: start all with the same number"
        )
    if card.jax != own.jax:
        return f"{card} has jax {card.jax}, {own} has {own.jax}: install the same in all"
    if card.process in there:
        return (
            f"{card} came, but {there[card.process]} is there already: two processes have one number. "
            f"Each needs its own, from 0 to {own.processes - 1}"
        )
    return None


def absent(own: Card, there: dict[int, Card], left: dict[int, Card], timeout: float, plain: bool) -> str:
    """That not all came, in words."""
    missing = [p for p in range(own.processes) if p != own.process and p not in there]
    shown = ", ".join(f"{p} ({left[p].host}, pid {left[p].pid})" if p in left else str(p) for p in missing[:8])
    if len(missing) > 8:
        shown += f" and {len(missing) - 8} more"
    text = (
        f"waited {timeout:g} s for process{'es' if len(missing) > 1 else ''} {shown} of {own.processes}, which did not "
        f"come to {own}. Were all started, with the same coordinator address, and can they reach it?"
    )
    if left:
        text += " Those named with a pid came and ended: see what they wrote."
    if plain:
        text += " Something came as JAX does by itself: every process must call sk.initialize()."
    return text


def _receive(listener: socket.socket, own: Card, timeout: float) -> None:
    """Process 0's part."""
    until = time.monotonic() + timeout
    there: dict[int, Card] = {}
    left: dict[int, Card] = {}
    plain = False
    guests: dict[int, _Guest] = {}
    listener.setblocking(False)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(lambda: [guest.connection.close() for guest in guests.values()])
        stack.enter_context(listener)
        selector.register(listener, selectors.EVENT_READ)
        while len(there) < own.processes - 1:
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise _refuse(guests, "missing", absent(own, there, left, timeout, plain))
            for key, _ in selector.select(remaining):
                if key.fileobj is listener:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        guests[connection.fileno()] = _Guest(connection)
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                guest = guests[key.fd]
                more = _read(guest.connection)
                guest.said += more
                line, end, _ = guest.said.partition(b"\n")
                card = _card(line) if end and guest.card is None else None
                if card is not None:
                    why = objection(card, own, there)
                    if why is None:
                        guest.card = there[card.process] = card
                        left.pop(card.process, None)
                        _say(guest.connection, {"shardkit": "wait"})
                        continue
                    if card.process not in there or card.processes != own.processes:
                        guest.card = card
                        raise _refuse(guests, "mismatch", why)
                    # Of two with one number the one that came first stays; the other is alone to hear of it.
                    _say(guest.connection, {"shardkit": "mismatch", "text": why})
                elif more and not end and len(guest.said) < _LONGEST:
                    continue
                # It went, or it's none of ours.
                plain = plain or guest.said.startswith(b"PRI * HTTP/2")
                if guest.card is not None:
                    left[guest.card.process] = there.pop(guest.card.process)
                selector.unregister(guest.connection)
                guest.connection.close()
                del guests[key.fd]
        # First closed, then said: who hears it finds JAX's service at the port, or nothing yet.
        listener.close()
        for guest in guests.values():
            if guest.card is not None:
                _say(guest.connection, {"shardkit": "go"})


def _come(address: str, card: Card, timeout: float) -> None:
    """The part of all others."""
    until = time.monotonic() + timeout
    pause, last = 0.02, "no answer"
    while (remaining := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(ports.split(address), timeout=min(remaining, 10))
        except OSError as error:
            last = str(error)
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, 0.2)
            continue
        with connection:
            if _attend(connection, address, card, until):
                break
        last = "it closed the connection"
        time.sleep(0.1)
    else:
        raise MissingProcessError(
            f"{card} waited {timeout:g} s for process 0 at {address}, which did not answer ({last}). "
            "Was it started, is that its address, and can this machine reach it?"
        )
    # JAX would ask again after a second; the service is there long before.
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection(ports.split(address), timeout=1).close()
            return
        time.sleep(0.01)


def _attend(connection: socket.socket, address: str, card: Card, until: float) -> bool:
    """One visit to process 0; False if it went away before it said anything."""
    said, welcome = b"", False
    try:
        _say(connection, dataclasses.asdict(card))
        while True:
            # Process 0 is the one that counts the time; it's given some more, so that its words arrive.
            connection.settimeout(max(0.1, until + 10 - time.monotonic()))
            more = connection.recv(4096)
            if not more:
                break
            *lines, said = (said + more).split(b"\n")
            if not (said[: len(_MARK)] == _MARK[: len(said)] and len(said) < _LONGEST):
                lines.append(said)  # it's none of ours, and may never end its line
            for line in lines:
                word = _word(line)
                if word is None:
                    raise MissingProcessError(
                        f"{card} came to {address}, but what answers there is not process 0 waiting for it: another "
                        "program has the port, process 0 does not call sk.initialize(), or the job has started "
                        "already and this is one process too many"
                    )
                if word["shardkit"] == "go":
                    return True
                if word["shardkit"] in _KINDS:
                    raise _KINDS[word["shardkit"]](word["text"])
                welcome = True
    except MissingProcessError:
        raise
    except (ConnectionError, TimeoutError):
        pass
    if welcome:
        raise MissingProcessError(
            f"process 0 at {address} ended, or fell silent, while {card} and it waited for others: see its output"
        )
    return False


def _refuse(guests: dict[int, _Guest], kind: str, text: str) -> Exception:
    for guest in guests.values():
        if guest.card is not None:
            _say(guest.connection, {"shardkit": kind, "text": text})
    return _KINDS[kind](text)


def _say(connection: socket.socket, word: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who has gone is seen when it's read from
        connection.sendall(json.dumps(word).encode() + b"\n")


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def _word(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "shardkit" in found else None


def _card(line: bytes) -> Card | None:
    try:
        return Card(**json.loads(line))
    except (ValueError, TypeError):
        return None
