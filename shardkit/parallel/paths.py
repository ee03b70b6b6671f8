"""Module paths and the patterns that name them: ``"enc/*/conv"``, ``"**"``, a compiled regex."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

PathPattern = str | re.Pattern[str]


def compile_pattern(pattern: PathPattern) -> re.Pattern[str]:
    """A regex over whole paths: ``*`` is one level, ``**`` any number of levels (none included).

    >>> matches("enc/*/conv", "enc/0/conv"), matches("**/conv", "conv"), matches("enc/*", "enc/0/conv")
    (True, True, False)
    """
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise TypeError(f"a plan's keys are path patterns (strings) or compiled regexes, got {pattern!r}")
    parts = []
    for part in pattern.split("/") if pattern else []:
        if part == "**":
            parts.append("(?:[^/]+/)*")
        else:
            parts.append("[^/]*".join(re.escape(p) for p in part.split("*")) + "/")
    # Every path is matched with a slash at its end, so that "**" can stand for no level at all.
    return re.compile("".join(parts))


def matches(pattern: PathPattern, path: str) -> bool:
    """Whether the pattern names this path."""
    regex = compile_pattern(pattern)
    slashed = path + "/" if path else ""
    return bool(regex.fullmatch(path if isinstance(pattern, re.Pattern) else slashed))


def takes_everything(pattern: PathPattern) -> bool:
    """A pattern that ends in ``**`` means every layer below that the plan knows; others mean each match."""
    return isinstance(pattern, str) and pattern.split("/")[-1] == "**"


def nearest(pattern: PathPattern, paths: Iterable[str], count: int = 5) -> list[str]:
    """Paths that look like the pattern, for messages."""
    text = pattern if isinstance(pattern, str) else pattern.pattern
    known = [p for p in paths if p]
    return difflib.get_close_matches(text, known, n=count, cutoff=0.0) or known[:count]


def below(path: str, name: str) -> str:
    """The path of what ``path`` holds as ``name``.

    >>> below("enc", "conv"), below("", "conv")
    ('enc/conv', 'conv')
    """
    return f"{path}/{name}" if path else name


def join_path(parts: Iterable[object]) -> str:
    """``("enc", 0, "conv")`` as ``"enc/0/conv"``; the model itself is ``""``."""
    return "/".join(str(p) for p in parts)
