"""Mesh axes as products of factors, so that a part of an axis can move on its own.

`P("x", "y") -> P("y", "x")` on a 2 x 4 mesh needs no gather once the axis of four is seen as two of two:
half of it changes dims, the rest trades places. Pure integers; no JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Factors:
    """The axes of a mesh, each cut into factors (major first), numbered through in mesh order.

    Attributes:
      axes: (name, sizes of its factors) of each axis, in mesh order. The product of an axis's sizes is its size.
    """

    axes: tuple[tuple[str, tuple[int, ...]], ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of each factor."""
        return tuple(size for _, sizes in self.axes for size in sizes)

    @functools.cached_property
    def of_axis(self) -> dict[str, tuple[int, ...]]:
        """The factors of each axis, major first."""
        count = itertools.count()
        return {name: tuple(next(count) for _ in sizes) for name, sizes in self.axes}

    @functools.cached_property
    def home(self) -> tuple[tuple[str, int], ...]:
        """Of each factor: its axis, and by what to divide a position on the axis to count in this factor."""
        return tuple((name, math.prod(sizes[i + 1 :])) for name, sizes in self.axes for i in range(len(sizes)))

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """Position on the mesh (row-major) of the device at each combination of factor coordinates."""
        return np.arange(math.prod(self.sizes)).reshape(self.sizes)

    def groups(self, factors: Sequence[int]) -> list[list[int]]:
        """Positions of the devices that differ in these factors only; within a group the first factor is major."""
        last = range(len(self.sizes) - len(factors), len(self.sizes))
        moved = np.moveaxis(self.positions, list(factors), list(last))
        return moved.reshape(-1, math.prod(self.sizes[f] for f in factors)).tolist()

    def whole_axes(self, factors: Sequence[int]) -> tuple[str, ...] | None:
        """The axes that these factors make up, in this order; None where they are parts, or interleaved."""
        left, names = list(factors), []
        while left:
            name = self.home[left[0]][0]
            mine = self.of_axis[name]
            if tuple(left[: len(mine)]) != mine:
                return None
            names.append(name)
            left = left[len(mine) :]
        return tuple(names)

    def label(self, factors: Sequence[int]) -> tuple[str, ...]:
        """How these factors are written: "x" for an axis, "x/4:2" for its factor of size 2 that counts in fours."""
        names, left = [], list(factors)
        while left:
            name, stride = self.home[left[0]]
            mine = self.of_axis[name]
            if tuple(left[: len(mine)]) == mine:
                names.append(name)
                left = left[len(mine) :]
            else:
                names.append(f"{name}/{stride}:{self.sizes[left[0]]}")
                left = left[1:]
        return tuple(names)


def whole(axis_sizes: Mapping[str, int]) -> Factors:
    """Each axis one factor; those of size 1, along which nothing can move, none."""
    return Factors(tuple((name, (size,) if size > 1 else ()) for name, size in axis_sizes.items()))


def split_for(axis_sizes: Mapping[str, int], changed: Sequence[str], most: int = 4) -> Factors:
    """Factors fine enough for parts of axes to move on their own: primes, where these are few.

    Else so fine that axes of different sizes can trade places.

    Args:
      axis_sizes: name and size of each axis.
      changed: the axes that do something else afterwards than before.
      most: with more factors the search gets slow, and a plan over whole axes is nearly as good.

    Example:
      >>> split_for({"x": 2, "y": 8}, ["x", "y"]).axes
      (('x', (2,)), ('y', (2, 2, 2)))
      >>> split_for({"x": 2, "y": 32}, ["x", "y"]).axes
      (('x', (2,)), ('y', (2, 16)))
    """
    finest = Factors(tuple((name, _primes(size)) for name, size in axis_sizes.items()))
    if len(finest.sizes) <= most:
        return finest
    cuts: dict[str, set[int]] = {name: set() for name in axis_sizes}
    for one, other in itertools.permutations(changed, 2):
        shared = math.gcd(axis_sizes[one], axis_sizes[other])
        if 1 < shared < axis_sizes[one]:
            cuts[one].add(axis_sizes[one] // shared)
    found = Factors(tuple((name, _cut(size, cuts[name])) for name, size in axis_sizes.items()))
    return found if len(found.sizes) <= most else whole(axis_sizes)


def _primes(size: int) -> tuple[int, ...]:
    found, prime = [], 2
    while size > 1:
        while size % prime == 0:
            found.append(prime)
            size //= prime
        prime += 1
    return tuple(found)


def _cut(size: int, strides: set[int]) -> tuple[int, ...]:
    """Factors of an axis, major first, with a cut at each stride that fits the smaller ones."""
    chain = [1]
    for stride in sorted(strides):
        if stride % chain[-1] == 0 and stride > chain[-1]:
            chain.append(stride)
    chain.append(size)
    return tuple(high // low for low, high in itertools.pairwise(chain) if high > low)[::-1]


def common(sizes: Sequence[int], others: Sequence[int]) -> tuple[int, ...] | None:
    """Factors that build both meshes over the same devices in the same order; None where there are none.

    Example:
      >>> common((2, 4), (4, 2)), common((2, 3), (3, 2))
      ((2, 2, 2), None)
    """
    ends = {math.prod(sizes[i:]) for i in range(len(sizes) + 1)} | {
        math.prod(others[i:]) for i in range(len(others) + 1)
    }
    chain = sorted(ends)
    if any(high % low for low, high in itertools.pairwise(chain)):
        return None
    return tuple(high // low for low, high in itertools.pairwise(chain))[::-1]
