"""Arrays that are only described: shapes and shardings in place of values, as on hardware that isn't here."""

from __future__ import annotations

from typing import Any

import jax


def is_described(x: Any) -> bool:
    """Whether it's a shape that stands for an array."""
    return isinstance(x, jax.ShapeDtypeStruct)


def any_described(tree: Any) -> bool:
    """Whether a tree has such leaves, so that nothing can be computed from it."""
    return any(map(is_described, jax.tree.leaves(tree)))


def cast(x: Any, dtype: Any) -> Any:
    """The same in another dtype."""
    return x.update(dtype=dtype) if is_described(x) else x.astype(dtype)
