"""Doing the steps of a plan on one device's block, inside a region where every axis it uses is manual."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit import scopes
from shardkit.arrays.kinds import identity, reduce_stack
from shardkit.reshard.moves import Move
from shardkit.reshard.ordered import from_ordered, to_ordered
from shardkit.reshard.states import Problem, State

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a program: a move of ``moves.py``, or what a move becomes when it's transposed.

    Attributes:
      kind: a kind of ``Move``; "copy" (every device along the new Partial factors keeps its value: the transpose of a
        reduction) or "collect" (the transpose of "contribute").
      before, after: the states it leads from and to.
    """

    kind: str
    before: State
    after: State


def as_steps(source: State, moves: Iterable[Move]) -> tuple[Step, ...]:
    """Moves as steps, each with the states it leads from and to."""
    steps = []
    for move in moves:
        steps.append(Step(move.kind, source, move.after))
        source = move.after
    return tuple(steps)


def take(problem: Problem, steps: Sequence[Step], axis_names: tuple[str, ...], x: Array) -> Array:
    """The device's block after the steps.

    Args:
      problem: the logical shape, the mesh, the kinds of reduction.
      steps: from a plan.
      axis_names: the axes of ``problem.factors``, all manual here.
      x: the device's block (its contribution, where the state is Partial) without leading dims.
    """
    if 0 in problem.shape and steps:  # nothing to move, and collectives refuse it
        return jnp.zeros(problem.block_shape(steps[-1].after), x.dtype)
    here = _Here(problem, axis_names)
    with scopes.scope(scopes.RESHARD):
        for step in steps:
            x = _STEPS[step.kind](here, step, x)
    return x


@dataclasses.dataclass(frozen=True)
class _Here:
    problem: Problem
    axis_names: tuple[str, ...]

    def over(self, factors: Sequence[int]) -> tuple[tuple[str, ...], list[list[int]] | None]:
        """axis_name and axis_index_groups of a collective over these factors, the first one major."""
        whole = self.problem.factors.whole_axes(factors)
        return (whole, None) if whole is not None else (self.axis_names, self.problem.factors.groups(factors))

    def index(self, factors: Sequence[int]) -> Array | int:
        """This device's position along these factors together."""
        found: Array | int = 0
        for f in factors:
            axis, stride = self.problem.factors.home[f]
            size = self.problem.factors.sizes[f]
            found = found * size + lax.axis_index(axis) // stride % size
        return found


def _slice(here: _Here, step: Step, x: Array) -> Array:
    for dim, added in grown(step.before, step.after).items():
        size = here.problem.block(dim, step.after.dims[dim])
        x = _pad_dim(x, dim, size * here.problem.parts(added))
        x = lax.dynamic_slice_in_dim(x, here.index(added) * size, size, dim)
    return x


def _all_gather(here: _Here, step: Step, x: Array) -> Array:
    removed = grown(step.after, step.before)
    group = [f for factors in removed.values() for f in factors]
    axes, groups = here.over(group)
    if len(removed) == 1:
        (dim,) = removed
        x = lax.all_gather(x, axes, axis_index_groups=groups, axis=dim, tiled=True)
        return _crop(here.problem, x, step.after, [dim])
    pieces = lax.all_gather(x, axes, axis_index_groups=groups, axis=0)
    return join(here.problem, pieces, removed, step.after, group)


def _all_to_all(here: _Here, step: Step, x: Array) -> Array:
    removed, added = grown(step.after, step.before), grown(step.before, step.after)
    group = [f for factors in removed.values() for f in factors]
    axes, groups = here.over(group)
    if len(removed) == len(added) == 1 and list(removed.values()) == list(added.values()):
        (source,), (target,) = removed, added
        x = _pad_for(here.problem, x, step.after, added)
        x = lax.all_to_all(x, axes, target, source, axis_index_groups=groups, tiled=True)
        return _crop(here.problem, x, step.after, [source])
    pieces = cut(here.problem, x, added, step.after, group)
    pieces = lax.all_to_all(pieces, axes, 0, 0, axis_index_groups=groups, tiled=True)
    return join(here.problem, pieces, removed, step.after, group)


