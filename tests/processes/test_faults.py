"""Processes killed at any moment: the job ends by itself, and its next start goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shardkit as sk

HERE = Path(__file__).parent
ENDS_WITHIN = 60  # seconds, on a machine that does other things besides


class Job:
    """The training under the launcher."""

    def __init__(self, path, until, processes=2, mesh="2x2", devices=2, options=()):
        path.mkdir(exist_ok=True)
        launch = [sys.executable, "-m", "shardkit.launch", "-n", processes, "--devices-per-process", devices, *options]
        self.process = subprocess.Popen(
            list(map(str, [*launch, HERE / "training.py", path, "--until", until, "--mesh", mesh])),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        )
        self.lines, self._over, self._more = [], False, threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line)
                self._more.notify_all()
        with self._more:
            self._over = True
            self._more.notify_all()

    def _heard(self, pattern):
        return len(re.findall(pattern, self.said))

    @property
    def said(self):
        return "".join(self.lines)

    @property
    def pids(self):
        return [int(pid) for pid in re.findall(r"process id (\d+)", self.said)]

    def wait_for(self, pattern, count=1):
        """Until that was said so often."""
        with self._more:
            self._more.wait_for(lambda: self._heard(pattern) >= count or self._over, timeout=240)
        assert self._heard(pattern) >= count, f"{pattern!r} wasn't said:\n{self.said}"

    def end(self):
        """Its status, once it ended by itself."""
        try:
            self.process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self.stop()
            pytest.fail(f"the job did not end:\n{self.said}")
        self._reader.join(10)
        return self.process.returncode

    def check_gone(self):
        """No process is left of it."""
        until = time.monotonic() + ENDS_WITHIN
        while left := [pid for pid in self.pids if is_running(pid)]:
            assert time.monotonic() < until, f"processes {left} are left:\n{self.said}"
            time.sleep(0.05)

    def stop(self):
        for pid in [*self.pids, self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        self.process.stdout.close()


def is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def losses(path):
    """Step and loss, for each time that a step was done; a last line cut short isn't one."""
    text = (path / "losses.txt").read_text() if (path / "losses.txt").exists() else ""
    whole = text[: text.rfind("\n") + 1]
    return [(int(step), float.fromhex(loss)) for step, loss in map(str.split, whole.splitlines())]


def finish(path, until, **options):
    job = Job(path, until, **options)
    try:
        job.process.wait(300)
        assert job.end() == 0, job.said
    finally:
        job.stop()
    return job


def trial(path, until, rng):
    """Start the job, kill one of it at some moment, see it end. Returns what was killed, and when."""
    job = Job(path, until, options=["--grace", 0.5])
    try:
        moment = rng.choice(["starting", "step", "step", "saving", "saving"])
        if moment == "starting":
            job.wait_for("process id", 2)
            time.sleep(rng.uniform(0, 4))
        else:
            job.wait_for(rf"\] {moment} \d", 2 * rng.randint(1, 3))
            time.sleep(rng.uniform(0, 0.08))
        victims = {"process 0": job.pids[0], "process 1": job.pids[1], "launcher": job.process.pid}
        name = rng.choice(["process 0", "process 0", "process 1", "process 1", "launcher"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victims[name], signal.SIGKILL)
        status = job.end()
        job.check_gone()
        if "launcher" not in name and status:
            assert status == 128 + signal.SIGKILL, job.said
            assert "SIGKILL" in job.said
    finally:
        job.stop()
    return name, moment


@pytest.fixture(scope="module")
def never_interrupted(tmp_path_factory):
    """The losses of one run on 2 processes."""
    path = tmp_path_factory.mktemp("whole")
    finish(path, 68)
    found = dict(losses(path))
    assert sorted(found) == list(range(1, 69))
    return found


def run_trials(path, count, seed, until, wanted):
    rng = random.Random(seed)
    done = []
    while len(done) < count:
        before = sk.latest_step(path / "steps") or 0
        # Steps for a whole trial must be left.
        assert before + 8 < until, f"{len(done)} trials used up {before} steps: {done}"
        done.append(trial(path, until, rng))
        newest = sk.latest_step(path / "steps") or 0
        assert newest >= before, "a checkpoint was lost"
        reached = max((step for step, _ in losses(path)), default=0)
        # At most what was being written, and the step after it, are to be done again.
        assert reached - newest <= 2, (reached, newest, done[-1])
    finish(path, until)
    again = losses(path)
    assert {step for step, _ in again} == set(range(1, until + 1))
    wrong = [(step, loss, wanted[step]) for step, loss in again if loss != wanted[step]]
    assert not wrong, (wrong, done)
    return done


@pytest.mark.not_smoke
def test_killed_at_any_moment_and_started_again(tmp_path, never_interrupted):
    """Ten kills, one after the other, in one training."""
    wanted = never_interrupted
    done = run_trials(tmp_path / "run", 10, 0, 64, wanted)
    assert len({what for what, _ in done}) > 1
    # And the rest of it on other meshes, and over another number of processes.
    for name, options in {
        "four": {"processes": 4, "mesh": "4x2"},
        "one": {"processes": 1, "mesh": "1x1", "devices": 1},
    }.items():
        there = tmp_path / name
        there.mkdir()
        shutil.copytree(tmp_path / "run" / "steps", there / "steps")
        finish(there, 68, **options)
        assert [step for step, _ in losses(there)] == [65, 66, 67, 68]
    for name in ("four", "one"):
        for step, loss in losses(tmp_path / name):
            assert loss == pytest.approx(wanted[step], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_killed_at_any_moment_many_times(tmp_path, never_interrupted, seed):
    """A hundred kills."""
    run_trials(tmp_path / "run", 10, seed, 64, never_interrupted)


@pytest.mark.not_smoke
def test_asked_to_end(tmp_path):
    """SIGTERM to the launcher: all processes save after the same step, and the job ends well."""
    job = Job(tmp_path, 10_000)
    try:
        job.wait_for(r"\] step \d", 6)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0, job.said
    finally:
        job.stop()
    (step,) = set(re.findall(r"asked to end after (\d+)", job.said))
    assert job.said.count("asked to end") == 2
    assert sk.latest_step(tmp_path / "steps") == int(step)
