"""`shard_optimizer`: any optax optimizer with its state spread over devices."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh

from shardkit.arrays import PartialArray, is_whole
from shardkit.meshes import ambient_mesh, concrete_mesh, mesh_of, or_stand_in
from shardkit.optim.described import any_described, is_described
from shardkit.optim.gather import gather_together
from shardkit.optim.homes import Home, check_match, homes_of, labelled, named_path, places_beside
from shardkit.optim.reduce import reduce_to
from shardkit.optim.stages import ShardingStage1, ShardingStage2
from shardkit.optim.stored import FlatShard, is_leaf, load, shape_of, store
from shardkit.optim.targets import check_axis, check_fuse, state_layout
from shardkit.placements import AnyMesh, Layout
from shardkit.reshard import reshard
from shardkit.static import Static


class ShardedState(NamedTuple):
    """State of a sharded optimizer.

    Attributes:
      inner: the state of the optimizer within, leaf by leaf as it is kept: in its shape, or where no dim divides as one
        padded row.
      homes: where each parameter lives, which updates come back to; no arrays.
      shapes: of the leaves of ``inner`` that are kept as rows, by number; no arrays.
    """

    inner: Any
    homes: Static
    shapes: Static


def shard_optimizer(
    tx: optax.GradientTransformation,
    stage: ShardingStage1,
    *,
    fuse: str = "reduce_scatter",
    bucket_bytes: int | None = None,
    gather_dtype: Any = None,
    mesh: AnyMesh | None = None,
    reduce_dtype: Any = None,
    param_placements: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax optimizer whose state is sharded over a mesh axis; the numbers are those of one device.

    Gradients are reduced all together (``sk.reduce_gradients``), ``tx`` runs on sharded arrays in global view, so that
    norms and whole matrices are right, and updates come back where the parameters live. Source: S. Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20, https://arxiv.org/abs/1910.02054.

    Args:
      tx: any optax transformation.
      stage: ``sk.ShardingStage1(axis)``, ``2`` or ``3``.
      fuse: how Partial gradients are reduced: "reduce_scatter", or "all_reduce" (stage 1 only).
      bucket_bytes: leaves are reduced together up to about so many bytes a device and collective; 0: each by itself;
        None: what is best on the platform.
      gather_dtype: updates travel back in this dtype (bfloat16, say); None: in their own.
      mesh: else that of the parameters, or the ambient one.
      reduce_dtype: sums of shorter floats are taken in this dtype (float32, say); None: in their own.
      param_placements: where the parameters live, in their structure: placements in any form, shardings, or the arrays.
        None: read from those that ``init`` is given, which within ``jit`` works on Explicit axes only (and else takes
        them for replicated).

    Returns:
      A transformation whose ``init`` builds state sharded, and whose ``update`` takes Partial or reduced gradients.
      Of parameters that are only described (``jax.ShapeDtypeStruct`` with shardings, on ``sk.target_mesh`` or any other
      mesh) ``init`` describes the state; ``jax.eval_shape(tx.init, params)`` would lose the shardings.

    Raises:
      ValueError: unknown ``fuse``, "all_reduce" with stage 2 or 3, an axis that the mesh doesn't have, no mesh,
        gradients that don't match the parameters.
      TypeError: ``stage`` is none, ``tx`` is no optax transformation.

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
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(f"shard_optimizer takes an optax transformation (optax.adam(1e-3), say), got {tx!r}")
    tx = optax.with_extra_args_support(tx)
    axis = stage.axis

    def place(tree: Any) -> AnyMesh:
        leaves = jax.tree.leaves(tree, is_leaf=is_whole)
        found = mesh if mesh is not None else next((m for m in map(mesh_of, leaves) if m is not None), None)
        found = ambient_mesh() if found is None else or_stand_in(found)
        if found is None:
            raise ValueError(
                "shard_optimizer found no mesh on the parameters; give mesh=, place them first, or call it under "
                "jax.set_mesh(mesh)"
            )
        check_axis(axis, found)
        return concrete_mesh(found)

    def init(params: Any) -> ShardedState:
        where = place(params)
        homes = homes_of(params, where, param_placements)

        rows: list[tuple[int, tuple[int, ...]]] = []

        def fresh(params: Any) -> Any:
            return _not_lookahead(tx.init(_seen(params)))

        def kept(state: Any) -> Any:
            inner, rows[:] = _kept(state, homes, axis, where)
            return inner

        if any_described(params):
            inner = kept(jax.eval_shape(fresh, params))
        else:  # in one program, so that nothing is ever whole on one device
            inner = jax.jit(lambda params: kept(fresh(params)))(params)
        return ShardedState(inner, Static(homes), Static(tuple(rows)))

    def update(grads: Any, state: ShardedState, params: Any = None, **extra: Any) -> tuple[Any, ShardedState]:
        where = place(grads if params is None else params)
        homes = state.homes.value
        check_match(grads, homes)
        at = [home.layout(where) for home in homes]
        cut = [state_layout(layout, home.shape, axis) for home, layout in zip(homes, at, strict=True)]

        def reduced(tree: Any) -> Any:
            """Gradients once they are summed, each beside its state."""
            leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
            leaves = [labelled(x, layout) for x, layout in zip(leaves, at, strict=True)]
            waiting = [i for i, x in enumerate(leaves) if isinstance(x, PartialArray)]
            ends = cut if fuse == "reduce_scatter" else at
            summed = reduce_to(
                [leaves[i] for i in waiting],
                [ends[i] for i in waiting],
                bucket_bytes=bucket_bytes,
                reduce_dtype=reduce_dtype,
            )
            for i, x in zip(waiting, summed, strict=True):
                leaves[i] = x
            return jax.tree.unflatten(structure, [beside(x, c) for x, c in zip(leaves, cut, strict=True)])

        def beside(x: Any, layout: Layout) -> Any:
            x = load(x)
            return reshard(x, layout.spec_for(x.ndim), where)

        grads, given = reduced(grads), grads
        if params is not None:
            leaves, structure = jax.tree.flatten(params, is_leaf=is_leaf)
            params = jax.tree.unflatten(structure, [beside(x, c) for x, c in zip(leaves, cut, strict=True)])
        # Line searches are handed the gradients once more, and others of the same kind.
        extra = {name: grads if tree is given else _whole(tree) for name, tree in extra.items()}
        inner = _loaded(state.inner, dict(state.shapes.value), axis)
        updates, inner = _updated(tx, (grads, inner, params), extra, homes, axis, where)
        leaves, structure = _checked(updates, homes)
        leaves = gather_together(leaves, cut, at, bucket_bytes=bucket_bytes, gather_dtype=gather_dtype)
        leaves = [store(x, layout, axis) if h.flat else x for x, h, layout in zip(leaves, homes, at, strict=True)]
        inner, rows = _kept(inner, homes, axis, where)
        return jax.tree.unflatten(structure, leaves), ShardedState(inner, state.homes, Static(tuple(rows)))

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _not_lookahead(state: Any) -> Any:
    if any(isinstance(x, optax.LookaheadState) for x in jax.tree.leaves(state, is_leaf=_is_lookahead)):
        raise TypeError(
            "shard_optimizer: optax.lookahead has two sets of parameters, and gradients of one of them; it can't be "
            "sharded"
        )
    return state


def _is_lookahead(x: Any) -> bool:
    return isinstance(x, optax.LookaheadState)


def _seen(tree: Any) -> Any:
    return jax.tree.map(load, tree, is_leaf=is_leaf)


def _whole(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reduce() if isinstance(x, PartialArray) else load(x), tree, is_leaf=is_leaf)


def _kept(state: Any, homes: tuple[Home, ...], axis: str, mesh: AnyMesh) -> tuple[Any, list[Any]]:
    """State leaves at their places, and the numbers and shapes of those that became rows.

    Those that stand for a parameter live beside it, the others by their shape.
    """
    place = places_beside(homes, axis, mesh)
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    done, rows = [], []
    for number, (path, x) in enumerate(leaves):
        if hasattr(x, "shape"):
            key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
            x = store(x, place(path, x), axis) if not key else reshard(x, {}, mesh) if is_described(x) else x
        if isinstance(x, FlatShard):
            rows.append((number, x.shape))
            x = x.flat
        done.append(x)
    return jax.tree.unflatten(structure, done), rows


def _loaded(state: Any, shapes: dict[int, tuple[int, ...]], axis: str) -> Any:
    """The state as the optimizer within knows it."""
    leaves, structure = jax.tree.flatten(state)
    leaves = [load(FlatShard(x, shapes[i], axis)) if i in shapes else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)


def _updated(
    tx: optax.GradientTransformationExtraArgs,
    arguments: tuple[Any, Any, Any],
    extra: dict[str, Any],
    homes: tuple[Home, ...],
    axis: str,
    mesh: AnyMesh,
) -> tuple[Any, Any]:
    """``tx.update`` in global view. Where axes are Explicit they are left to the compiler meanwhile.

    Types refuse to contract dims that are cut, which is what optimizers of whole matrices do.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return tx.update(*arguments, **extra)
    arrays = {name: x for name, x in extra.items() if not callable(x)}
    others = {name: x for name, x in extra.items() if callable(x)}

    def run(arguments: Any, arrays: Any) -> Any:
        return tx.update(*arguments, **arrays, **others)

    place = places_beside(homes, axis, mesh)
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arguments, arrays))
    shapes = jax.eval_shape(run, *described)
    specs = jax.tree_util.tree_map_with_path(lambda path, x: place(path, x).spec_for(x.ndim), shapes)
    with _ambient(mesh, traced=any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments))):
        return jax.sharding.auto_axes(run, out_sharding=specs)(arguments, arrays)  # type: ignore[call-arg]


def _ambient(mesh: AnyMesh, traced: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``auto_axes`` finds the mesh, eagerly too."""
    if ambient_mesh() is not None:
        return contextlib.nullcontext()
    if traced:
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext()


def _checked(updates: Any, homes: tuple[Home, ...]) -> tuple[list[Any], Any]:
    """Leaves and structure of what the optimizer returned."""
    found, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_leaf)
    given = [(named_path(path), None if isinstance(x, PartialArray) else shape_of(x)) for path, x in found]
    for one, home in itertools.zip_longest(given, homes):
        if home is None or one != (home.path, home.shape):
            path = one[0] if home is None else home.path
            got = "none" if one is None else "one not reduced" if one[1] is None else f"one of shape {one[1]}"
            raise ValueError(
                f"shard_optimizer: the optimizer within returned other updates than one for every parameter, of its "
                f"shape: for {jax.tree_util.keystr(path)!r}{f' of shape {home.shape}' if home else ''} {got}; it "
                "can't be sharded"
            )
    return [x for _, x in found], structure
