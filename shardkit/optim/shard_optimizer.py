"""`shard_optimizer`: any optax optimizer with its state spread over devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardkit.arrays import is_whole
from shardkit.meshes import concrete_mesh, mesh_of
from shardkit.optim.reduce import reduce_gradients
from shardkit.optim.stages import ShardingStage1, ShardingStage2
from shardkit.optim.stored import FlatShard, known_placements, load, store, whole_placements
from shardkit.optim.targets import check_fuse, target_placements
from shardkit.placements import AnyMesh, Placement
from shardkit.reshard import reshard
from shardkit.static import Static


class ShardedState(NamedTuple):
    """State of a sharded optimizer.

    Attributes:
      inner: the state of the optimizer within, leaf by leaf as it is kept.
      homes: placements of each parameter, where updates come back to; no arrays.
    """

    inner: Any
    homes: Static


def shard_optimizer(
    tx: optax.GradientTransformation,
    stage: ShardingStage1,
    *,
    fuse: str = "reduce_scatter",
    bucket_bytes: int | None = None,
    gather_dtype: Any = None,
    mesh: AnyMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax optimizer whose state is sharded over a mesh axis; the numbers are those of one device.

    Gradients are reduced all together (``sk.reduce_gradients``), ``tx`` runs on sharded arrays in global view, so that
    norms and whole matrices are right, and updates come back where the parameters live.

    Args:
      tx: any optax transformation.
      stage: ``sk.ShardingStage1(axis)``, ``2`` or ``3``.
      fuse: how Partial gradients are reduced: "reduce_scatter", or "all_reduce" (stage 1 only).
      bucket_bytes: see ``sk.reduce_gradients``.
      gather_dtype: updates travel back in this dtype (bfloat16, say); None: in their own.
      mesh: else that of the parameters.

    Returns:
      A transformation whose ``init`` builds state sharded, and whose ``update`` takes Partial or reduced gradients.

    Raises:
      ValueError: unknown ``fuse``, an axis that the mesh doesn't have, no mesh, gradients that don't match the
        parameters.
      TypeError: ``stage`` is none.

    Example:
      >>> import jax.numpy as jnp, optax, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> tx = sk.shard_optimizer(optax.sgd(0.5), sk.ShardingStage1("dp"), mesh=mesh)
      >>> params = {"w": sk.shard_tensor(jnp.ones(4), [sk.Replicate()], mesh)}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates["w"].tolist()
      [-0.5, -0.5, -0.5, -0.5]
    """
    check_fuse(fuse)
    if not isinstance(stage, ShardingStage1):
        raise TypeError(f"stage={stage!r}: use sk.ShardingStage1(axis), ShardingStage2(axis) or ShardingStage3(axis)")
    if fuse == "all_reduce" and isinstance(stage, ShardingStage2):
        raise ValueError(f'fuse="all_reduce" keeps whole gradients, which {stage} does not; use "reduce_scatter"')
    tx = optax.with_extra_args_support(tx)
    axis = stage.axis

    def place(tree: Any) -> AnyMesh:
        leaves = jax.tree.leaves(tree, is_leaf=is_whole)
        found = mesh if mesh is not None else next((m for m in map(mesh_of, leaves) if m is not None), None)
        if found is None:
            raise ValueError("shard_optimizer found no mesh on the parameters; give mesh=, or place them first")
        found = concrete_mesh(found)
        target_placements(whole_placements(found), (), axis, fuse, found)  # the axis is there
        return found

    def target(placements: tuple[Placement, ...], shape: tuple[int, ...], where: AnyMesh) -> tuple[Placement, ...]:
        return target_placements(placements, shape, axis, "reduce_scatter", where)

    def kept(state: Any, homes: Any, where: AnyMesh) -> Any:
        """State leaves at their places: those that stand for a parameter beside it, the others by their shape."""

        def put(path: Any, x: Any) -> Any:
            if not hasattr(x, "shape"):
                return x
            return store(x, target(_home_of(path, x, homes, where), x.shape, where), axis, where)

        return jax.tree_util.tree_map_with_path(put, state)

    def init(params: Any) -> ShardedState:
        where = place(params)
        homes = _homes(params, where)
        build = jax.jit(lambda p: kept(tx.init(p), homes, where))
        return ShardedState(build(params), Static(homes))

    def update(grads: Any, state: ShardedState, params: Any = None, **extra: Any) -> tuple[Any, ShardedState]:
        where = place(grads if params is None else params)
        homes = state.homes.value
        _check_match(grads, homes)
        grads = reduce_gradients(grads, fuse, axis=axis, bucket_bytes=bucket_bytes, mesh=where)

        def each(tree: Any, put: Any) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            return jax.tree.unflatten(structure, [put(x, h) for x, (_, _, h) in zip(leaves, homes, strict=True)])

        def beside(x: Any, home: Any) -> Any:
            return reshard(x, target(home, jnp.shape(x), where), where)

        def back(x: Any, home: Any) -> Any:
            if gather_dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
                return reshard(x.astype(gather_dtype), home, where).astype(x.dtype)
            return reshard(x, home, where)

        inner = jax.tree.map(load, state.inner, is_leaf=lambda x: isinstance(x, FlatShard))
        local = None if params is None else each(params, beside)
        updates, inner = tx.update(each(grads, beside), inner, local, **extra)
        return each(updates, back), ShardedState(kept(inner, homes, where), state.homes)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


Homes = tuple[tuple[Any, tuple[int, ...], tuple[Placement, ...]], ...]  # of each parameter: path, shape, placements


def _homes(params: Any, mesh: AnyMesh) -> Homes:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return tuple((tuple(path), jnp.shape(x), known_placements(x, mesh)) for path, x in leaves)


def _home_of(path: Any, x: Any, homes: Homes, mesh: AnyMesh) -> tuple[Placement, ...]:
    """Placements of the parameter that a state leaf stands for: one of its shape whose path ends the leaf's."""
    for own, shape, placements in homes:
        if shape == x.shape and tuple(path[len(path) - len(own) :]) == own:
            return placements
    return whole_placements(mesh)


def _check_match(grads: Any, homes: Homes) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_whole)
    given = [(tuple(path), tuple(x.shape)) for path, x in leaves]
    known = [(path, shape) for path, shape, _ in homes]
    if given != known:
        odd = next(iter([g for g in given if g not in known] + [k for k in known if k not in given]), given)
        name = jax.tree_util.keystr(odd[0]) if isinstance(odd, tuple) else ""
        raise ValueError(
            f"shard_optimizer: the gradients don't match the parameters that its state was made for, at {name!r} of "
            f"shape {odd[1]}; give a gradient for every parameter, of its shape"
        )
