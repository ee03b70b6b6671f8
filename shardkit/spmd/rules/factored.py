"""Operations whose dims have names, and the strategies that follow from the names alone.

Most operations are told by giving every dim of every operand and result a letter, as in an einsum: a letter is cut by
the same mesh axes wherever it appears. A dim may be made of several letters, major first (a reshape that merges or
splits); a letter may be one that mustn't be cut (a sorted dim); one that's missing from a result is contracted, and
cutting it leaves the result Partial. With what may be Partial ("linear"), that is the whole rule. The idea is that of
Shardy's sharding rules (openxla/shardy, "Sharding propagation": dims, factors, reductions).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit.placements import REDUCE_KINDS
from shardkit.spmd.placed import Placed, Sizes, block_shape, in_mesh_order, parts
from shardkit.spmd.rules.halos import AfterReading
from shardkit.spmd.rules.strategy import Case, Op, Strategy, Traffic

Dim = tuple[str, ...]  # the letters a dim is made of, major first; none for a dim of size 1 that nothing can cut
Cut = Mapping[str, tuple[str, ...]]  # of each letter that is cut, the mesh axes, major first

ANY = tuple(REDUCE_KINDS)
SUMS = ("sum", "mean")


class Together(NamedTuple):
    """Operands that may be Partial at once (the others whole along the axis), which leaves every result Partial.

    Attributes:
      operands: their positions.
      kinds: of reduction.
    """

    operands: frozenset[int]
    kinds: tuple[str, ...] = SUMS


@dataclasses.dataclass(frozen=True)
class Local:
    """How blocks are worked on, for one way to cut the letters.

    Attributes:
      params: of the primitive, for blocks; None: as they are.
      run: as in ``Strategy``; None: the primitive.
      traffic, why: as in ``Strategy``.
    """

    params: Mapping[str, Any] | None = None
    run: Callable[..., Sequence[Any]] | None = None
    traffic: tuple[Traffic, ...] = ()
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Factored:
    """An operation in letters.

    Attributes:
      operands, results: of each, the letters of each dim.
      sizes: elements of each letter.
      whole: letters that mustn't be cut.
      contracted: letters whose cutting leaves results without them Partial, and of which kind.
      linear: what may be Partial.
      local: what to do with blocks; None where the primitive does, its params unchanged. ``local(cut, sizes)`` may
        return None: this way isn't possible.
      uneven: blocks may be padded (``ceil(size / n)``): no element of a padded tail reaches one that counts. Contracted
        letters are masked.
      flops: an element of the largest result, or in all (``work``).
      work: flops of the whole operation; divided by the devices that cut a letter.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    contracted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    linear: tuple[Together, ...] = ()
    local: Callable[[Cut, Sizes], Local | None] | None = None
    uneven: bool = False
    work: float | None = None

    def cut_of(self, dims: Sequence[Dim], placed: Placed, sizes: Sizes) -> Cut | None:
        """The letters that a placement of one operand or result cuts; None where letters can't say it."""
        found: dict[str, tuple[str, ...]] = {}
        for letters, axes in zip(dims, placed.dims, strict=True):
            left = list(axes)
            for letter in letters:
                took: list[str] = []
                while left and self.sizes[letter] % parts((*took, left[0]), sizes) == 0:
                    took.append(left.pop(0))
                if left and not took and len(letters) == 1:
                    took, left = left, []  # doesn't divide: for those who can pad
                if took and letter in found and found[letter] != tuple(took):
                    return None
                if took:
                    found[letter] = tuple(took)
                if left and parts(took, sizes) != self.sizes[letter]:
                    return None  # the next letter could only be cut if this one were cut entirely
            if left:
                return None
        return found

    def placed(self, dims: Sequence[Dim], cut: Cut, sizes: Sizes) -> Placed | None:
        """Where an operand or result is, when letters are cut; None where blocks wouldn't be consecutive."""
        found = []
        for letters in dims:
            axes: tuple[str, ...] = ()
            open_major = False  # a more major letter isn't cut entirely
            for letter in letters:
                mine = cut.get(letter, ())
                if mine and open_major:
                    return None
                axes += mine
                open_major = open_major or parts(mine, sizes) != self.sizes[letter]
            found.append(axes)
        return Placed(tuple(found))


@dataclasses.dataclass(frozen=True)
class Custom:
    """An operation of which letters don't say all.

    Attributes:
      base: what they do say; None: nothing.
      more: further strategies, for operands that are somewhere.
    """

    base: Factored | None
    more: Callable[[Case], Sequence[Strategy]]


def names(count: int, prefix: str = "") -> list[str]:
    """So many letters.

    Example:
      >>> names(3)
      ['a', 'b', 'c']
    """
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return [prefix + (alphabet[i] if i < 26 else f"{alphabet[i % 26]}{i // 26}") for i in range(count)]


