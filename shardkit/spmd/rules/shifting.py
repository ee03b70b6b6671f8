"""Padding, cropping and slicing: windows of one element, so that of a cut dim only edges travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.arrays.kinds import identity
from shardkit.spatial.windows import Window, shard_window
from shardkit.spmd.placed import Sizes, parts
from shardkit.spmd.rules.factored import ANY, Cut, Factored, Local, Together, names, one_letter_each
from shardkit.spmd.rules.halos import AfterReading, Read, fitted, halo_of, traffic, worthwhile
from shardkit.spmd.rules.strategy import Op


def pad(op: Op) -> Factored:
    """Edge and interior padding, negative too. Contributions are padded with zeros only."""
    operand, config = op.operands[0], op.params["padding_config"]
    windows = [
        Window(size, 1, 1, low, high, interior + 1)
        for size, (low, high, interior) in zip(operand.shape, config, strict=True)
    ]
    kind = _fill_kind(operand.dtype, op.constants[1] if len(op.constants) > 1 else None)
    linear = Together(frozenset({0}) if kind == "sum" else frozenset({0, 1}))

    def unmoved(dims: Sequence[int], block: Sequence[int]) -> Mapping[str, Any]:
        return {"padding_config": tuple((0, 0, 0) if d in dims else c for d, c in enumerate(config))}

    return _shifted(op, windows, kind, unmoved, (linear,))


def slice_(op: Op) -> Factored:
    """A part of a dim, in steps."""
    operand, start, limit = op.operands[0], op.params["start_indices"], op.params["limit_indices"]
    strides = op.params["strides"] or (1,) * len(start)
    rows = zip(operand.shape, start, limit, strides, strict=True)
    windows = [Window(size, 1, step, -first, last - size) for size, first, last, step in rows]

    def unmoved(dims: Sequence[int], block: Sequence[int]) -> Mapping[str, Any]:
        # A dim that is cut and left as it is, or has been shifted already: all of the block.
        whole = [d in dims or not _moves(windows[d]) for d in range(len(block))]
        return {
            "start_indices": tuple(0 if w else s for w, s in zip(whole, start, strict=True)),
            "limit_indices": tuple(b if w else e for w, b, e in zip(whole, block, limit, strict=True)),
            "strides": tuple(1 if w else s for w, s in zip(whole, strides, strict=True)),
        }

    # What stands beyond the ends is never taken.
    kind = _fill_kind(operand.dtype, np.zeros((), np.bool_ if _boolean(operand.dtype) else np.int8))
    return _shifted(op, windows, kind, unmoved, (Together(frozenset({0}), ANY),))


def _moves(window: Window) -> bool:
    return window != Window(window.size, 1)


def _boolean(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.bool_)


def _fill_kind(dtype: Any, value: Any) -> str | None:
    """The kind of reduction whose identity the padding is; None where it is none, or isn't known."""
    if value is None or np.ndim(value) or not (jnp.issubdtype(dtype, jnp.number) or _boolean(dtype)):
        return None
    if _boolean(dtype):
        return "all" if value else "any"
    kinds = ("sum",) if jnp.issubdtype(dtype, jnp.complexfloating) else ("sum", "max", "min")
    return next((kind for kind in kinds if np.asarray(value).astype(dtype) == identity(kind, dtype)), None)


def _shifted(
    op: Op,
    windows: Sequence[Window],
    kind: str | None,
    unmoved: Callable[[Sequence[int], Sequence[int]], Mapping[str, Any]],
    linear: tuple[Together, ...],
) -> Factored:
    """The rule of an operation that moves windows of one element.

    Args:
      op: the operation; what it moves comes first, all other operands are scalars.
      windows: of each dim.
      kind: what stands beyond the ends; None: dims along which windows move must be whole.
      unmoved: the parameters that leave these dims of a block of this shape as they are.
      linear: what may be Partial.
    """
    operand = op.operands[0]
    letters = names(operand.ndim)
    moved = {x for x, w in zip(letters, windows, strict=True) if _moves(w)}

    def local(cut: Cut, mesh: Sizes) -> Local | None:
        block = [-(-t // parts(cut.get(x, ()), mesh)) for t, x in zip(operand.shape, letters, strict=True)]
        across = {d: cut[x] for d, x in enumerate(letters) if x in cut and x in moved}
        if not across:
            return Local({**op.params, **unmoved((), block)})
        plans = {d: shard_window(windows[d], parts(axes, mesh)) for d, axes in across.items()}
        if not all(map(worthwhile, plans.values())) or not all(w.output_size and w.size for w in windows):
            return None
        over = [(halo_of(d, across[d], plan), plan) for d, plan in plans.items()]
        halos = tuple(halo for halo, _ in over)

        def work(here: Any, x: Any, *scalars: Any) -> Any:
            x = fitted(here, x, over, kind or "sum")
            for d in across:
                x = lax.slice_in_dim(x, 0, None, windows[d].stride, axis=d)
            return op.primitive.bind(x, *scalars, **{**op.params, **unmoved(tuple(across), x.shape)})

        return Local(
            run=AfterReading((Read(0, halos, kind or "sum"),), work),
            traffic=traffic(halos, block, operand.dtype),
            why="halo exchange",
        )

    return Factored(
        (*one_letter_each(letters), *((),) * (len(op.operands) - 1)),
        one_letter_each(letters),
        dict(zip(letters, operand.shape, strict=True)),
        frozenset(moved) if kind is None else frozenset(),
        linear=linear,
        local=local,
        uneven=True,
        work=0.0,
    )


RULES = {"pad": pad, "slice": slice_}
