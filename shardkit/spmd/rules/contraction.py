"""``dot_general``: batch, contracted and free dims."""

from __future__ import annotations

import math

from shardkit.spmd.rules.banded import banded
from shardkit.spmd.rules.factored import Custom, Factored, Together, names, one_letter_each, strategies
from shardkit.spmd.rules.strategy import Op


def dot_general(op: Op) -> Factored | Custom:
    """A product; with a known matrix of few entries a column there is another way, too."""
    plain, other = product(op), banded(op)
    return plain if other is None else Custom(plain, lambda case: strategies(case, other))


def product(op: Op) -> Factored:
    """The letters of the einsum it is; linear in each operand.

    A contracted letter that is cut on both sides leaves the product Partial; batch and free letters stay cut.
    """
    (left_contracted, right_contracted), (left_batch, right_batch) = op.params["dimension_numbers"]
    left = names(op.operands[0].ndim, "l")
    right = names(op.operands[1].ndim, "r")
    for i, j in (*zip(left_batch, right_batch, strict=True), *zip(left_contracted, right_contracted, strict=True)):
        right[j] = left[i]
    out = [left[i] for i in left_batch]
    out += [x for i, x in enumerate(left) if i not in (*left_batch, *left_contracted)]
    out += [x for j, x in enumerate(right) if j not in (*right_batch, *right_contracted)]
    sizes = dict(zip((*left, *right), (*op.operands[0].shape, *op.operands[1].shape), strict=True))
    return Factored(
        operands=one_letter_each(left, right),
        results=one_letter_each(out),
        sizes=sizes,
        contracted={left[i]: "sum" for i in left_contracted},
        linear=(Together(frozenset({0})), Together(frozenset({1}))),
        uneven=True,
        work=2.0 * math.prod(sizes.values()),
    )


RULES = {"dot_general": dot_general}
