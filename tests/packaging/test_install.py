"""Built, installed into an empty environment without extras, and used there. Takes a minute or two, and PyPI."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

import shardkit
from tests.packaging.built import wheel_files

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="build is in the extra 'test'"),
]

# The package and, all the way down, what it needs on this machine; printed beside what is installed.
CLOSURE = textwrap.dedent("""
    import json
    from importlib import metadata
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found, todo = set(), [("shardkit", "")]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(requirement.name), e) for e in ("", *requirement.extras)]
    installed = {canonicalize_name(d.metadata["Name"]) for d in metadata.distributions()}
    print(json.dumps({"installed": sorted(installed), "needed": sorted({name for name, _ in found})}))
""")


def run(*command, cwd, **options):
    """Without what this process, or the tests' own set-up, says of Python and XLA."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA_", "JAX_", "SHARDKIT_", "PYTEST"))}
    env |= {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **options}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder, on a machine that reaches a package index."""
    folder = tmp_path_factory.mktemp("install")
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1", "--timeout=15"]
    done = subprocess.run([*asked, f"--dest={folder / 'asked'}", "hatchling"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index to be reached: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.fixture(scope="module")
def built(folder):
    """(wheel, sdist); the wheel is made from the sdist, so that has all it takes."""
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def python(folder, built):
    """The interpreter of an environment into which the wheel was installed, without extras."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", built[0], cwd=folder)
    return python


def test_the_wheel_of_the_sdist_is_whole(built):
    assert {"shardkit/py.typed", "shardkit/spatial/convolution/forms.json"} <= wheel_files(built[0])


def test_only_what_it_needs_is_installed(folder, python):
    names = json.loads(run(python, "-c", CLOSURE, cwd=folder))
    assert set(names["installed"]) - {"pip", "setuptools", "wheel"} == set(names["needed"])
    extras = {"pytest", "hypothesis", "ruff", "pyright", "matplotlib", "scikit-image", "tqdm", "grain", "jupytext"}
    assert not extras & set(names["installed"])


def test_it_works_there(folder, python):
    run(python, "-W", "error", HERE / "smoke.py", shardkit.__version__, cwd=folder)


def test_the_doctor_finds_nothing_wrong(folder, python):
    assert "shardkit" in run(python, "-m", "shardkit", "doctor", cwd=folder)


def test_the_launcher_starts_processes_there(folder, python):
    (folder / "two.py").write_text(
        "import jax, shardkit as sk; sk.initialize()\n"
        "print('process', jax.process_index(), 'of', jax.process_count())\n"
    )
    lines = run(python, "-m", "shardkit.launch", "-n", "2", "two.py", cwd=folder)
    assert "process 0 of 2" in lines
    assert "process 1 of 2" in lines


def test_the_sdist_installs_as_well(folder, python, built):
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", built[1], cwd=folder)
    run(python, HERE / "smoke.py", shardkit.__version__, cwd=folder)
