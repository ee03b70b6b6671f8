"""Environment variables that a compiler wants, set for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Sets variables and puts back what was there, also after an error."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
