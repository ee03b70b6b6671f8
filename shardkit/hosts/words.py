"""Processes, in words."""

from __future__ import annotations

from collections.abc import Sequence


def processes(numbers: Sequence[int], most: int = 8) -> str:
    """Several processes in words."""
    shown = ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
