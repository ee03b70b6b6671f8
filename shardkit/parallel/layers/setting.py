"""Another value for an attribute of a layer, past what Flax lets users change."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def setting(layer: Any, name: str, value: Any) -> Generator[None]:
    """An attribute of a frozen linen module, or of an nnx layer made in another trace, has another value meanwhile."""
    before = getattr(layer, name)
    object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        object.__setattr__(layer, name, before)
