"""`initialize`, in processes as they are started in life."""

import contextlib
import os
import socket
import sys
from pathlib import Path

import jax
import pytest

import shardkit
from shardkit.launch import initialize, leaving, run

PROGRAM = Path(__file__).with_name("program.py")
ROOT = str(Path(shardkit.__file__).parents[1])

# What can be run without the package, and starts in a moment.
SOURCE = Path(leaving.__file__).read_text().replace("from __future__ import annotations", "")
NEWLINE = "\n"

# The package's attribute of that name is the function.
MODULE = sys.modules["shardkit.launch.initialize"]


def started(mode, processes=2, devices_per_process=2, **env):
    return run(
        [PROGRAM, mode],
        processes,
        devices_per_process,
        env={"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu", **env},
        timeout=240,
        capture=True,
    )


def said(result):
    """The lines of all, without those of gloo."""
    lines = [ended.stdout.splitlines() for ended in result.check().processes]
    return [[line for line in of if not line.startswith("[Gloo]")] for of in lines]


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_by_the_launcher(processes, devices):
    lines = [
        f"{devices} devices, 4 in all",
        "refused: part of one job only",
        f"refused: SHARDKIT_NUM_PROCESSES says that there are {processes}",
    ]
    result = started("launcher", processes, devices)
    assert said(result) == [lines] * processes
    assert result.called


@contextlib.contextmanager
def job():
    """A job's number for which the port that JAX makes of it is free: one of the last 4096."""
    with socket.socket() as held:
        for number in range(os.getpid() % 4096, 2 * 4096):
            with contextlib.suppress(OSError):
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                held.bind(("127.0.0.1", 61440 + number % 4096))
                break
        yield str(number % 4096)


@pytest.mark.not_smoke
@pytest.mark.parametrize("mode", ["slurm", pytest.param("open_mpi", marks=pytest.mark.slow)])
def test_by_a_cluster(mode):
    """JAX finds out by itself."""
    with job() as number:
        assert said(started(mode, JOB=number)) == [["2 devices, 4 in all"]] * 2


@pytest.mark.slow
def test_by_arguments():
    assert said(started("arguments")) == [["2 devices, 4 in all"]] * 2


@pytest.mark.not_smoke
def test_a_failure_ends_all_at_once():
    """By itself JAX would have the one that failed wait for the others, for minutes."""
    result = started("failing")
    assert (result.status, result.first_failure) == (1, 1)
    assert "ValueError: one fails" in result.processes[1].stderr
    assert "Terminating process" not in result.processes[1].stderr  # what JAX writes when it aborts


@pytest.mark.not_smoke
def test_fewer_processes_than_were_promised():
    result = started("impatient", SHARDKIT_NUM_PROCESSES="3")
    assert result.status == 1
    text = "MissingProcessError: waited 5 s for process 2 of 3, which did not come to process 0"
    assert text in result.processes[result.first_failure].stderr


@pytest.mark.slow
def test_fewer_tasks_than_slurm_says():
    """Where they'd meet JAX alone knows: it aborts, but not without a word."""
    with job() as number:
        result = started("impatient", JOB=number, TASKS="3")
    assert result.status == 134
    assert "not all 3 processes of the job came within 5 s" in result.processes[result.first_failure].stderr


@pytest.mark.slow
def test_after_jax_was_used():
    assert said(started("late")) == [["refused: too late"]] * 2


# What a process alone does: this one, in which JAX has been used.


@pytest.fixture
def environ(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SHARDKIT_", "SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "TPU_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    return monkeypatch


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
LAUNCHER = {"SHARDKIT_COORDINATOR": "127.0.0.1:4000", "SHARDKIT_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        LAUNCHER | {"SHARDKIT_NUM_PROCESSES": "1", "SHARDKIT_DEVICES_PER_PROCESS": "8"},
    ],
)
def test_a_process_alone_goes_on_as_it_is(environ, variables):
    for name, value in variables.items():
        environ.setenv(name, value)
    jax.devices()
    initialize()
    initialize()
    assert not jax.distributed.is_initialized()


