"""A region's program as people read it: line by line, what stays in the layout, what is exchanged, what leaves it."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping

from shardkit.spatial.regions.block import Cuts
from shardkit.spatial.regions.margins import NONE, Margin
from shardkit.spatial.regions.plan import Plan, wanted
from shardkit.spatial.regions.step import LEFT, LOCAL, OWN, WHOLE, WINDOW, Step

_FUNCTION = "function"  # whose body stands below it, unless it acts in place


@dataclasses.dataclass(frozen=True)
class RegionLine:
    """One operation.

    Attributes:
      name: of the JAX primitive.
      kind: how it treats the layout: "in place", "window", "own exchange", "reduction",
        "function", "left the layout".
      result: dtype and shape of its (first) result on one device, margins written "+1".
      fetched: what is fetched before it: of each blocked dim, elements before and after.
      source: the user's line, ``file.py:12``.
      note: what isn't plain about it.
      depth: in how many loops and calls it stands.
    """

    name: str
    kind: str
    result: str
    fetched: Mapping[int, Margin]
    source: str
    note: str
    depth: int = 0

    def __str__(self) -> str:
        fetch = ", ".join(f"{lo}+{hi} of dim {d}" for d, (lo, hi) in self.fetched.items())
        parts = [f"{'  ' * self.depth}{self.name:<22}", f"{self.result:<30}", f"{self.kind:<16}"]
        parts += [f"fetches {fetch};" if fetch else "", self.note, f"# {self.source}" if self.source else ""]
        return " ".join(p for p in parts if p).rstrip()


@dataclasses.dataclass(frozen=True)
class RegionProgram:
    """What ``Region.program`` returns; print it.

    Attributes:
      axes: mesh axes that cut, and their sizes.
      every: windows between two exchanges, as asked for or chosen.
      lines: one an operation on blocks (operations on whole values aren't shown).

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> step = sk.spatial.region(lambda x: 2 * x, spatial_axes={"sp": 0}, mesh=sk.make_mesh({"sp": 1}))
      >>> step.program(jnp.arange(3)).axes
      {'sp': 1}
    """

    axes: Mapping[str, int]
    every: int
    lines: tuple[RegionLine, ...]

    @property
    def left(self) -> tuple[RegionLine, ...]:
        """Operations that left the layout: every device does all of them."""
        return tuple(line for line in self.lines if line.kind == LEFT)

    @property
    def exchanges(self) -> int:
        """Values whose margins are fetched in a forward pass, by plan or by an operation itself; loops counted once."""
        return sum(line.kind == OWN or any(m != NONE for m in line.fetched.values()) for line in self.lines)

    def __repr__(self) -> str:
        return f"<{self._headline()}>"

    def __str__(self) -> str:
        return "\n".join([self._headline(), *(f"  {line}" for line in self.lines)])

    def _headline(self) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in self.axes.items())
        every = "every window" if self.every == 1 else f"every {self.every} windows"
        left = f"; {len(self.left)} left the layout" if self.left else ""
        return f"region over {axes}: margins exchanged for {every}, {self.exchanges} exchanges{left}"

    def _repr_html_(self) -> str:
        rows = []
        for line in str(self).splitlines():
            style = "background:#fde8e8" if LEFT in line else "background:#e8f1fd" if "fetches" in line else ""
            rows.append(f'<span style="{style}">{html.escape(line)}</span>')
        return '<pre style="line-height:1.35">' + "\n".join(rows) + "</pre>"


def program_of(plan: Plan, axes: Mapping[str, int], depth: int = 0) -> RegionProgram:
    """The program of a plan."""
    lines: list[RegionLine] = []
    shown: set[int] = set()
    for step in plan.steps:
        if step.kind == WHOLE:
            continue
        lines.append(_line(plan, step, shown, depth))
        for inner, _ in step.inner:
            if not inner.stays:
                lines += program_of(inner, axes, depth + 1).lines
    return RegionProgram(dict(axes), plan.every, tuple(lines))


def _line(plan: Plan, step: Step, shown: set[int], depth: int) -> RegionLine:
    fetched: dict[int, Margin] = {}
    for value, links in zip(step.inputs, step.links, strict=True):
        if links and step.kind in (LOCAL, WINDOW) and value.number in plan.fetched and value.number not in shown:
            shown.add(value.number)
            fetched |= {d: m for d, (m, _) in plan.fetched[value.number].items() if m != NONE}
    value, cuts = step.outputs[0], step.cuts[0]
    kind = _FUNCTION if step.inner else step.kind
    return RegionLine(
        step.node.name,
        kind,
        _type(value, cuts, wanted(plan, step)),
        fetched,
        step.node.source,
        step.note,
        depth,
    )


def _type(value: object, cuts: Cuts, margins: Mapping[int, Margin]) -> str:
    sizes = []
    for dim, size in enumerate(value.shape):  # type: ignore[attr-defined]
        margin = sum(margins.get(dim, NONE))
        block = str(cuts[dim].block) if dim in cuts else str(size)
        sizes.append(f"{block}+{margin}" if dim in cuts and margin else block)
    return f"{value.aval.dtype}[{','.join(sizes)}]"  # type: ignore[attr-defined]
