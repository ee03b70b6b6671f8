"""Products with a matrix of few entries a column (resizing, differences): rows of neighbours, not sums of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.spatial.windows import Exchange, Span, block_size, plan_exchange
from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.factored import Cut, Factored, Local, Together, names, one_letter_each
from shardkit.spmd.rules.halos import AfterReading, Halo, Read, traffic
from shardkit.spmd.rules.strategy import Op


def banded(op: Op) -> Factored | None:
    """The rule of ``dot_general`` with a known matrix, of which the contracted dim is cut; None where there is none."""
    which = [i for i, c in enumerate(op.constants) if isinstance(c, np.ndarray) and c.ndim == 2]
    contracted, batch = op.params["dimension_numbers"]
    if len(which) != 1 or any(batch) or len(contracted[0]) != 1:
        return None
    matrix_at, field_at = which[0], 1 - which[0]
    rows, along = contracted[matrix_at][0], contracted[field_at][0]
    matrix = op.constants[matrix_at] if rows == 0 else op.constants[matrix_at].T
    field = op.operands[field_at]
    letters = names(field.ndim)
    spread = letters[along]
    kept = [x for d, x in enumerate(letters) if d != along]
    out = [spread, *kept] if matrix_at == 0 else [*kept, spread]

    def local(cut: Cut, mesh: Sizes) -> Local | None:
        axes = cut.get(spread, ())
        if not axes:
            return None  # that's the plain product
        plan, starts = _plan(matrix, parts(axes, mesh))
        if plan.received >= (plan.shards - 1) * plan.block:
            return None
        halo = Halo(along, axes, plan, line=False)
        block = [-(-s // parts(cut.get(x, ()), mesh)) for s, x in zip(field.shape, letters, strict=True)]

        def work(here: Any, *blocks: Any) -> Any:
            part = _part(blocks[matrix_at], rows, starts, plan, matrix.shape[1], here.index(axes))
            given = [part, part]
            given[field_at] = blocks[field_at]
            return op.primitive.bind(*given, **op.params)

        return Local(
            run=AfterReading((Read(field_at, (halo,), "sum"),), work),
            traffic=traffic((halo,), block, field.dtype),
            why="halo exchange",
        )

    operands: list[Any] = [one_letter_each(letters)[0]] * 2
    operands[matrix_at] = (("m",), ("n",))
    sizes = dict(zip(letters, field.shape, strict=True)) | dict(zip("mn", op.operands[matrix_at].shape, strict=True))
    few = int((matrix != 0).sum(0).max())
    return Factored(
        tuple(operands),
        one_letter_each(out),
        sizes,
        whole=frozenset("mn"),
        linear=(Together(frozenset({field_at})),),
        local=local,
        uneven=True,
        work=2.0 * math.prod(sizes[x] for x in kept) * matrix.shape[1] * few,
    )


def _plan(matrix: np.ndarray, shards: int) -> tuple[Exchange, tuple[int, ...]]:
    """Who needs which rows of what is multiplied, and where each device's span of them begins."""
    count, columns = matrix.shape
    block = block_size(columns, shards)
    needs = []
    for i in range(shards):
        used = np.flatnonzero((matrix[:, i * block : (i + 1) * block] != 0).any(1))
        own = i * block_size(count, shards)
        needs.append((int(used[0]), int(used[-1]) + 1) if used.size else (own, own))
    length = max(1, max(hi - lo for lo, hi in needs))
    return plan_exchange(count, shards, "zeros", [Span(lo, lo, hi) for lo, hi in needs], length), tuple(
        lo for lo, _ in needs
    )


def _part(matrix: Any, rows: int, starts: Sequence[int], plan: Exchange, columns: int, index: Any) -> Any:
    """The rows of this device's span, and the columns of its block of the result."""
    block = block_size(columns, plan.shards)
    config = [(0, 0, 0), (0, 0, 0)]
    config[rows] = (0, plan.length, 0)
    config[1 - rows] = (0, block * plan.shards - columns, 0)
    padded = lax.pad(matrix, jnp.zeros((), matrix.dtype), config)
    first = jnp.asarray(np.asarray(starts, np.int32))[index]
    part = lax.dynamic_slice_in_dim(padded, first, plan.length, rows)
    return lax.dynamic_slice_in_dim(part, index * block, block, 1 - rows)