def one_letter_each(*dims: Sequence[str]) -> tuple[tuple[Dim, ...], ...]:
    """Dims that are one letter each, from strings or lists of letters.

    Example:
      >>> one_letter_each("ab", "b")
      ((('a',), ('b',)), (('b',),))
    """
    return tuple(tuple((letter,) for letter in letters) for letters in dims)


def strategies(case: Case, rule: Factored | Custom) -> list[Strategy]:
    """Every way to run the operation that something speaks for: an operand that is so, or a wish."""
    if isinstance(rule, Custom):
        plain = strategies(case, rule.base) if rule.base is not None else []
        return [*plain, *rule.more(case)]
    options = [_options(case, rule, axis) for axis in case.sizes]
    orders = _orders(case, rule)
    found = []
    for chosen in itertools.product(*options):
        strategy = _strategy(case, rule, dict(zip(case.sizes, chosen, strict=True)), orders)
        if strategy is not None:
            found.append(strategy)
    return found


Choice = str | Together | None  # what one mesh axis does: cut a letter, leave operands Partial, nothing


def _options(case: Case, rule: Factored, axis: str) -> list[Choice]:
    """What a mesh axis could do, the plainest last."""
    found: list[Choice] = []

    def add(dims: Sequence[Dim], placed: Placed) -> None:
        for letters, axes in zip(dims, placed.dims, strict=True):
            if axis in axes:
                at = axes.index(axis)
                letter = _letter(rule, letters, axes[: at + 1], case.sizes)
                if letter is not None and letter not in rule.whole and letter not in found:
                    found.append(letter)

    for dims, placed in zip(rule.operands, case.placed, strict=True):
        add(dims, placed)
    for dims, wish in zip(rule.results, case.wishes or (None,) * len(rule.results), strict=True):
        if wish is not None:
            add(dims, wish)
    partial = frozenset(i for i, placed in enumerate(case.placed) if axis in placed.partial)
    wished = any(w is not None and axis in w.partial for w in case.wishes)
    for together in rule.linear:
        kinds = {case.placed[i].reduce for i in partial & together.operands}
        if (len(kinds) == 1 and kinds <= set(together.kinds)) or (not partial and wished and "sum" in together.kinds):
            found.append(together)
    return [*found, None]


def _letter(rule: Factored, letters: Dim, axes: Sequence[str], sizes: Sizes) -> str | None:
    """Which letter of a dim the last of these axes cuts, each letter taking all the axes it can."""
    left = list(axes)
    for letter in letters:
        took: list[str] = []
        while left and rule.sizes[letter] % parts((*took, left[0]), sizes) == 0:
            took.append(left.pop(0))
        if not left:
            return letter
        if parts(took, sizes) != rule.sizes[letter]:
            break
    return letters[0] if len(letters) == 1 and rule.uneven else None


def _orders(case: Case, rule: Factored) -> dict[str, tuple[str, ...]]:
    """In which order axes cut a letter: as the first operand that says so, else as the mesh has them."""
    found: dict[str, tuple[str, ...]] = {}
    pairs = list(zip(rule.operands, case.placed, strict=True))
    pairs += [
        (d, w) for d, w in zip(rule.results, case.wishes or (None,) * len(rule.results), strict=True) if w is not None
    ]
    for dims, placed in pairs:
        for letter, axes in (rule.cut_of(dims, placed, case.sizes) or {}).items():
            if len(axes) > len(found.get(letter, ())):
                found[letter] = axes
    return found


def _strategy(
    case: Case, rule: Factored, chosen: Mapping[str, Choice], orders: Mapping[str, tuple[str, ...]]
) -> Strategy | None:
    cut: dict[str, tuple[str, ...]] = {}
    for axis, choice in chosen.items():
        if isinstance(choice, str):
            cut[choice] = (*cut.get(choice, ()), axis)
    for letter, axes in cut.items():
        order = orders.get(letter, ())
        if len(axes) > 1 and set(axes) <= set(order):
            cut[letter] = tuple(a for a in order if a in axes)
    for letter, axes in cut.items():
        if rule.sizes[letter] % parts(axes, case.sizes) and not rule.uneven:
            return None
        if rule.sizes[letter] == 0:
            return None
    operands = [rule.placed(dims, cut, case.sizes) for dims in rule.operands]
    results = [rule.placed(dims, cut, case.sizes) for dims in rule.results]
    if any(p is None for p in (*operands, *results)):
        return None
    local = rule.local(cut, case.sizes) if rule.local is not None else Local(params=case.op.params)
    if local is None:
        return None
    with_operands = _partial_operands(case, chosen, operands)
    with_results = _partial_results(case, rule, chosen, cut, results)
    if with_operands is None or with_results is None:
        return None
    strategy = Strategy(
        operands=tuple(with_operands),
        results=tuple(with_results),
        params=None if local.run is not None else local.params if local.params is not None else case.op.params,
        run=local.run,
        flops=_flops(case, rule, cut, with_results),
        traffic=local.traffic,
        why=local.why,
    )
    return _masked(case, rule, cut, strategy)


