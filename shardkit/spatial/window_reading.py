"""Arguments that all windowed operators have in common, read and checked: sizes, strides, padding, edges."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from shardkit.spatial.windows import PADDING_MODES, Window


def per_dim(given: Any, count: int, name: str, what: str, dims: str = "dim") -> tuple[int, ...]:
    """One positive integer a dim; 1 each where nothing is given. ``dims``: what the caller calls a dim."""
    if given is None:
        return (1,) * count
    try:
        values = tuple(operator.index(v) for v in given)
    except TypeError:
        raise ValueError(f"{what}: {name} takes one integer a {dims}, got {given!r}") from None
    if len(values) != count:
        raise ValueError(f"{what}: {name}={values} has {len(values)} entries for {count} {dims}s")
    if any(v < 1 for v in values):
        raise ValueError(f"{what}: {name}={values} must be at least 1")
    return values


def read_padding(
    padding: Any,
    sizes: Sequence[int],
    kernels: Sequence[int],
    strides: Sequence[int],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    what: str,
) -> Sequence[tuple[int, int]]:
    """Padding as one (low, high) pair of integers a spatial dim, from a name or pairs."""
    count = len(sizes)
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(
                f"{what}: padding={padding!r} is unknown; use 'SAME', 'SAME_LOWER', 'VALID' or (low, high) pairs"
            )
        if any(d != 1 for d in lhs_dilation):
            raise ValueError(
                f"{what}: a padding name has no meaning with lhs_dilation={tuple(lhs_dilation)}; give (low, high) "
                "pairs, or use sk.ring_conv_transpose"
            )
        reach = [(k - 1) * d + 1 for k, d in zip(kernels, rhs_dilation, strict=True)]
        return lax.padtype_to_pads(sizes, reach, strides, padding.upper())
    try:
        pads = [(operator.index(lo), operator.index(hi)) for lo, hi in padding]
    except (TypeError, ValueError):
        raise ValueError(
            f"{what}: padding takes a name or one (low, high) pair a spatial dim, got {padding!r}"
        ) from None
    if len(pads) != count:
        raise ValueError(f"{what}: padding={padding!r} has {len(pads)} pairs for {count} spatial dims")
    return pads


def read_modes(
    given: Any, dims: Sequence[int], letters: Mapping[str, int], what: str, *, name: str = "dim", none_such: str = ""
) -> tuple[str, ...]:
    """What lies beyond the ends of each of ``dims``: one mode for all, one a dim, or a mapping by letter or dim.

    ``name`` and ``none_such`` are for messages: what the caller calls a dim, and what's wrong with another one.
    """
    none_such = none_such or f"but windows move along dims {tuple(dims)}"
    if isinstance(given, str):
        modes = [given] * len(dims)
    elif isinstance(given, Mapping):
        by_dim = {}
        for key, mode in given.items():
            dim = letters.get(key) if isinstance(key, str) else key
            if dim not in dims:
                raise ValueError(f"{what}: padding_mode names dim {key!r}, {none_such}")
            by_dim[dim] = mode
        modes = [by_dim.get(d, "zeros") for d in dims]
    else:
        modes = list(given)
        if len(modes) != len(dims):
            raise ValueError(f"{what}: padding_mode={given!r} has {len(modes)} entries for {len(dims)} {name}s")
    for mode in modes:
        if mode not in PADDING_MODES:
            raise ValueError(f"{what}: padding_mode={mode!r} is unknown; use one of {PADDING_MODES}")
    return tuple(modes)


def check_window(window: Window, mode: str, where: str, what: str, reader: str = "window") -> None:
    """The window has an output, and what its mode mirrors exists. ``where``: the dim, as the caller calls it."""
    if window.output_size < 1:
        raise ValueError(
            f"{what}: no output in {where}: {window.size} elements"
            f"{f' dilated to {window.dilated_size}' if window.lhs_dilation > 1 else ''} with padding "
            f"({window.pad_lo}, {window.pad_hi}) are fewer than the {window.reach} that the {reader} covers"
        )
    beyond = max(-(-max(p, 0) // window.lhs_dilation) for p in (window.pad_lo, window.pad_hi))
    if mode == "reflect" and beyond >= window.size > 1:
        raise ValueError(
            f"{what}: padding ({window.pad_lo}, {window.pad_hi}) reflects more than the {window.size} elements of "
            f"{where} hold; pad at most {(window.size - 1) * window.lhs_dilation}"
        )
