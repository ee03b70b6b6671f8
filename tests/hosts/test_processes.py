"""Two processes, one of which is stuck, dead or of another opinion."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardkit.hosts.watching import STATUS

PROGRAM = Path(__file__).with_name("processes_program.py")


class Pair:
    """Two processes that run one case of the program."""

    def __init__(self, case):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
        self.running = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), address, str(number), case],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for number in range(2)
        ]
        self.said = [""] * 2
        self.readers = [threading.Thread(target=self._read, args=[number]) for number in range(2)]
        for reader in self.readers:
            reader.start()

    def _read(self, number):
        self.said[number] = self.running[number].communicate()[0]

    def ended(self, *numbers):
        """Exit statuses and output, of all or some processes, which have to end by themselves; the rest is killed."""
        try:
            for number in numbers or (0, 1):
                self.readers[number].join(100)
            late = [number for number in numbers or (0, 1) if self.readers[number].is_alive()]
        finally:
            self.end()
        assert not late, f"process {late} still ran:\n" + "\n".join(self.said)
        return [process.returncode for process in self.running], self.said

    def end(self):
        for process in self.running:
            process.kill()
        for reader in self.readers:
            reader.join()


@pytest.fixture(scope="module")
def start(request):
    """Pairs by case; two are under way at a time, as most of it is waiting."""
    chosen = [item for item in request.session.items if item.path == request.path]
    cases = [item.originalname.removeprefix("test_") for item in chosen]
    pairs = {}

    def get(case):
        for each in cases[cases.index(case) :][:2]:
            if each not in pairs:
                pairs[each] = Pair(each)
        return pairs[case]

    yield get
    for pair in pairs.values():
        pair.end()


def test_agreements(start):
    status, said = start("agreements").ended()
    assert status == [0, 0] and all("all is well" in text for text in said), "\n".join(said)
    assert "shardkit: " not in "".join(said)  # one ended long before the other, which isn't taken for dead


@pytest.mark.not_smoke
def test_stuck(start):
    """It's named with the line that it's in, in both; nobody waits for ever."""
    status, said = start("stuck").ended()
    assert status == [STATUS, STATUS], "\n".join(said)
    for text in said:
        assert "shardkit: process 1 (" in text and ") is stuck: no progress for " in text
        assert "in stuck: time.sleep(300); 1 marks of progress, the last 'step 2'" in text
        assert "2 marks of progress, the last 'step 3'" in text
    assert "total(ones).block_until_ready()" in said[0].partition("most recent call last")[2]


@pytest.mark.not_smoke
def test_stopped(start):
    """SIGSTOP: it's silent, and its peer's wait ends."""
    status, said = start("stopped").ended(0)
    assert status == [STATUS, -signal.SIGKILL], said[0]
    assert "shardkit: process 1 (" in said[0] and ") is dead: not heard of for " in said[0]


@pytest.mark.not_smoke
def test_killed(start):
    """The other gets an exception from gloo, and then would wait for the dead one as it ends."""
    status, said = start("killed").ended()
    assert status == [STATUS, -signal.SIGKILL], said[0]
    assert "shardkit: process 1 (" in said[0] and ") is dead: not heard of for " in said[0]
    assert "ended by " in said[0] and "Gloo" in said[0]


@pytest.mark.not_smoke
def test_killed_first(start):
    """Without process 0 there is no service: JAX aborts the rest before Python could say a word, and says why."""
    status, said = start("killed_first").ended()
    assert status[0] == -signal.SIGKILL and status[1] in (-signal.SIGABRT, STATUS), said[1]
    assert "leader task" in said[1] or "shardkit: process 0" in said[1]


@pytest.mark.not_smoke
def test_failed(start):
    """An exception ends its process; the others wait for it in a collective, it for them as it ends, within JAX."""
    status, said = start("failed").ended()
    assert status == [STATUS, -signal.SIGABRT], "\n".join(said)
    assert "shardkit: process 1 (" in said[0] and "ended by RuntimeError: the disk is full" in said[0]


@pytest.mark.slow
def test_failed_first(start):
    """Process 0 takes the others along, by its own words."""
    status, said = start("failed_first").ended()
    assert status == [1, STATUS], "\n".join(said)
    assert "shardkit: process 0 (" in said[1] and "ended by RuntimeError: the disk is full" in said[1]


@pytest.mark.slow
def test_stopped_first(start):
    """The service stops with process 0: the other's questions hang, its patience doesn't."""
    status, said = start("stopped_first").ended(1)
    assert status == [-signal.SIGKILL, STATUS], said[1]
    assert "shardkit: process 0 (" in said[1] and ") is dead: not heard of for " in said[1]
