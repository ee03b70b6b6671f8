"""A group of child processes that answer together, and is killed when one of them doesn't."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOISE = ("Warning", "warn(", "TF_CPP", "[W", "I0000", "W0000", "E0000")


class Failure(Exception):  # noqa: N818
    """What a group said instead of an answer."""


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Group:
    """``processes`` children of one interpreter; started when first asked, again after a failure."""

    def __init__(self, python: str, program: str, processes: int, limit: float = 150.0, **given: Any):
        self.python, self.program, self.processes, self.limit, self.given = python, program, processes, limit, given
        self.running: list[subprocess.Popen[str]] = []
        self.errors: list[Any] = []
        self.versions = ""

    def start(self) -> str:
        """Start them, unless they run; what they say first."""
        if self.running:
            return self.versions
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        address = free_address()
        for rank in range(self.processes):
            given = self.given | {"processes": self.processes, "rank": rank, "address": address}
            self.errors.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115
            self.running.append(
                subprocess.Popen(
                    [self.python, str(HERE / self.program), json.dumps(given)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors[-1],
                    text=True,
                    env=environment,
                )
            )
        self.versions = self.replies(self.limit)[0]["versions"]
        return self.versions

    def ask(self, do: str, limit: float | None = None, **what: Any) -> list[Any]:
        """Everyone's answer. Raises Failure, with the first one's words, if any raises, dies or keeps silent."""
        self.start()
        begun = time.monotonic()
        for process in self.running:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do} | what) + "\n")
            process.stdin.flush()
        replies = self.replies(limit or self.limit)
        bad = [reply["raises"] for reply in replies if "raises" in reply]
        if bad:
            # All of them at once, before they'd have waited for each other: nothing is half sent, they may go on.
            if len(bad) < len(replies) or time.monotonic() - begun > 5:
                self.stop()
            raise Failure(f"raises: {bad[0]}")
        return [reply["value"] for reply in replies]

    def replies(self, limit: float) -> list[dict[str, Any]]:
        until = time.monotonic() + limit
        found = []
        for number, process in enumerate(self.running):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            if not line:
                words = self.last_words(number)
                self.stop()
                raise Failure(f"dies: {words}" if ready else f"hangs: no answer in {limit:.0f} s, killed. {words}")
            found.append(json.loads(line))
        return found

    def last_words(self, number: int) -> str:
        """The last line on a child's stderr that isn't a warning."""
        self.errors[number].seek(0)
        lines = [line.strip() for line in self.errors[number].read().splitlines() if line.strip()]
        lines = [line for line in lines if not any(noise in line for noise in NOISE)]
        return lines[-1] if lines else ""

    def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        for file in self.errors:
            file.close()
        self.running, self.errors = [], []
