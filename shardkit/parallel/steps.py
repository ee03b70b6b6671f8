"""What a layer's plans put around its call, for nnx and linen alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardkit.parallel.around import (
    After,
    Around,
    Before,
    CastOnce,
    Cut,
    CutBatch,
    CutInputs,
    CutResult,
    OneMaskForAll,
    UserInput,
    UserOutput,
)
from shardkit.parallel.plans import (
    ColWiseParallel,
    DataParallel,
    FullyShard,
    LayerPlan,
    PrepareLayerInput,
    PrepareLayerOutput,
    RingAttention,
    RowWiseParallel,
    SequenceParallel,
)
from shardkit.parallel.plans.base import find_plan


def around_layer(
    plans: Sequence[LayerPlan],
    mesh: Mesh | AbstractMesh,
    path: str,
    *,
    outputs: int | None,
    table: bool = False,
    attends: bool = False,
    parameters: Callable[[Any], Sequence[Any] | None] = lambda layer: None,
) -> Around:
    """Around one layer.

    Args:
      plans: all of the layer's.
      mesh, path: of the layer.
      outputs: dims that the layer's weight gives its result; None: it has no such weight, or isn't its own layer to
        multiply it (attention).
      table: the weight is an embedding table.
      attends: it's attention.
      parameters: finds a layer's own, for the dtype that it multiplies in.
    """
    before: list[Before] = []
    after: list[After] = []

    def cut(dim: int, axis: str | None, plan: Any) -> Cut:
        return Cut(dim, axis, mesh, path, str(plan))

    if attends:
        before.append(OneMaskForAll(path))
    user = find_plan(plans, PrepareLayerInput)
    if user is not None:
        before.append(UserInput(user.fn, mesh))
    data = find_plan(plans, DataParallel) or find_plan(plans, FullyShard)
    if isinstance(data, DataParallel) or (data is not None and path == ""):
        dim = data.dim if isinstance(data, DataParallel) else 0
        before.append(CutBatch(cut(dim, data.axis, data)))
        after.append(CutResult(cut(dim, data.axis, data), may=True))
    weight = find_plan(plans, (ColWiseParallel, RowWiseParallel))
    sequence = find_plan(plans, SequenceParallel)
    ring = find_plan(plans, RingAttention)
    if ring is not None:
        before.append(CutInputs(cut(-2, ring.axis, ring), count=3))  # of query, key and value
        after.append(CutResult(cut(-2, ring.axis, ring)))
    if weight is None and sequence is not None:
        before.append(CutInputs(cut(sequence.dim, sequence.axis, sequence)))
        after.append(CutResult(cut(sequence.dim, sequence.axis, sequence)))
    if outputs is not None and isinstance(weight, ColWiseParallel):
        if not table:
            before.append(CastOnce(parameters))
        if weight.gather_output:
            after.append(CutResult(dataclasses.replace(cut(-outputs, None, weight), joins=weight.axis)))
    user = find_plan(plans, PrepareLayerOutput)
    if user is not None:
        after.append(UserOutput(user.fn, mesh))
    return Around(tuple(before), tuple(after))
