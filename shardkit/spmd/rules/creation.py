"""Values made from nothing, or from a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.factored import Cut, Dim, Factored, Local, names, one_letter_each
from shardkit.spmd.rules.strategy import Op


def iota(op: Op) -> Factored:
    """Every device counts from where its block begins."""
    shape, dim = op.params["shape"], op.params["dimension"]
    letters = names(len(shape))

    def local(cut: Cut, sizes: Sizes) -> Local:
        blocks = tuple(-(-s // parts(cut.get(x, ()), sizes)) for s, x in zip(shape, letters, strict=True))
        params = {**op.params, "shape": blocks, "sharding": None}
        axes = cut.get(letters[dim], ())
        if not axes:
            return Local(params)

        def run(here: Any) -> Sequence[Any]:
            # Counted in integers: a short float would round both, and then their sum.
            count = lax.broadcasted_iota(np.int32, blocks, dim) + here.index(axes) * blocks[dim]
            return [lax.convert_element_type(count, op.params["dtype"])]

        return Local(run=run)

    sizes = dict(zip(letters, shape, strict=True))
    return Factored((), one_letter_each(letters), sizes, local=local, uneven=True)


def whole(op: Op) -> Factored:
    """Every device does all of it: a small thing, or one whose numbers depend on the whole shape."""
    letters: dict[str, int] = {}

    def dims(of: Sequence[Any], prefix: str) -> tuple[tuple[Dim, ...], ...]:
        found = []
        for i, t in enumerate(of):
            mine = names(t.ndim, f"{prefix}{i}")
            letters.update(zip(mine, t.shape, strict=True))
            found.append(mine)
        return one_letter_each(*found)

    operands, results = dims(op.operands, "o"), dims(op.results, "r")
    return Factored(operands, results, letters, frozenset(letters))


def keyed(op: Op) -> Factored:
    """Of many keys each on its own; what one key gives stays whole, so that the numbers are those of one device."""
    keys = op.operands[0].ndim
    if op.name == "random_wrap":
        keys -= 1
    letters = names(keys)
    sizes = dict(zip(letters, op.operands[0].shape[:keys], strict=True))
    fixed = set()

    def dims(ndim: int, prefix: str, shape: Sequence[int]) -> list[str]:
        more = names(ndim - keys, prefix)
        sizes.update(zip(more, shape[keys:], strict=True))
        fixed.update(more)
        return [*letters, *more]

    operands = [dims(t.ndim, f"o{i}", t.shape) for i, t in enumerate(op.operands)]
    results = [dims(t.ndim, f"r{i}", t.shape) for i, t in enumerate(op.results)]
    return Factored(one_letter_each(*operands), one_letter_each(*results), sizes, frozenset(fixed))


RULES = {
    "iota": iota,
    "random_bits": keyed,
    "random_split": keyed,
    "random_wrap": keyed,
    "random_unwrap": keyed,
    "random_seed": keyed,
    "random_clone": keyed,
    "random_gamma": whole,
    "rng_bit_generator": whole,
    "rng_uniform": whole,
    "empty": whole,
    "empty2": whole,
}
