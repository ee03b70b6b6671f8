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

    Raises:
      TypeError: ``fn`` is no function.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> def halve(mesh, x):
      ...     return x / 2
      >>> head = nnx.Linear(2, 2, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
      >>> head = sk.parallelize(head, {"": sk.PrepareLayerInput(halve)}, sk.make_mesh({"dp": 1}))
      >>> head(jnp.ones((1, 2))).tolist()
      [[1.0, 1.0]]
    """

    part: ClassVar[str] = "input"

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        _check(self, self.fn)


@dataclasses.dataclass(frozen=True)
class PrepareLayerOutput(LayerPlan):
    """Run a function on a layer's result.

    Args:
      fn: ``fn(mesh, result)`` returns the new result. A function defined once, not a new lambda a step.

    Raises:
      TypeError: ``fn`` is no function.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> from flax import nnx
      >>> def first(mesh, result):
      ...     return result[..., :1]
      >>> head = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
      >>> head = sk.parallelize(head, {"": sk.PrepareLayerOutput(first)}, sk.make_mesh({"dp": 1}))
      >>> head(jnp.ones((3, 2))).shape
      (3, 1)
    """

    part: ClassVar[str] = "output"

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        _check(self, self.fn)
