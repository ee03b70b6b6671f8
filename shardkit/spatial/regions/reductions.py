"""Reductions of blocked dims: every device's own elements, margins and tails left out, combined over the mesh axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from shardkit import scopes
from shardkit.spatial.pooling.global_pool import extreme
from shardkit.spatial.pooling.reduce_window import identity
from shardkit.spatial.reduction import Reduction
from shardkit.spatial.regions.block import ANYTHING, Block, Cuts, cleared, cropped, out_of_chunks
from shardkit.spatial.regions.graph import Node
from shardkit.spatial.regions.left import everywhere
from shardkit.spatial.regions.margins import NONE
from shardkit.spatial.regions.step import REDUCTION, Ensure, Held, Link, Step, Wants, Whole


def _fill(name: str, dtype: Any) -> Any:
    if name in ("reduce_max", "reduce_min"):
        return identity(lax.max if name == "reduce_max" else lax.min, dtype)
    return {"reduce_sum": 0, "reduce_prod": 1, "reduce_or": False, "reduce_and": True}[name]


def reduction(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """``reduce_*`` over dims of which some are blocked."""
    cuts, axes = lies[0], tuple(node.params["axes"])
    ndim = len(node.inputs[0].shape)
    if not set(axes) & set(cuts):
        return None
    kept = {d: i for i, d in enumerate(d for d in range(ndim) if d not in axes)}
    result = {kept[d]: c for d, c in cuts.items() if d in kept}
    links = tuple(Link(d, kept[d], c.shards) for d, c in cuts.items() if d in kept)
    names = tuple(a for d, c in cuts.items() if d in axes for a in c.axes)

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        x = ensure(0) if links else operands[0]
        assert isinstance(x, Block)
        x = cropped(x, {link.source: wants.get(link.result, NONE) for link in links})
        chunks = x.chunks
        if chunks is not None and not {chunks.dim, chunks.batch} <= set(axes):
            x = out_of_chunks(x, here.where)
        # What stands beyond the ends of dims that stay needn't be anything.
        x = cleared(x, here.where, _fill(node.name, x.array.dtype), set(axes) & set(cuts))
        out = _combined(here, node, x.array, axes, names)
        if not result:
            return [Whole(out, node.outputs[0].shape)]
        margins = {kept[d]: m for d, m in x.margins.items() if d in kept}
        return [Block(out, result, margins, dict.fromkeys(result, ANYTHING))]

    return Step(node, REDUCTION, node.inputs, (result,), (links,), run, node.outputs)


def _combined(here: Any, node: Node, x: Array, axes: tuple[int, ...], names: tuple[str, ...]) -> Array:
    if node.name in ("reduce_max", "reduce_min"):
        whole = Reduction(axes, (), (), math.prod(x.shape[d] for d in axes), names)
        return jnp.squeeze(extreme(node.name == "reduce_max", whole, x), axes)
    local = node.primitive.bind(x, **node.params)
    with scopes.scope(scopes.REDUCTION):
        if node.name == "reduce_sum":
            return lax.psum(local, names)
        if node.name in ("reduce_or", "reduce_and"):
            combine = lax.pmax if node.name == "reduce_or" else lax.pmin
            return combine(local.astype(np.int32), names).astype(local.dtype)
        # A product has no collective of its own; every device's is small.
        return everywhere(lax.all_gather(local, names), names, here).prod(0)


RULES: Mapping[str, Callable[[Node, Sequence[Cuts]], Step | None]] = dict.fromkeys(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and"), reduction
)
