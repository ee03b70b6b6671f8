"""The class that a linen model had before it carried a plan."""

from __future__ import annotations

from typing import Any

WRAPS = "_shardkit_wraps"  # of a model's class: the class it was


def plain_class(module: Any) -> type:
    """The class of a module, without the plan that a model may carry."""
    return getattr(type(module), WRAPS, type(module))
