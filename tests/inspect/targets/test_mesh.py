"""Described hardware: the mesh, its errors, the environment, and (where a compiler is installed) a program for it."""

import importlib.util
import os

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect.targets import gpu, mesh, tpu
from shardkit.inspect.targets.environment import environment
from shardkit.inspect.targets.names import CARDS, parse_target

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu-target")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None,
    reason="needs the extra gpu-target",
)


@pytest.mark.parametrize(("target", "extra"), [("tpu:v5e:2x4", "tpu-target"), ("gpu:h100:8", "gpu-target")])
def test_an_absent_compiler_names_the_extra(monkeypatch, target, extra):
    def absent(module):
        raise ImportError(module)

    monkeypatch.setattr(mesh.importlib, "import_module", absent)
    with pytest.raises(ImportError, match=rf"needs its compiler.*pip install 'shardkit\[{extra}\]'"):
        sk.target_mesh(target, {"sp": 8})


def test_unknown_targets_are_told_which_there_are():
    with pytest.raises(ValueError, match="'v9' is unknown; known are"):
        sk.target_mesh("tpu:v9:2x4", {"sp": 8})


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        (
            {"sp": 16},
            ValueError,
            r"has 8 devices, but axes \{'sp': 16\} need 16; choose sizes whose product is the number of",
        ),
        (
            {"sp": 4},
            ValueError,
            r"need 4; choose sizes whose product is the number of devices, or a slice of that size",
        ),
        ({"dp": 3, "sp": -1}, ValueError, r"has 8 devices: 8 devices can't be split .* does not divide 8"),
        ({"dp": -1, "sp": -1}, ValueError, "only one mesh axis can be -1"),
        ({"dp": 0}, ValueError, "must be positive integers"),
        ({}, ValueError, "at least one axis"),
        (8, TypeError, "mapping of axis name to size"),
    ],
)
def test_meshes_that_do_not_fit(axes, error, message):
    with pytest.raises(error, match=message):
        sk.target_mesh("tpu:v5e:2x4", axes)


def test_what_stands_for_a_target(monkeypatch):
    """The mesh's shape, order and types, with this machine's devices in place of described ones."""
    monkeypatch.setattr(mesh, "_need", lambda *_: None)
    monkeypatch.setattr(mesh, "_described", mesh._described.__wrapped__)
    monkeypatch.setattr(mesh, "tpu_devices", lambda name: jax.devices()[: name.devices])
    monkeypatch.setattr(mesh, "gpu_devices", lambda name: jax.devices()[: name.devices])
    found = sk.target_mesh("tpu:v5e:2x4", {"dp": 2, "sp": -1}, axis_types="explicit")
    assert dict(found.shape) == {"dp": 2, "sp": 4}
    assert set(found.axis_types) == {AxisType.Explicit}
    assert sk.target_mesh("tpu:v4:2x2x1", {"dp": 8}).size == 8  # which JAX can't arrange, so in order
    assert list(sk.target_mesh("gpu:h100:2x4", {"sp": 2}).devices.flat) == jax.devices()[:2]


def test_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    seen = {}

    def describe(name, **options):
        seen.update(
            {n: os.environ.get(n) for n in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE")}, name=name, **options
        )
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such thing\nand more")

    from jax.experimental import topologies

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    with pytest.raises(
        ValueError, match=r"target 'tpu:v5e:2x4': libtpu doesn't describe it: INVALID_ARGUMENT: no such"
    ):
        tpu.tpu_devices(parse_target("tpu:v5e:2x4"))
    assert seen == {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "name": "v5e:2x4",
        "platform": "tpu",
        "chips_per_host_bounds": [2, 4, 1],
    }
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "0"
    assert "TPU_ACCELERATOR_TYPE" not in os.environ


def test_a_plugin_that_refused_for_want_of_a_driver_is_asked_again(monkeypatch):
    from jax.experimental import topologies

    calls = []

    class Plugin:
        def initialize(self):
            calls.append(os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"))

    class Topology:
        devices = ("a", "b")

    def describe(name, **options):
        if not calls:
            raise NotImplementedError("topology not implemented for cuda")
        assert options["topology"] == "1x2x8"
        return Topology()

    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: Plugin())
    assert gpu.gpu_devices(parse_target("gpu:h100:2x8")) == ["a", "b"]
    assert calls == ["1"]
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ


@pytest.mark.parametrize("card", CARDS)
def test_descriptions_of_cards(card):
    text = gpu.target_config(card)
    assert text.count("{") == text.count("}") == 3
    for field in ("core_count", "device_memory_size", "cuda_compute_capability", "device_description_str"):
        assert field in text


def test_environment_after_an_error(monkeypatch):
    monkeypatch.setenv("SHARDKIT_A", "before")

    @environment({"SHARDKIT_A": "now", "SHARDKIT_B": "now"})
    def fail():
        raise RuntimeError(os.environ["SHARDKIT_A"] + os.environ["SHARDKIT_B"])

    with pytest.raises(RuntimeError, match="nownow"):
        fail()
    assert os.environ["SHARDKIT_A"] == "before"
    assert "SHARDKIT_B" not in os.environ


def _ring(on):
    x = jax.ShapeDtypeStruct((1, 16, 64, 8), jnp.float32, sharding=NamedSharding(on, P(None, None, "sp")))
    kernel = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32, sharding=NamedSharding(on, P()))

    def conv(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return sk.ring_conv(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, spatial_axes={"sp": "W"}, mesh=on)

    return sk.explain(conv, x, kernel)


@needs_libtpu
@pytest.mark.parametrize("target", ["tpu:v5e:2x4", "tpu:v4:2x2x1", "tpu:v5p:2x2x2", "tpu:v6e:2x4"])
def test_a_program_compiled_for_a_tpu_that_is_not_here(target):
    page = _ring(sk.target_mesh(target, {"sp": 8}))
    assert page.report.by_kind() == {"collective_permute": 2}
    assert {e.purpose for e in page.collectives} == {"halo"}
    assert page.fits
    assert page.estimate.communication > 0


@needs_libtpu
def test_a_pod_of_256_chips_and_the_errors_of_its_compiler():
    pod = sk.target_mesh("tpu:v6e:16x16", {"dp": 128, "tp": 2})  # no whole dims of the torus: some are split
    assert len({d.id for d in np.ravel(pod.devices)}) == 256
    with pytest.raises(ValueError, match=r"libtpu doesn't describe it.*even numbers"):
        sk.target_mesh("tpu:v5e:3x5", {"sp": 15})


@needs_cuda
@pytest.mark.parametrize(("target", "axes"), [("gpu:a100:8", {"sp": 8}), ("gpu:h100:2x8", {"dp": 2, "sp": 8})])
def test_a_program_compiled_for_gpus_that_are_not_here(target, axes):
    page = _ring(sk.target_mesh(target, axes))
    assert page.report.by_kind() == {"collective_permute": 2}
    assert page.hosts == axes.get("dp", 1)
    assert page.fits
