"""`assert_collectives`: says in a test which communication a program may do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from shardkit.inspect import compiling
from shardkit.inspect.collectives import collectives
from shardkit.inspect.report import KINDS, CollectiveReport
from shardkit.inspect.tables import format_bytes

Bounds = tuple[int, int | None]
Count = int | tuple[int | None, int | None]


def assert_collectives(
    fun: Any,
    *args: Any,
    mesh: compiling.AnyMesh | None = None,
    all_gather: Count | Mapping[Any, Count] | None = None,
    all_reduce: Count | Mapping[Any, Count] | None = None,
    reduce_scatter: Count | Mapping[Any, Count] | None = None,
    all_to_all: Count | Mapping[Any, Count] | None = None,
    collective_permute: Count | Mapping[Any, Count] | None = None,
    collective_broadcast: Count | Mapping[Any, Count] | None = None,
    ragged_all_to_all: Count | Mapping[Any, Count] | None = None,
    in_loop: Count | Mapping[Any, Count] | None = None,
    max_bytes: int | None = None,
    axis: Any = None,
    **kwargs: Any,
) -> CollectiveReport:
    """Checks how many collectives of each kind a program has, after XLA's optimizations.

    A count is an int (exactly so many), a pair `(low, high)` with None for an open end, or a mapping
    from mesh axes to these. An axis name stands for the collectives over this axis, alone or together
    with others; a tuple of names for those over exactly these axes. What is left out is not checked.

    Args:
      fun: a function, a jitted function, or a `jax.stages` Traced, Lowered or Compiled (then without
        arguments).
      *args: arguments of `fun`: arrays, `jax.ShapeDtypeStruct`s with shardings, pytrees of these. Keyword
        arguments cannot be given to it here; use `functools.partial`.
      mesh: the mesh whose axes are named; found as in `collectives` if not given.
      all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute, collective_broadcast,
        ragged_all_to_all: the count of this kind, those in loops (once each) included.
      in_loop: the count of collectives of any kind inside loops.
      max_bytes: the largest result, in bytes on one device, that any collective may have.
      axis: restricts all counts, and max_bytes, to one axis, or a tuple of axes.
      **kwargs: none: an unknown keyword is an error, with the ones that are near it.

    Returns:
      The report, for further checks.

    Raises:
      AssertionError: the program does otherwise; the message has what was expected, what was found,
        and where in the user's code it comes from.
      TypeError: an unknown keyword, or a value of the wrong type.
      ValueError: a bad count, an axis that is not in the mesh, or nothing to check.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> len(sk.assert_collectives(jnp.sum, jnp.ones(8), all_gather=0, all_reduce=(None, 1)))
      0
    """
    if kwargs:
        raise TypeError(_unknown_keyword(next(iter(kwargs))))
    counts = {
        "all_gather": all_gather,
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "collective_permute": collective_permute,
        "collective_broadcast": collective_broadcast,
        "ragged_all_to_all": ragged_all_to_all,
        "in_loop": in_loop,
    }
    checks = [check for name, count in counts.items() if count is not None for check in _checks(name, count, axis)]
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise TypeError(f"max_bytes must be an int (bytes on one device) or None; got {max_bytes!r}.")
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes must be at least 0; got {max_bytes}.")
    if not checks and max_bytes is None:
        raise ValueError(
            "nothing to check: give at least one count, such as all_gather=0, or max_bytes=; "
            "to only look at the collectives use `collectives`."
        )
    report = collectives(fun, *args, mesh=mesh)
    failures = [text for check in checks for text in _failures(report, *check)]
    if max_bytes is not None:
        failures += _too_large(report, max_bytes, axis)
    if failures:
        raise AssertionError("\n".join(["the program's collectives are not as expected:", *failures, str(report)]))
    return report


def _unknown_keyword(name: str) -> str:
    allowed = (*KINDS, "in_loop", "max_bytes", "axis", "mesh")
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"assert_collectives has no keyword {name!r}; allowed are {', '.join(allowed)}.{hint} To give the "
        f"function a keyword argument, use functools.partial(fun, {name}=...)."
    )


def _checks(name: str, count: Any, axis: Any) -> list[tuple[str, Any, Bounds]]:
    """One (name, axis, bounds) for each thing that `name=count` demands."""
    if not isinstance(count, Mapping):
        return [(name, axis, _bounds(name, count))]
    if axis is not None:
        raise ValueError(
            f"{name}={dict(count)!r} names axes itself, so axis={axis!r} cannot be given with it; "
            "leave out one of the two."
        )
    return [(name, over, _bounds(f"{name}[{over!r}]", each)) for over, each in count.items()]


def _bounds(name: str, count: Any) -> Bounds:
    if _is_count(count):
        _check_not_negative(name, count)
        return (count, count)
    if isinstance(count, tuple | list) and len(count) == 2 and all(n is None or _is_count(n) for n in count):
        low, high = count
        for end in count:
            if end is not None:
                _check_not_negative(name, end)
        if low is not None and high is not None and low > high:
            raise ValueError(f"{name}={count!r}: no number is at least {low} and at most {high}; swap the two.")
        return (low or 0, high)
    raise TypeError(
        f"{name} must be None (not checked), an int (exactly so many), a pair (low, high) with None for an "
        f"open end, or a mapping from mesh axes to these; got {count!r}."
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_not_negative(name: str, count: int) -> None:
    if count < 0:
        raise ValueError(f"{name}: a number of collectives is at least 0; got {count}.")


def _failures(report: CollectiveReport, name: str, axis: Any, bounds: Bounds) -> list[str]:
    kind, in_loop = (None, True) if name == "in_loop" else (name, None)
    what = "collectives in loops" if name == "in_loop" else name
    low, high = bounds
    over = "" if axis is None else f" over {_axis_text(axis)}"
    failures = []
    found = report.count(kind, axis=axis, in_loop=in_loop)
    if found < low or (high is not None and found > high):
        failures.append(f"  {what}{over}: expected {_bounds_text(bounds)}, found {found}")
    if axis is not None:
        # A collective of which it is not known where it runs could run over the axis as well.
        unmapped = [e for e in report if e.axes is None and kind in (None, e.kind) and in_loop in (None, e.in_loop)]
        failures += [f"  {what}{over}: cannot tell the axes of {entry}" for entry in unmapped]
    return failures


def _too_large(report: CollectiveReport, max_bytes: int, axis: Any) -> list[str]:
    return [
        f"  max_bytes: expected results of at most {max_bytes} bytes ({format_bytes(max_bytes)}) on one "
        f"device, found {entry.result_bytes} bytes: {entry}"
        for entry in report.select(axis=axis)
        if entry.result_bytes > max_bytes
    ]


def _bounds_text(bounds: Bounds) -> str:
    low, high = bounds
    if low == high:
        return str(low)
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low == 0 else f"{low} to {high}"


def _axis_text(axis: Any) -> str:
    return f"axes {', '.join(map(str, axis))}" if isinstance(axis, tuple) else f"axis {axis}"
