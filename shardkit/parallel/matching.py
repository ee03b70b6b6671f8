"""Which plans a layer gets: patterns against paths, and plans against kinds of layers."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardkit.parallel.paths import PathPattern, matches, nearest, takes_everything
from shardkit.parallel.plans import (
    ColWiseParallel,
    ConvParallel,
    LayerPlan,
    RingAttention,
    RowWiseParallel,
    SequenceParallel,
)
from shardkit.parallel.plans.base import listed
from shardkit.placements import AnyMesh


@dataclasses.dataclass(frozen=True)
class Framework:
    """What nnx or linen has in the way of layers.

    Attributes:
      name: "nnx" or "linen".
      spatial: kinds that ``ConvParallel`` applies to.
      tensor: kinds with a weight that column and row plans share out.
      attention: kinds of attention.
      positionwise: kinds that treat positions of a sequence one by one.
      kind_of: the Flax class of a layer, whatever plans have made of it.
      spatial_dims: how many spatial dims a layer convolves over; None: it says nothing of them.
      holds_spatial: a module that ``ConvParallel`` can run as one region: layers of ``spatial`` are in it.
    """

    name: str
    spatial: tuple[type, ...]
    tensor: tuple[type, ...]
    attention: tuple[type, ...]
    positionwise: tuple[type, ...]
    kind_of: Callable[[Any], type]
    spatial_dims: Callable[[Any], int | None]
    holds_spatial: Callable[[Any], bool] = lambda layer: False

    def kinds(self, plan: LayerPlan, everything: bool) -> tuple[type, ...] | None:
        """The kinds of layers a plan applies to; None: any. ``everything``: of a pattern that takes all it knows."""
        if isinstance(plan, ConvParallel):
            return self.spatial
        if isinstance(plan, ColWiseParallel | RowWiseParallel):
            return (*self.tensor, *self.attention)
        if isinstance(plan, RingAttention):
            return self.attention
        return self.positionwise if everything and isinstance(plan, SequenceParallel) else None

    def problem(self, plan: LayerPlan, layer: Any) -> str | None:
        """Why a plan doesn't fit a layer of a right kind."""
        if not isinstance(plan, ConvParallel):
            return None
        dims = self.spatial_dims(layer)
        return plan.problem(3 if dims is None else dims)


Plans = Mapping[PathPattern, LayerPlan | Sequence[LayerPlan]]


def read_plans(plans: Any, mesh: AnyMesh) -> dict[PathPattern, tuple[LayerPlan, ...]]:
    """A user's plan, checked.

    Raises:
      TypeError: not a mapping, or not plan objects.
      ValueError: a mesh axis that the mesh doesn't have.
    """
    if not isinstance(plans, Mapping):
        raise TypeError(
            f'a plan maps path patterns to plan objects, e.g. {{"mlp/up": sk.ColWiseParallel("tp")}}; got {plans!r}'
        )
    found: dict[PathPattern, tuple[LayerPlan, ...]] = {}
    for key, given in plans.items():
        items = listed(given)
        for item in items:
            if not isinstance(item, LayerPlan):
                raise TypeError(
                    f"the plan for {key!r} is {given!r}; use a plan object such as sk.ConvParallel or a list of them"
                )
            absent = [a for a in item.mesh_axes if a not in mesh.axis_names]
            if absent:
                raise ValueError(
                    f"the plan for {key!r} uses mesh axes {absent}, but the mesh has {tuple(mesh.axis_names)}; name "
                    "one of these in the plan, or make a mesh that has the plan's: sk.make_mesh({'dp': 2, 'tp': 4})"
                )
        found[key] = items
    return found


