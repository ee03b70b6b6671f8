"""Collectives in a region that the user wrote: they run as they are, on blocks.

JAX types say there over which axes a value varies, and some collectives come in a form for such types ("invariant": the
result no longer varies). Our region has no such types, so the plain form is bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from shardkit.reshard.cost import wire_bytes
from shardkit.spmd.placed import replicated
from shardkit.spmd.rules.factored import Custom
from shardkit.spmd.rules.strategy import Case, Op, Strategy, Traffic


def _psum(params: Mapping[str, Any], *blocks: Any) -> Sequence[Any]:
    return [lax.psum(block, params["axes"], axis_index_groups=params.get("axis_index_groups")) for block in blocks]


def _all_gather(params: Mapping[str, Any], *blocks: Any) -> Sequence[Any]:
    return [
        lax.all_gather(
            block,
            params["axis_name"],
            axis_index_groups=params.get("axis_index_groups"),
            axis=params["all_gather_dimension"],
            tiled=params["tiled"],
        )
        for block in blocks
    ]


_FORMS: dict[str, Callable[..., Sequence[Any]]] = {"psum_invariant": _psum, "all_gather_invariant": _all_gather}
_PLAIN = [
    "psum",
    "pmax",
    "pmin",
    "ppermute",
    "pbroadcast",
    "all_to_all",
    "all_gather",
    "reduce_scatter",
    "axis_index",
    "ragged_all_to_all",
]


# As the compiled program calls them.
_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "ppermute": "collective_permute",
    "pbroadcast": "collective_broadcast",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
}


def _traffic(case: Case) -> tuple[Traffic, ...]:
    """What one device receives."""
    params, kind = case.op.params, _KINDS.get(case.op.name)
    named = params.get("axes", params.get("axis_name", ()))
    axes = tuple(a for a in ((named,) if isinstance(named, str) else named) if isinstance(a, str))
    groups = params.get("axis_index_groups")
    size = len(groups[0]) if groups else math.prod(case.manual.get(a, 1) for a in axes)
    if kind is None or size == 1:
        return ()
    return tuple(
        Traffic(kind, axes, wire_bytes(kind, math.prod(t.shape) * t.dtype.itemsize, size)) for t in case.op.results
    )


def collective(op: Op) -> Custom:
    """Blocks in, blocks out."""

    def only(case: Case) -> Sequence[Strategy]:
        operands = tuple(replicated(t.ndim) for t in op.operands)
        results = tuple(replicated(t.ndim) for t in op.results)
        form = _FORMS.get(op.name)
        if form is None:
            return [Strategy(operands, results, params=op.params, traffic=_traffic(case))]
        return [Strategy(operands, results, run=lambda here, *blocks: form(op.params, *blocks), traffic=_traffic(case))]

    return Custom(None, only)


RULES = dict.fromkeys((*_PLAIN, *_FORMS), collective)
