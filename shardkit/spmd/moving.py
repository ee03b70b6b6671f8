"""What it costs to take a value from one place to another, and doing it on a device's block."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from shardkit.reshard.local import take
from shardkit.reshard.route import Ends, Route, between
from shardkit.spmd.placed import Placed, Sizes
from shardkit.spmd.rules.strategy import Type


def way(of: Type, source: Placed, goal: Placed, sizes: Sizes) -> Route:
    """The cheapest moves, those of ``sk.plan_reshard``.

    Keys of random numbers travel as the integers they're made of.
    """
    shape, itemsize = of.shape, int(of.dtype.itemsize)
    ends = [(p.dims, p.partial) for p in (source, goal)]
    return _way(tuple(sizes.items()), shape, itemsize, *ends, source.reduce, goal.reduce)


@functools.lru_cache(1 << 16)
def _way(
    sizes: tuple[tuple[str, int], ...],
    shape: tuple[int, ...],
    itemsize: int,
    source: Ends,
    goal: Ends,
    reduce: str | None,
    wanted: str | None,
) -> Route:
    """The search, once for all shapes whose dims the whole mesh divides: there bytes grow with the elements alone."""
    devices = math.prod(size for _, size in sizes)
    smallest = tuple(devices if size and size % devices == 0 else size for size in shape)
    found = between(sizes, smallest, itemsize, source, goal, reduce, wanted)
    if smallest == shape:
        return found
    larger = math.prod(s // t for s, t in zip(shape, smallest, strict=True) if t)
    moves = tuple(m._replace(bytes=m.bytes * larger, peak=m.peak * larger) for m in found.moves)
    return dataclasses.replace(found, problem=dataclasses.replace(found.problem, shape=shape), moves=moves)


def cost(of: Type, source: Placed, goal: Placed, sizes: Sizes) -> tuple[int, int]:
    """Bytes that one device receives, and the number of collectives."""
    return (0, 0) if source == goal else way(of, source, goal, sizes).cost


def move(route: Route, sizes: Sizes, block: Any) -> Any:
    """This device's block after the moves."""
    if jnp.issubdtype(block.dtype, jax.dtypes.prng_key):
        return _move_keys(route, sizes, block)
    return take(route.problem, route.steps, tuple(sizes), block)


def _move_keys(route: Route, sizes: Sizes, block: Any) -> Any:
    data = jax.random.key_data(block)
    more = data.shape[block.ndim :]
    flat = data.reshape(*block.shape, math.prod(more))
    moved = [take(route.problem, route.steps, tuple(sizes), flat[..., i]) for i in range(flat.shape[-1])]
    joined = jnp.stack(moved, -1)
    return jax.random.wrap_key_data(joined.reshape(*joined.shape[:-1], *more), impl=jax.random.key_impl(block))