def _permute(here: _Here, step: Step, x: Array) -> Array:
    pairs = permutation(here.problem, step.before, step.after)
    if all(source == target for source, target in pairs):
        return x
    return lax.ppermute(x, here.axis_names, pairs)


def permutation(problem: Problem, before: State, after: State) -> list[tuple[int, int]]:
    """(source, target) of each device, in place wherever what it holds is what it needs."""
    held, needed = problem.contents(before), problem.contents(after)
    stay = held == needed
    sources: dict[int, list[int]] = {}
    for device in np.flatnonzero(~stay).tolist():
        sources.setdefault(int(held[device]), []).append(device)
    pairs = [(d, d) for d in np.flatnonzero(stay).tolist()]
    pairs += [(sources[int(needed[d])].pop(0), d) for d in np.flatnonzero(~stay).tolist()]
    return sorted(pairs)


def _reduce(here: _Here, step: Step, x: Array) -> Array:
    kind = here.problem.reduce or "sum"
    chosen = [f for f in step.before.partial if f not in step.after.partial]
    axes, groups = here.over(chosen)
    if kind == "prod":
        return reduce_stack("prod", lax.all_gather(x, axes, axis_index_groups=groups, axis=0), (0,))
    if kind in ("sum", "mean"):
        total = lax.psum(x, axes, axis_index_groups=groups)
        return total if kind == "sum" else total / np.asarray(here.problem.parts(tuple(chosen)), x.dtype)
    ordered = to_ordered(x, kind)
    extreme = lax.pmax if kind in ("max", "any") else lax.pmin
    return from_ordered(extreme(ordered, axes, axis_index_groups=groups), x.dtype)


def _reduce_scatter(here: _Here, step: Step, x: Array) -> Array:
    kind, added = here.problem.reduce or "sum", grown(step.before, step.after)
    group = [f for factors in added.values() for f in factors]
    axes, groups = here.over(group)
    if kind not in ("sum", "mean"):
        # No reduce-scatter of other kinds in JAX: the pieces travel as they are, for the same bytes.
        pieces = lax.all_to_all(
            cut(here.problem, x, added, step.after, group), axes, 0, 0, axis_index_groups=groups, tiled=True
        )
        return reduce_stack(kind, pieces, (0,))
    if len(added) == 1:
        (dim,) = added
        x = _pad_for(here.problem, x, step.after, added)
        total = lax.psum_scatter(x, axes, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
    else:
        pieces = cut(here.problem, x, added, step.after, group)
        total = lax.psum_scatter(pieces, axes, scatter_dimension=0, axis_index_groups=groups)
    return total if kind == "sum" else total / np.asarray(here.problem.parts(tuple(group)), x.dtype)


def _contribute(here: _Here, step: Step, x: Array) -> Array:
    kind = here.problem.wanted or "sum"
    if kind == "mean":
        return x  # every device along the axis holds the value itself
    nothing = identity(kind, x.dtype)
    embedded, holders = _contribution(step)
    for dim, factors in embedded.items():
        size = x.shape[dim]
        whole = [size * here.problem.parts(factors) if d == dim else s for d, s in enumerate(x.shape)]
        x = lax.dynamic_update_slice_in_dim(jnp.full(whole, nothing), x, here.index(factors) * size, dim)
    x = _crop(here.problem, x, step.after, embedded)
    return jnp.where(here.index(holders) == 0, x, nothing) if holders else x


def _collect(here: _Here, step: Step, x: Array) -> Array:
    """The transpose of "contribute": of each device's cotangent, what its contribution was made of."""
    contribute = Step("contribute", step.after, step.before)
    embedded, holders = _contribution(contribute)
    if holders:
        axes, groups = here.over(holders)
        mine = x if here.problem.reduce == "mean" else jnp.where(here.index(holders) == 0, x, 0)
        x = lax.psum(mine, axes, axis_index_groups=groups)
    for dim, factors in embedded.items():
        size = here.problem.block(dim, step.after.dims[dim])
        x = _pad_dim(x, dim, size * here.problem.parts(factors))
        x = lax.dynamic_slice_in_dim(x, here.index(factors) * size, size, dim)
    return x


def _copy(here: _Here, step: Step, x: Array) -> Array:
    """The transpose of a reduction: every contribution has the cotangent of the whole."""
    if here.problem.wanted != "mean":
        return x
    count = here.problem.parts(tuple(f for f in step.after.partial if f not in step.before.partial))
    return x / np.asarray(count, x.dtype)


_STEPS = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "contribute": _contribute,
    "collect": _collect,
    "copy": _copy,
}


