"""What to say of a function that looks at its arguments' values, where only their shapes are known."""

from __future__ import annotations

import traceback

import jax

from shardkit.sources import Frame, short_location, user_frame

LOOKED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def line_of(error: BaseException) -> str:
    """The line of the user's at which an error was raised, as "train.py:12"; "" if there's none."""
    stack = traceback.extract_tb(error.__traceback__)
    return short_location(user_frame([Frame(s.filename, s.lineno or 0, s.name) for s in reversed(stack)]))


def looked(error: Exception, name: str) -> TypeError:
    """The error of ``partition``, for one of ``LOOKED``."""
    said = str(error).splitlines()[0]
    return TypeError(
        f"partition: {name} looks at the values of its arguments, at {line_of(error)}, so that no program can be made "
        f"for their shapes: {said} Arguments that must be known (sizes, flags) are static (static_argnums=...); "
        "branches on values are jax.lax.cond."
    )
