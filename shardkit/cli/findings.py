"""What the doctor says of one thing."""

from __future__ import annotations

import dataclasses

PROBLEM = "problem"
NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
      level: "problem" (something won't work: exit status 1) or "note" (works, but know this).
      name: a few words for what it's about.
      happens: what is the case, and what comes of it.
      todo: what to do.
      source: how we know.
    """

    level: str
    name: str
    happens: str
    todo: str = ""
    source: str = ""


def problems(findings: list[Finding]) -> list[Finding]:
    """Those that are problems.

    Example:
      >>> [f.name for f in problems([Finding(NOTE, "a", ""), Finding(PROBLEM, "b", "")])]
      ['b']
    """
    return [finding for finding in findings if finding.level == PROBLEM]
