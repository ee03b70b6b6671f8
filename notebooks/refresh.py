"""Makes the notebooks from their scripts: executed, with outputs, and without what changes from run to run.

    pip install -e '.[notebooks]' && python notebooks/refresh.py            # all
    python notebooks/refresh.py 01_placements                              # one

``NN_name.py`` is what is edited; ``NN_name.ipynb`` is what is read. With the extras ``tpu-target`` and ``gpu-target``
the figures of notebook 5 are measured anew; without them they are those in ``05_pod.json``, and stay.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Compilers of hardware that isn't here say so; readers needn't know.
_NOISE = re.compile(
    r"^(WARNING: All log messages before absl|[IWE]\d{4} [\d:.]+ ).*\n?", re.MULTILINE
)
_STORE = """
import json, pathlib
if measured:
    pathlib.Path("05_pod.json").write_text(json.dumps(measured, indent=1) + "\\n")
"""


def clean(notebook: Any) -> Any:
    """The notebook without times, counts of runs, random ids and noise, so that equal runs are equal files."""
    notebook.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    number = 0
    for at, cell in enumerate(notebook.cells):
        cell.id = f"cell-{at}"
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            if "text/plain" in output.get("data", ()):  # of what draws itself, beside the drawing
                output.data["text/plain"] = re.sub(r" at 0x\w+>", ">", output.data["text/plain"])
            if output.output_type == "stream":
                output.text = _NOISE.sub("", output.text)
        cell.outputs = [o for o in cell.outputs if o.output_type != "stream" or o.text]
    return notebook


def execute(script: Path, *, store: bool = True) -> Any:
    """The notebook of a script, with the outputs of a fresh kernel; ``store``: notebook 5 writes its figures.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import jupytext
    import nbformat
    from nbclient import NotebookClient

    notebook = jupytext.read(script)
    stores = store and script.stem == "05_pod"
    if stores:
        notebook.cells.append(nbformat.v4.new_code_cell(_STORE))
    # Tables name the lines of the program: "cell:3" reads better than the number that the kernel gives a cell's file.
    environment = os.environ | {
        "IPYKERNEL_CELL_NAME": "cell",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_PLATFORMS": "cpu",
    }
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
    ).execute(env=environment)
    if stores:
        notebook.cells.pop()
    return clean(notebook)


def main(names: list[str]) -> None:
    import nbformat

    scripts = sorted(HERE.glob("[0-9][0-9]_*.py"))
    for script in scripts:
        if not names or script.stem in names:
            notebook = execute(script)
            nbformat.validate(notebook)
            nbformat.write(notebook, script.with_suffix(".ipynb"))
            print(f"{script.stem}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main(sys.argv[1:])
