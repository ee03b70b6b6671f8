"""Operations along an order: sorts, the largest, cumulative sums.

A sorted dim must be whole. Where what one block contributes is small (its largest element, its total), the dim can be
cut: every device works on its block, and what the blocks say is gathered and combined by everybody.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.arrays.kinds import identity
from shardkit.reshard.cost import wire_bytes
from shardkit.spmd.placed import Placed, Sizes, block_shape, parts
from shardkit.spmd.rules.factored import (
    SUMS,
    Custom,
    Cut,
    Factored,
    Local,
    Together,
    names,
    one_letter_each,
    strategies,
)
from shardkit.spmd.rules.strategy import Case, Op, Strategy, Traffic


def gathered(axes: tuple[str, ...], shape: Sequence[int], dim: int, each: int, dtype: Any, sizes: Sizes) -> Traffic:
    """An all-gather of ``each`` elements along ``dim`` of a block of this shape."""
    count = parts(axes, sizes)
    elements = math.prod(s for d, s in enumerate(shape) if d != dim) * each * count
    return Traffic("all_gather", axes, wire_bytes("all_gather", elements * np.dtype(dtype).itemsize, count))


def before_end(here: Any, block: jax.Array, dim: int, axes: Sequence[str], size: int) -> jax.Array:
    """Which elements of a block aren't its padded tail."""
    position = lax.broadcasted_iota(np.int32, block.shape, dim)
    return position < size - here.index(axes) * block.shape[dim]


def _alike(op: Op, dim: int) -> Factored:
    """Operands and results of one shape, or one that differs along ``dim`` only; that one is whole."""
    shape = op.operands[0].shape
    letters, result = names(len(shape)), names(len(shape))
    result[dim] = "found"
    sizes = dict(zip(letters, shape, strict=True)) | {"found": op.results[0].shape[dim]}
    return Factored(
        operands=one_letter_each(*[letters] * len(op.operands)),
        results=one_letter_each(*[result] * len(op.results)),
        sizes=sizes,
        whole=frozenset({letters[dim], "found"}),
        uneven=True,
        work=float(math.prod(shape)),
    )


def sort(op: Op) -> Factored:
    """The sorted dim must be whole."""
    return _alike(op, op.params["dimension"] % op.operands[0].ndim)


def approx_top_k(op: Op) -> Factored:
    """The searched dim must be whole."""
    return _alike(op, op.params["reduction_dimension"] % op.operands[0].ndim)


def across(
    rule: Factored, dim: int, blockwise: Callable[[tuple[str, ...], tuple[int, ...], Sizes], Local | None]
) -> Custom:
    """An operation that gives its whole result from a dim that's cut.

    Args:
      rule: with that dim of its only operand whole.
      dim: the dim.
      blockwise: of (the axes that cut it, the block's shape, the mesh) how; None: not possible.
    """
    (letter,) = rule.operands[0][dim]
    # Letters know only one way to lose a letter that's cut, a Partial: made so, and then taken back.
    open_rule = dataclasses.replace(rule, whole=rule.whole - {letter}, contracted={letter: "max"})

    def more(case: Case) -> Sequence[Strategy]:
        found = []
        for s in strategies(case, open_rule):
            axes = s.operands[0].dims[dim]
            shape = block_shape(case.op.operands[0].shape, s.operands[0], case.sizes)
            how = blockwise(axes, shape, case.sizes) if axes else None
            if how is not None:
                results = tuple(Placed(r.dims) for r in s.results)
                found.append(
                    dataclasses.replace(s, results=results, params=None, run=how.run, traffic=how.traffic, why=how.why)
                )
        return found

    return Custom(rule, more)


def argextreme(op: Op) -> Custom:
    """``argmax``, ``argmin``: of a cut dim, every block's best with its index, and the best of those.

    Blocks are gathered in the order of their elements, so the first of equals (or of nans) wins, as on one device.
    """
    operand, (result,) = op.operands[0], op.results
    (dim,) = op.params["axes"]
    dim %= operand.ndim
    kind = "max" if op.name == "argmax" else "min"
    letters = names(operand.ndim)
    rule = Factored(
        operands=one_letter_each(letters),
        results=one_letter_each([x for d, x in enumerate(letters) if d != dim]),
        sizes=dict(zip(letters, operand.shape, strict=True)),
        whole=frozenset({letters[dim]}),
        uneven=True,
        work=float(math.prod(operand.shape)),
    )

    def blockwise(axes: tuple[str, ...], shape: tuple[int, ...], sizes: Sizes) -> Local:
        padded = operand.shape[dim] % parts(axes, sizes) != 0

        def run(here: Any, block: jax.Array) -> Sequence[Any]:
            if padded:
                # A tie with an element that counts: that one is before it.
                least = identity(kind, block.dtype)
                block = jnp.where(before_end(here, block, dim, axes, operand.shape[dim]), block, least)
            at = jnp.expand_dims(op.primitive.bind(block, **op.params), dim)
            best = jnp.take_along_axis(block, at, dim, mode="clip")
            at += jnp.asarray(here.index(axes) * block.shape[dim], at.dtype)
            best = lax.all_gather(best, axes, axis=dim, tiled=True)
            at = lax.all_gather(at, axes, axis=dim, tiled=True)
            winner = jnp.expand_dims(op.primitive.bind(best, **op.params), dim)
            return [jnp.squeeze(jnp.take_along_axis(at, winner, dim, mode="clip"), dim)]

        traffic = tuple(gathered(axes, shape, dim, 1, t, sizes) for t in (operand.dtype, result.dtype))
        return Local(run=run, traffic=traffic, why="best of each block")

    return across(rule, dim, blockwise)


