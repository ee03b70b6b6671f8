"""Where a thread of Python is, as its author would say it."""

from __future__ import annotations

import linecache
import os
import sysconfig
from pathlib import Path
from types import FrameType

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        *(_PATHS[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    }
)


def where(frame: FrameType | None, longest: int = 80) -> str:
    """The innermost frame that is the user's own, with its line of source: ``train.py:88 in train: loss = step(x)``.

    What is in a library (Python's, installed ones, this one) is passed over; if all is, the innermost is taken.
    """
    if frame is None:
        return "nowhere"
    own = frame
    while own is not None and _in_library(own.f_code.co_filename):
        own = own.f_back
    own = own or frame
    file, line = own.f_code.co_filename, own.f_lineno
    source = linecache.getline(file, line or 0, own.f_globals).strip()
    source = source if len(source) <= longest else source[: longest - 3] + "..."
    return f"{os.path.basename(file)}:{line} in {own.f_code.co_name}" + (f": {source}" if source else "")


def _in_library(file: str) -> bool:
    return file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file
