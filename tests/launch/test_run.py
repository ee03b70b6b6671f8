"""Programs without JAX: what a launcher does with any process."""

import signal
import sys
import time

import pytest

from shardkit.launch import Ended, PortTakenError, ProcessFailedError, Result, RunTimeoutError, ports, run
from shardkit.launch.environment import Told
from shardkit.launch.results import describe
from shardkit.launch.run import environ

# Starts in a moment.
PYTHON = [sys.executable, "-I", "-S", "-c"]
WHO = """
import os, sys, time, signal
me = int(os.environ['SHARDKIT_PROCESS_ID'])
def here():
    open(f"here{me}", "w").close()
def wait_for(*processes):
    while not all(os.path.exists(f"here{process}") for process in processes):
        time.sleep(0.02)
"""


def started(text, processes=2, **options):
    return run([*PYTHON, WHO + text], processes, **options)


def statuses(result):
    return [ended.status for ended in result.processes]


def lives(pid):
    """Whether there's such a process; one that has ended and that nobody asked about is none."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=20.0):
    until = time.monotonic() + seconds
    while any(lives(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(lives(pid) for pid in pids)


def test_each_process_is_told_who_it_is(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("LEFT_OUT", "here")
    names = "SHARDKIT_COORDINATOR SHARDKIT_NUM_PROCESSES SHARDKIT_PROCESS_ID SHARDKIT_DEVICES_PER_PROCESS JAX_PLATFORMS"
    names = [*names.split(), "JAX_NUM_CPU_DEVICES", "PYTHONUNBUFFERED", "LEFT_OUT", "ADDED"]
    text = f"print(*[os.environ.get(name) for name in {names}])"
    result = started(text, 3, devices_per_process=2, env={"LEFT_OUT": None, "ADDED": "x"}, capture=True).check()
    said = [ended.stdout.split() for ended in result.processes]
    assert len({words[0] for words in said}) == 1
    assert said[0][0].startswith("127.0.0.1:")
    assert [words[1:] for words in said] == [["3", str(p), "2", "cpu", "2", "1", "None", "x"] for p in range(3)]
    assert result == result.check()
    assert result.summary() == "3 processes ended well"
    assert not result.called


def test_without_simulated_devices_the_platform_is_left_alone(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("SHARDKIT_DEVICES_PER_PROCESS", "8")
    text = "print(os.environ.get('JAX_PLATFORMS'), os.environ.get('SHARDKIT_DEVICES_PER_PROCESS'))"
    assert started(text, 1, capture=True).check().processes[0].stdout == "None None\n"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert started(text, 1, devices_per_process=2, capture=True).check().processes[0].stdout == "cuda 2\n"


def test_lines_are_whole_and_have_the_number_of_their_process(capfd):
    text = """
