"""A value that JAX treats as part of a pytree's structure, where it expects a pytree of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Holds one hashable value."""

    value: Any
