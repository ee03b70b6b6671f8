"""`CheckpointError`: what is wrong with a checkpoint, and which one is whole."""

from __future__ import annotations

import os


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or read.

    Attributes:
      file: the damaged or missing file, if it's about one.
      previous: the step of the newest other checkpoint there that is whole; None if there's none.
    """

    def __init__(self, message: str, *, file: str | os.PathLike[str] | None = None, previous: int | None = None):
        super().__init__(message)
        self.file: str | None = None if file is None else os.fspath(file)
        self.previous = previous
