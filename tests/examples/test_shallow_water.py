"""The shallow-water example, small: the same as on one device, conserved mass, and few exchanges."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def example():
    """Its functions, as someone who copies them would have them."""
    path = Path(__file__).parents[2] / "examples" / "shallow_water.py"
    spec = importlib.util.spec_from_file_location("shallow_water", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ran(example, tmp_path_factory):
    """One run on 2 x 2 blocks: what it returned, and its picture. The wires are of 1 and of 4 steps an exchange."""
    picture = tmp_path_factory.mktemp("shallow") / "picture.png"
    small = ["--size", "48", "--steps", "16", "--chunk", "16", "--devices", "2x2", "--exchange-every", "4"]
    return example.main([*small, "--check", "--picture", str(picture)]), picture


def test_fields_are_those_of_one_device(ran):
    assert ran[0]["check"] <= 1e-10


def test_mass_stays_and_energy_goes_slowly(example, ran):
    run = ran[0]["run"]
    assert run.state.h.dtype == np.float64
    assert example.worst_change(run.mass) <= 1e-14
    assert 0.9 < run.energy[-1] / run.energy[0] < 1
    assert np.abs(np.asarray(run.state.h) - example.start(48, 0, "float64").h).max() > 1  # metres: something moved


def test_fields_lie_in_blocks(ran):
    assert {s.data.shape for field in ran[0]["run"].state for s in field.addressable_shards} == {(24, 24)}


def test_exchanges_drop_fourfold(ran):
    one, four = ran[0]["wires"].values()
    assert (one.every, four.every) == (1, 4)
    assert one.permutes == 12  # three fields, two dims, two sides
    assert four.permutes == 3
    assert one.others == four.others == 0


def test_draws_a_picture(ran):
    from matplotlib import image

    pixels = image.imread(ran[1])
    assert pixels.shape[:2] == (946, 1485)  # 13.5 x 8.6 inches at 110 dpi
    assert np.std(pixels[..., :3]) > 0.05


@pytest.mark.not_smoke
def test_bands_are_exchanged_along_one_axis(example):
    mesh = sk.make_mesh({"sy": 4})
    first = example.start(32, 1, "float64")
    s = example.on_mesh(first, mesh)
    program = example.compiled(s, mesh, 2, 1)
    wire = example.wire_of(program, mesh, 2)
    assert (wire.every, wire.permutes, wire.others) == (1, 6, 0)
    found = program(s)
    dx, dt = example.time_step(32)
    expected = example.advance(example.State(*map(jnp.asarray, first)), dx, dt, 2)
    assert example.largest_difference(found, expected) <= 1e-12
    assert {s.data.shape for s in found.h.addressable_shards} == {(8, 32)}


def test_a_flow_that_blows_up_says_so(example):
    rest = example.start(16, 0, "float64")
    bad = example.State(*map(jnp.asarray, (rest.h * np.nan, rest.u, rest.v)))
    with pytest.raises(SystemExit, match="blew up before step 1"):
        example.simulate(bad, jax.jit(lambda s: s), 1, 1, set(), example.Console(quiet=True), "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "2x2x2"], "--devices '2x2x2' is not of the form 2x4"),
        (["--devices", "0"], "--devices '0' is not of the form 2x4"),
        (["--devices", "5"], "--size 192 does not divide over sy=5"),
        (["--exchange-every", "0"], "--exchange-every '0' is neither a number of time steps nor auto"),
        (["--steps", "10", "--chunk", "3"], "--steps 10 is not a multiple of --chunk 3"),
        (["--size", "4"], "--size must be at least 8"),
    ],
)
def test_names_what_does_not_fit(example, arguments, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        example.main(arguments)
