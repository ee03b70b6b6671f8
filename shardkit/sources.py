"""Which of the Python lines behind an instruction is the user's own."""

from __future__ import annotations

import dataclasses
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_JAX = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:jax|jaxlib)[/\\]|[/\\]jax[/\\]_src[/\\]")
_NOTEBOOK = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-")
_OWN = str(Path(__file__).resolve().parent)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A line of the user's program: `file`, `line` (from 1), and the `function` if known."""

    file: str
    line: int
    function: str = ""


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's code.

    Lines of installed packages come second (a Flax layer says more than nothing), those of JAX, of
    this library and of Python itself last.

    Args:
      frames: a stack, innermost first.

    Returns:
      The frame, or None for an empty stack.

    Example:
      >>> user_frame([Frame("/lib/site-packages/jax/numpy.py", 7), Frame("/home/user/model.py", 3)]).line
      3
    """
    # min() returns the first, hence innermost, of the best.
    return min(frames, key=lambda frame: _rank(frame.file), default=None)


def _rank(file: str) -> int:
    if not file or file.startswith("<frozen"):
        return 2
    if _JAX.search(file) or _is_below(file, _OWN):
        return 2
    if _INSTALLED.search(file):
        return 1
    return 2 if _is_below(file, _STANDARD_LIBRARY) else 0


def _is_below(file: str, folder: str) -> bool:
    return file.startswith(folder) and file[len(folder) : len(folder) + 1] in ("/", "\\")


def short_location(frame: Frame | None) -> str:
    """`file.py:12`, without the folder; `cell:12` in a notebook, whose files have numbers for names; "" for no frame.

    Example:
      >>> short_location(Frame("/home/user/model.py", 12))
      'model.py:12'
    """
    if frame is None or not frame.file:
        return ""
    if _NOTEBOOK.search(frame.file):
        return f"cell:{frame.line}"
    name = re.split(r"[/\\]", frame.file)[-1]
    return f"{name}:{frame.line}"
