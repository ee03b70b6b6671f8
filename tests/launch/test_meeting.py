"""Processes that come together, as threads: each has a socket of its own, which is all that they need."""

import concurrent.futures
import contextlib
import json
import socket

import pytest

from shardkit.hosts import MissingProcessError, ProcessMismatchError
from shardkit.launch import PortTakenError, ports
from shardkit.launch.meeting import Card, absent, meet, objection


def card(process, processes=3, jax="1.0", pid=None):
    return Card(process, processes, jax, "host", 100 + process if pid is None else pid)


@pytest.fixture
def address():
    with ports.reserve() as held:
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def come(address):
    """``come(card, timeout)``: a process comes; a future of its end."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:

        def start(who, timeout=20.0):
            return pool.submit(meet, address, who, bind=address if who.process == 0 else None, timeout=timeout)

        yield start


@contextlib.contextmanager
def visitor(address):
    """A connection to process 0, as soon as it listens."""
    host, port = ports.split(address)
    for _ in range(2000):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), timeout=10)
            break
    with connection:
        yield connection


def say(connection, who):
    connection.sendall(json.dumps(who.__dict__).encode() + b"\n")
    return connection.recv(4096)


@pytest.fixture
def service(address):
    """What JAX's service is to those who come: something listens."""
    return lambda: ports.listen(*ports.split(address))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_come(come, service, order):
    ends = {process: come(card(process)) for process in order}
    ends[0].result(20)
    with service():
        for end in ends.values():
            assert end.result(20) is None


def test_one_alone(come):
    assert come(card(0, 1)).result(20) is None


def test_many_come(address):
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        ends = [
            pool.submit(meet, address, card(p, 40), bind=address if p == 0 else None, timeout=30.0) for p in range(40)
        ]
        ends[0].result(30)
        with ports.listen(*ports.split(address)):
            assert [end.result(30) for end in ends] == [None] * 40


def test_those_that_do_not_come_are_named_in_all_others(come):
    ends = [come(card(process, 4), 2.0) for process in (0, 2)]
    for end in ends:
        with pytest.raises(MissingProcessError, match=r"waited 2 s for processes 1, 3 of 4, which did not come"):
            end.result(20)


def test_one_that_came_and_ended_is_named_with_its_pid(come, address):
    end = come(card(0), 2.0)
    with visitor(address) as connection:
        assert b"wait" in say(connection, card(1, pid=77))
    with pytest.raises(MissingProcessError, match=r"for processes 1 \(host, pid 77\), 2 of 3.* came and ended"):
        end.result(20)


def test_one_that_ended_may_come_again(come, address, service):
    ends = [come(card(0))]
    with visitor(address) as connection:
        say(connection, card(1, pid=77))
    ends += [come(card(1)), come(card(2))]
    ends[0].result(20)
    with service():
        for end in ends:
            end.result(20)


def test_nobody_listens(come, address):
    with pytest.raises(MissingProcessError, match=f"waited 1 s for process 0 at {address}, which did not answer"):
        come(card(1), 1.0).result(20)


def test_process_0_ends_while_others_wait(address, come):
    with ports.listen(*ports.split(address)) as listener:
        end = come(card(1))
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(b'{"shardkit": "wait"}\n')
        connection.close()
        with pytest.raises(MissingProcessError, match=f"process 0 at {address} ended, or fell silent"):
            end.result(20)


def test_two_of_one_number(come, address, service):
    """The one too many is refused; the others don't notice."""
    ends = [come(card(0))]
    with visitor(address) as connection:
        say(connection, card(1, pid=77))
        with pytest.raises(
            ProcessMismatchError, match=r"process 1 \(host, pid 101\) came, but process 1 \(host, pid 77"
        ):
            come(card(1)).result(20)
        ends.append(come(card(2)))
        ends[0].result(20)
        with service():
            ends[1].result(20)


def test_different_numbers_of_processes(come, address):
    first = come(card(0))
    with visitor(address) as connection:
        say(connection, card(1))
        for end in (come(card(2, 4)), first):
            with pytest.raises(ProcessMismatchError, match=r"process 2 .* was told of 4 processes, process 0 .* of 3"):
                end.result(20)
        assert b"was told of 4 processes" in connection.recv(4096)


def test_different_versions_of_jax(come):
    ends = [come(card(0, 2)), come(card(1, 2, jax="2.0"))]
    for end in ends:
        with pytest.raises(ProcessMismatchError, match=r"process 1 .* has jax 2\.0, process 0 .* has 1\.0"):
            end.result(20)


def test_a_taken_port(come, address):
    with ports.listen(*ports.split(address)), pytest.raises(PortTakenError, match="is taken"):
        come(card(0)).result(20)


@pytest.mark.parametrize("answer", [b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", b"HTTP/1.1 400 Bad Request\r\n", b"{}\n"])
def test_something_else_answers(come, address, answer):
    """JAX's own service, for one: the job has begun, or process 0 came without saying who it is."""
    with ports.listen(*ports.split(address)) as listener:
        end = come(card(1))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)
            with pytest.raises(MissingProcessError, match="not process 0 waiting for it"):
                end.result(20)


def test_strangers_are_let_be(come, address, service):
    """Scanners, health checks, and processes that call jax.distributed.initialize, of which it's said."""
    first = come(card(0, 2))
    with visitor(address) as silent, visitor(address) as other, visitor(address) as plain, visitor(address) as half:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert other.recv(100) == b""
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert plain.recv(100) == b""
        half.sendall(b'{"process": 1')
        second = come(card(1, 2))
        first.result(20)
        with service():
            second.result(20)
        assert silent.recv(100) == b""


def test_plain_jax_is_spoken_of(come, address):
    first = come(card(0, 2), 2.0)
    with visitor(address) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with pytest.raises(MissingProcessError, match=r"every process must call sk\.initialize"):
            first.result(20)


def test_absent_in_words():
    text = absent(card(0, 12), {1: card(1, 12)}, {}, 300, False)
    assert text.startswith("waited 300 s for processes 2, 3, 4, 5, 6, 7, 8, 9 and 2 more of 12, which did not come to")


def test_no_objection():
    assert objection(card(1), card(0), {2: card(2)}) is None
