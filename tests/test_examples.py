"""The examples, each run once at a small size as a user would."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

ROOT = Path(__file__).parent.parent

pytest.importorskip("matplotlib")
pytest.importorskip("skimage")
pytest.importorskip("sklearn")


def run(example, *arguments, **keywords):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, ROOT / "examples" / example, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
        **keywords,
    )


def module_of(example):
    """An example's functions, as someone who copies them would have them."""
    spec = importlib.util.spec_from_file_location(Path(example).stem, ROOT / "examples" / example)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fundus(tmp_path_factory):
    """One run on the default mesh (dp=2, sp=4), with the comparison against one device."""
    picture = tmp_path_factory.mktemp("fundus") / "picture.png"
    done = run("train_fundus.py", "--scale", 0.06, "--steps", 3, "--check", "--out", picture)
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


def test_fundus_has_a_reason_for_every_collective(fundus):
    done, _ = fundus
    wire = rows(done.stdout, "Collectives of one training step on {'dp': 2, 'sp': 4}")
    assert {r[5] for r in wire} == {"halo", "gradient reduction", "reduction"}
    assert "asks for" not in done.stdout


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
        pytest.param(
            ["--mesh", "tp=2,sp=4"],
            "--mesh 'tp=2,sp=4' names axes ['tp']; this job uses dp and sp",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.not_smoke
def test_fundus_names_a_bad_mesh(arguments, message, tmp_path):
    done = run("train_fundus.py", *arguments, "--out", tmp_path / "no.png")
    assert done.returncode == 1
    assert done.stderr.strip() == message
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def charlm(tmp_path_factory):
    """One run on the default mesh (dp=4, tp=2), with the comparison against one device."""
    folder = tmp_path_factory.mktemp("charlm") / "new"
    model = ("--layers", 1, "--features", 32, "--heads", 2, "--context", 16, "--batch", 16, "--microbatches", 2)
    done = run("train_charlm.py", *model, "--steps", 4, "--sample", 40, "--check", "--out", folder)
    return done, folder


@pytest.mark.not_smoke
def test_charlm_trains_the_same_as_one_device(charlm):
    done, _ = charlm
    assert done.returncode == 0, done.stderr
    assert "16 windows of 16 characters a step: 4 parts, each 2 microbatches of 2" in done.stdout
    found = re.search(r"Loss curves: equal; largest relative difference (\S+) over 4 steps", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 1e-4


@pytest.mark.not_smoke
def test_charlm_reduces_once_and_not_in_the_loop(charlm):
    done, _ = charlm
    wire = rows(done.stdout, "Collectives of one training step")
    over_dp = [r for r in wire if "dp" in r[1]]
    assert over_dp
    assert {r[2] for r in over_dp} == {"once"}
    assert [r[3] for r in over_dp if r[0] == "reduce_scatter"] == ["1"]
    assert {(r[0], r[1]) for r in wire if r[2] == "2x in the loop"} == {("all_reduce", "tp")}
    assert '0 collectives over "dp"' in done.stdout


@pytest.mark.not_smoke
def test_charlm_has_a_reason_for_every_collective(charlm):
    done, _ = charlm
    wire = rows(done.stdout, "Collectives of one training step")
    assert {r[6] for r in wire} == {"gradient reduction", "parameter gather", "reduction"}
    assert {r[6] for r in wire if "dp" not in r[1]} == {"reduction"}  # of activations, along "tp"
    assert "asks for" not in done.stdout


@pytest.mark.not_smoke
def test_charlm_keeps_optimizer_state_cut_over_all_devices(charlm):
    done, _ = charlm
    (parameters, state) = rows(done.stdout, "Kept between steps on {'dp': 4, 'tp': 2}")
    assert (parameters[0], state[0]) == ("parameters", "optimizer state")
    assert float(state[3].rstrip(" %")) < 15  # 100 / 8, and counters
    assert float(parameters[3].rstrip(" %")) < 100


@pytest.mark.not_smoke
def test_charlm_says_what_it_reached(charlm):
    done, _ = charlm
    quality = rows(done.stdout, "Bits per character")
    assert [r[0] for r in quality] == ["unigram, held-out text", "GPT, held-out text", "GPT, last 4 training batches"]
    assert all(3 < float(bits) < 8 for _, bits in quality)
    assert "40 characters after 'The following '" in done.stdout


@pytest.mark.not_smoke
def test_charlm_draws_its_loss_curve(charlm):
    _, folder = charlm
    assert [p.name for p in folder.iterdir()] == ["charlm.png"]
    assert (folder / "charlm.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "24"], "--batch 24 does not divide into 4 x 4 microbatches"),
        pytest.param(
            ["--mesh", "dp=1,tp=3"],
            "--features 128 must be a multiple of --heads 4, and both --heads 4",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.not_smoke
def test_charlm_names_what_does_not_fit(arguments, message):
    done = run("train_charlm.py", *arguments)
    assert done.returncode == 1
    assert done.stderr.strip().startswith(message)


@pytest.fixture(scope="module")
def fundus_linen(tmp_path_factory):
    """The linen twin on the default mesh (dp=2, sp=4), with the comparison against one device."""
    picture = tmp_path_factory.mktemp("fundus_linen") / "picture.png"
    done = run("train_fundus_linen.py", "--scale", 0.06, "--steps", 3, "--check", "--out", picture)
    return done, picture


@pytest.mark.not_smoke
def test_fundus_linen_trains_the_same_as_one_device(fundus_linen):
    done, picture = fundus_linen
    assert done.returncode == 0, done.stderr
    found = re.search(r"Loss curves: equal; largest relative difference (\S+) over 3 steps", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 1e-4
    quality = rows(done.stdout, "Restoration (PSNR in dB")
    assert [r[0] for r in quality] == ["whole photograph", "held-out region"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.not_smoke
def test_fundus_linen_gathers_nothing_and_has_a_reason_for_all_it_sends(fundus_linen):
    done, _ = fundus_linen
    wire = rows(done.stdout, "Collectives of one training step on {'dp': 2, 'sp': 4}")
    assert {(r[0], r[1]) for r in wire} == {
        ("collective_permute", "sp"),
        ("all_reduce", "sp"),
        ("all_reduce", "dp"),
    }
    assert {r[5] for r in wire} == {"halo", "gradient reduction", "reduction"}
    assert "asks for" not in done.stdout


def test_fundus_twins_are_one_model():
    made = module_of("train_fundus.py").Restorer
    model = nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    twin = module_of("train_fundus_linen.py").Restorer()
    image = np.random.default_rng(0).random((1, 21, 19, 3), np.float32)
    variables = jax.eval_shape(twin.init, jax.random.key(0), image)
    rng = np.random.default_rng(1)
    values = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), variables)
    for name, layer in values["params"].items():
        for part, value in layer.items():
            variable = getattr(getattr(model, name), part)
            assert variable.shape == value.shape
            variable.set_raw_value(jnp.asarray(value))
    expected = nnx.jit(lambda model, x: model(x))(model, image)
    np.testing.assert_allclose(jax.jit(twin.apply)(values, image), expected, atol=1e-5)


@pytest.fixture(scope="module")
def digits_vit(tmp_path_factory):
    """One run on the default mesh (dp=2, tp=4), with the comparison against one device."""
    picture = tmp_path_factory.mktemp("digits") / "picture.png"
    model = ("--layers", 1, "--features", 16, "--batch", 16)
    done = run("train_digits_vit.py", *model, "--steps", 12, "--check", "--out", picture)
    return done, picture


@pytest.mark.not_smoke
def test_digits_vit_trains_the_same_as_one_device(digits_vit):
    done, _ = digits_vit
    assert done.returncode == 0, done.stderr
    assert "Digits: 1,437 to train on, 360 held out; 16 a step, 8 on each of 2 parts" in done.stdout
    assert "each of 4 devices has 1 of 4 heads, and 4 of 16 patches between" in done.stdout
    found = re.search(r"Losses: equal; largest relative difference (\S+) over the first 10 steps", done.stdout)
    assert found, done.stdout
    assert float(found[1]) <= 1e-5
    assert re.search(r"Held-out digits: \d+\.\d\d% right, \d+ of 360 wrong", done.stdout)


@pytest.mark.not_smoke
def test_digits_vit_says_what_each_collective_is_for(digits_vit):
    done, _ = digits_vit
    wire = rows(done.stdout, "Collectives of one training step, by purpose")
    count = {(kind, over): 0 for _, kind, over, *_ in wire}
    for _, kind, over, number, *_ in wire:
        count[kind, over] += int(number)
    assert count["reduce_scatter", "dp"] == 1  # all gradients at once
    # Into attention and MLP the patches are put together, out of them sums are cut again; backward the same.
    assert count["reduce_scatter", "tp"] == 4
    assert {r[0] for r in wire} == {"gradient reduction", "parameter gather", "reduction", "reshard"}
    assert "asks for" not in done.stdout


@pytest.mark.not_smoke
def test_digits_vit_keeps_optimizer_state_cut_over_all_devices(digits_vit):
    done, _ = digits_vit
    (parameters, state) = rows(done.stdout, "Kept between steps on {'dp': 2, 'tp': 4}")
    assert (parameters[0], state[0]) == ("parameters", "optimizer state")
    assert float(state[3].rstrip(" %")) < 20  # 100 / 8, counters, and padding
    assert float(parameters[3].rstrip(" %")) < 50


@pytest.mark.not_smoke
def test_digits_vit_draws_a_picture(digits_vit):
    _, picture = digits_vit
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=8,sp=1"], "--mesh 'dp=8,sp=1' names axes ['sp']; this job uses dp and tp"),
        (["--mesh", "dp=4,tp=1", "--batch", "30"], "--batch 30 does not divide over dp=4"),
        (["--mesh", "tp=8"], "--features 64 must be a multiple of --heads 4, and both --heads 4 and the 16 patches"),
    ],
)
def test_digits_vit_names_what_does_not_fit(arguments, message):
    example = module_of("train_digits_vit.py")
    with pytest.raises(SystemExit, match=re.escape(message)):
        example.main(arguments)


@pytest.mark.not_smoke
def test_multihost_is_interrupted_and_ends_as_if_it_were_not(tmp_path):
    small = ("--steps", 9, "--every", 2, "--batch", 8, "--context", 8, "--features", 16)
    done = run("train_multihost.py", *small, "--out", tmp_path / "new")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"Loss curves: equal; largest relative difference (\S+) over 9 steps", done.stdout)
    assert found, done.stdout
    assert float(found[1]) <= 1e-5
    table = rows(done.stdout, "Losses of the interrupted job")
    assert [r[1] for r in table] == ["2", "4"]
    assert table[0][0].startswith("1 - ")
    assert table[1][0].endswith(" - 9")
    assert (tmp_path / "new" / "multihost.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_multihost_writes_over_nothing(tmp_path):
    (tmp_path / "alone").mkdir()
    done = run("train_multihost.py", "--out", tmp_path)
    assert done.returncode == 1
    assert "alone is there already; remove it, or give another --out" in done.stderr
