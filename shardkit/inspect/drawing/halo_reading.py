"""The ``halo=`` argument of ``sk.show``: elements, a convolution's arguments, or a plan, for each dim."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from shardkit.inspect.drawing.halos import Runs, runs_of
from shardkit.inspect.drawing.subject import Subject
from shardkit.spatial.window_reading import check_window, per_dim, read_padding
from shardkit.spatial.windows import PADDING_MODES, Exchange, ShardedWindow, Window, shard_halo, shard_window

WHAT = "sk.show: halo"
_CONV = ("kernel", "window_strides", "padding", "lhs_dilation", "rhs_dilation", "padding_mode")
_TAKES = (
    "(before, after) elements, (before, after, padding_mode), the convolution's arguments along the dim "
    f"({{'kernel': 3, ...}} with any of {_CONV}), or a plan of shardkit.spatial.windows"
)


def read_halos(given: Any, subject: Subject) -> Runs:
    """What each part receives, for each dim that ``halo=`` names.

    Raises:
      ValueError: a dim that doesn't exist or isn't cut, no shape, negative elements, a plan for another cut.
      TypeError: what is no halo.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{WHAT} maps array dims to what they need, such as {{2: (1, 1)}}; got {given!r}")
    if not subject.sized:
        raise ValueError(f"{WHAT} counts elements, so the sizes must be known; give shape=")
    found = {}
    for key, value in given.items():
        dim = _dim(key, subject)
        if dim in found:
            raise ValueError(f"{WHAT} names dim {dim} twice, in {list(given)}; give each dim once")
        found[dim] = runs_of(_fitting(_exchange(value, subject, dim), subject, dim))
    return found


def _dim(key: Any, subject: Subject) -> int:
    cuts = subject.holdings.cuts
    if isinstance(key, bool) or not hasattr(key, "__index__"):
        raise TypeError(f"{WHAT} maps array dims (integers) to what they need, such as {{2: (1, 1)}}; got key {key!r}")
    dim = operator.index(key)
    if not -len(cuts) <= dim < len(cuts):
        raise ValueError(f"{WHAT} names dim {dim}, but the array has {len(cuts)} dims")
    dim %= len(cuts)
    if cuts[dim].parts == 1:
        cut = [d for d, c in enumerate(cuts) if c.parts > 1]
        raise ValueError(
            f"{WHAT} names dim {dim}, which isn't cut, so nothing is received along it; leave it out (cut: {cut})"
        )
    return dim


def _exchange(value: Any, subject: Subject, dim: int) -> Exchange:
    cut = subject.holdings.cuts[dim]
    size, parts = cut.size or 0, cut.parts
    if isinstance(value, ShardedWindow):
        value = value.exchange
    if isinstance(value, Exchange):
        if (value.size, value.shards) != (size, parts):
            raise ValueError(
                f"{WHAT}: the plan is for {value.size} elements over {value.shards} shards, but dim {dim} has {size} "
                f"over {parts}"
            )
        return value
    if isinstance(value, Window):
        if value.size != size:
            raise ValueError(f"{WHAT}: the window is for {value.size} elements, but dim {dim} has {size}")
        return shard_window(value, parts).exchange
    if isinstance(value, Mapping):
        return _of_conv(value, size, parts, dim)
    return _of_pair(value, size, parts, dim)


def _fitting(exchange: Exchange, subject: Subject, dim: int) -> Exchange:
    start, stop = subject.holdings.cuts[dim].stored[0]
    if stop - start != exchange.block:
        raise ValueError(
            f"{WHAT}: dim {dim} is stored in blocks of {stop - start}, but a halo exchange of {exchange.size} elements "
            f'over {exchange.shards} works on blocks of {exchange.block}; use sk.shard_tensor(..., uneven="pad")'
        )
    return exchange


def _of_pair(value: Any, size: int, parts: int, dim: int) -> Exchange:
    try:
        before, after, *mode = value
        before, after = operator.index(before), operator.index(after)
    except (TypeError, ValueError):
        raise TypeError(f"{WHAT} of dim {dim} takes {_TAKES}; got {value!r}") from None
    if len(mode) > 1:
        raise TypeError(f"{WHAT} of dim {dim} takes {_TAKES}; got {value!r}")
    if before < 0 or after < 0:
        raise ValueError(f"{WHAT} of dim {dim} is {value!r}, but a halo has at least 0 elements on either side")
    return shard_halo(size, parts, before, after, _mode(mode[0] if mode else "zeros", dim))


def _of_conv(given: Mapping[str, Any], size: int, parts: int, dim: int) -> Exchange:
    unknown = [key for key in given if key not in _CONV]
    if unknown or "kernel" not in given:
        problem = f"unknown {unknown}" if unknown else "no 'kernel' (its size along the dim)"
        raise ValueError(f"{WHAT} of dim {dim}: {problem} in {dict(given)!r}; it takes {_CONV}")
    what = f"{WHAT} of dim {dim}"
    one = {
        name: per_dim([given.get(name, 1)], 1, name, what)
        for name in ("kernel", "window_strides", "lhs_dilation", "rhs_dilation")
    }
    padding = given.get("padding", "VALID")
    pads = read_padding(
        padding if isinstance(padding, str) else [padding],
        (size,),
        one["kernel"],
        one["window_strides"],
        one["lhs_dilation"],
        one["rhs_dilation"],
        what,
    )
    (kernel,), (stride,), (lhs,), (rhs,) = one.values()
    window = Window(size, kernel, stride, *pads[0], lhs, rhs)
    mode = _mode(given.get("padding_mode", "zeros"), dim)
    check_window(window, mode, f"dim {dim}", WHAT, "kernel")
    return shard_window(window, parts, mode).exchange


def _mode(mode: Any, dim: int) -> str:
    if mode not in PADDING_MODES:
        raise ValueError(f"{WHAT} of dim {dim}: padding_mode={mode!r} is unknown; use one of {PADDING_MODES}")
    return mode
