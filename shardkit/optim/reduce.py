"""`reduce_gradients`: all Partial gradients of a step reduced together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardkit import scopes
from shardkit.arrays import PartialArray, from_unreduced, is_unreduced, is_whole
from shardkit.meshes import ambient_mesh, concrete_mesh, manual_axes, mesh_of
from shardkit.optim.buckets import Bucket, pack
from shardkit.optim.stored import known_layout
from shardkit.optim.targets import check_axis, check_fuse, target_layout
from shardkit.optim.together import limit_on, on_blocks
from shardkit.placements import AnyMesh, Layout
from shardkit.reshard import reshard
from shardkit.reshard.factors import whole
from shardkit.reshard.local import Step, cut, grown, take
from shardkit.reshard.route import state_in
from shardkit.reshard.states import Problem, State


def reduce_gradients(
    grads: Any,
    fuse: str = "reduce_scatter",
    *,
    axis: str,
    bucket_bytes: int | None = None,
    reduce_dtype: Any = None,
    mesh: AnyMesh | None = None,
) -> Any:
    """Reduce the Partial leaves of a tree together, in few collectives.

    With "all_reduce" every Partial axis becomes Replicate and shards stay. With "reduce_scatter" each device keeps its
    part: of the axes that don't cut the leaf, ``axis`` first and then the others in mesh order, each takes the lowest
    dim that none cuts yet and that it divides (else the next, else it replicates). A leaf that isn't Partial is placed
    likewise, by local slices where it is replicated.

    Leaves of equal dtype that are reduced over the same axes travel together: one collective over all of these axes
    for scattered ones (and one for what is left Partial over others), one for the rest.

    Args:
      grads: a pytree of ``PartialArray`` (sum or mean), JAX's ``unreduced`` arrays, and arrays. Tied weights are one
        leaf, as in the parameters.
      fuse: "reduce_scatter" or "all_reduce".
      axis: the mesh axis over which optimizer state is to be sharded.
      bucket_bytes: leaves are put together up to about so many bytes a device and collective; 0: each by itself, for
        the compiler to combine; None: what is best on the platform (``shardkit.optim.buckets.best_limit``).
      reduce_dtype: sums of shorter floats are taken in this dtype (float32, say: in float16 a mean may overflow before
        it's divided); None: in their own.
      mesh: else that of the leaves, or the ambient one.

    Returns:
      The tree, of arrays.

    Raises:
      ValueError: unknown ``fuse``, ``axis`` not on the mesh, no mesh, leaves on different meshes, a Partial of another
        kind, mesh axes that are manual here.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> g = sk.from_local([jnp.ones(2)], [sk.Partial()], mesh)
      >>> sk.reduce_gradients({"w": g}, axis="dp")["w"].tolist()
      [1.0, 1.0]
    """
    check_fuse(fuse)
    if manual_axes():
        raise ValueError(
            f"reduce_gradients takes whole arrays, but mesh axes {sorted(manual_axes())} are manual here (inside "
            "jax.shard_map); return the gradients as PartialArrays and call it outside"
        )
    leaves, tree = jax.tree.flatten(grads, is_leaf=is_whole)
    leaves = [from_unreduced(x) if is_unreduced(x) else x for x in leaves]
    where = _one_mesh(leaves, mesh) or ambient_mesh()
    if where is None:
        raise ValueError(
            "reduce_gradients found no mesh on the leaves; give mesh=, place them first, or call it under "
            "jax.set_mesh(mesh)"
        )
    where = concrete_mesh(where)
    check_axis(axis, where)
    fused = [i for i, x in enumerate(leaves) if isinstance(x, PartialArray) and x.logical_shape is None]
    targets = [
        target_layout(leaves[i].layout.on(where).resolved(leaves[i].ndim), leaves[i].shape, axis, fuse) for i in fused
    ]
    done = reduce_to([leaves[i] for i in fused], targets, bucket_bytes=bucket_bytes, reduce_dtype=reduce_dtype)
    for i, value in zip(fused, done, strict=True):
        leaves[i] = value
    for i in sorted(set(range(len(leaves))) - set(fused)):
        leaves[i] = _placed(leaves[i], axis, fuse, where)
    return jax.tree.unflatten(tree, leaves)


def reduce_to(
    leaves: Sequence[PartialArray], targets: Sequence[Layout], *, bucket_bytes: int | None, reduce_dtype: Any
) -> list[jax.Array]:
    """The same for leaves that are all Partial, each to a layout on one mesh: cut as it is, and by other axes."""
    if not leaves:
        return []
    deeper = [_deeper(x, target) for x, target in zip(leaves, targets, strict=True)]
    jobs = tuple(_job(x, target, reduce_dtype) for x, target in zip(leaves, deeper, strict=True))
    done = _compiled(targets[0].mesh, jobs, bucket_bytes)([x.stack for x in leaves])
    with scopes.scope(scopes.GRADIENTS):
        return [
            x if now is target else reshard(x, target.spec_for(x.ndim), target.mesh)
            for x, now, target in zip(done, deeper, targets, strict=True)
        ]


def _deeper(x: PartialArray, target: Layout) -> Layout:
    """The target with new axes behind those that cut a dim already, so that blocks are scattered as they lie.

    The target itself, where that's how it is.
    """
    own, wanted = (layout.dim_axes(x.ndim) for layout in (x.layout.on(target.mesh), target))
    entries = []
    for dim in range(x.ndim):
        have, want = own.get(dim, ()), wanted.get(dim, ())
        entries.append(have + tuple(n for n in want if n not in have) or None)
    if all(entry == wanted.get(dim) for dim, entry in enumerate(entries)):
        return target
    return Layout(target.mesh, PartitionSpec(*entries)).resolved(x.ndim)


def _one_mesh(leaves: Sequence[Any], mesh: AnyMesh | None) -> AnyMesh | None:
    found = mesh
    for leaf in leaves:
        own = mesh_of(leaf)
        if own is None:
            continue
        if found is None:
            found = own
        if tuple(found.shape.items()) != tuple(own.shape.items()):
            raise ValueError(
                f"reduce_gradients: leaves live on different meshes, {dict(found.shape)} and {dict(own.shape)}; "
                "sk.reshard them to one"
            )
        if not isinstance(found, jax.sharding.Mesh):
            found = own  # one that knows its devices, if any does
    return found


def _placed(x: Any, axis: str, fuse: str, mesh: AnyMesh) -> Any:
    """A leaf that isn't reduced with the others, at its target."""
    if not hasattr(x, "shape"):
        x = jnp.asarray(x)
    return reshard(x, target_layout(known_layout(x, mesh), x.shape, axis, fuse).spec_for(x.ndim), mesh)


@dataclasses.dataclass(frozen=True)
class _Job:
    """One leaf: where it is, where it goes, and by which sums.

    Attributes:
      layout, target: of the contributions, and of the result.
      problem, states: the same in factors: the source, the source cut by those axes along which it was replicated,
        and the target.
      scatter, total: the factors over which it is summed and scattered, and summed only.
      mean: the sum is divided by the number of contributions.
      dtype: that the sum is taken in.
    """

    layout: Layout
    target: Layout
    problem: Problem
    states: tuple[State, State, State]
    scatter: tuple[int, ...]
    total: tuple[int, ...]
    mean: bool
    dtype: np.dtype

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of a device's part of the result."""
        return self.problem.block_shape(self.states[2])

    @property
    def key(self) -> Any:
        """What leaves in one bucket have in common."""
        return (self.scatter, self.total, self.dtype)


def _job(x: PartialArray, target: Layout, reduce_dtype: Any) -> _Job:
    mesh = target.mesh
    layout = x.layout.on(mesh).resolved(x.ndim)
    if layout.reduce not in ("sum", "mean"):
        raise ValueError(f"reduce_gradients sums contributions, but got {x!r}; reduce it first: sk.reshard(x, ...)")
    problem = Problem(whole(dict(mesh.shape)), tuple(x.shape), x.dtype.itemsize, "sum", None)
    source, goal = (state_in(problem, end) for end in (layout, target))
    before = {f for dims in source.dims for f in dims}
    free = set(problem.free(source))
    sliced = tuple(tuple(f for f in dims if f in before or f in free) for dims in goal.dims)
    scatter = tuple(f for dims in goal.dims for f in dims if f in source.partial)
    dtype = np.dtype(x.dtype if reduce_dtype is None else jnp.promote_types(x.dtype, reduce_dtype))
    return _Job(
        layout=layout,
        target=target,
        problem=problem,
        states=(source, State(sliced, source.partial), State(goal.dims, ())),
        scatter=tuple(sorted(scatter)),
        total=tuple(f for f in source.partial if f not in scatter),
        mean=layout.reduce == "mean",
        dtype=dtype,
    )


@functools.lru_cache(256)
def _compiled(mesh: AnyMesh, jobs: tuple[_Job, ...], bucket_bytes: int | None):
    itemsizes = [job.dtype.itemsize * job.problem.parts(job.scatter) for job in jobs]
    sizes = [int(np.prod(job.piece)) for job in jobs]
    buckets = pack([job.key for job in jobs], sizes, itemsizes, limit_on(mesh, bucket_bytes))

    def body(stacks: list[jax.Array]) -> list[jax.Array]:
        done: list[Any] = [None] * len(jobs)
        mine = [_mine(job, stack, mesh) for job, stack in zip(jobs, stacks, strict=True)]
        for bucket in buckets:
            together = len(bucket.slots) > 1
            summed = _sum(bucket, jobs, [_row(jobs[s.leaf], mine[s.leaf]) for s in bucket.slots]) if together else None
            for slot in bucket.slots:
                job = jobs[slot.leaf]
                if summed is None:
                    piece = _alone(job, mine[slot.leaf], mesh)
                else:
                    piece = summed[slot.start : slot.start + slot.size].reshape(job.piece)
                if job.mean:
                    piece = piece / np.asarray(job.problem.parts(job.states[0].partial), piece.dtype)
                done[slot.leaf] = piece.astype(stacks[slot.leaf].dtype)
        return done

    ndims = [len(job.problem.shape) for job in jobs]
    return on_blocks(body, mesh, [job.layout for job in jobs], [job.target for job in jobs], ndims)


def _mine(job: _Job, stack: jax.Array, mesh: AnyMesh) -> jax.Array:
    """This device's contribution to what is reduced: cut by those axes of the target along which it was replicated."""
    source, sliced, _ = job.states
    x = stack.reshape(stack.shape[len(job.layout.partial_axes) :])
    if sliced != source:
        with scopes.scope(scopes.GRADIENTS):
            x = take(job.problem, [Step("slice", source, sliced)], tuple(mesh.axis_names), x)
    return x.astype(job.dtype)


def _alone(job: _Job, x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """One leaf reduced by itself, dim by dim as it lies: nothing is flattened."""
    _, sliced, goal = job.states
    scattered = State(goal.dims, job.total)
    steps = [Step("reduce_scatter", sliced, scattered)] if job.scatter else []
    steps += [Step("reduce", scattered, goal)] if job.total else []
    with scopes.scope(scopes.GRADIENTS):
        return take(job.problem, steps, tuple(mesh.axis_names), x)


def _row(job: _Job, x: jax.Array) -> jax.Array:
    """The contribution as a matrix: a row for each device that gets a piece of it."""
    if not job.scatter:
        return x.reshape(1, -1)
    _, sliced, goal = job.states
    added = grown(sliced, goal)
    return cut(job.problem, x, added, goal, job.scatter).reshape(job.problem.parts(job.scatter), -1)


def _sum(bucket: Bucket, jobs: Sequence[_Job], rows: list[jax.Array]) -> jax.Array:
    """What this device gets of a bucket: one row, summed."""
    job = jobs[bucket.slots[0].leaf]
    names = job.problem.factors.whole_axes
    matrix = jnp.concatenate(rows, axis=1)
    scatter, total = names(job.scatter), names(job.total)
    with scopes.scope(scopes.GRADIENTS):
        if scatter:
            matrix = lax.psum_scatter(matrix, scatter, scatter_dimension=0, tiled=True)
        return (lax.psum(matrix, total) if total else matrix)[0]
