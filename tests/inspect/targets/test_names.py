"""Names of targets: read, and what is said of those that aren't one."""

import pytest

from shardkit.inspect.targets.hardware import HARDWARE, hardware_of
from shardkit.inspect.targets.names import CARDS, GENERATIONS, parse_target


@pytest.mark.parametrize(
    ("target", "model", "topology", "devices"),
    [
        ("tpu:v5e:2x4", "v5e", (2, 4), 8),
        ("TPU:V5E:16x16 ", "v5e", (16, 16), 256),
        ("tpu:v5litepod:1x1", "v5e", (1, 1), 1),
        ("tpu:v5p:4x8x8", "v5p", (4, 8, 8), 256),
        ("tpu:v4:2x2x1", "v4", (2, 2, 1), 8),  # two devices a chip
        ("tpu:trillium:2x4", "v6e", (2, 4), 8),
        ("tpu:v7x:2x2x1", "tpu7x", (2, 2, 1), 8),
        ("gpu:h100:8", "h100", (1, 8), 8),
        ("gpu:h200:2x8", "h200", (2, 8), 16),
    ],
)
def test_names(target, model, topology, devices):
    name = parse_target(target)
    assert (name.model, name.topology, name.devices) == (model, topology, devices)


@pytest.mark.parametrize("target", ["", "tpu", "tpu:v5e", "h100", "gpu:h100:x", "abacus:one:8", "cpu:8", "tpu:v5e:0x4"])
def test_what_is_no_target_is_told_which_there_are(target):
    with pytest.raises(ValueError, match=r"is unknown; known are tpu:v2:AxB.*tpu:v5e:AxB.*gpu:a100:N, gpu:h100:N"):
        parse_target(target)


@pytest.mark.parametrize("target", ["tpu:v9:2x2", "gpu:gtx:8", "gpu:v5e:8", "tpu:h100:2x2"])
def test_unknown_models_are_told_which_there_are(target):
    with pytest.raises(ValueError, match=r"is unknown; known are .*tpu:v6e:AxB"):
        parse_target(target)


def test_no_string():
    with pytest.raises(TypeError, match="target must be a string; got 8; known are"):
        parse_target(8)  # type: ignore[arg-type]


def test_the_dims_of_a_torus():
    with pytest.raises(
        ValueError, match=r"torus of 3 dims, so write 3 numbers, such as \"tpu:v5p:2x2x2\"; '2x2' has 2"
    ):
        parse_target("tpu:v5p:2x2")
    with pytest.raises(ValueError, match='write "gpu:h100:<cards>" or'):
        parse_target("gpu:h100:2x2x2")


def test_every_target_has_figures():
    assert {row.name for row in HARDWARE} == {*GENERATIONS, *CARDS}
    assert len({row.kind for row in HARDWARE}) == len(HARDWARE)
    for row in HARDWARE:
        assert row.source
        assert hardware_of(row.kind) is row
        # A peak is 50 to 1000 flops a byte of memory's bandwidth on all of them: a slip in a unit would show.
        assert 30 < row.flops / row.memory_bandwidth < 1000
        assert row.link is None or row.link < row.memory_bandwidth
    assert hardware_of("cpu") is None
