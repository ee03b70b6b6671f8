"""Signals to the launcher, and the end of the launcher itself."""

import os
import signal
import sys

import pytest

from shardkit.launch import run

# A signal's handler must not print: it may come in the middle of another print.
WHO = """
import os, sys, time, signal
me = int(os.environ['SHARDKIT_PROCESS_ID'])
def say(text):
    os.write(1, text.encode() + b"\\n")
"""


@pytest.fixture
def signalled(monkeypatch):
    """``signalled(text, {word: signal})``: a run in which this process gets a signal once both have said a word."""

    def start(text, answers, **options):
        said = []

        def write(process, name, line):
            said.append(line)
            if line in answers and said.count(line) == 2:
                os.kill(os.getpid(), answers[line])

        monkeypatch.setattr(sys.modules["shardkit.launch.run"], "_write", write)
        command = [sys.executable, "-I", "-S", "-c", WHO + text]
        return run(command, 2, forward_signals=True, timeout=60, **options), said

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_goes_to_all(signalled, number):
    """Who saves what it has and ends well isn't a failure."""
    text = """
def save(number, frame):
    time.sleep(0.3 * me)
    say(f"saved {number}")
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
say("ready")
time.sleep(100)
"""
    before = signal.getsignal(number)
    result, said = signalled(text, {"ready": number})
    assert said == ["ready", "ready", *[f"saved {int(number)}"] * 2]
    assert (result.status, result.first_failure, result.signal) == (0, None, number)
    assert signal.getsignal(number) == before


def test_a_signal_that_ends_them(signalled):
    result, _ = signalled("say('ready'); time.sleep(100)", {"ready": signal.SIGTERM})
    assert [ended.status for ended in result.processes] == [-signal.SIGTERM] * 2
    assert (result.status, result.first_failure) == (143, None)
    assert result.summary() == "stopped by SIGTERM"


def test_they_are_given_time_and_then_killed(signalled):
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); time.sleep(100)"
    result, _ = signalled(text, {"ready": signal.SIGTERM}, grace=0.3)
    assert [ended.status for ended in result.processes] == [-signal.SIGKILL] * 2
    assert result.status == 143


def test_a_second_interrupt_kills(signalled):
    text = """
signal.signal(signal.SIGINT, lambda *_: say("busy"))
say("ready")
while True:
    time.sleep(1)
"""
    result, said = signalled(text, {"ready": signal.SIGINT, "busy": signal.SIGINT})
    assert said == ["ready", "ready", "busy", "busy"]
    assert [ended.status for ended in result.processes] == [-signal.SIGKILL] * 2
    assert result.status == 130


def test_a_failure_while_they_end_is_none(signalled):
    """The others may still be saving."""
    text = """
def end(*_):
    if me == 0:
        sys.exit(1)
    time.sleep(1)
    say("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("ready")
time.sleep(100)
"""
    result, said = signalled(text, {"ready": signal.SIGTERM})
    assert said[-1] == "saved"
    assert [ended.status for ended in result.processes] == [1, 0]
    assert result.status == 143
