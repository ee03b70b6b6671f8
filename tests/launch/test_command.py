"""``python -m shardkit.launch`` as it's typed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.launch import __main__ as command
from shardkit.launch import ports

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def launcher(tmp_path):
    """``launcher("-n", "2", "script.py")``: one that has been started, where the test's scripts are."""
    with contextlib.ExitStack() as stack:

        def start(*words):
            started = subprocess.Popen(
                [sys.executable, "-m", "shardkit.launch", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env=ENVIRONMENT | {"TMPDIR": str(tmp_path)},
            )
            stack.enter_context(started)
            stack.callback(started.terminate)
            return started

        yield start


def test_it_runs_a_script_and_a_module(launcher, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv)\n")
    (tmp_path / "failing.py").write_text(
        "import os, pathlib, sys, time\n"
        "print(sys.argv[1:])\n"
        "if os.environ['SHARDKIT_PROCESS_ID'] == '0':\n"
        "    pathlib.Path('there').touch()\n"
        "    time.sleep(100)\n"
        "while not os.path.exists('there'):\n"
        "    time.sleep(0.02)\n"
        "sys.exit(7)\n"
    )
    well = launcher("-n", "3", "script.py", "-n", "9", "--help")
    badly = launcher("-n", "2", "--grace", "0.5", "-m", "failing", "--port", "x")
    out, err = well.communicate(timeout=120)
    assert sorted(out.splitlines()) == [f"[{p}] __main__ ['script.py', '-n', '9', '--help']" for p in range(3)]
    assert well.returncode == 0
    assert err == (
        "python -m shardkit.launch: none of the 3 processes called sk.initialize(), so that each ran all of the "
        "program for itself (unless they were connected in another way): call it first in the script, or start one "
        "process\n"
    )
    out, err = badly.communicate(timeout=120)
    assert sorted(out.splitlines()) == [f"[{p}] ['--port', 'x']" for p in range(2)]
    assert badly.returncode == 7
    assert err == (
        "python -m shardkit.launch: process 1 ended with exit status 7; none is left\n"
        "python -m shardkit.launch: none of the 2 processes had called sk.initialize() by then: where a script doesn't "
        "call it first, each process runs all of the program for itself\n"
    )


@pytest.mark.parametrize(
    ("processes", "script", "warns"),
    [
        ("2", "", True),
        ("1", "", False),
        # As initialize() does it, which takes seconds to import.
        (
            "2",
            "import os\nif os.environ['SHARDKIT_PROCESS_ID'] == '1': os.unlink(os.environ['SHARDKIT_UNCALLED'])",
            False,
        ),
    ],
)
def test_several_of_which_none_calls_initialize_are_told(processes, script, warns, tmp_path, capsys):
    (tmp_path / "script.py").write_text(script)
    assert command.main(["-n", processes, str(tmp_path / "script.py")]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m shardkit.launch: none of the 2 processes called sk.initialize(), so") == warns
    assert err.count("\n") == warns


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_killed_launcher_takes_its_processes_along(launcher, tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, time\nos.fork()\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(100)\n"
    )
    started = launcher("-n", "2", "script.py")
    lines = [started.stdout.readline() for _ in range(4)]
    pids = {int(line.split()[-1]) for line in lines}
    assert len(pids) == 4
    started.kill()
    started.communicate()
    until = time.monotonic() + 20
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


def lives(pid):
    """Whether there's such a process; one that has ended and that nobody asked about is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_nobody_reads(launcher, tmp_path):
    """As before ``| head -1``: all end, without a traceback."""
    (tmp_path / "script.py").write_text("while True:\n    print('again')\n")
    started = launcher("-n", "2", "script.py")
    assert started.stdout.readline().endswith("again\n")
    started.stdout.close()
    assert started.wait(120) == 141
    assert "\nTraceback" not in f"\n{started.stderr.read()}"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "give a script"),
        (["-n", "2"], "give a script"),
        (["nowhere.py"], "no script 'nowhere.py'"),
        (["-n", "0", __file__], "processes must be a positive number, such as 2; got 0"),
        (["-n", "two", __file__], "invalid int value: 'two'"),
        (["--devices-per-process", "0", __file__], "devices_per_process must be a positive number, such as 2; got 0"),
        (["--port", "70000", __file__], "from 1 to 65535; got 70000"),
        (["--grace", "-1", __file__], "--grace takes seconds, 0 or more; got -1"),
        (["--proc", "2", __file__], "unrecognized arguments"),
    ],
)
def test_what_it_can_not_run(words, part, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert part in capsys.readouterr().err


def test_a_taken_port(capsys):
    with ports.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            command.main(["--port", str(port), __file__])
    assert stop.value.code == 2
    assert f"error: port {port} is taken" in capsys.readouterr().err


@pytest.mark.slow
def test_signals_are_forwarded(launcher, tmp_path):
    (tmp_path / "script.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(100)\n")
    started = launcher("-n", "2", "script.py")
    assert [started.stdout.readline().split()[1] for _ in range(2)] == ["ready", "ready"]
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=120)
    assert started.returncode == 130
    assert err.count("KeyboardInterrupt") == 2
    assert err.endswith("stopped by SIGINT; none is left\n")