class Matcher:
    """A plan's patterns, which layers are asked about one by one."""

    def __init__(self, plans: Mapping[PathPattern, tuple[LayerPlan, ...]], framework: Framework, strict: bool):
        self._plans, self._framework, self._strict = plans, framework, strict
        self._used: set[PathPattern] = set()

    def plans_for(
        self, paths: Sequence[str], layer: Any, others: Callable[[], Mapping[str, Any]]
    ) -> tuple[LayerPlan, ...]:
        """The plans of a layer.

        Args:
          paths: its path, and others that lead to the same layer.
          layer: the layer.
          others: all layers that are known by path, for messages.

        Raises:
          ValueError: a plan that doesn't fit the layer, or two that fight (with ``strict``; else a warning).
        """
        chosen: dict[str, tuple[PathPattern, LayerPlan]] = {}
        for pattern, items in self._plans.items():
            path = next((p for p in paths if matches(pattern, p)), None)
            if path is None:
                continue
            for item in items:
                if not self._fits(pattern, item, path, layer, others):
                    continue
                self._used.add(pattern)
                before = chosen.setdefault(item.part, (pattern, item))
                if before[1] != item:
                    raise ValueError(_fight(path, before, (pattern, item)))
        return tuple(item for _, item in chosen.values())

    def check_used(self, layers: Mapping[str, Any], kinds: tuple[type, ...] = (LayerPlan,)) -> None:
        """Raises ValueError for a pattern (with plans of ``kinds``) that no layer was found for (not strict: warns)."""
        for pattern, items in self._plans.items():
            if not any(isinstance(item, kinds) for item in items):
                continue
            if pattern in self._used or (self._left_out(pattern, layers) and not takes_everything(pattern)):
                continue
            usable = self._usable(items[0], layers) if items else list(layers)
            names = [f"{type(item).__name__} applies to ({self._known(item)})" for item in items]
            self._complain(
                f"pattern {pattern!r} matches no layer that {' or '.join(names)}; nearest paths: "
                f"{nearest(pattern, usable or list(layers))}"
            )

    def _left_out(self, pattern: PathPattern, layers: Mapping[str, Any]) -> bool:
        """Some layer matches, and was complained about."""
        return any(matches(pattern, path) for path in layers)

    def _fits(self, pattern: PathPattern, item: LayerPlan, path: str, layer: Any, others: Any) -> bool:
        everything = takes_everything(pattern)
        kinds = self._framework.kinds(item, everything)
        kind = self._framework.kind_of(layer)
        no_layer = isinstance(item, ConvParallel) and not everything and kind not in self._framework.spatial
        if no_layer and self._framework.holds_spatial(layer):
            return True  # a module that becomes one region
        if kinds is not None and kind not in kinds:
            if issubclass(kind, kinds):
                text = f"{path!r} is a {kind.__name__}, a subclass with code of its own: it is left alone"
                self._complain(text, always=everything)
            elif not everything:
                self._complain(
                    f"pattern {pattern!r} matches {path!r}, a {kind.__name__}, which {type(item).__name__} doesn't "
                    f"know; it applies to {self._known(item)}. Layers of these kinds: "
                    f"{self._usable(item, others())[:8]}"
                )
            return False
        problem = self._framework.problem(item, layer)
        if problem is not None:
            self._complain(f"{path!r} {problem}")
        return problem is None

    def _known(self, item: LayerPlan) -> str:
        kinds = self._framework.kinds(item, False)
        if kinds is None:
            return "any layer"
        return ", ".join(sorted(f"{self._framework.name}.{kind.__name__}" for kind in kinds))

    def _usable(self, item: LayerPlan, layers: Mapping[str, Any]) -> list[str]:
        kinds = self._framework.kinds(item, False)
        return [p for p, layer in layers.items() if kinds is None or self._framework.kind_of(layer) in kinds]

    def _complain(self, text: str, always: bool = False) -> None:
        if self._strict and not always:
            raise ValueError(text)
        warnings.warn(text, UserWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """How far up the code is that isn't ours or Flax's: where a warning points at."""
    frame, level = sys._getframe(1), 1  # pyright: ignore[reportPrivateUsage]  # as warnings.warn counts: 1 is who calls it
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in ("shardkit", "flax", "jax", "contextlib", "functools"):
            return level
        frame, level = frame.f_back, level + 1
    return 2


def _fight(path: str, first: tuple[PathPattern, LayerPlan], second: tuple[PathPattern, LayerPlan]) -> str:
    if first[0] == second[0]:
        return f"layer {path!r} gets two plans that fight, {first[1]} and {second[1]}; leave out one of them"
    return (
        f"layer {path!r} is matched by both {first[0]!r} and {second[0]!r} with different plans ({first[1]}, "
        f"{second[1]}); make one of them narrower"
    )


def batch_axes_of(plans: Iterable[tuple[LayerPlan, ...]]) -> tuple[str, ...]:
    """Mesh axes that a plan says the batch (dim 0) is spread over."""
    items = [item for group in plans for item in group]
    return tuple(dict.fromkeys(item.axis for item in items if item.part == "data" and getattr(item, "dim", 0) == 0))  # type: ignore[attr-defined]
