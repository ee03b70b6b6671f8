import socket

import pytest

from shardkit.launch import PortTakenError, ports


def test_a_reserved_port_is_free_to_its_coordinator_alone():
    with ports.reserve() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        ports.listen("127.0.0.1", port).close()
        with socket.socket() as service:  # as JAX's does it
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            service.bind(("127.0.0.1", port))
            service.listen()
            socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "::", "localhost"])
def test_a_taken_port_is_refused(shared, host):
    """Also one whose owner would share it, as JAX's service does."""
    with socket.socket() as taken:
        if shared:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} is taken"):
            ports.listen(host, port)
        with pytest.raises(PortTakenError, match=f"port {port} is taken"):
            ports.reserve(port)


def test_a_given_port():
    with ports.reserve() as held:
        port = held.getsockname()[1]
    with ports.reserve(port) as held:
        assert held.getsockname() == ("127.0.0.1", port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_numbers_that_are_no_ports(port):
    with pytest.raises(ValueError, match=f"from 1 to 65535; got {port}"):
        ports.reserve(port)


@pytest.mark.parametrize("address", ["host", "host:", "host:http", "host:0", "host:70000", ":"])
def test_addresses_without_a_port(address):
    with pytest.raises(ValueError, match='"host:port"'):
        ports.split(address)


@pytest.mark.parametrize(
    ("host", "inside"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("node1", False)]
)
def test_loopback(host, inside):
    assert ports.loopback(host) == inside
