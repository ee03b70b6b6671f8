"""Two processes with one folder: where one can't go on, neither waits for the other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardkit as sk

PROGRAM = Path(__file__).with_name("processes_program.py")
DONE = "^done$"


def told(name, first, second):
    return pytest.param(name, (first, second), id=name)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Where all of them save."""
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def said(path):
    """What each process says of each case."""
    launch = ["-m", "shardkit.launch", "-n", "2", "--devices-per-process", "2", str(PROGRAM), str(path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *launch], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((path / f"said-{number}.json").read_text()) for number in range(2)]


VALUES = r"^CheckpointError: .*processes hold different values of n: NumPy's arrays and those of a process's own"


@pytest.mark.not_smoke
@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        told("same", DONE, DONE),
        told("other_numpy", VALUES, VALUES),
        told("other_own", VALUES, VALUES),
        told("other_number", *[r'^ProcessMismatchError: .*\n  n: process 0: "int 0"; process 1: "int 1"'] * 2),
        told("other_tree", *[r'^ProcessMismatchError: .*\n  m: process 0: nothing; process 1: "int 2"'] * 2),
        told("other_value", "saving to .* failed in process 1, so .*: TypeError: n is of type object", "^TypeError: n"),
        told("other_path", *[r"^ProcessMismatchError: .*\n  path: process 0: .*-0.; process 1: .*-1"] * 2),
        told("own_states", DONE, DONE),
        told(
            "not_taken", "^CheckpointError: restoring from .* failed in process 1.*not taken", "^ValueError: not taken"
        ),
        told("part_nowhere", "^TypeError: x has no part on the devices of process 0", "failed in process 0.*x has no"),
        told("other_target", "^CheckpointError: .* differ:\n  y: not in the checkpoint", "failed in process 0"),
        told("restored_elsewhere", "failed in process 1", "^CheckpointError: there is no checkpoint at .*nowhere"),
        told("below_a_file", "^CheckpointError: .*could not be written.*Not a directory", "failed in process 0"),
        told(
            "full_disk", "^CheckpointError: .*could not be written.*process 1 failed", "^CheckpointError: .*written to"
        ),
        told("damaged", DONE, DONE),
        told("preempted", DONE, DONE),
    ],
)
def test_both_are_told(said, name, patterns):
    for pattern, text in zip(patterns, (one[name] for one in said), strict=True):
        assert re.search(pattern, text), text


@pytest.mark.not_smoke
def test_one_process_goes_on_from_two(path, said):
    """With all but what was each process's own."""
    assert said[0]["same"] == said[0]["own_states"] == "done"
    found = sk.restore(path / "same", {"all": np.zeros((8, 8), np.float32)}, partial=True)
    np.testing.assert_array_equal(found["all"].ravel(), np.arange(64))
    with pytest.raises(sk.CheckpointError, match=r"position: each of the 2 processes .* of its own, which 1 can't"):
        sk.restore(path / "own_states", {"position": np.random.RandomState(0)})
