"""Layers with something around their call: a class of the same name whose ``__call__`` does it."""

from __future__ import annotations

import functools
from typing import Any

from shardkit.parallel.around import Around

_MADE = "_shardkit_wraps"


def own_class(layer: Any) -> type:
    """The class of a layer without what was put around it."""
    return getattr(type(layer), _MADE, type(layer))


def wrap(layer: Any, around: Around) -> None:
    """Put ``around`` around a layer's call, in place of what was there before."""
    cls = own_class(layer)
    if around:
        layer.__class__ = _wrapped(cls)
        layer.shardkit_around = around
    else:
        layer.__class__ = cls


@functools.cache
def _wrapped(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.shardkit_around(self, functools.partial(cls.__call__, self), args, kwargs)

    names = {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**names, _MADE: cls})