def _partial_operands(case: Case, chosen: Mapping[str, Choice], operands: list[Any]) -> list[Placed] | None:
    found = []
    for i, placed in enumerate(operands):
        axes = [a for a, c in chosen.items() if isinstance(c, Together) and i in c.operands]
        kind = None
        if axes:
            kinds = {case.placed[j].reduce for a in axes for j in chosen[a].operands if a in case.placed[j].partial}  # type: ignore[union-attr]
            kinds = kinds or {"sum"}
            if len(kinds) > 1:
                return None
            (kind,) = kinds
        found.append(Placed(placed.dims, in_mesh_order(axes, case.sizes), kind))
    return found


def _partial_results(
    case: Case, rule: Factored, chosen: Mapping[str, Choice], cut: Cut, results: list[Any]
) -> list[Placed] | None:
    passed: dict[str, str] = {}
    for axis, choice in chosen.items():
        if isinstance(choice, Together):
            kinds = {case.placed[i].reduce or "sum" for i in choice.operands if axis in case.placed[i].partial}
            passed[axis] = next(iter(kinds), "sum")
    found = []
    for dims, placed in zip(rule.results, results, strict=True):
        mine = {letter for letters in dims for letter in letters}
        waits = dict(passed)
        for letter, axes in cut.items():
            if letter in mine:
                continue
            if letter not in rule.contracted:
                if letter in _gone(rule):
                    return None  # a result that doesn't have it, and doesn't reduce it
                continue
            waits.update(dict.fromkeys(axes, rule.contracted[letter]))
        kinds = set(waits.values())
        if len(kinds) > 1:
            return None
        found.append(Placed(placed.dims, in_mesh_order(waits, case.sizes), next(iter(kinds), None)))
    return found


def _gone(rule: Factored) -> set[str]:
    """Letters of operands."""
    return {letter for dims in rule.operands for letters in dims for letter in letters}


def _flops(case: Case, rule: Factored, cut: Cut, results: Sequence[Placed]) -> float:
    if rule.work is not None:
        return rule.work / math.prod(parts(axes, case.sizes) for axes in cut.values())
    shapes = [block_shape(t.shape, p, case.sizes) for t, p in zip(case.op.results, results, strict=True)]
    return float(max((math.prod(s) for s in shapes), default=0))


def _masked(case: Case, rule: Factored, cut: Cut, strategy: Strategy) -> Strategy:
    """Padded tails of contracted letters replaced by what changes nothing."""
    if not rule.uneven:
        return strategy
    padded = [
        letter
        for letter, axes in cut.items()
        if letter in rule.contracted and rule.sizes[letter] % parts(axes, case.sizes)
    ]
    if not padded:
        return strategy
    per_operand = tuple(
        tuple(
            (d, cut[ls[0]], rule.sizes[ls[0]], rule.contracted[ls[0]])
            for d, ls in enumerate(dims)
            if ls and ls[0] in padded
        )
        for dims in rule.operands
    )

    def masked(here: Any, blocks: Sequence[Any]) -> list[Any]:
        return [here.mask(b, fill) if fill else b for b, fill in zip(blocks, per_operand, strict=True)]

    def plain(here: Any, *blocks: Any) -> Sequence[Any]:
        return here.run(case.op, strategy, masked(here, blocks))

    inner = strategy.run
    if not isinstance(inner, AfterReading):
        return dataclasses.replace(strategy, run=plain, params=None)
    # What it reads of its neighbours may be what others read, too, so that comes first.
    work = inner.work
    after = AfterReading(inner.reads, lambda here, *blocks: work(here, *masked(here, blocks)))
    return dataclasses.replace(strategy, run=after, params=None)


def elementwise(op: Op, linear: tuple[Together, ...] = (), *, uneven: bool = True) -> Factored:
    """A rule for operations on arrays of one shape (those of rank 0, and dims of size 1, are broadcast)."""
    ndim = max((t.ndim for t in op.results), default=0)
    letters = names(ndim)
    shape = op.results[0].shape
    dims = tuple(
        tuple((x,) if size == full else () for x, size, full in zip(letters, t.shape, shape, strict=True))
        if t.ndim
        else ()
        for t in op.operands
    )
    results = tuple(tuple((x,) for x in letters) for _ in op.results)
    return Factored(dims, results, dict(zip(letters, shape, strict=True)), linear=linear, uneven=uneven)
