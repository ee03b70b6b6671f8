"""Every layout on a mesh, arrays of random contributions in it, and what they reduce to by NumPy."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.placements import REDUCE_KINDS as KINDS

MESHES = [{"x": 2}, {"x": 4}, {"x": 8}, {"x": 2, "y": 2}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}]
REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod, "any": np.any, "all": np.all}


@functools.cache
def mesh_of(shape: tuple[tuple[str, int], ...], axis_types: str = "auto") -> jax.sharding.Mesh:
    """One mesh a shape: what is compiled for it stays known."""
    return sk.make_mesh(dict(shape), axis_types=axis_types)


def layouts(mesh: Any, ndim: int, kind: str | None = None, *, orders: bool = False) -> list[sk.Layout]:
    """Every layout of an array of ``ndim`` dims; with Partial axes only if there's a kind.

    Args:
      orders: also those whose axes cut a dim in another order than the mesh's (no Partial but sums: a PartitionSpec
        can say no other everywhere).
    """
    each: list[sk.Placement] = [*map(sk.Shard, range(ndim)), sk.Replicate()]
    if kind is not None:
        each.append(sk.Partial(kind))
    found = [sk.Layout(mesh, list(p)) for p in itertools.product(each, repeat=len(mesh.axis_names))]
    if orders and kind in (None, "sum"):
        found += [other for layout in found for other in _reordered(layout, ndim)]
    return found


def _reordered(layout: sk.Layout, ndim: int) -> Iterator[sk.Layout]:
    cuts = layout.dim_axes(ndim)
    more: dict[str, Any] = {"unreduced": set(layout.partial_axes)} if layout.partial_axes else {}
    choices = [list(itertools.permutations(cuts.get(d, ()))) for d in range(ndim)]
    for chosen in list(itertools.product(*choices))[1:]:  # the first is in mesh order
        yield sk.Layout(layout.mesh, P(*[axes or None for axes in chosen], **more))


def pairs(mesh: Any, ndim: int, kind: str, *, orders: bool = False) -> list[tuple[sk.Layout, sk.Layout]]:
    """Every ordered pair in which the kind matters; for sums also those without Partial."""
    found = layouts(mesh, ndim, kind, orders=orders)
    every = itertools.product(found, found)
    return [p for p in every if kind == "sum" or p[0].partial_axes or p[1].partial_axes]


def by_source(found: list[tuple[sk.Layout, sk.Layout]]) -> dict[sk.Layout, list[sk.Layout]]:
    """The destinations of each source."""
    groups: dict[sk.Layout, list[sk.Layout]] = {}
    for source, goal in found:
        groups.setdefault(source, []).append(goal)
    return groups


def sample(found: list, count: int, seed: Any) -> list:
    """Some of them, in every run the same."""
    return found if len(found) <= count else random.Random(str(seed)).sample(found, count)


def even_shape(mesh: Any, ndim: int) -> tuple[int, ...]:
    """Sizes that all axes together divide, each another one."""
    return tuple(mesh.size * n for n in (1, 2, 3)[:ndim])


def dtype_for(kind: str) -> str:
    return "bool" if kind in ("any", "all") else "float64"


def contributions(rng: np.random.Generator, kind: str | None, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Random values whose reductions are exact."""
    if np.dtype(dtype) == bool:
        return rng.random(shape) < (0.8 if kind in ("all", "min") else 0.2)
    if kind == "prod":
        return rng.choice([-3, -2, -1, 1, 2, 3, 0], shape, p=[0.16] * 6 + [0.04]).astype(dtype)
    return rng.integers(-9, 10, shape).astype(dtype)


def reduced(stack: np.ndarray, layout: sk.Layout) -> np.ndarray:
    """The value of a stack, by NumPy."""
    lead = tuple(range(len(layout.partial_axes)))
    return REDUCE[layout.reduce or ""](stack, axis=lead).astype(stack.dtype) if lead else stack


def place(stack: Any, layout: sk.Layout, logical: tuple[int, ...] | None = None) -> Any:
    """A NumPy array (or stack of contributions) where the layout says."""
    lead = len(layout.partial_axes)
    array = jax.device_put(stack, NamedSharding(layout.mesh, layout.stack_spec(np.ndim(stack) - lead)))  # type: ignore[arg-type]
    if lead:
        return sk.PartialArray(array, layout, logical)
    return array if logical is None else sk.Padded(array, logical)


def source(seed: Any, layout: sk.Layout, shape: tuple[int, ...], dtype: Any) -> tuple[Any, np.ndarray]:
    """An array in this layout, every contribution random, and its value."""
    rng = np.random.default_rng(random.Random(str(seed)).getrandbits(32))
    lead = tuple(layout.mesh.shape[a] for a in layout.partial_axes)
    stack = contributions(rng, layout.reduce, dtype, lead + shape)
    return place(stack, layout), reduced(stack, layout)


def padded_source(seed: Any, layout: sk.Layout, shape: tuple[int, ...], garbage: float) -> tuple[Any, np.ndarray]:
    """The same of a shape that needn't divide: a Padded (or PartialArray of one) with garbage in its tails."""
    rng = np.random.default_rng(random.Random(str(seed)).getrandbits(32))
    lead = tuple(layout.mesh.shape[a] for a in layout.partial_axes)
    stack = np.full(lead + layout.padded_shape(shape), garbage)
    inner = (..., *(slice(size) for size in shape))
    stack[inner] = contributions(rng, layout.reduce, "float64", lead + shape)
    return place(stack, layout, shape), reduced(stack[inner], layout)


def whole(array: jax.Array) -> np.ndarray:
    """The array by NumPy; every device is asked, and those that should hold the same do."""
    found = np.asarray(array)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), found[shard.index])
    return found


def check(y: Any, goal: sk.Layout, value: np.ndarray, *, padded: bool = False) -> None:
    """The type, the placement on every device and the value of a reshard's result."""
    shape = value.shape
    assert (tuple(y.shape), y.dtype) == (shape, value.dtype)
    assert sk.placements(y) == goal.resolved(len(shape)).placements
    if goal.partial_axes:
        assert isinstance(y, sk.PartialArray)
        assert y.logical_shape == (shape if padded else None)
        assert y.layout == goal.resolved(len(shape))
    else:
        assert isinstance(y, sk.Padded if padded else jax.Array)
    array: Any = getattr(y, "stack" if goal.partial_axes else "array", y)
    lead = tuple(goal.mesh.shape[a] for a in goal.partial_axes)
    assert array.shape == lead + goal.padded_shape(shape)
    spec = goal.stack_spec(len(shape))
    assert array.sharding.is_equivalent_to(NamedSharding(goal.mesh, spec), array.ndim)  # type: ignore[arg-type]
    inner = (..., *(slice(size) for size in shape))
    found = np.asarray(array) if padded else whole(array)
    np.testing.assert_array_equal(reduced(found[inner], goal), value)


def many(goals: list[sk.Layout], source: sk.Layout, *, explicit: bool = False) -> Any:
    """One program that brings its argument to each of the goals."""

    def run(x):
        src = None if explicit or isinstance(x, sk.PartialArray) else source
        return [sk.reshard(x, goal, src=src) for goal in goals]

    return jax.jit(run)


__all__ = [
    "KINDS",
    "MESHES",
    "REDUCE",
    "by_source",
    "check",
    "contributions",
    "dtype_for",
    "even_shape",
    "layouts",
    "many",
    "mesh_of",
    "padded_source",
    "pairs",
    "place",
    "reduced",
    "sample",
    "source",
    "whole",
]
