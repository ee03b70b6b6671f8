"""Runs the blocks of pages, each page in a namespace and a folder of its own, and writes what became of them as JSON.

``python run_blocks.py result.json README.md docs/index.md ...``, in a process of its own: the pages simulate devices,
and their checkpoints catch SIGTERM.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import linecache
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pages import ROOT, Block, python_blocks
from stand_ins import stand_ins

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_page(page: str) -> list[dict[str, object]]:
    """What became of each block; those after one that failed aren't run."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    told = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in python_blocks(page):
            begun = time.perf_counter()
            error = run_block(block, namespace)
            told.append({"line": block.line, "error": error, "seconds": round(time.perf_counter() - begun, 2)})
            if error is not None:
                break
    return told


def run_block(block: Block, namespace: dict[str, object]) -> str | None:
    """Runs it after its stand-ins; None, or what went wrong."""
    name = f"{ROOT / block.page}:{block.line}"
    linecache.cache[name] = (len(block.text), None, block.text.splitlines(keepends=True), name)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            for code in stand_ins(block):
                exec(compile(code, f"the stand-ins of {block.page}", "exec"), namespace)
            exec(compile(block.text, name, "exec"), namespace)
    except BaseException:  # an exit, too, is a failure of the block
        return traceback.format_exc()
    if block.prints is None:
        return None
    if doctest.OutputChecker().check_output(block.prints, printed.getvalue(), _FLAGS):
        return None
    return f"{block.page}:{block.line} says that it prints\n{block.prints}\nand printed\n{printed.getvalue()}"


if __name__ == "__main__":
    warnings.simplefilter("error")
    os.environ.setdefault("NO_COLOR", "1")
    result, *pages = sys.argv[1:]
    Path(result).write_text(json.dumps({page: run_page(page) for page in pages}))