def test_the_launcher_sees_that_it_was_called(environ, tmp_path):
    (tmp_path / "uncalled").touch()
    environ.setenv("SHARDKIT_UNCALLED", str(tmp_path / "uncalled"))
    initialize()
    assert not os.listdir(tmp_path)
    initialize()


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}])
def test_a_process_alone_before_jax_was_used(variables):
    program = (
        "import os\n"
        "for name in [name for name in os.environ if name.startswith('SHARDKIT_')]: del os.environ[name]\n"
        "import shardkit.launch as launch, jax; launch.initialize(); print(jax.process_count())"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    result = run(command, 1, env={"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu", **variables}, capture=True).check()
    assert result.processes[0].stdout == "1\n"


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        (SLURM, {}),
        (LAUNCHER | {"SHARDKIT_NUM_PROCESSES": "2"}, {}),
        ({}, {"num_processes": 2, "process_id": 0, "coordinator_address": "127.0.0.1:4000"}),
        ({"JOB_COMPLETION_INDEX": "0"}, {}),
    ],
)
def test_too_late_for_several(environ, variables, arguments):
    for name, value in variables.items():
        environ.setenv(name, value)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"too late.*Call sk.initialize\(\) first"):
        initialize(**arguments)


def test_too_late_for_other_devices(environ):
    for name, value in (LAUNCHER | {"SHARDKIT_NUM_PROCESSES": "1", "SHARDKIT_DEVICES_PER_PROCESS": "3"}).items():
        environ.setenv(name, value)
    jax.devices()
    with pytest.raises(RuntimeError, match="too late for 3 simulated devices"):
        initialize()
    assert jax.config.jax_num_cpu_devices == jax.device_count()


@pytest.mark.parametrize(
    ("variables", "arguments", "kind", "part"),
    [
        (SLURM, {"num_processes": 2}, ValueError, "num_processes=2, but SLURM_NTASKS says that there are 4"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, {"num_processes": 1}, ValueError, "OMPI_COMM_WORLD_SIZE says that there are 3"),
        ({}, {"num_processes": 0}, ValueError, "num_processes must be 1 or more; got 0"),
        ({}, {"num_processes": "2"}, TypeError, "num_processes must be a whole number; got '2'"),
        ({}, {"num_processes": 2, "process_id": 2}, ValueError, "from 0 to 1, as num_processes is 2; got 2"),
        ({}, {"process_id": -1}, ValueError, "from 0; got -1"),
        ({}, {"process_id": True}, TypeError, "process_id must be a whole number"),
        ({}, {"coordinator_address": "here"}, ValueError, '"host:port"'),
        (LAUNCHER, {}, ValueError, "but not SHARDKIT_NUM_PROCESSES"),
    ],
)
def test_what_can_not_be(environ, variables, arguments, kind, part):
    for name, value in variables.items():
        environ.setenv(name, value)
    with pytest.raises(kind, match=part.replace("(", r"\(")):
        initialize(**arguments)


@pytest.mark.parametrize(
    ("variables", "arguments", "part"),
    [
        ({"PMI_SIZE": "4"}, {}, "PMI_SIZE says that this is one of 4 processes"),
        ({}, {"num_processes": 2}, "knows num_processes=2, but not coordinator_address and process_id"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, {}, "but not num_processes and process_id"),
    ],
)
def test_what_nobody_knows(environ, variables, arguments, part):
    """As if JAX had not been used: it says that not all is known."""
    environ.setattr(MODULE, "_started", lambda: False)

    def nothing_found(*_, **__):
        raise ValueError("Number of processes must be defined.")

    environ.setattr(jax.distributed, "initialize", nothing_found)
    for name, value in variables.items():
        environ.setenv(name, value)
    with pytest.raises(ValueError, match=part):
        initialize(**arguments)


@pytest.mark.parametrize(
    ("end", "status", "written"),
    [
        ("raise KeyError('reason')", 1, "hook\nregistered after\n"),
        ("raise KeyboardInterrupt", 130, "hook\nregistered after\n"),
        ("sys.exit(3)", 3, "registered after\nregistered before\n"),
        ("pass", 0, "registered after\nregistered before\n"),
        ("try: raise KeyError\nexcept KeyError as error: sys.last_value = error", 0, None),
    ],
)
def test_an_exception_ends_the_process_but_for_its_last_words(end, status, written):
    """JAX's own handler, which waits for others, was registered before."""
    program = f"""
import atexit, sys
{SOURCE}
atexit.register(lambda: print("registered before"))
before = sys.excepthook
leave_on_failure()
leave_on_failure()
atexit.register(lambda: print("registered after"))
sys.excepthook = lambda *error: (print("hook"), before(*error))
def main():
    {end.replace(NEWLINE, NEWLINE + "    ")}
main()
"""
    ended = run([sys.executable, "-I", "-c", program], 1, capture=True).processes[0]
    assert ended.status == status
    assert ended.stdout == written or written is None
