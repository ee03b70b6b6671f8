"""Runs a notebook's script without Jupyter: the last expression of each cell is looked at as Jupyter would.

python run_script.py notebooks/01_placements.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path


def look_at(value: object) -> bool:
    """What a notebook would draw of it; whether there's anything."""
    if value is None:
        return False
    drawn = getattr(value, "_repr_html_", None)
    assert drawn() if drawn is not None else repr(value)
    return True


def cells_of(text: str) -> list[tuple[str, int, str]]:
    """("code" or "markdown", line before it, source) of each cell of a script in the percent format."""
    marks = list(re.finditer(r"^# %%( \[markdown\])?\n", text, re.MULTILINE))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    cells = []
    for mark, end in zip(marks, ends, strict=True):
        source = text[mark.end() : end].strip("\n")
        if mark[1]:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        cells.append(("markdown" if mark[1] else "code", text[: mark.end()].count("\n"), source))
    return cells


def main(path: str) -> None:
    from matplotlib import pyplot as plt

    names: dict[str, object] = {"__name__": "__main__"}
    looked = figures = 0
    for kind, line, source in cells_of(Path(path).read_text()):
        if kind == "markdown":
            continue
        tree = ast.increment_lineno(ast.parse(source, path), line)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path, "exec"), names)
        if isinstance(last, ast.Expr):
            looked += look_at(eval(compile(ast.Expression(last.value), path, "eval"), names))
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
            figures += 1
        plt.close("all")
    sys.stdout.write(f"looked at: {looked} values and {figures} figures\n")


if __name__ == "__main__":
    main(sys.argv[1])
