"""``parallelize``: a plan applied to the layers of a model, by path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import linen, nnx
from jax.sharding import AbstractMesh, Mesh

from shardkit.meshes import concrete_mesh, holds_arrays, resolve_mesh
from shardkit.parallel.config import optimizer_for, read_config
from shardkit.parallel.linen.model import LinenPlan, with_plan
from shardkit.parallel.matching import Plans, read_plans
from shardkit.parallel.nnx.apply import apply_plans, place, variables_of
from shardkit.parallel.ready.guessing import ReadyPlan


def parallelize(
    model: Any,
    plan: Plans | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    strict: bool = True,
    config: Mapping[str, Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Any:
    """Apply plans to the layers of a model, by path.

    Parameters keep their names and shapes, and the model's own code stays as it is; layers that the plan names run over
    devices as it says. Every parameter is placed on the mesh: as a plan says, else whole on every device. Batch norms,
    with a plan or without, have the statistics of the whole batch, in ``sk.value_and_grad`` as well.

    Args:
      model: an ``nnx.Module``, which changes in place; a function that makes one, which is then made with every
        parameter where it goes (never whole on one device), with the values it has unsharded; or a ``linen.Module``,
        whose copy under the plan is returned: its ``init`` makes variables where they go. On devices that are only
        described (``sk.target_mesh``) what's made are ``jax.ShapeDtypeStruct``, for ``sk.explain`` and its kin.
      plan: ``{path pattern: plan}``, or a list of plans for a pattern. In a pattern ``*`` is one level and ``**`` any
        number of levels, and ``""`` is the model itself; one that ends in ``**`` takes every layer below that the plan
        knows, any other must match only such layers. A compiled regex must match the whole path. ``sk.plans`` makes
        plans for whole models.
      mesh: else the ambient mesh.
      strict: a pattern that matches nothing, or a layer of the wrong kind, is an error; with ``strict=False`` a
        warning. Of a linen model that's found out when it's called.
      config: all at once, in place of ``plan``: ``{"dp": {"axis": "dp", "stage": 2}, "mp": {"plan": {...}},
        "sp": {"axis": "sp", "dim": "W"}}``, each of them optional. "dp" spreads the batch, and shards optimizer state
        (stage 1), gradients (2), parameters (3); 0: none of them. "mp" is a plan. "sp" is a plan, or an axis and a
        dim for ``sk.ConvParallel`` on every layer that knows it.
      optimizer: an optax optimizer. The result is then ``(model, optimizer)``: it takes gradients as
        ``sk.value_and_grad`` gives them, and keeps its state as ``config["dp"]["stage"]`` says.

    Returns:
      The model, or ``(model, optimizer)``.

    Raises:
      ValueError: a pattern that matches nothing or a wrong layer (``strict``); a mesh axis the mesh doesn't have; two
        plans that fight over a layer or a parameter; sizes or heads that don't divide; unknown keys of ``config``;
        neither or both of ``plan`` and ``config``; an ``optimizer`` without ``config``.
      TypeError: no model, or not a plan object.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, shardkit as sk
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.down(nnx.relu(self.up(x)))
      >>> plan = {"up": sk.ColWiseParallel("tp"), "down": sk.RowWiseParallel("tp")}
      >>> net = sk.parallelize(Net(nnx.Rngs(0)), plan, sk.make_mesh({"tp": 1}))
      >>> sk.placements(net.up.kernel[...]), net(jnp.ones((2, 4))).shape
      ((Shard(dim=1),), (2, 4))
    """
    where = concrete_mesh(resolve_mesh(mesh, what="parallelize"))
    if (plan is None) == (config is None):
        raise ValueError(
            "parallelize takes a plan or a config (one of them), e.g. plan={'mlp/up': sk.ColWiseParallel()}"
        )
    if optimizer is not None and config is None:
        raise ValueError(
            'parallelize: optimizer= goes with config=, which says how it is sharded: {"dp": {"axis": "dp", '
            '"stage": 2}}; with a plan, call sk.shard_optimizer yourself'
        )
    read = None if config is None else read_config(config, where)
    given = plan if read is None else read.plans
    if isinstance(model, linen.Module):
        done: Any = with_plan(model, LinenPlan.of(given, where, strict))
    elif isinstance(model, nnx.Module):
        place(model, apply_plans(model, _plans_for(model, given, where), where, strict))
        done = model
    elif callable(model) and _needs_nothing(model):
        done = _create(model, given, where, strict)
    else:
        raise TypeError(
            "parallelize takes a flax.nnx.Module, a flax.linen.Module, or a function without arguments that makes an "
            f"nnx.Module; got {model!r}. For parameters without a module there is sk.parallelize_params"
        )
    if optimizer is None:
        return done
    assert read is not None
    return done, optimizer_for(read, optimizer, where)


def _plans_for(model: nnx.Module, given: Any, mesh: Mesh | AbstractMesh) -> Any:
    return read_plans(given.guess(model, mesh=mesh) if isinstance(given, ReadyPlan) else given, mesh)


def _needs_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _create(make: Callable[[], Any], given: Any, mesh: Mesh | AbstractMesh, strict: bool) -> nnx.Module:
    """A model made with every variable where it goes."""
    model = nnx.eval_shape(make)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"parallelize: the function made a {type(model).__name__}, not an nnx.Module")
    places = apply_plans(model, _plans_for(model, given, mesh), mesh, strict)
    if not holds_arrays(mesh):
        place(model, places)
        return model
    variables = [variable for _, variable in variables_of(model)]
    placed = [i for i, variable in enumerate(variables) if id(variable) in places]
    others = [i for i in range(len(variables)) if i not in placed]

    def values(of: tuple[int, ...]) -> list[Any]:
        made = [variable.get_raw_value() for _, variable in variables_of(make())]
        return [made[i] for i in of]

    found = jax.jit(values, static_argnums=0, out_shardings=[places[id(variables[i])] for i in placed])(tuple(placed))
    rest = jax.jit(values, static_argnums=0)(tuple(others)) if others else []
    for i, value in zip((*placed, *others), (*found, *rest), strict=True):
        variables[i].set_raw_value(value)
    return model
