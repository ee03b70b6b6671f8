"""Described hardware: names, errors, and (where a compiler is installed) a program compiled for it."""

import importlib
import importlib.util
import os

import jax
import pytest
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.inspect import targets


@pytest.mark.parametrize("name", ["tpu", "tpu:v5e", "h100", "gpu:h100:x", "abacus:one:8"])
def test_unreadable_targets_are_shown_how_to_be_written(name):
    with pytest.raises(ValueError, match=r'is unknown; write for example "tpu:v5e:2x4" or "gpu:h100:8"'):
        targets.target_devices(name)


def test_unknown_generations_and_cards():
    with pytest.raises(ValueError, match=r"generation 'v1' is unknown; use one of \['v4', 'v5e', 'v5p', 'v6e'\]"):
        targets.target_devices("tpu:v1:2x2")
    with pytest.raises(ValueError, match=r'write "gpu:h100:<count>"'):
        targets.target_devices("gpu:gtx:8")
    with pytest.raises(ValueError, match=r'write "gpu:h100:<count>"'):
        targets.target_devices("gpu:h100:2x8")


@pytest.mark.parametrize(
    ("name", "package"), [("tpu:v5e:2x4", r"jax\[tpu\]"), ("gpu:h100:8", "jax-cuda12-plugin jax-cuda12-pjrt")]
)
def test_an_absent_compiler_is_named(monkeypatch, name, package):
    def absent(module):
        raise ImportError(module)

    monkeypatch.setattr(targets.importlib, "import_module", absent)
    with pytest.raises(ImportError, match=f"needs its compiler: pip install {package}"):
        targets.target_devices(name)


def test_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    seen = {}

    def devices(name, **options):
        seen.update({n: os.environ.get(n) for n in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE")}, name=name)
        return jnp.zeros(8)

    monkeypatch.setattr(targets, "_need", lambda *_: None)
    monkeypatch.setattr(targets, "_devices", devices)
    targets.target_devices("tpu:v5e:2x4")
    assert seen == {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "name": "v5e:2x4"}
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "0"
    assert "TPU_ACCELERATOR_TYPE" not in os.environ


def test_a_mesh_larger_than_the_target(monkeypatch):
    monkeypatch.setattr(targets, "target_devices", lambda _: jnp.zeros(8))
    with pytest.raises(ValueError, match=r"has 8 devices, but axes \{'sp': 16\} need 16"):
        targets.described_mesh("tpu:v5e:2x4", {"sp": 16})


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler (extra tpu-target)")
def test_a_program_compiled_for_a_tpu_that_is_not_here():
    mesh = targets.described_mesh("tpu:v5e:2x4", {"sp": 8})
    x = jax.ShapeDtypeStruct((1, 16, 64, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "sp")))
    kernel = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32, sharding=NamedSharding(mesh, P()))

    def conv(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return sk.ring_conv(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, spatial_axes={"sp": "W"}, mesh=mesh, method="blocks"
        )

    assert sk.collectives(conv, x, kernel, mesh=mesh).by_kind() == {"collective_permute": 2}
