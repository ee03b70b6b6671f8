"""Collectives in a region that the user wrote: they run as they are, on blocks.

JAX types say there over which axes a value varies, and some collectives come in a form for such types ("invariant": the
result no longer varies). Our region has no such types, so the plain form is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from shardkit.spmd.placed import replicated
from shardkit.spmd.rules.factored import Custom
from shardkit.spmd.rules.strategy import Case, Op, Strategy


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


def collective(op: Op) -> Custom:
    """Blocks in, blocks out."""

    def only(case: Case) -> Sequence[Strategy]:
        operands = tuple(replicated(t.ndim) for t in op.operands)
        results = tuple(replicated(t.ndim) for t in op.results)
        form = _FORMS.get(op.name)
        if form is None:
            return [Strategy(operands, results, params=op.params)]
        return [Strategy(operands, results, run=lambda here, *blocks: form(op.params, *blocks))]

    return Custom(None, only)


RULES = dict.fromkeys((*_PLAIN, *_FORMS), collective)
