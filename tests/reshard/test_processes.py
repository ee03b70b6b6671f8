"""The same over two processes, each of which holds half of the devices."""

from pathlib import Path

from shardkit.launch import run

PROGRAM = Path(__file__).with_name("processes_program.py")


def test_two_processes():
    """Arrays made, moved and reduced where no process sees all of them; what can't be had says so."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = run([PROGRAM], 2, devices_per_process=2, env=env, timeout=240, capture=True).check()
    assert all("all is well" in ended.stdout for ended in result.processes)
