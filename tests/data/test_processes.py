"""The same over several processes, each of which holds two of the devices and loads its own part."""

from pathlib import Path

import pytest

from shardkit.launch import run

PROGRAM = Path(__file__).with_name("processes_program.py")


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.not_smoke
def test_processes(processes):
    """Batches, records, iterators and their states; what differs between processes is named in all of them."""
    environment = {"PYTHONPATH": str(PROGRAM.parents[2])}
    result = run(PROGRAM, processes=processes, devices_per_process=2, env=environment, timeout=240, capture=True)
    assert all("all is well" in ended.stdout for ended in result.check().processes)