def _contribution(step: Step) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    """Of a "contribute": the factors that cut each dim before, and those along which one device holds all."""
    embedded = grown(step.after, step.before)
    cut = {f for factors in embedded.values() for f in factors}
    new = [f for f in step.after.partial if f not in step.before.partial]
    return embedded, tuple(f for f in new if f not in cut)


def grown(small: State, large: State) -> dict[int, tuple[int, ...]]:
    """The factors that cut each dim in ``large`` on top of those in ``small``, major first."""
    pairs = list(enumerate(zip(small.dims, large.dims, strict=True)))
    assert all(b[: len(a)] == a for _, (a, b) in pairs if len(b) > len(a)), (small, large)
    return {d: b[len(a) :] for d, (a, b) in pairs if len(b) > len(a)}


def cut(problem: Problem, x: Array, added: dict[int, tuple[int, ...]], after: State, group: Sequence[int]) -> Array:
    """One piece for each device of the group, in its order, along a new first dim."""
    x = _pad_for(problem, x, after, added)
    shape: list[int] = []
    where = {}  # factor -> its dim in the reshaped array
    for dim, size in enumerate(x.shape):
        for f in added.get(dim, ()):
            where[f] = len(shape)
            shape.append(problem.factors.sizes[f])
        shape.append(size // problem.parts(added.get(dim, ())))
    front = [where[f] for f in group]
    rest = [d for d in range(len(shape)) if d not in front]
    pieces = x.reshape(shape).transpose(*front, *rest)
    return pieces.reshape(problem.parts(tuple(group)), *(shape[d] for d in rest))


def join(
    problem: Problem, pieces: Array, removed: dict[int, tuple[int, ...]], after: State, group: Sequence[int]
) -> Array:
    """The block that pieces along the first dim make up: one of each device of the group, in its order."""
    sizes = [problem.factors.sizes[f] for f in group]
    order: list[int] = []
    shape = []
    for dim, size in enumerate(pieces.shape[1:]):
        mine = removed.get(dim, ())
        order += [group.index(f) for f in mine] + [len(group) + dim]
        shape.append(size * problem.parts(mine))
    x = pieces.reshape(*sizes, *pieces.shape[1:]).transpose(order).reshape(shape)
    return _crop(problem, x, after, removed)


def _pad_for(problem: Problem, x: Array, after: State, added: dict[int, tuple[int, ...]]) -> Array:
    for dim, factors in added.items():
        x = _pad_dim(x, dim, problem.block(dim, after.dims[dim]) * problem.parts(factors))
    return x


def _pad_dim(x: Array, dim: int, size: int) -> Array:
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[dim] if d == dim else 0) for d in range(x.ndim)])


def _crop(problem: Problem, x: Array, after: State, dims: Iterable[int]) -> Array:
    """Without the padded tails of dims that are whole now."""
    for dim in dims:
        if not after.dims[dim]:
            x = lax.slice_in_dim(x, 0, problem.shape[dim], axis=dim)
    return x
