"""Where an array is, in factors, and how large a device's block is there. Integers only."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from shardkit.reshard.factors import Factors


class State(NamedTuple):
    """Which factors cut which dim (major first), and over which the array is Partial; the others replicate."""

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...]  # ascending


@dataclasses.dataclass(frozen=True)
class Problem:
    """What stays the same along a way from one state to another.

    Attributes:
      factors: the mesh.
      shape: the logical sizes of the array.
      itemsize: bytes an element.
      reduce: what the Partial factors of the source wait for; None where it has none.
      wanted: what those of the destination shall wait for; None likewise.
    """

    factors: Factors
    shape: tuple[int, ...]
    itemsize: int
    reduce: str | None = None
    wanted: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_blocks", {})

    def parts(self, factors: tuple[int, ...]) -> int:
        """Devices along these factors."""
        sizes = self.factors.sizes
        return math.prod(sizes[f] for f in factors)

    def block(self, dim: int, factors: tuple[int, ...]) -> int:
        """Elements of dim ``dim`` that a device keeps where these factors cut it, the padding counted."""
        key = (dim, factors)
        if key not in self._blocks:  # type: ignore[attr-defined]
            self._blocks[key] = -(-self.shape[dim] // self.parts(factors))  # type: ignore[attr-defined]
        return self._blocks[key]  # type: ignore[attr-defined]

    def block_shape(self, state: State) -> tuple[int, ...]:
        """The shape of what one device holds."""
        return tuple(self.block(d, f) for d, f in enumerate(state.dims))

    def local_bytes(self, state: State) -> int:
        """Bytes of what one device holds."""
        count = self.itemsize
        for dim, factors in enumerate(state.dims):
            count *= self.block(dim, factors)
        return count

    def nests(self, dim: int, outer: tuple[int, ...], inner: tuple[int, ...]) -> bool:
        """Whether the blocks cut by ``outer + inner`` are pieces of the blocks cut by ``outer``.

        Always so where sizes divide. Where they don't, a block of `ceil(W / n)` may straddle two larger ones; only
        the whole dim can be cut, or put together, in any case.
        """
        return not outer or self.block(dim, outer) == self.parts(inner) * self.block(dim, outer + inner)

    def free(self, state: State) -> tuple[int, ...]:
        """The factors along which the state replicates."""
        used = set(state.partial).union(*state.dims)
        return tuple(f for f in range(len(self.factors.sizes)) if f not in used)

    def signature(self, state: State) -> tuple[int, ...]:
        """States of equal signature hold the same blocks, on other devices."""
        return (*(self.parts(f) for f in state.dims), self.parts(state.partial))

    @functools.cached_property
    def coordinates(self) -> np.ndarray:
        """Of each factor, each device's position along it; shape (factors, devices)."""
        sizes = self.factors.sizes
        return np.indices(sizes).reshape(len(sizes), math.prod(sizes))

    def index(self, factors: tuple[int, ...]) -> np.ndarray:
        """Each device's position along these factors together, major first."""
        found = np.zeros(self.coordinates.shape[1], int)
        for f in factors:
            found = found * self.factors.sizes[f] + self.coordinates[f]
        return found

    def interval(self, dim: int, factors: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Where each device's block begins and ends in a dim cut by these factors, without the padding."""
        key = (dim, factors, "interval")
        if key not in self._blocks:  # type: ignore[attr-defined]
            size, block = self.shape[dim], self.block(dim, factors)
            low = np.minimum(self.index(factors) * block, size)
            self._blocks[key] = low, np.minimum(low + block, size)  # type: ignore[attr-defined]
        return self._blocks[key]  # type: ignore[attr-defined]

    def contents(self, state: State) -> np.ndarray:
        """A number for what each device holds: equal numbers, equal blocks (and contributions)."""
        found = self.index(state.partial)
        for factors in state.dims:
            found = found * self.parts(factors) + self.index(factors)
        return found
