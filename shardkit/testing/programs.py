"""``assert_same_collectives``: two programs communicate alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardkit.inspect import Collective, CollectiveReport, collectives
from shardkit.inspect.compiling import AnyMesh
from shardkit.inspect.tables import format_bytes

FIELDS = ("kind", "reduction", "axes", "bytes", "in_loop")


def assert_same_collectives(
    fun: Any, other: Any, *args: Any, mesh: AnyMesh | None = None, by: Sequence[str] = FIELDS
) -> CollectiveReport:
    """Checks that two programs run the same collectives, in whatever order.

    Args:
      fun: a function, jitted or not, as ``sk.collectives`` takes it; or a ``CollectiveReport``.
      other: the one it is compared with: a function, or a ``CollectiveReport``.
      *args: arguments of both: arrays, or ``jax.ShapeDtypeStruct``s with shardings.
      mesh: the mesh whose axes are named, if it can't be found from the arguments.
      by: what must agree: of "kind", "reduction" (add, max, ...), "axes", "bytes" (that one device receives) and
        "in_loop".

    Returns:
      The report of ``fun``, for more checks.

    Raises:
      AssertionError: they differ; the message is a diff, from ``other`` (-) to ``fun`` (+).
      ValueError: an unknown name in ``by``.

    Example:
      >>> import jax.numpy as jnp
      >>> from shardkit import testing
      >>> len(testing.assert_same_collectives(jnp.sum, jnp.max, jnp.ones(8)))
      0
    """
    unknown = [name for name in by if name not in FIELDS]
    if unknown or isinstance(by, str) or not by:
        raise ValueError(f"by={by!r}: collectives are compared by some of {FIELDS}")
    found, wanted = (f if isinstance(f, CollectiveReport) else collectives(f, *args, mesh=mesh) for f in (fun, other))
    ours, theirs = (Counter(_said(entry, by) for entry in report) for report in (found, wanted))
    if ours != theirs:
        lines = [_line("-", text, n) for text, n in sorted((theirs - ours).items())]
        lines += [_line("+", text, n) for text, n in sorted((ours - theirs).items())]
        same = (ours & theirs).total()
        lines.append(f"  {same} {'is' if same == 1 else 'are'} the same")
        raise AssertionError(
            f"the programs' collectives differ: {len(wanted)} wanted (-), {len(found)} found (+):\n" + "\n".join(lines)
        )
    return found


def _said(entry: Collective, by: Sequence[str]) -> str:
    over = "?" if entry.axes is None else ",".join(map(str, entry.axes))
    texts = {
        "kind": entry.kind,
        "reduction": entry.reduction or "",
        "axes": f"over {over}",
        "bytes": f"{entry.bytes} bytes ({format_bytes(entry.bytes)}) a device",
        "in_loop": "in a loop" if entry.in_loop else "",
    }
    return ", ".join(texts[name] for name in FIELDS if name in by and texts[name]) or "not in a loop"


def _line(sign: str, text: str, count: int) -> str:
    return f"{sign} {text}" + (f"  (x{count})" if count > 1 else "")
