"""The same over two processes, each of which holds half of the devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("processes_program.py")


def test_two_processes():
    """Arrays made, moved and reduced where no process sees all of them; what can't be had says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), address, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    assert all("all is well" in text for text in said)
