"""While a form is tried: every convolution runs in it or says why it can't, and is written down."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator

from shardkit.spatial.convolution.layers import Regime
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.convolution.table import Form


class CantRunError(Exception):
    """A form that is tried can't run a convolution; the message is the reason."""


@dataclasses.dataclass
class Attempt:
    """The form that is tried, and the convolutions that were met.

    Attributes:
      form: which.
      met: each without a form, and its regime.
    """

    form: Form
    met: list[tuple[LocalConv, Regime]] = dataclasses.field(default_factory=list)

    def enter(self, conv: LocalConv, regime: Regime, found: LocalConv | None, reason: str | None) -> LocalConv:
        """Writes a convolution down; ``found`` is it in the form, or None for a reason.

        Raises:
          CantRunError: there is a reason.
        """
        self.met.append((conv, regime))
        if found is None:
            raise CantRunError(reason)
        return found


_current: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("shardkit_attempt", default=None)


def current_trial() -> Attempt | None:
    """What is tried; None most of the time."""
    return _current.get()


@contextlib.contextmanager
def trying(form: Form) -> Generator[Attempt]:
    """Within it, functions that weren't traced before are traced in this form."""
    attempt = Attempt(form)
    token = _current.set(attempt)
    try:
        yield attempt
    finally:
        _current.reset(token)
