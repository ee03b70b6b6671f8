"""The wheel and the sdist, as the build backend makes them of this folder: no network, nothing installed."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

import shardkit
from tests.packaging.built import sdist_files, wheel_files, wheel_metadata

ROOT = Path(__file__).parents[2]
# DESIGN.md, section 3, and what `python -m shardkit doctor` reads versions with.
RUNTIME = {"jax", "optax", "numpy", "flax", "orbax-checkpoint", "rich"} | {"packaging"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist)"""
    hatchling = pytest.importorskip("hatchling.build", reason="hatchling, the build backend, is in the extra 'test'")
    out = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return out / hatchling.build_wheel(str(out)), out / hatchling.build_sdist(str(out))


def test_the_wheel_has_the_package_and_nothing_else(built):
    files = wheel_files(built[0])
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "shardkit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"shardkit/py.typed", "shardkit/spatial/convolution/forms.json"} <= sources
    assert {name for name in files if ".dist-info/" not in name} == sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_the_sdist_has_what_a_distributor_builds_tests_and_documents_with(built):
    files = sdist_files(built[1])
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"} <= files
    for folder in ("shardkit", "tests", "examples", "benchmarks", "notebooks", "docs"):
        wanted = {
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".md", ".ipynb", ".json", ".txt", ".gz") and not _ignored(path)
        }
        assert wanted, folder
        assert wanted <= files, folder


def _ignored(path):
    """What .gitignore names: an sdist leaves it out."""
    return bool({"__pycache__", "out", "site", "dist", "build", ".ipynb_checkpoints"} & set(path.parts))


def test_metadata(built):
    metadata = wheel_metadata(built[0])
    assert (metadata["Name"], metadata["Version"]) == ("shardkit", shardkit.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"examples", "notebooks", "tpu-target", "gpu-target", "test", "dev"} <= set(
        metadata.get_all("Provides-Extra")
    )


def test_runtime_dependencies_are_those_of_the_design(built):
    requirements = [Requirement(line) for line in wheel_metadata(built[0]).get_all("Requires-Dist")]
    plain = [r for r in requirements if r.marker is None or "extra" not in str(r.marker)]
    assert {r.name for r in plain} == RUNTIME
    assert not any(r.extras for r in plain)  # an extra of jax's is a flavour of jaxlib
    assert not any(r.name == "jaxlib" for r in requirements)
