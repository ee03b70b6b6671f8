"""The notebooks: their scripts run, and what is kept of their outputs is whole and belongs to them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "notebooks"
NAMES = ["01_placements", "02_convolution", "03_gradients", "04_programs", "05_pod"]
RUNNER = Path(__file__).parent / "run_script.py"

pytest.importorskip("matplotlib")


def environment():
    # The whole suite's flags, which halve the time to compile, are inherited.
    return os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept(name):
    """The cells of a notebook, with their outputs."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def kinds_of(cell):
    """What a cell shows: the formats of its outputs, those that are printed left out."""
    return [sorted(output["data"]) for output in cell.get("outputs", ()) if "data" in output]


def test_every_notebook_is_tested_and_has_its_script():
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == NAMES
    assert [path.stem for path in sorted(FOLDER.glob("[0-9]*.py"))] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_script_and_notebook_are_the_same(name):
    script = module_at(RUNNER).cells_of((FOLDER / f"{name}.py").read_text())
    assert [(kind, source) for kind, _, source in script] == [(c["cell_type"], c["source"]) for c in kept(name)]


@pytest.mark.parametrize("name", NAMES)
def test_script_and_notebook_are_the_same_to_jupytext(name):
    script = pytest.importorskip("jupytext").read(FOLDER / f"{name}.py")
    assert [(c.cell_type, c.source) for c in script.cells] == [(c["cell_type"], c["source"]) for c in kept(name)]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept_and_are_good_ones(name):
    code = [cell for cell in kept(name) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    kinds = [kind for o in outputs for kind in o.get("data", ())]
    assert kinds.count("image/png") >= 1
    assert kinds.count("text/html") >= 1


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_valid(name):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(FOLDER / f"{name}.ipynb", as_version=4))


@pytest.mark.parametrize("name", NAMES)
def test_first_cell_sets_the_devices(name):
    text = (FOLDER / f"{name}.py").read_text()
    first = text.split("# %%\n")[1].split("# %%")[0]
    assert re.fullmatch(
        r"#[^\n]+\nimport jax\n\njax\.config\.update\(\"jax_platforms\", \"cpu\"\)\n"
        r"jax\.config\.update\(\"jax_num_cpu_devices\", 8\)\s*",
        first,
    )


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", (FOLDER / f"{name}.py").read_text()):
        assert target.startswith("https://") or (FOLDER / target).exists(), target


@pytest.mark.not_smoke
@pytest.mark.parametrize("name", NAMES)
def test_script_runs(name):
    done = subprocess.run(
        [sys.executable, "-W", "error", RUNNER, FOLDER / f"{name}.py"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"looked at: (\d+) values and (\d+) figures", done.stdout)
    assert found, done.stdout
    assert int(found[1]) >= 1
    assert int(found[2]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_in_jupyter_and_gives_the_same_kinds_of_output(name, monkeypatch):
    for module in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(module)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = module_at(FOLDER / "refresh.py").execute(FOLDER / f"{name}.py", store=False).cells
    assert [kinds_of(cell) for cell in made] == [kinds_of(cell) for cell in kept(name)]
