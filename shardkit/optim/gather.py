"""Sharded updates brought back together: the way home, in few collectives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit import scopes
from shardkit.optim.buckets import pack
from shardkit.optim.stored import shorter
from shardkit.optim.together import limit_on, on_blocks
from shardkit.placements import AnyMesh, Layout
from shardkit.reshard import reshard
from shardkit.reshard.factors import whole
from shardkit.reshard.local import Step, grown, join, take
from shardkit.reshard.route import state_in
from shardkit.reshard.states import Problem, State


def gather_together(
    leaves: Sequence[jax.Array],
    here: Sequence[Layout],
    homes: Sequence[Layout],
    *,
    bucket_bytes: int | None = None,
    gather_dtype: Any = None,
) -> list[jax.Array]:
    """Arrays taken from where they are sharded to layouts with fewer shards.

    Args:
      leaves: arrays.
      here: the layout of each, on one mesh; put there first, where it isn't yet.
      homes: where each goes, on the same mesh: usually some of the same shards.
      bucket_bytes: as in ``sk.reduce_gradients``.
      gather_dtype: floats that are longer travel in this dtype; None: in their own.

    Returns:
      The arrays at their homes, of the dtypes they had.
    """
    done = list(leaves)
    fused: list[tuple[int, _Job]] = []
    for i, (x, at, home) in enumerate(zip(leaves, here, homes, strict=True)):
        job = _job(x, at, home, gather_dtype)
        if job is None:
            done[i] = reshard(x, home.spec_for(x.ndim), home.mesh)
        else:
            fused.append((i, job))
    if fused:
        mesh = homes[0].mesh
        placed = [reshard(leaves[i], job.source.spec_for(leaves[i].ndim), mesh) for i, job in fused]
        gathered = _compiled(mesh, tuple(job for _, job in fused), bucket_bytes)(placed)
        for (i, _), x in zip(fused, gathered, strict=True):
            done[i] = x
    return done


@dataclasses.dataclass(frozen=True)
class _Job:
    """One leaf: where it is, where it goes, the same in factors, over which it's gathered, and in which dtype."""

    source: Layout
    target: Layout
    problem: Problem
    states: tuple[State, State]
    over: tuple[int, ...]
    dtype: np.dtype

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of what one device has of it."""
        return self.problem.block_shape(self.states[0])


def _job(x: Any, source: Layout, target: Layout, dtype: Any) -> _Job | None:
    """None where home isn't just fewer cuts, each of which divides."""
    problem = Problem(whole(dict(source.mesh.shape)), tuple(x.shape), x.dtype.itemsize)
    before, after = (state_in(problem, end) for end in (source, target))
    kept = all(old[: len(new)] == new for old, new in zip(before.dims, after.dims, strict=True))
    even = all(size % problem.parts(cut) == 0 for size, cut in zip(x.shape, before.dims, strict=True))
    if before == after or not kept or not even or x.size == 0:
        return None
    over = tuple(sorted(f for cut in grown(after, before).values() for f in cut))
    return _Job(source, target, problem, (before, after), over, np.dtype(shorter(dtype, x) or x.dtype))


@functools.lru_cache(256)
def _compiled(mesh: AnyMesh, jobs: tuple[_Job, ...], bucket_bytes: int | None):
    sizes = [int(np.prod(job.piece)) for job in jobs]
    itemsizes = [job.dtype.itemsize * job.problem.parts(job.over) for job in jobs]
    buckets = pack([(job.over, job.dtype) for job in jobs], sizes, itemsizes, limit_on(mesh, bucket_bytes))

    def body(blocks: list[jax.Array]) -> list[jax.Array]:
        done: list[Any] = [None] * len(jobs)
        for bucket in buckets:
            members = [jobs[slot.leaf] for slot in bucket.slots]
            short = [blocks[slot.leaf].astype(job.dtype) for slot, job in zip(bucket.slots, members, strict=True)]
            with scopes.scope(scopes.PARAMETERS):
                found = _whole(bucket.slots, members, short, mesh.axis_names)
            for slot, x in zip(bucket.slots, found, strict=True):
                done[slot.leaf] = x.astype(blocks[slot.leaf].dtype)
        return done

    ndims = [len(job.problem.shape) for job in jobs]
    return on_blocks(body, mesh, [job.source for job in jobs], [job.target for job in jobs], ndims)


def _whole(slots: Sequence[Any], members: Sequence[_Job], short: Sequence[jax.Array], axis_names: Any) -> list[Any]:
    """The leaves of a bucket put together, in one collective."""
    if len(members) == 1:
        return [take(members[0].problem, [Step("all_gather", *members[0].states)], axis_names, short[0])]
    names = members[0].problem.factors.whole_axes(members[0].over)
    rows = lax.all_gather(jnp.concatenate([jnp.ravel(x) for x in short]), names)
    return [
        _joined(job, rows[:, slot.start : slot.start + slot.size]) for slot, job in zip(slots, members, strict=True)
    ]


def _joined(job: _Job, rows: jax.Array) -> jax.Array:
    """The block at home, of one row a device."""
    before, after = job.states
    return join(job.problem, rows.reshape(-1, *job.piece), grown(after, before), after, job.over)
