"""Eight simulated devices, exact arithmetic, and the meshes that tests run on."""

import contextlib
import importlib.metadata
import os

import hypothesis
import jax
import pytest

import shardkit as sk

# Half the compile time, the same collectives: what XLA partitions is decided before these passes. Read by
# XLA when its backend starts, so it must be set first; child processes of tests inherit it.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # unknown to later ones; the second Python tests those
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f for f in _FLAGS if f.split("=")[0] not in _given)]).strip()

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

# The same examples in every run: a failure here is a failure for everyone.
hypothesis.settings.register_profile("shardkit", derandomize=True, deadline=None, database=None, max_examples=100)
hypothesis.settings.load_profile("shardkit")


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(items):
    """The first case of every test function is a smoke test (unless it's slow, or one of many alike)."""
    seen = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        left_out = item.get_closest_marker("slow") or item.get_closest_marker("not_smoke")
        if name not in seen and left_out is None:
            seen.add(name)
            item.add_marker(pytest.mark.smoke)
    # The longest file first: whole files go to workers, and it would be alone at the end.
    items.sort(key=lambda item: "test_random_programs" not in item.nodeid)


@pytest.fixture(scope="session")
def mesh_for():
    """``mesh_for({"dp": 2, "sp": 4}, "explicit")``: a mesh on the first devices."""

    def make(shape, axis_types="auto"):
        return sk.make_mesh(shape, axis_types=axis_types)

    return make


@pytest.fixture(scope="session")
def ambient():
    """``with ambient(mesh):`` sets an Explicit mesh, which eager operations on its arrays need; no other."""

    def enter(mesh):
        explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
        return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()

    return enter


@pytest.fixture(params=["auto", "explicit"])
def axis_types(request):
    return request.param
