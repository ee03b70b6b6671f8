"""A process that fails ends at once, so that whoever started it can stop the others."""

from __future__ import annotations

import atexit
import logging
import os
import sys

_registered: list[bool] = []


def leave_on_failure() -> None:
    """From now on an exception that nobody catches ends the process without waiting for the others.

    Else JAX waits for them as the process ends, up to ``shutdown_timeout_seconds`` (300), while they wait for it in a
    collective; then it aborts, and the exit status of the exception is lost. The handlers of ``atexit`` that are
    registered after this call run as ever.
    """
    if not _registered:
        _registered.append(True)
        atexit.register(_leave)


def failure() -> int | None:
    """The exit status of the exception by which this process ends; None if it ends by none.

    Python doesn't say which status ``sys.exit`` was given.
    """
    error = getattr(sys, "last_value", None)
    # Others keep an exception there, too, that they have caught: it didn't go through the outermost frame. At a prompt
    # one is no end.
    if error is None or error.__traceback__ is None or error.__traceback__.tb_frame.f_back is not None:
        return None
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return None
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _leave() -> None:
    status = failure()
    if status is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
