"""Whether any process of a run called `initialize`: a file of the launcher's, which the call removes.

Whatever goes wrong with the file (no folder for it, a cleaner of old ones) looks like a call: nobody is warned in vain.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Mapping

from shardkit.launch.environment import UNCALLED


@contextlib.contextmanager
def expected() -> Generator[str | None]:
    """The path of a file that is there until some process has called; None if none could be made.

    Example:
      >>> with expected() as path:
      ...     before = was_called(path)
      ...     called({"SHARDKIT_UNCALLED": path})
      ...     before, was_called(path)
      (False, True)
    """
    try:
        file, path = tempfile.mkstemp(prefix="shardkit-uncalled-")
        os.close(file)
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        _remove(path)


def called(environ: Mapping[str, str]) -> None:
    """Says in a process that it has called.

    Args:
      environ: of the process: `run` says in it where the file is.
    """
    if path := environ.get(UNCALLED):
        _remove(path)


def was_called(path: str | None) -> bool:
    """Whether some process has."""
    return path is None or not os.path.exists(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
