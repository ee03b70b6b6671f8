"""Operations that work on each element alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from shardkit.elementwise import NONLINEAR
from shardkit.spmd.rules.factored import ANY, Factored, Local, Together, elementwise, names, one_letter_each
from shardkit.spmd.rules.strategy import Op


def _first(op: Op) -> Factored:
    return elementwise(op, (Together(frozenset({0})),))


def same(op: Op) -> Factored:
    """What hands elements on unchanged: whatever the contributions wait for, it's still right."""
    return elementwise(op, (Together(frozenset({0}), ANY),))


def cast(op: Op) -> Factored:
    """Between floats (and complex) sums pass; a cast to or from integers and bools needs the value itself."""
    before, after = op.operands[0].dtype, op.results[0].dtype
    linear = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
    real_part = jnp.issubdtype(before, jnp.complexfloating) and not jnp.issubdtype(after, jnp.complexfloating)
    return elementwise(op, (Together(frozenset({0})),) if linear and not real_part else ())


def both(op: Op) -> Factored:
    """Sums of contributions are contributions to the sum."""
    return elementwise(op, (Together(frozenset(range(len(op.operands)))),))


def product(op: Op) -> Factored:
    """Linear in each factor, the other one whole."""
    return elementwise(op, (Together(frozenset({0})), Together(frozenset({1}))))


def quotient(op: Op) -> Factored:
    """Linear in what is divided; not so for integers, which round."""
    exact = jnp.issubdtype(op.results[0].dtype, jnp.inexact)
    return elementwise(op, (Together(frozenset({0})),) if exact else ())


def select(op: Op) -> Factored:
    """The same choice among contributions on every device."""
    return elementwise(op, (Together(frozenset(range(1, len(op.operands))), ANY),))


def _extreme(kind: str, boolean: str):
    def rule(op: Op) -> Factored:
        kinds = (kind, boolean) if op.results[0].dtype == bool else (kind,)
        return elementwise(op, (Together(frozenset({0, 1}), kinds),))

    return rule


def logical(kind: str) -> Callable[[Op], Factored]:
    """``and`` of contributions to an all, ``or`` of those to an any."""

    def rule(op: Op) -> Factored:
        return elementwise(op, (Together(frozenset({0, 1}), (kind,)),) if op.results[0].dtype == bool else ())

    return rule


def polynomial(op: Op) -> Factored:
    """Linear in its coefficients, all at once."""
    return elementwise(op, (Together(frozenset(range(1, len(op.operands)))),))


def bitcast(op: Op) -> Factored:
    """The same bits; where elements are of another width, the last dim of the narrower ones is what makes one wider."""
    before, after = op.operands[0], op.results[0]
    letters = names(max(before.ndim, after.ndim))
    wider = before if before.ndim > after.ndim else after
    sizes = dict(zip(letters, wider.shape, strict=True))
    fixed = frozenset(letters[min(before.ndim, after.ndim) :])
    dims = one_letter_each(letters[: before.ndim], letters[: after.ndim])
    return Factored(dims[:1], dims[1:], sizes, fixed, uneven=True)


def device_put(op: Op) -> Factored:
    """Nothing is put anywhere: where values are is said by marks."""
    return dataclasses.replace(barrier(op), local=lambda cut, sizes: Local(run=lambda here, *blocks: list(blocks)))


def barrier(op: Op) -> Factored:
    """``optimization_barrier``: operands of any shapes, each as it is."""
    letters = [[f"{i}.{d}" for d in range(t.ndim)] for i, t in enumerate(op.operands)]
    dims = tuple(tuple((x,) for x in mine) for mine in letters)
    sizes = {x: s for mine, t in zip(letters, op.operands, strict=True) for x, s in zip(mine, t.shape, strict=True)}
    return Factored(dims, dims, sizes, uneven=True)


RULES: dict[str, Callable[[Op], Factored]] = dict.fromkeys(
    (*NONLINEAR, "threefry2x32", "random_fold_in"), elementwise
) | {
    "neg": _first,
    "real": _first,
    "imag": _first,
    "conj": _first,
    "copy": same,
    "copy_p": same,
    "name": same,
    "device_put": device_put,
    "optimization_barrier": barrier,
    "bitcast_convert_type": bitcast,
    "polynomial": polynomial,
    "convert_element_type": cast,
    "complex": both,
    "add": both,
    "add_any": both,
    "sub": both,
    "mul": product,
    "div": quotient,
    "select_n": select,
    "max": _extreme("max", "any"),
    "min": _extreme("min", "all"),
    "and": logical("all"),
    "or": logical("any"),
}
