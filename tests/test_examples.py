"""The examples, each run once at a small size as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent

pytest.importorskip("matplotlib")
pytest.importorskip("skimage")


def run(*arguments, **keywords):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, ROOT / "examples/train_fundus.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
        **keywords,
    )


@pytest.fixture(scope="module")
def fundus(tmp_path_factory):
    """One run on the default mesh (dp=2, sp=4), with the comparison against one device."""
    picture = tmp_path_factory.mktemp("fundus") / "picture.png"
    done = run("--scale", 0.06, "--steps", 3, "--check", "--out", picture)
    return done, picture


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a title."""
    after = text[text.index(title) :]
    body = after[: after.index("└")]
    return [[c.strip() for c in line.strip("│ ").split("│")] for line in body.splitlines() if line.startswith("│")]


def test_fundus_trains_the_same_as_one_device(fundus):
    done, _ = fundus
    assert done.returncode == 0, done.stderr
    assert re.search(r"Retina photograph (\d+) x \1, 2 copies a step; 4 shards of \d+ columns", done.stdout)
    found = re.search(r"Loss curves: equal; largest relative difference (\S+) over 3 steps", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 1e-4


def test_fundus_prints_what_it_reached_and_what_it_cost(fundus):
    done, _ = fundus
    quality = rows(done.stdout, "Restoration (PSNR in dB")
    assert [r[0] for r in quality] == ["whole photograph", "held-out region"]
    for _, before, after, gain in quality:
        assert float(after) - float(before) == pytest.approx(float(gain), abs=0.011)
    memory = rows(done.stdout, "Memory of one training step, per device")
    assert [r[0] for r in memory] == ["sharded over 8 devices", "unsharded, one device"]


def test_fundus_gathers_nothing(fundus):
    done, _ = fundus
    wire = rows(done.stdout, "Collectives of one training step on {'dp': 2, 'sp': 4}")
    assert {r[0] for r in wire} == {"collective_permute", "all_reduce"}
    assert all(int(r[2]) > 0 for r in wire)
    (permutes,) = [r for r in wire if r[0] == "collective_permute"]
    assert permutes[1] == "sp"


def test_fundus_draws_a_picture(fundus):
    from matplotlib import image

    _, picture = fundus
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(picture)
    assert pixels.shape[:2] == (924, 1320)  # 12 x 8.4 inches at 110 dpi
    assert np.std(pixels[..., :3]) > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "8"], "--mesh '8' is not of the form dp=2,sp=4"),
        (["--mesh", "tp=2,sp=4"], "--mesh 'tp=2,sp=4' names axes ['tp']; this job uses dp and sp"),
    ],
)
def test_fundus_names_a_bad_mesh(arguments, message, tmp_path):
    done = run(*arguments, "--out", tmp_path / "no.png")
    assert done.returncode == 1
    assert done.stderr.strip() == message
    assert not list(tmp_path.iterdir())
