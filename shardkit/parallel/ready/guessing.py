"""A plan that is guessed when it meets its model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import rich
from rich.table import Table

from shardkit.parallel.paths import PathPattern
from shardkit.parallel.plans import LayerPlan
from shardkit.parallel.plans.base import listed
from shardkit.placements import AnyMesh


@dataclasses.dataclass(frozen=True)
class Found:
    """A layer that a model has.

    Attributes:
      path: its path.
      kind: "linear", "attention", "embedding", "norm", "dropout", "conv", "model" (the model itself) or "other".
      name: of its class.
      inputs, outputs: features in and out; of an embedding vocabulary and features; 0 where it has none.
      heads, kv_heads: of attention.

    Example:
      >>> import shardkit as sk
      >>> sk.plans.Found("blocks/0/up", "linear", "Linear", inputs=4, outputs=8).last
      'up'
    """

    path: str
    kind: str
    name: str
    inputs: int = 0
    outputs: int = 0
    heads: int = 0
    kv_heads: int = 0

    @property
    def parent(self) -> str:
        """The path of what holds it."""
        return self.path.rpartition("/")[0]

    @property
    def last(self) -> str:
        """Its own name."""
        return self.path.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen for a layer, and why: a row of the table that a ready plan prints.

    Attributes:
      path: the layer's path.
      name: of its class.
      plans: the plan objects; none: it's left as it is.
      why: the reason, in words.

    Example:
      >>> import shardkit as sk
      >>> sk.plans.Choice("up", "Linear", (sk.ColWiseParallel("tp"),), "widens 4 to 8").plans
      (ColWiseParallel(axis='tp', gather_output=False),)
    """

    path: PathPattern
    name: str
    plans: tuple[LayerPlan, ...]
    why: str


Guess = Callable[[Sequence[Found], AnyMesh | None], list[Choice]]


class ReadyPlan(dict[PathPattern, Any]):
    """``{path pattern: plan}`` of your own, over a guess that's made when the plan meets its model.

    Entries that you set stand in for what was guessed for that path; ``None`` leaves the layer as it is.
    ``guess(model)`` gives the whole plan as a plain dictionary, to be edited. Made by ``sk.plans.transformer``,
    ``sk.plans.unet`` and ``sk.plans.fsdp``.

    Example:
      >>> import shardkit as sk
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
      >>> plan = sk.plans.transformer(tp="tp", verbose=False)
      >>> plan["layers/2"] = None  # not that one
      >>> plan.guess(model)
      {'layers/0': [ColWiseParallel(axis='tp', gather_output=False)]}
    """

    title: str
    verbose: bool

    def __init__(self, title: str, guess: Guess, verbose: bool = True):
        super().__init__()
        self.title, self.verbose, self._guess = title, verbose, guess
        self._shown: list[Choice] | None = None
        self._more: tuple[Mapping[PathPattern, Any], ...] = ()

    def guess(self, model: Any, *args: Any, mesh: AnyMesh | None = None, **kwargs: Any) -> dict[PathPattern, Any]:
        """The plan for a model, as a plain dictionary; what was chosen is printed (``verbose``).

        Args:
          model: an ``nnx.Module``; or a ``linen.Module``, with what its ``init`` takes.
          args, kwargs: for ``init`` of a linen model (a key and inputs; shapes will do).
          mesh: sizes are checked against it, if given.

        Returns:
          ``{path pattern: list of plans}``, as ``sk.parallelize`` takes it.

        Raises:
          TypeError: ``model`` is no module of Flax, or a linen one comes without what its ``init`` takes.
        """
        from shardkit.parallel.ready.describe import describe

        return self.for_layers(describe(model, args, kwargs), mesh)

    def for_layers(self, layers: Sequence[Found], mesh: AnyMesh | None) -> dict[PathPattern, Any]:
        """The plan for a model of these layers; what was chosen is printed (``verbose``).

        Args:
          layers: those of the model, as ``sk.plans.Found``.
          mesh: sizes are checked against it; None: they aren't.

        Returns:
          ``{path pattern: list of plans}``.
        """
        choices = self._guess(layers, mesh)
        if self.verbose and choices != self._shown:
            rich.print(self._table(choices))
        self._shown = choices
        plan: dict[PathPattern, Any] = {c.path: list(c.plans) for c in choices if c.plans}
        plan |= dict(self)
        plan = {pattern: items for pattern, items in plan.items() if items is not None}
        for more in self._more:
            more = more.for_layers(layers, mesh) if isinstance(more, ReadyPlan) else more
            plan |= {pattern: [*listed(plan.get(pattern, ())), *listed(items)] for pattern, items in more.items()}
        return plan

    def with_plans(self, more: Mapping[PathPattern, Any]) -> ReadyPlan:
        """This plan with those of another, which join what's there for their paths.

        Args:
          more: ``{path pattern: plan}``, or another ready plan.

        Returns:
          A new ready plan; this one stays as it is.
        """
        joined = ReadyPlan(self.title, self._guess, self.verbose)
        joined.update(self)
        joined._more = (*self._more, more)
        return joined

    def _table(self, choices: Sequence[Choice]) -> Table:
        table = Table("path", "layer", "plan", "why", title=self.title, title_justify="left")
        for (name, plans, why), paths in _alike(choices, self).items():
            shown = list(dict.fromkeys(re.sub(r"\d+", "*", p) if len(paths) > 1 else p for p in paths))
            table.add_row("\n".join(p or "(the model)" for p in shown), name, plans, why)
        return table


def _alike(choices: Sequence[Choice], own: Container[Any]) -> dict[tuple[str, str, str], list[str]]:
    """Paths of layers of which one row tells all, in order."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for choice in choices:
        plans = " + ".join(plan.label for plan in choice.plans) or "-"
        why = choice.why + ("; yours stands in for it" if choice.path in own else "")
        found.setdefault((choice.name, plans, why), []).append(str(choice.path))
    return found
