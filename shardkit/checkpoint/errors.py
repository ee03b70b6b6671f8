"""`CheckpointError`: what is wrong with a checkpoint, and which one is whole."""

from __future__ import annotations

import os


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or read.

    Args:
      message: what is wrong, in words.
      file: the damaged or missing file, if it's about one; an attribute, too.
      previous: the step of the newest other checkpoint there that is whole, None if there's none; an attribute, too.

    Example:
      >>> import tempfile, shardkit as sk
      >>> try:
      ...     sk.restore(tempfile.mkdtemp(), {"w": 0})
      ... except sk.CheckpointError as error:
      ...     print("start anew:", error.previous)
      start anew: None
    """

    def __init__(self, message: str, *, file: str | os.PathLike[str] | None = None, previous: int | None = None):
        super().__init__(message)
        self.file: str | None = None if file is None else os.fspath(file)
        self.previous = previous
