"""Reductions over dims."""

from __future__ import annotations

from shardkit.spmd.rules.factored import Factored, Together, names, one_letter_each
from shardkit.spmd.rules.strategy import Op

_KINDS = {
    "reduce_sum": ("sum", ("sum", "mean")),
    "reduce_max": ("max", ("max", "any")),
    "reduce_min": ("min", ("min", "all")),
    "reduce_prod": ("prod", ("prod",)),
    "reduce_and": ("all", ("all",)),
    "reduce_or": ("any", ("any",)),
    "reduce_xor": ("sum", ()),
}
_BOOLEAN = {"max": "any", "min": "all"}


def reduce(op: Op) -> Factored:
    """A cut dim that is reduced leaves the result Partial, of the reduction's kind."""
    kind, passes = _KINDS[op.name]
    boolean = op.operands[0].dtype == bool
    kind = _BOOLEAN.get(kind, kind) if boolean else kind
    bitwise = op.name == "reduce_xor" or (op.name in ("reduce_and", "reduce_or") and not boolean)
    letters = names(op.operands[0].ndim)
    axes = [a % len(letters) for a in op.params["axes"]] if letters else []
    gone = [letters[a] for a in axes]
    return Factored(
        operands=one_letter_each(letters),
        results=one_letter_each([x for x in letters if x not in gone]),
        sizes=dict(zip(letters, op.operands[0].shape, strict=True)),
        whole=frozenset(gone) if bitwise else frozenset(),
        contracted=dict.fromkeys(gone, kind or "sum"),
        linear=() if bitwise else (Together(frozenset({0}), passes),),
        uneven=True,
    )


def by_function(op: Op) -> Factored:
    """``lax.reduce`` with a function of the user's: dims that are reduced must be whole."""
    count = len(op.operands) // 2
    letters = names(op.operands[0].ndim)
    gone = [letters[d] for d in op.params["dimensions"]]
    kept = [x for x in letters if x not in gone]
    return Factored(
        operands=one_letter_each(*[letters] * count, *[[]] * count),
        results=one_letter_each(*[kept] * count),
        sizes=dict(zip(letters, op.operands[0].shape, strict=True)),
        whole=frozenset(gone),
        uneven=True,
    )


RULES = dict.fromkeys(_KINDS, reduce) | {"reduce": by_function}
