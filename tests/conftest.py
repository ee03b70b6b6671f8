"""Eight simulated devices, exact arithmetic, and the meshes that tests run on."""

import contextlib
import gc
import importlib.metadata
import os

import hypothesis
import jax
import pytest

import shardkit as sk

# Half the compile time, the same collectives: what XLA partitions is decided before these passes. Read by
# XLA when its backend starts, so it must be set first; child processes of tests inherit it.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
_FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")  # one LLVM module a program: both cores are busy anyway
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # unknown to later ones; the second Python tests those
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f for f in _FLAGS if f.split("=")[0] not in _given)]).strip()

# Else XLA before 0.12 may hang with many programs under way on few threads (shardkit/cli/known_bad.py).
os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 16)))

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

# The same examples in every run: a failure here is a failure for everyone.
hypothesis.settings.register_profile("shardkit", derandomize=True, deadline=None, database=None, max_examples=100)
hypothesis.settings.load_profile("shardkit")


def diagonals(cases):
    """For each case of one test, the sum of its places among the values of each parametrize and fixture.

    Every n-th diagonal of this table has all values of each, beside another that has n values or more.
    """
    given = [case.callspec.params for case in cases]
    marks = [mark.args[0] for mark in cases[0].iter_markers("parametrize")]
    together = [[n.strip() for n in names.split(",")] if isinstance(names, str) else list(names) for names in marks]
    together += [[name] for name in given[0] if not any(name in names for names in together)]
    found = [0] * len(cases)
    for names in together:
        values = [tuple(id(params[name]) for name in names) for params in given]
        place = {value: i for i, value in enumerate(dict.fromkeys(values))}
        found = [sum_ + place[value] for sum_, value in zip(found, values, strict=True)]
    return found


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(items):
    """The first case of every test function is a smoke test (unless it's slow, or one of many alike)."""
    tables = {}
    for item in items:
        if item.get_closest_marker("every") is not None:
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tables.values():
        for case, diagonal in zip(cases, diagonals(cases), strict=True):
            if diagonal % case.get_closest_marker("every").args[0]:
                case.add_marker(pytest.mark.slow)
    seen = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        left_out = item.get_closest_marker("slow") or item.get_closest_marker("not_smoke")
        if name not in seen and left_out is None:
            seen.add(name)
            item.add_marker(pytest.mark.smoke)
    # The longest files first: whole files go to workers, and they would be alone at the end.
    first = ("test_faults", "test_random_programs", "test_same_numbers", "hosts/test_processes", "data/test_processes")
    items.sort(key=lambda item: next((i for i, name in enumerate(first) if name in item.nodeid), len(first)))


def pytest_collection_finish():
    """What is there by now stays: tracing makes many objects, and all would be looked at again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


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
