"""What other platforms choose, run here: the choice is made from the mesh's platform, the code is the same."""

import random

import pytest

from shardkit.spatial.convolution import region
from tests.spatial.conv_cases import NAMED, draw
from tests.spatial.test_conv import check


@pytest.fixture(params=["tpu", "gpu"])
def platform(request, monkeypatch):
    monkeypatch.setattr(region, "platform_of", lambda mesh: request.param)
    return request.param


def dilated(count: int, seed: int):
    """Random configurations with a dilated input: windows begin at another phase on each shard."""
    rng = random.Random(seed)
    cases = []
    while len(cases) < count:
        case = draw(rng)
        if any(d > 1 for d in case.lhs_dilation):
            cases.append(case)
    return cases


@pytest.mark.parametrize("number", range(3))
@pytest.mark.every(2)
def test_phases_of_dilated_inputs(platform, number):
    check(dilated(3, seed=5)[number], "explicit" if number % 4 == 3 else "auto")


@pytest.mark.parametrize(
    "name", ["transposed, lhs dilation 2", "grouped, batch sharded too", "k=3 s=2 on two shards of 4"]
)
@pytest.mark.every(2)
def test_named_configurations(platform, name):
    check(NAMED[name])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(120))
def test_phases_of_dilated_inputs_in_full(platform, number):
    check(dilated(120, seed=6)[number], "explicit" if number % 4 == 3 else "auto")
