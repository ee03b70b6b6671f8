"""What all plan objects share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from jax.sharding import AbstractMesh, Mesh

P = TypeVar("P")


class LayerPlan:
    """What a user says should happen to a layer: static, hashable, without arrays.

    Attributes:
      part: what of a layer it decides; two different plans of one part for one layer fight.
    """

    part: ClassVar[str] = ""

    @property
    def label(self) -> str:
        """Its name and axes, as short as can be: "ColWise(tp)"."""
        return f"{type(self).__name__.removesuffix('Parallel')}({', '.join(self.mesh_axes)})"

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis the plan uses."""
        axis = getattr(self, "axis", ())
        return (axis,) if isinstance(axis, str) else tuple(axis)


@dataclasses.dataclass(frozen=True)
class Applied:
    """A plan bound to one layer: kept on the layer as a static attribute."""

    plan: Any
    mesh: Mesh | AbstractMesh
    path: str


def check_axis_name(plan: Any, axis: Any) -> None:
    """Raises TypeError where the axis is no name."""
    if not isinstance(axis, str):
        raise TypeError(f'{type(plan).__name__}: axis is the name of a mesh axis, for example "tp"; got {axis!r}')


def check_count(plan: Any, name: str, count: Any) -> None:
    """Raises TypeError where it's no number, ValueError where it's below 0."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{type(plan).__name__}: {name} is a number, 0 or more; got {count!r}")
    if count < 0:
        raise ValueError(f"{type(plan).__name__}: {name}={count} must be 0 or more")


def check_dim(plan: Any, dim: Any) -> None:
    """Raises TypeError where a dim is no number, ValueError where it's counted from the back."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{type(plan).__name__}: dim is a number, counted from the front; got {dim!r}")
    if dim < 0:
        raise ValueError(
            f"{type(plan).__name__}: dim={dim} counts from the back, where layers in one model have different dims; "
            "count from the front (1 is the sequence of [batch, sequence, features])"
        )


def listed(items: Any) -> tuple[Any, ...]:
    """One plan, or a list of them, as a tuple."""
    return tuple(items) if isinstance(items, list | tuple) else (items,)


def find_plan(plans: Iterable[Any], kind: type[P] | tuple[type[P], ...]) -> P | None:
    """The first plan of a kind (or of several)."""
    return next((plan for plan in plans if isinstance(plan, kind)), None)
