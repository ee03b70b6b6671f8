"""The structure of a batch in words, for a process that never had one to look at."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def to_words(node: Any) -> Any:
    """A batch's structure as JSON holds it; None where it has nodes of other kinds than dict, list and tuple.

    Example:
      >>> import numpy as np
      >>> to_words({"x": np.zeros((8, 3), np.float32)})
      {'dict': [['x', {'dtype': 'float32', 'shape': [8, 3]}]]}
    """
    if node is None:
        return "nothing"
    if type(node) is dict:
        children = [[key, to_words(child)] for key, child in node.items()]
        plain = all(type(key) in (str, int) and words is not None for key, words in children)
        return {"dict": children} if plain else None
    if type(node) in (list, tuple):
        children = [to_words(child) for child in node]
        return {type(node).__name__: children} if all(words is not None for words in children) else None
    if hasattr(node, "dtype") or isinstance(node, bool | int | float | complex):
        array = np.asarray(node)
        return {"dtype": array.dtype.name, "shape": list(array.shape)}
    return None


def from_words(words: Any) -> Any:
    """A batch of that structure without rows: zeros, of which one element takes memory."""
    if words == "nothing":
        return None
    if "dict" in words:
        return {key: from_words(child) for key, child in words["dict"]}
    if "list" in words:
        return [from_words(child) for child in words["list"]]
    if "tuple" in words:
        return tuple(from_words(child) for child in words["tuple"])
    zero = np.zeros((), jnp.dtype(words["dtype"]))
    return np.broadcast_to(zero, (0, *words["shape"][1:]) if words["shape"] else ())
