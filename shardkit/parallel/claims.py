"""Where parameters go: what plans claim of each, one placement an axis, whoever shares it."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardkit.placements import AnyMesh, Layout, Shard


@dataclasses.dataclass
class Claim:
    """Of one parameter.

    Attributes:
      name: its path, for messages.
      by: for each mesh axis that cuts it, the placement and who says so.
    """

    name: str
    by: dict[str, tuple[Shard, str]] = dataclasses.field(default_factory=dict)

    def add(self, axis: str, placement: Shard, who: str) -> None:
        """Raises ValueError where another plan cuts the parameter otherwise."""
        before = self.by.setdefault(axis, (placement, who))
        if before[0] != placement:
            raise ValueError(
                f"two plans fight over parameter {self.name!r}: {before[1]} makes it {before[0]} over mesh axis "
                f"{axis!r}, {who} makes it {placement}; change one of them, or give the layers parameters of their own"
            )

    def layout(self, mesh: AnyMesh, ndim: int) -> Layout:
        """All claims together."""
        return Layout(mesh, {axis: placement for axis, (placement, _) in self.by.items()}).resolved(ndim)


class Claims:
    """Of all parameters of a model, by any hashable key (the same for a parameter that layers share)."""

    def __init__(self) -> None:
        self._found: dict[Any, Claim] = {}

    def add(self, key: Any, name: str, axis: str, dim: int, who: str) -> None:
        """Dim ``dim`` is cut over ``axis``; counted from the back, as layers may be stacked along dims before."""
        self._found.setdefault(key, Claim(name)).add(axis, Shard(dim), who)

    def layout(self, key: Any, mesh: AnyMesh, ndim: int) -> Layout | None:
        """Where the parameter goes; None: nobody says."""
        claim = self._found.get(key)
        return None if claim is None else claim.layout(mesh, ndim)
