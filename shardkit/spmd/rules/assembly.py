"""Operations that put arrays together or take them apart: concatenate, stack, tile, split."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.factored import ANY, Cut, Factored, Local, Together, names, one_letter_each
from shardkit.spmd.rules.strategy import Op, Type


def _parts(
    letters: Sequence[str], dim: int, pieces: Sequence[Type], sizes: dict[str, int]
) -> tuple[list[list[str]], frozenset[str]]:
    """The letters of arrays that lie side by side along a dim (their sizes are added), and those that must be whole."""
    own = [f"part{i}" for i in range(len(pieces))]
    sizes.update((x, t.shape[dim]) for x, t in zip(own, pieces, strict=True))
    return [[*letters[:dim], x, *letters[dim + 1 :]] for x in own], frozenset({letters[dim], *own})


def concatenate(op: Op) -> Factored:
    """The dim along which they're put together must be whole."""
    dim = op.params["dimension"]
    letters = names(op.results[0].ndim)
    sizes = dict(zip(letters, op.results[0].shape, strict=True))
    operands, whole = _parts(letters, dim, op.operands, sizes)
    together = Together(frozenset(range(len(operands))), ANY)
    return Factored(
        one_letter_each(*operands),
        one_letter_each(letters),
        sizes,
        whole,
        linear=(together,),
        uneven=True,
        work=0.0,
    )


def split(op: Op) -> Factored:
    """The dim that is split must be whole."""
    axis = op.params["axis"]
    letters = names(op.operands[0].ndim)
    sizes = dict(zip(letters, op.operands[0].shape, strict=True))
    results, whole = _parts(letters, axis, op.results, sizes)
    linear = (Together(frozenset({0}), ANY),)
    return Factored(
        one_letter_each(letters),
        one_letter_each(*results),
        sizes,
        whole,
        linear=linear,
        uneven=True,
        work=0.0,
    )


def stack(op: Op) -> Factored:
    """The new dim must be whole."""
    axis = op.params["axis"]
    letters = names(op.results[0].ndim)
    sizes = dict(zip(letters, op.results[0].shape, strict=True))
    mine = [x for d, x in enumerate(letters) if d != axis]
    linear = (Together(frozenset(range(len(op.operands))), ANY),)
    operands = one_letter_each(*[mine] * len(op.operands))
    whole = frozenset({letters[axis]})
    return Factored(operands, one_letter_each(letters), sizes, whole, linear=linear, uneven=True, work=0.0)


def unstack(op: Op) -> Factored:
    """The dim that goes must be whole."""
    axis = op.params["axis"]
    letters = names(op.operands[0].ndim)
    sizes = dict(zip(letters, op.operands[0].shape, strict=True))
    mine = [x for d, x in enumerate(letters) if d != axis]
    linear = (Together(frozenset({0}), ANY),)
    results = one_letter_each(*[mine] * len(op.results))
    whole = frozenset({letters[axis]})
    return Factored(one_letter_each(letters), results, sizes, whole, linear=linear, uneven=True, work=0.0)


def tile(op: Op) -> Factored:
    """Dims that are repeated must be whole; of one element every device makes its own part of the copies."""
    shape, reps = op.operands[0].shape, op.params["reps"]
    letters, copies = names(len(shape)), names(len(shape))
    sizes = dict(zip(letters, shape, strict=True))
    whole = set()
    for d, count in enumerate(reps):
        if count != 1:
            copies[d] = f"copies{d}"
            sizes[copies[d]] = op.results[0].shape[d]
            whole.update((letters[d],) if shape[d] == 1 else (letters[d], copies[d]))

    def local(cut: Cut, mesh: Sizes) -> Local:
        counts = [
            -(-count // parts(cut[x], mesh)) if x in cut and count != 1 else count
            for x, count in zip(copies, reps, strict=True)
        ]
        return Local({**op.params, "reps": tuple(counts)})

    return Factored(
        operands=one_letter_each(letters),
        results=one_letter_each(copies),
        sizes=sizes,
        whole=frozenset(whole),
        linear=(Together(frozenset({0}), ANY),),
        local=local,
        uneven=True,
        work=0.0,
    )


RULES = {
    "concatenate": concatenate,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
}
