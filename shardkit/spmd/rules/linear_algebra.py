"""Decompositions, solves and Fourier transforms: one matrix (or signal) on one device, many of them cut by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shardkit.spmd.rules.factored import Factored, Together, names, one_letter_each
from shardkit.spmd.rules.strategy import Op

# The dims of the first operand that make one problem; those before are its batch, and that of all others.
_MATRIX = ("cholesky", "qr", "lu", "householder_product", "ormqr", "symmetric_product", "triangular_solve")
_ITERATIVE = ("svd", "eigh", "eig", "schur", "hessenberg", "tridiagonal")
_VECTOR = ("lu_pivots_to_permutation", "tridiagonal_solve")


def batched(
    op: Op, core: int, *, uneven: bool = True, free: Mapping[int, int] | None = None, linear: tuple[Together, ...] = ()
) -> Factored:
    """One problem whole, the batch of problems in letters.

    Args:
      op: the operation.
      core: trailing dims of the first operand that are one problem.
      uneven: a problem that is only padding does no harm.
      free: by position of an operand, a dim (counted from the end) that is so many right-hand sides; of the first
        result, too.
      linear: what may be Partial.
    """
    ndim = op.operands[0].ndim - core
    batch = names(ndim)
    sizes = dict(zip(batch, op.operands[0].shape[:ndim], strict=True))
    fixed: set[str] = set()

    def dims(shape: tuple[int, ...], prefix: str, side: int | None) -> list[str]:
        more = names(len(shape) - ndim, prefix)
        sizes.update(zip(more, shape[ndim:], strict=True))
        fixed.update(more)
        if side is not None:
            more[side] = "side"
            sizes["side"] = shape[side]
        return [*batch, *more]

    free = free or {}
    operands = [dims(t.shape, f"o{i}", free.get(i)) for i, t in enumerate(op.operands)]
    shared = next(iter(free.values()), None)
    results = [dims(t.shape, f"r{i}", shared if i == 0 else None) for i, t in enumerate(op.results)]
    n = max((t.shape[-1] for t in op.operands if t.ndim), default=1)
    return Factored(
        operands=one_letter_each(*operands),
        results=one_letter_each(*results),
        sizes=sizes,
        whole=frozenset(fixed),
        linear=linear,
        uneven=uneven,
        work=float(n * math.prod(op.operands[0].shape)),
    )


def triangular_solve(op: Op) -> Factored:
    """Right-hand sides are each on their own: the columns of ``b``, or its rows where the matrix is on the right."""
    side = -1 if op.params["left_side"] else -2
    return batched(op, 2, free={1: side}, linear=(Together(frozenset({1})),))


def tridiagonal_solve(op: Op) -> Factored:
    """Three diagonals, and right-hand sides that are the columns of the last operand."""
    return batched(op, 1, free={3: -1}, linear=(Together(frozenset({3})),))


def fft(op: Op) -> Factored:
    """The last dims are transformed, as many as there are lengths."""
    return batched(op, len(op.params["fft_lengths"]), linear=(Together(frozenset({0})),))


def _rule(core: int, uneven: bool) -> Callable[[Op], Factored]:
    def rule(op: Op) -> Factored:
        return batched(op, core, uneven=uneven)

    return rule


# An iteration needn't end, or end well, on the nan a padded problem may be made of.
RULES: dict[str, Callable[[Op], Factored]] = (
    dict.fromkeys(_MATRIX, _rule(2, True))
    | dict.fromkeys(_ITERATIVE, _rule(2, False))
    | dict.fromkeys(_VECTOR, _rule(1, True))
    | {"triangular_solve": triangular_solve, "tridiagonal_solve": tridiagonal_solve, "fft": fft}
)
