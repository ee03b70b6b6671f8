"""One dictionary that says all: data, model and space."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import optax

from shardkit.optim import (
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    shard_optimizer,
)
from shardkit.optim.placed_optimizer import placed_optimizer
from shardkit.parallel.paths import PathPattern
from shardkit.parallel.plans import ConvParallel, DataParallel, FullyShard
from shardkit.parallel.plans.base import listed
from shardkit.parallel.ready.guessing import ReadyPlan
from shardkit.placements import AnyMesh

_KEYS = {"dp": ("axis", "stage"), "mp": ("plan",), "sp": ("axis", "dim", "plan")}
_STAGES = {1: ShardingStage1, 2: ShardingStage2, 3: ShardingStage3}


@dataclasses.dataclass(frozen=True)
class Config:
    """What a user's dictionary says.

    Attributes:
      plans: of layers, by pattern.
      axis: of the batch; None: it isn't spread.
      stage: what of the optimizer is sharded over it, 0 - 3.
    """

    plans: Mapping[PathPattern, Any]
    axis: str | None
    stage: int


def read_config(config: Any, mesh: AnyMesh) -> Config:
    """The dictionary, checked.

    Raises:
      TypeError: not a mapping of mappings.
      ValueError: unknown keys or values, missing ones, an axis that the mesh doesn't have.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f'config is a dictionary, e.g. {{"dp": {{"axis": "dp", "stage": 2}}}}; got {config!r}')
    _check_keys(config, tuple(_KEYS), "config")
    for part, given in config.items():
        if not isinstance(given, Mapping):
            raise TypeError(f"config[{part!r}] is a dictionary with keys among {_KEYS[part]}; got {given!r}")
        _check_keys(given, _KEYS[part], f"config[{part!r}]")
    plans: dict[PathPattern, Any] = {}
    axis, stage = None, 0
    if "dp" in config:
        axis, stage = config["dp"].get("axis", "dp"), config["dp"].get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, *_STAGES):
            raise ValueError(
                f"config['dp']['stage'] is 0 (nothing is sharded), 1 (optimizer state), 2 (and gradients) or 3 (and "
                f"parameters); got {stage!r}"
            )
        if axis not in mesh.axis_names:
            raise ValueError(f"config['dp'] uses mesh axis {axis!r}, but the mesh has {tuple(mesh.axis_names)}")
        _add(plans, {"": FullyShard(axis) if stage == 3 else DataParallel(axis)})
    if "mp" in config:
        if "plan" not in config["mp"]:
            raise ValueError('config["mp"] needs a plan: {"plan": {"mlp/up": sk.ColWiseParallel("tp"), ...}}')
        plans = _merged(plans, config["mp"]["plan"])
    if "sp" in config:
        plans = _merged(plans, _spatial(config["sp"]))
    return Config(plans, axis, stage)


def _spatial(given: Mapping[str, Any]) -> Mapping[PathPattern, Any]:
    if "plan" not in given:
        return {"**": ConvParallel(given.get("axis", "sp"), given.get("dim"))}
    if set(given) != {"plan"}:
        extra = sorted(set(given) - {"plan"})
        raise ValueError(f"config['sp'] has a plan, which says the axis and the dim itself; leave {extra} out")
    return given["plan"]


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.3)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{what} has an unknown key {key!r}{hint}; known are {known}")


def _merged(plans: dict[PathPattern, Any], more: Any) -> Any:
    """Plans added to those there are; a plan that waits for a model (``sk.plans``) takes them in."""
    if not isinstance(more, Mapping):
        raise TypeError(f"a plan maps path patterns to plan objects; got {more!r}")
    if isinstance(plans, ReadyPlan):
        return plans.with_plans(more)
    if isinstance(more, ReadyPlan):
        return more.with_plans(plans)
    _add(plans, more)
    return plans


def _add(plans: dict[PathPattern, Any], more: Mapping[PathPattern, Any]) -> None:
    for pattern, items in more.items():
        before = listed(plans.get(pattern, ()))
        plans[pattern] = [*before, *listed(items)]


def optimizer_for(config: Config, tx: optax.GradientTransformation, mesh: AnyMesh) -> Any:
    """The optimizer, with its state as the config says; it takes Partial gradients.

    Raises:
      TypeError: not an optax optimizer.
    """
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(f"optimizer is an optax transformation (optax.adamw(1e-3), say); got {tx!r}")
    if config.axis is not None and config.stage:
        return shard_optimizer(tx, _STAGES[config.stage](config.axis), mesh=mesh)
    return placed_optimizer(tx, config.axis, mesh)
