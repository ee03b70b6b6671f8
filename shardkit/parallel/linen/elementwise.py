"""linen layers that work element by element, of inputs sharded in space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkit.arrays import Padded
from shardkit.parallel.layers import elementwise
from shardkit.parallel.layers.dropout import linen_dropout
from shardkit.parallel.plans import Applied


def prelu(module: Any, applied: Applied, run: Callable[..., Any], inputs: Any) -> Any:
    """``nn.PReLU`` that takes and gives ``sk.Padded``."""
    del module
    return elementwise.elementwise(inputs, applied, run) if isinstance(inputs, Padded) else run(inputs)


def dropout(
    module: Any,
    applied: Applied,
    run: Callable[..., Any],
    inputs: Any,
    deterministic: bool | None = None,
    rng: Any = None,
) -> Any:
    """``nn.Dropout`` that takes and gives ``sk.Padded``, and drops the elements that it would drop of the whole."""
    del applied, run
    return elementwise.dropout(inputs, module.rate, lambda array: linen_dropout(module, array, deterministic, rng))
