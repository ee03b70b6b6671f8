"""Layers with something around their call: a class of the same name whose ``__call__`` does it."""

from __future__ import annotations

import functools
from typing import Any

from shardkit.parallel.around import Around

_MADE = "_shardkit_wraps"


def own_class(layer: Any) -> type:
    """The class of a layer without what was put around it."""
    return getattr(type(layer), _MADE, type(layer))


def is_wrapped(layer: Any) -> bool:
    """Something is around the layer's call."""
    return hasattr(type(layer), _MADE)


def wrap(layer: Any, around: Around) -> None:
    """Put ``around`` around a layer's call, in place of what was there before."""
    cls = own_class(layer)
    if around:
        layer.__class__ = _wrapped(cls)
        layer.shardkit_around = around
    else:
        layer.__class__ = cls


def _empty(cls: type) -> Any:
    return object.__new__(_wrapped(cls))


@functools.cache
def _wrapped(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.shardkit_around(self, functools.partial(cls.__call__, self), args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        return _empty, (cls,), vars(self)  # pickle can't find the class by its name

    names: dict[str, Any] = {"__call__": call, "__reduce_ex__": reduce}
    names |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**names, _MADE: cls})
