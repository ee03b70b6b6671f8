"""`placed_optimizer`: an optax optimizer whose state and updates stay where the parameters live; nothing is sharded."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardkit.arrays.placing import constrain
from shardkit.meshes import or_stand_in
from shardkit.optim.described import any_described, is_described
from shardkit.optim.homes import check_match, homes_of, labelled, places_beside
from shardkit.optim.reduce import reduce_gradients
from shardkit.optim.stored import is_leaf
from shardkit.placements import AnyMesh
from shardkit.reshard import reshard
from shardkit.static import Static


class PlacedState(NamedTuple):
    """State of such an optimizer.

    Attributes:
      inner: the state of the optimizer within, beside the parameters.
      homes: where each parameter lives; no arrays.
    """

    inner: Any
    homes: Static


def placed_optimizer(
    tx: optax.GradientTransformation, axis: str | None, mesh: AnyMesh
) -> optax.GradientTransformationExtraArgs:
    """``tx`` on gradients that are reduced all together first, if they wait for that.

    Without it the compiler may leave an updated parameter where its gradient happened to be.

    Args:
      tx: any optax transformation.
      axis: the mesh axis that Partial gradients wait for; None: there are none.
      mesh: of the parameters, whose places ``init`` reads from them (outside ``jit``).
    """
    within = optax.with_extra_args_support(tx)

    def placed(tree: Any, homes: Any) -> Any:
        here = or_stand_in(mesh)
        place = places_beside(homes, None, here)

        def one(path: Any, x: Any) -> Any:
            if not hasattr(x, "ndim") or jnp.issubdtype(x.dtype, jax.dtypes.extended):
                return x
            spec = place(path, x).spec_for(x.ndim)
            return reshard(x, spec, here) if is_described(x) else constrain(x, here, spec)

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: Any) -> PlacedState:
        homes = homes_of(params, mesh, None)
        if any_described(params):
            inner = placed(jax.eval_shape(within.init, params), homes)
        else:
            inner = jax.jit(lambda p: placed(within.init(p), homes))(params)
        return PlacedState(inner, Static(homes))

    def update(grads: Any, state: PlacedState, params: Any = None, **extra: Any) -> tuple[Any, PlacedState]:
        homes = state.homes.value
        check_match(grads, homes)
        if axis is not None:
            leaves, structure = jax.tree.flatten(grads, is_leaf=is_leaf)
            leaves = [labelled(x, home.layout(or_stand_in(mesh))) for x, home in zip(leaves, homes, strict=True)]
            grads = reduce_gradients(jax.tree.unflatten(structure, leaves), "all_reduce", axis=axis)
        updates, inner = within.update(placed(grads, homes), state.inner, params, **extra)
        return placed(updates, homes), PlacedState(placed(inner, homes), state.homes)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]
