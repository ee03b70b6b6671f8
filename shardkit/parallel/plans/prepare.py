"""Plans that run a user's function on what a layer takes or gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from shardkit.parallel.plans.base import LayerPlan


def _check(plan: Any, fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"{type(plan).__name__} takes a function, got {fn!r}")


@dataclasses.dataclass(frozen=True)
class PrepareLayerInput(LayerPlan):
    """Run a function on a layer's arguments before it's called.

    Args:
      fn: ``fn(mesh, *args, **kwargs)`` returns all the layer is called with: its only argument, a tuple of positional
        ones, or ``(tuple, dict)`` with those by name. A function defined once, not a new lambda a step: it's part of
        what ``jit`` compares.

    Example:
      >>> import shardkit as sk
      >>> def halve(mesh, x):
      ...     return x / 2
      >>> plan = {"head": sk.PrepareLayerInput(halve)}
    """

    part: ClassVar[str] = "input"

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        _check(self, self.fn)


@dataclasses.dataclass(frozen=True)
class PrepareLayerOutput(LayerPlan):
    """Run a function on a layer's result.

    Args:
      fn: ``fn(mesh, result)`` returns the new result.

    Example:
      >>> import shardkit as sk
      >>> def first(mesh, result):
      ...     return result[..., :1]
      >>> plan = {"head": sk.PrepareLayerOutput(first)}
    """

    part: ClassVar[str] = "output"

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        _check(self, self.fn)
