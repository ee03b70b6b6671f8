"""Ports: one that is free and stays so, and whether a given one is."""

from __future__ import annotations

import errno
import socket

LOOPBACK = "127.0.0.1"


class PortTakenError(OSError):
    """Something else listens at the port that a job's coordinator was to have.

    Example:
      >>> import socket, sys
      >>> from shardkit.launch import PortTakenError, run
      >>> with socket.create_server(("127.0.0.1", 0)) as taken:
      ...     try:
      ...         _ = run([sys.executable, "-c", "pass"], port=taken.getsockname()[1])
      ...     except PortTakenError:
      ...         print("another port, please")
      another port, please
    """


def reserve(port: int | None = None) -> socket.socket:
    """A port of this machine's loopback that nobody else is given while the returned socket is open.

    It's bound and never listens, so that the coordination service can: JAX's sets SO_REUSEPORT, as this does. To find a
    free port and to close it again would let another program have it before process 0 has started, which takes seconds.

    Args:
      port: which one. None: any that is free.

    Raises:
      PortTakenError: something listens there.
      ValueError: no such port.
    """
    if port is not None:
        if not 0 < port < 65536:
            raise ValueError(f"a port is a number from 1 to 65535; got {port}")
        # By itself SO_REUSEPORT would share it with another service of JAX, and mix two jobs.
        listen(LOOPBACK, port).close()
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((LOOPBACK, port or 0))
    except BaseException:
        held.close()
        raise
    return held


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, alone.

    Args:
      host: a name or address of this machine; "::" or nothing for all of its addresses.
      port: which one.

    Raises:
      PortTakenError: something else does.
      OSError: the host isn't this machine, or the port is not for this user.
    """
    try:
        if host in ("", "::", "0.0.0.0"):
            if host != "0.0.0.0" and socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
            return socket.create_server(("", port), backlog=4096)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=4096)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTakenError(
            errno.EADDRINUSE,
            f"port {port} is taken: another program listens there (perhaps a run that has not ended). "
            "Give another port, or end that program",
        ) from None


def split(address: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises:
      ValueError: it isn't "host:port".

    Example:
      >>> split("10.0.0.1:1234"), split("[::1]:80")
      (('10.0.0.1', 1234), ('::1', 80))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f'an address of the coordinator is "host:port", such as "10.0.0.1:1234"; got {address!r}')
    return host.removeprefix("[").removesuffix("]"), int(port)


def loopback(host: str) -> bool:
    """Whether only this machine is reached by that name."""
    return host in ("localhost", "::1") or host.startswith("127.")
