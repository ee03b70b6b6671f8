"""What a loss changes in the modules that it's given, which it would lose."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

_TODO = (
    "split the module (graphdef, params, rest = nnx.split(model, nnx.Param, ...)), put it together in the loss by "
    "nnx.merge(graphdef, params, rest, copy=True), and return what changed as aux (has_aux=True): "
    "nnx.state(model, (nnx.BatchStat, nnx.RngCount)), which nnx.merge_state(rest, changed) puts back"
)


def refusing_changes(call: Callable[[], Any], held: Any) -> Any:
    """What ``call`` returns, if modules of Flax nnx in the tree ``held`` are as they were after it.

    They are made anew for each device: statistics that a batch norm updates, and counts of random numbers, are gone
    with them.

    Raises:
      ValueError: the variables that were changed, and what to do. Where these are counts of random numbers only, so
        that the next call draws the same, it's a warning.
    """
    if "flax.nnx" not in sys.modules:  # which takes its time to import: then there are none
        return call()
    from flax import nnx

    before = _values(held)
    result = call()
    changed = [(path, variable) for path, variable, value in before if variable.get_raw_value() is not value]
    lost = [path for path, variable in changed if not isinstance(variable, nnx.RngState)]
    if lost:
        raise ValueError(
            f"value_and_grad: the loss changed {_listed(lost)} of a module that it was given, which would be lost; "
            f"{_TODO}; or call model.eval()"
        )
    if changed:
        warnings.warn(
            f"value_and_grad: the loss drew random numbers of a module that it was given ({changed[0][0]}), whose "
            f"counts are lost, so that the next call draws the same; {_TODO}",
            UserWarning,
            stacklevel=2,
        )
    return result


def _values(tree: Any) -> list[tuple[str, Any, Any]]:
    """Path, variable and value of each variable that a module among the leaves of ``tree`` holds."""
    from flax import nnx

    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module))
    return [
        (_name(path), x, x.get_raw_value())
        for module in found
        if isinstance(module, nnx.Module)
        for path, x in jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda x: isinstance(x, nnx.Variable))[0]
        if isinstance(x, nnx.Variable)
    ]


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "key", key))) for key in path)


def of_random_state(tree: Any) -> list[bool]:
    """For each leaf whether it's of an nnx variable that random numbers are drawn with: a key, or a count of draws.

    Those are a part of no batch, whatever their dtype.
    """
    if "flax.nnx" not in sys.modules:
        return [False] * len(jax.tree.leaves(tree))
    from flax import nnx

    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [isinstance(x, nnx.RngState) for x in found for _ in jax.tree.leaves(x)]
