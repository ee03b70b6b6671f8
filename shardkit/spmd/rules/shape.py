"""Operations that only arrange dims: broadcast, reshape, transpose, squeeze, reverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.factored import ANY, Cut, Dim, Factored, Local, Together, names, one_letter_each
from shardkit.spmd.rules.strategy import Op

_PASS = (Together(frozenset({0}), ANY),)


def block_sizes(
    dims: Sequence[Dim], letters: dict[str, int], shape: Sequence[int], cut: Cut, sizes: Sizes
) -> tuple[Any, ...]:
    """The sizes of a block whose dims are made of letters."""
    return tuple(
        -(-size // math.prod(parts(cut.get(x, ()), sizes) for x in mine))
        for mine, size in zip(dims, shape, strict=True)
    )


def broadcast_in_dim(op: Op) -> Factored:
    """A new dim can be cut, too: every device makes its own part."""
    operand, shape = op.operands[0], op.params["shape"]
    out = names(len(shape))
    dims: list[Dim] = []
    for size, d in zip(operand.shape, op.params["broadcast_dimensions"], strict=True):
        dims.append((out[d],) if size == shape[d] else ())
    results = one_letter_each(out)
    letters = dict(zip(out, shape, strict=True))

    def local(cut: Cut, sizes: Sizes) -> Local:
        blocks = block_sizes(results[0], letters, shape, cut, sizes)
        return Local({**op.params, "shape": blocks, "sharding": None})

    return Factored((tuple(dims),), results, letters, linear=_PASS, local=local, uneven=True, work=0.0)


def factors(before: Sequence[int], after: Sequence[int]) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """The common letters of a reshape.

    Dims are taken apart from the major end: as long as the dims at hand have a common divisor, it is a letter of both.
    What then is left of a group of dims without one belongs to nobody else, and can't be cut.

    Returns:
      The letters of each dim before and after, their sizes, and those that can't be cut.

    Example:
      >>> factors((6, 4), (2, 12))
      ([('f0', 'f1'), ('f2',)], [('f0',), ('f1', 'f2')], {'f0': 2, 'f1': 3, 'f2': 4}, set())
    """
    one: list[list[str]] = [[] for _ in before]
    two: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    stuck: set[str] = set()
    if 0 in before or 0 in after:
        for side, given in ((one, before), (two, after)):
            for d, size in enumerate(given):
                letter = f"x{len(sizes)}"
                sizes[letter] = size
                stuck.add(letter)
                side[d].append(letter)
        return [tuple(x) for x in one], [tuple(x) for x in two], sizes, stuck

    def new(size: int) -> str:
        letter = f"f{len(sizes)}"
        sizes[letter] = size
        return letter

    i = j = 0
    left, right = (before[0] if before else 1), (after[0] if after else 1)
    while i < len(before) or j < len(after):
        if left == 1 and i < len(before):
            i += 1
            left = before[i] if i < len(before) else 1
            continue
        if right == 1 and j < len(after):
            j += 1
            right = after[j] if j < len(after) else 1
            continue
        if i >= len(before) or j >= len(after):
            break
        common = math.gcd(left, right)
        if common > 1:
            letter = new(common)
            one[i].append(letter)
            two[j].append(letter)
            left //= common
            right //= common
            continue
        # No common divisor: whole up to where both have passed the same number of elements.
        passed = [left, right]
        mine, theirs = new(left), new(right)
        stuck.update((mine, theirs))
        one[i].append(mine)
        two[j].append(theirs)
        while passed[0] != passed[1]:
            if passed[0] < passed[1]:
                i += 1
                passed[0] *= before[i]
                if before[i] > 1:
                    one[i].append(new(before[i]))
                    stuck.add(one[i][-1])
            else:
                j += 1
                passed[1] *= after[j]
                if after[j] > 1:
                    two[j].append(new(after[j]))
                    stuck.add(two[j][-1])
        left = right = 1
    return [tuple(x) for x in one], [tuple(x) for x in two], sizes, stuck


def reshape(op: Op) -> Factored:
    """Merging dims keeps the cut of the major one, splitting one hands its cut to the major part.

    With ``dimensions`` (the derivative of a product over dims has it) dims change places first.
    """
    shape, operand = op.params["new_sizes"], op.operands[0]
    order = op.params.get("dimensions") or range(operand.ndim)
    read, after, letters, stuck = factors([operand.shape[d] for d in order], shape)
    before = [dims for _, dims in sorted(zip(order, read, strict=True))]

    def local(cut: Cut, sizes: Sizes) -> Local | None:
        for letter, axes in cut.items():
            alone = (letter,) in before and (letter,) in after
            if letters[letter] % parts(axes, sizes) and not alone:
                return None
        blocks = block_sizes(after, letters, shape, cut, sizes)
        return Local({**op.params, "new_sizes": blocks, "sharding": None})

    return Factored(
        (tuple(before),), (tuple(after),), letters, frozenset(stuck), linear=_PASS, local=local, uneven=True
    )


def transpose(op: Op) -> Factored:
    """Dims change places."""
    letters = names(op.operands[0].ndim)
    out = [letters[i] for i in op.params["permutation"]]
    sizes = dict(zip(letters, op.operands[0].shape, strict=True))
    return Factored(one_letter_each(letters), one_letter_each(out), sizes, linear=_PASS, uneven=True, work=0.0)


def squeeze(op: Op) -> Factored:
    """Dims of size 1 go."""
    letters = names(op.operands[0].ndim)
    gone = {d % len(letters) for d in op.params["dimensions"]} if letters else set()
    out = [x for i, x in enumerate(letters) if i not in gone]
    sizes = dict(zip(letters, op.operands[0].shape, strict=True))
    whole = frozenset(letters[i] for i in gone)
    return Factored(one_letter_each(letters), one_letter_each(out), sizes, whole, linear=_PASS, uneven=True, work=0.0)


def expand_dims(op: Op) -> Factored:
    """New dims of size 1."""
    letters = names(op.results[0].ndim)
    new = {d % len(letters) for d in op.params["dimensions"]}
    inner = [x for i, x in enumerate(letters) if i not in new]
    sizes = dict(zip(letters, op.results[0].shape, strict=True))
    whole = frozenset(letters[i] for i in new)
    return Factored(one_letter_each(inner), one_letter_each(letters), sizes, whole, linear=_PASS, uneven=True, work=0.0)


def rev(op: Op) -> Factored:
    """A reversed dim must be whole."""
    letters = names(op.operands[0].ndim)
    sizes = dict(zip(letters, op.operands[0].shape, strict=True))
    whole = frozenset(letters[d] for d in op.params["dimensions"])
    dims = one_letter_each(letters)
    return Factored(dims, dims, sizes, whole, linear=_PASS, uneven=True, work=0.0)


RULES = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "expand_dims": expand_dims,
    "rev": rev,
}