def lowest_of_all(dtype: Any) -> Any:
    """What ``top_k`` finds last: of floats, which it orders by their bits, the nan that is below minus infinity."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return identity("max", dtype)
    bits = np.array(-1, f"int{8 * np.dtype(dtype).itemsize}")
    return bits.view(dtype)[()]


def top_k(op: Op) -> Custom:
    """Of a cut dim, the largest of every block, and the largest of those.

    Candidates are gathered in the order of their elements, so equals come out in the order of one device.
    """
    operand, k = op.operands[0], op.params["k"]
    dim = op.params.get("axis", -1) % operand.ndim

    def blockwise(axes: tuple[str, ...], shape: tuple[int, ...], sizes: Sizes) -> Local | None:
        if not 0 < k <= shape[dim]:
            return None  # the candidates would be everything
        padded = operand.shape[dim] % parts(axes, sizes) != 0

        def run(here: Any, block: jax.Array) -> Sequence[Any]:
            if padded:
                real = before_end(here, block, dim, axes, operand.shape[dim])
                block = jnp.where(real, block, lowest_of_all(block.dtype))
            values, at = op.primitive.bind(block, **op.params)
            at += jnp.asarray(here.index(axes) * block.shape[dim], at.dtype)
            values = lax.all_gather(values, axes, axis=dim, tiled=True)
            at = lax.all_gather(at, axes, axis=dim, tiled=True)
            values, chosen = op.primitive.bind(values, **op.params)
            return [values, jnp.take_along_axis(at, chosen, dim, mode="clip")]

        traffic = tuple(gathered(axes, shape, dim, k, t.dtype, sizes) for t in op.results)
        return Local(run=run, traffic=traffic, why="largest of each block")

    return across(_alike(op, dim), dim, blockwise)


def _logsumexp(values: jax.Array, axis: int) -> jax.Array:
    return jax.nn.logsumexp(values, axis=axis, keepdims=True)


def _total(values: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(values, axis=axis, keepdims=True, dtype=values.dtype)


def _product(values: jax.Array, axis: int) -> jax.Array:
    return jnp.prod(values, axis=axis, keepdims=True, dtype=values.dtype)


def _largest(values: jax.Array, axis: int) -> jax.Array:
    return jnp.max(values, axis=axis, keepdims=True)


def _smallest(values: jax.Array, axis: int) -> jax.Array:
    return jnp.min(values, axis=axis, keepdims=True)


# Of each: the kind whose identity changes nothing, the kinds it passes, the reduction, and how two are combined.
_CUMULATIVE = {
    "cumsum": ("sum", SUMS, _total, lax.add),
    "cumprod": ("prod", ("prod",), _product, lax.mul),
    "cummax": ("max", ("max",), _largest, lax.max),
    "cummin": ("min", ("min",), _smallest, lax.min),
    "cumlogsumexp": ("max", (), _logsumexp, jnp.logaddexp),
}


def cumulative(op: Op) -> Factored:
    """Of a cut dim, every block on its own, and on top what the totals of the blocks before it come to."""
    kind, passes, total, combine = _CUMULATIVE[op.name]
    operand, reverse = op.operands[0], op.params["reverse"]
    dim = op.params["axis"] % operand.ndim
    letters = names(operand.ndim)
    ordered = kind in ("max", "min")

    def local(cut: Cut, sizes: Sizes) -> Local | None:
        axes = cut.get(letters[dim], ())
        if not axes:
            return Local(op.params)
        if ordered and jnp.issubdtype(operand.dtype, jnp.complexfloating):
            return None
        shape = [-(-s // parts(cut.get(x, ()), sizes)) for s, x in zip(operand.shape, letters, strict=True)]
        padded = operand.shape[dim] % parts(axes, sizes) != 0

        def run(here: Any, block: jax.Array) -> Sequence[Any]:
            unit = identity(kind, block.dtype)
            if padded and reverse:  # else the tail is after all that counts
                block = jnp.where(before_end(here, block, dim, axes, operand.shape[dim]), block, unit)
            inner = op.primitive.bind(block, **op.params)
            edge = 0 if reverse else block.shape[dim] - 1
            totals = lax.all_gather(lax.slice_in_dim(inner, edge, edge + 1, axis=dim), axes, axis=dim, tiled=True)
            position = lax.broadcasted_iota(np.int32, totals.shape, dim)
            me = here.index(axes)
            earlier = position > me if reverse else position < me
            return [combine(inner, total(jnp.where(earlier, totals, unit), dim))]

        traffic = (gathered(axes, shape, dim, 1, operand.dtype, sizes),)
        return Local(run=run, traffic=traffic, why="blocks on their own, then what is before them")

    dims = one_letter_each(letters)
    return Factored(
        operands=dims,
        results=dims,
        sizes=dict(zip(letters, operand.shape, strict=True)),
        linear=(Together(frozenset({0}), passes),) if passes else (),
        local=local,
        uneven=True,
    )


RULES: dict[str, Callable[[Op], Factored] | Callable[[Op], Custom]] = {
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": approx_top_k,
    "argmax": argextreme,
    "argmin": argextreme,
} | dict.fromkeys(_CUMULATIVE, cumulative)
