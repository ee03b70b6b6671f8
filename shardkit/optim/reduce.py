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

from shardkit.arrays import PartialArray, from_unreduced, is_unreduced, is_whole
from shardkit.meshes import manual_axes, mesh_of
from shardkit.optim.buckets import Bucket, pack
from shardkit.optim.stored import known_placements, whole_placements
from shardkit.optim.targets import check_fuse, target_placements
from shardkit.placements import AnyMesh, Layout
from shardkit.reshard import reshard
from shardkit.reshard.factors import whole
from shardkit.reshard.local import Step, cut, take
from shardkit.reshard.route import state_of
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
      bucket_bytes: leaves are put together up to about so many bytes a device and collective; None: without bound.
      reduce_dtype: sums of shorter floats are taken in this dtype (float32, say); None: in their own.
      mesh: else that of the leaves.

    Returns:
      The tree, of arrays.

    Raises:
      ValueError: unknown ``fuse``, ``axis`` not on the mesh, leaves on different meshes, a Partial of another kind.

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
    where = _one_mesh(leaves, mesh)
    if where is None:
        raise ValueError("reduce_gradients found no mesh on the leaves; give mesh=, or place them first")
    target_placements(whole_placements(where), (), axis, fuse, where)  # the axis is there
    fused = [i for i, x in enumerate(leaves) if isinstance(x, PartialArray) and x.logical_shape is None]
    jobs = tuple(_job(leaves[i], axis, fuse, where, reduce_dtype) for i in fused)
    done = _compiled(where, jobs, bucket_bytes)([leaves[i].stack for i in fused]) if fused else []
    for i, value in zip(fused, done, strict=True):
        leaves[i] = value
    for i in sorted(set(range(len(leaves))) - set(fused)):
        leaves[i] = _placed(leaves[i], axis, fuse, where)
    return jax.tree.unflatten(tree, leaves)


def _one_mesh(leaves: Sequence[Any], mesh: AnyMesh | None) -> AnyMesh | None:
    found = mesh
    for leaf in leaves:
        own = mesh_of(leaf)
        if own is None:
            continue
        if found is None:
            found = own
        if dict(found.shape) != dict(own.shape):
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
    return reshard(x, target_placements(known_placements(x, mesh), x.shape, axis, fuse, mesh), mesh)


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


def _job(x: PartialArray, axis: str, fuse: str, mesh: AnyMesh, reduce_dtype: Any) -> _Job:
    layout = x.layout.on(mesh).resolved(x.ndim)
    if layout.reduce not in ("sum", "mean"):
        raise ValueError(f"reduce_gradients sums contributions, but got {x!r}; reduce it first: sk.reshard(x, ...)")
    target = Layout(mesh, target_placements(layout.placements, x.shape, axis, fuse, mesh))
    factors = whole(dict(mesh.shape))
    problem = Problem(factors, tuple(x.shape), x.dtype.itemsize, "sum", None)
    ends = []
    for end in (layout, target):
        dims = end.dim_axes(x.ndim)
        ends.append(state_of(factors, tuple(dims.get(d, ()) for d in range(x.ndim)), end.partial_axes))
    source, goal = ends
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
    buckets = pack([job.key for job in jobs], sizes, itemsizes, bucket_bytes)

    def body(stacks: list[jax.Array]) -> list[jax.Array]:
        done: list[Any] = [None] * len(jobs)
        for bucket in buckets:
            rows = [_row(jobs[slot.leaf], stacks[slot.leaf], mesh) for slot in bucket.slots]
            summed = _sum(bucket, jobs, rows, mesh)
            for slot in bucket.slots:
                job = jobs[slot.leaf]
                piece = summed[slot.start : slot.start + slot.size].reshape(job.piece)
                if job.mean:
                    piece = piece / np.asarray(job.problem.parts(job.states[0].partial), piece.dtype)
                done[slot.leaf] = piece.astype(stacks[slot.leaf].dtype)
        return done

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=([job.layout.stack_spec(len(job.problem.shape)) for job in jobs],),
            out_specs=[job.target.stack_spec(len(job.problem.shape)) for job in jobs],
            check_vma=False,  # says where everything is, and isn't differentiated
        )
    )


def _row(job: _Job, stack: jax.Array, mesh: AnyMesh) -> jax.Array:
    """The contribution as a matrix: a row for each device that gets a piece of it."""
    source, sliced, goal = job.states
    x = stack.reshape(stack.shape[len(job.layout.partial_axes) :])
    if sliced != source:
        x = take(job.problem, [Step("slice", source, sliced)], tuple(mesh.axis_names), x)
    x = x.astype(job.dtype)
    if not job.scatter:
        return x.reshape(1, -1)
    added = {d: new[len(old) :] for d, (old, new) in enumerate(zip(sliced.dims, goal.dims, strict=True)) if new != old}
    return cut(job.problem, x, added, goal, job.scatter).reshape(job.problem.parts(job.scatter), -1)


def _sum(bucket: Bucket, jobs: Sequence[_Job], rows: list[jax.Array], mesh: AnyMesh) -> jax.Array:
    """What this device gets of a bucket: one row, summed."""
    job = jobs[bucket.slots[0].leaf]
    names = job.problem.factors.whole_axes
    matrix = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)
    scatter, total = names(job.scatter), names(job.total)
    if scatter:
        matrix = lax.psum_scatter(matrix, scatter, scatter_dimension=0, tiled=True)
    return (lax.psum(matrix, total) if total else matrix)[0]
