"""Scalars, text and states as JSON, and back: what JSON doesn't know is written as its kind and its content."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

_KIND, _CONTENT = "is", "of"


def to_json(x: Any) -> Any:
    """A value as JSON can hold it, from which ``from_json`` makes the same again, types and all.

    Raises:
      TypeError: it holds something that isn't a number, text, bytes, None, a NumPy array, or a list, tuple or dict of
        these.
    """
    if isinstance(x, np.ndarray | np.generic):
        if x.dtype.kind in "OUSMm" or x.dtype.names is not None:
            raise TypeError(f"an array of dtype {x.dtype}")
        content = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
        return _of("array" if isinstance(x, np.ndarray) else "scalar", [_dtype_name(x.dtype), list(x.shape), content])
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, bytes):
        return _of("bytes", base64.b64encode(x).decode())
    if isinstance(x, complex):
        return _of("complex", [x.real, x.imag])
    if type(x) is list:
        return [to_json(item) for item in x]
    if type(x) is tuple:
        return _of("tuple", [to_json(item) for item in x])
    if isinstance(x, dict):
        if _KIND not in x and all(type(key) is str for key in x):
            return {key: to_json(item) for key, item in x.items()}
        return _of("dict", [[to_json(key), to_json(item)] for key, item in x.items()])
    raise TypeError(f"a {type(x).__name__}")


def from_json(x: Any) -> Any:
    """The reverse of ``to_json``."""
    if isinstance(x, list):
        return [from_json(item) for item in x]
    if not isinstance(x, dict):
        return x
    if _KIND not in x:
        return {key: from_json(item) for key, item in x.items()}
    return _MAKERS[x[_KIND]](x[_CONTENT])


def _of(kind: str, content: Any) -> dict[str, Any]:
    return {_KIND: kind, _CONTENT: content}


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind in "biufc" else str(dtype)  # with the order of bytes, where there's one to tell


def _array(content: Any) -> np.ndarray:
    name, shape, text = content
    return np.frombuffer(base64.b64decode(text), np.dtype(name)).reshape(shape).copy()


_MAKERS = {
    "array": _array,
    "scalar": lambda content: _array(content)[()],
    "bytes": base64.b64decode,
    "complex": lambda content: complex(*content),
    "tuple": lambda content: tuple(map(from_json, content)),
    "dict": lambda content: {from_json(key): from_json(item) for key, item in content},
}