for count in range(200):
    for piece in ("a" * 50, "b" * 50, "\\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
sys.stderr.write("to stderr\\n10%\\r20%")
sys.stdout.write("caf\\u00e9, no end")
"""
    assert started(text, 3).status == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert set(lines) == {f"[{p}] {line}" for p in range(3) for line in ("a" * 50 + "b" * 50, "café, no end")}
    assert len(lines) == 3 * 201
    assert sorted(err.splitlines()) == sorted(f"[{p}] {line}" for p in range(3) for line in ("to stderr", "10%", "20%"))


def test_captured_output_is_as_written(capfd):
    result = started("sys.stdout.write('10%\\r20%'); sys.stderr.write(f'{me}\\n')", capture=True)
    assert [(ended.stdout, ended.stderr) for ended in result.processes] == [("10%\r20%", "0\n"), ("10%\r20%", "1\n")]
    assert capfd.readouterr() == ("", "")


def test_a_process_may_end_before_the_others():
    result = started("time.sleep(0.3 * me)", 3)
    assert statuses(result) == [0, 0, 0]


@pytest.mark.parametrize(
    ("failing", "status", "words"),
    [
        ("sys.exit(3)", 3, "process 1 ended with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 was killed by signal 9 (SIGKILL)"),
        ("raise ValueError('a word')", 1, "process 1 ended with exit status 1"),
    ],
)
def test_the_first_failure_ends_all(failing, status, words, tmp_path):
    """Those that ignore SIGTERM, too, and what they have started in turn."""
    text = f"""
if me == 1:
    wait_for(0, 2)
    {failing}
if me == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.fork()
if pid:
    print(os.getpid(), pid, flush=True)
    here()
time.sleep(100)
"""
    result = started(text, 3, capture=True, grace=0.5, cwd=tmp_path)
    assert result.status == status
    assert result.first_failure == 1
    assert statuses(result)[0] == -signal.SIGTERM
    assert statuses(result)[2] == -signal.SIGKILL
    assert result.summary() == words
    with pytest.raises(ProcessFailedError, match="process 1") as caught:
        result.check()
    assert caught.value.result is result
    assert ("a word" in str(caught.value)) == ("a word" in failing)
    pids = [int(pid) for process in (0, 2) for pid in result.processes[process].stdout.split()]
    assert len(pids) == 4
    assert gone(pids)


def test_one_that_ended_because_of_another_is_not_blamed(tmp_path):
    """The watch ends the others first (75), and only then the one that failed, where the service is."""
    text = """
if me:
    here()
    sys.exit(75)
wait_for(1, 2)
time.sleep(0.3)
sys.exit(4)
"""
    result = started(text, 3, cwd=tmp_path)
    assert statuses(result) == [4, 75, 75]
    assert (result.first_failure, result.status) == (0, 4)
    assert started("sys.exit(75)").status == 75


def test_out_of_time():
    text = "print('so far', os.getpid(), flush=True)\ntime.sleep(100 * me)"
    with pytest.raises(RunTimeoutError, match=r"after 2\.5 s process 1 of 2 still ran.*\n\[0\] so far") as caught:
        started(text, capture=True, timeout=2.5)
    result = caught.value.result
    assert statuses(result) == [0, None]
    assert gone([int(ended.stdout.split()[-1]) for ended in result.processes])


def test_nothing_is_left_after_an_exception_here(monkeypatch):
    """As KeyboardInterrupt in a notebook."""
    seen = []

    def write(process, name, line):
        seen.append(int(line))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["shardkit.launch.run"], "_write", write)
    with pytest.raises(KeyboardInterrupt):
        started("print(os.getpid(), flush=True); time.sleep(100)")
    assert gone(seen)


def test_what_a_process_leaves_behind_does_not_hold_the_run(capfd):
    """It ended well; something that it started still has its pipe."""
    result = started("if os.fork() == 0: time.sleep(3)\nelse: print('done')", 1)
    assert result.status == 0
    assert capfd.readouterr().out == "[0] done\n"


@pytest.mark.parametrize("option", ["processes", "devices_per_process"])
@pytest.mark.parametrize("number", [0, -1, 2.0, True])
def test_numbers_that_are_not_positive(option, number):
    with pytest.raises(ValueError, match=f"{option} must be a positive number"):
        run([*PYTHON, ""], **{option: number})


def test_commands_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="command is empty"):
        run([])
    with pytest.raises(FileNotFoundError, match="no script"):
        run([tmp_path / "nowhere.py"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run([str(tmp_path / "nowhere")])


def test_a_script_and_where_it_runs(tmp_path):
    (tmp_path / "script.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])")
    result = run(["script.py", "--flag", 1 * "x"], 1, cwd=tmp_path, capture=True).check()
    assert result.processes[0].stdout == f"{tmp_path} ['--flag', 'x']\n"


def test_a_taken_port():
    with ports.listen("127.0.0.1", 0) as taken, pytest.raises(PortTakenError, match="is taken"):
        started("", port=taken.getsockname()[1])


def test_a_given_port():
    with ports.reserve() as held:
        port = held.getsockname()[1]
    result = started("print(os.environ['SHARDKIT_COORDINATOR'])", 1, port=port, capture=True)
    assert result.check().processes[0].stdout == f"127.0.0.1:{port}\n"


@pytest.mark.parametrize(
    ("processes", "first", "number", "status"),
    [
        ([0, 0], None, None, 0),
        ([0, 3], 1, None, 3),
        ([-15, -11], 1, None, 139),
        ([0, -15], None, signal.SIGTERM, 143),
        ([0, -2], None, signal.SIGINT, 130),
        ([0, 0], None, signal.SIGTERM, 0),
    ],
)
def test_exit_status(processes, first, number, status):
    ended = tuple(Ended(process, of) for process, of in enumerate(processes))
    assert Result(ended, first, number).status == status


@pytest.mark.parametrize(
    ("statuses", "called", "warns"),
    [
        ([0, 0], False, "none of the 2 processes called sk.initialize(), so that each ran all"),
        ([0, 0], True, None),
        ([0], False, None),
        ([0, 3], False, "none of the 2 processes had called sk.initialize() by then: where a script doesn't call"),
        ([0, 3], True, None),
        ([3], False, None),
    ],
)
def test_processes_that_never_met_are_told(statuses, called, warns):
    ended = tuple(Ended(process, of) for process, of in enumerate(statuses))
    first = next((ended.process for ended in ended if ended.status), None)
    warning = Result(ended, first, called=called).warning
    assert (warning is not None) == (warns is not None)
    assert warning is None or warning.startswith(warns)


def test_processes_that_a_signal_ended_are_not_told():
    assert Result((Ended(0, 0), Ended(1, -15)), None, signal.SIGTERM, called=False).warning is None


def test_unknown_signals_have_no_name():
    assert describe(Ended(0, -64 - 60)) == "process 0 was killed by signal 124 (signal 124)"
    assert describe(Ended(0, None)) == "process 0 still ran"


@pytest.mark.parametrize(
    ("devices", "given", "wanted"),
    [
        (64, {}, "128"),
        (1, {}, None),
        (None, {}, None),
        (64, {"PJRT_NPROC": "3"}, "3"),
        (64, {"NPROC": "3"}, None),
    ],
)
def test_simulated_devices_have_threads_enough(devices, given, wanted, monkeypatch):
    """XLA before 0.12 may hang on fewer than two a device (``shardkit.cli.known_bad``)."""
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = environ(Told("127.0.0.1:1", 2, 0, devices))
    assert found.get("PJRT_NPROC") == wanted
