"""Operations that read or write windows whose places are data: gather, the scatters, dynamic slices.

A dim that windows span entirely is a letter like any other. A dim along which windows are one element wide can be cut,
too: every device works on the windows that start in its own block. What it reads for the others is nothing, so that
contributions add up to the lookup (a table cut by vocabulary); what it writes for them is dropped (the gradient of that
table, or of logits cut by class).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.spmd.placed import Placed, Sizes, in_mesh_order, parts
from shardkit.spmd.rules.factored import (
    ANY,
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
from shardkit.spmd.rules.strategy import Case, Op, Strategy

Pieces = Mapping[int, tuple[tuple[str, ...], int]]  # of a coordinate: the axes that cut its dim, and the block's size


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a gather or scatter, by operand dim.

    Attributes:
      shape: of the operand.
      sizes: of a window.
      columns: of an index vector's coordinates, the operand dims that they're for.
      spanned: dims that windows span entirely, and keep.
      batching: dims paired with a dim of the indices, by that dim.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    columns: tuple[int, ...]
    spanned: tuple[int, ...]
    batching: Mapping[int, int]

    @property
    def points(self) -> tuple[int, ...]:
        """Dims with an index, along which a window is one element."""
        taken = (*self.spanned, *self.batching)
        return tuple(d for d in self.columns if self.sizes[d] == 1 and d not in taken)

    @property
    def last(self) -> tuple[int, ...]:
        """The last start, of each coordinate, from which a window is within the operand."""
        return tuple(self.shape[d] - self.sizes[d] for d in self.columns)

    def letters(self, batch: Sequence[str]) -> list[str]:
        """Of the operand, where the indices have the letters ``batch``."""
        own = names(len(self.shape), "o")
        return [batch[self.batching[d]] if d in self.batching else own[d] for d in range(len(own))]

    def pieces(self, letters: Sequence[str], cut: Cut, sizes: Sizes) -> Pieces:
        """The coordinates whose dims are cut and have windows of one element."""
        return {
            c: (cut[letters[d]], -(-self.shape[d] // parts(cut[letters[d]], sizes)))
            for c, d in enumerate(self.columns)
            if d in self.points and letters[d] in cut
        }


def is_opaque(dtype: Any) -> bool:
    """Whether elements are no numbers (random keys): there's no zero, and they can't be Partial."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def nothing(dtype: Any) -> str | None:
    """The kind of a Partial whose devices hold the element or zero; None where there's no such thing."""
    if is_opaque(dtype):
        return None
    return "any" if np.dtype(dtype) == np.bool_ else "sum"


def index_dtype(shape: Sequence[int]) -> Any:
    """One that holds every position."""
    return np.int32 if max(shape, default=0) <= np.iinfo(np.int32).max else np.int64


def _bounds(last: Sequence[int] | int, dtype: Any) -> np.ndarray:
    """The last starts in the dtype of the starts, where they fit: an int8 one can't reach element 128 anyway."""
    most = int(jnp.iinfo(dtype).max)
    return np.asarray(min(last, most) if isinstance(last, int) else [min(x, most) for x in last], dtype)


def clamped(starts: jax.Array, last: Sequence[int] | int, dtype: Any) -> jax.Array:
    """Starts moved to where the whole window is inside, in a dtype that holds every position."""
    return jnp.clip(starts, starts.dtype.type(0), _bounds(last, starts.dtype)).astype(dtype)


def within(starts: jax.Array, last: Sequence[int]) -> jax.Array:
    """Of each index vector, whether its window is inside along every dim: ``[..., columns] -> [...]``."""
    return ((starts >= 0) & (starts <= _bounds(last, starts.dtype))).all(-1)


def to_block(here: Any, starts: jax.Array, windows: Windows, pieces: Pieces) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Index vectors of the whole operand, as ones of this device's block.

    Args:
      here: the device.
      starts: ``[..., columns]``, anywhere.
      windows: of the whole operand.
      pieces: the coordinates whose dims are cut.

    Returns:
      The starts, clamped as on one device and then counted from the block's first element, ``[..., columns]``; which
      of them are in the block, ``[...]``; starts that are outside of any block, ``[columns]``.
    """
    dtype = index_dtype(windows.shape)
    first, beyond = [], []
    for c, last in enumerate(windows.last):
        axes, size = pieces.get(c, ((), last + 1))
        first.append(jnp.asarray(here.index(axes) * size, dtype))
        beyond.append(size)
    outside = jnp.asarray(beyond, dtype)
    local = clamped(starts, windows.last, dtype) - jnp.stack(first)
    return local, ((local >= 0) & (local < outside)).all(-1), outside


def unhinted(op: Op, batch: Sequence[str], cut: Cut, sizes: Mapping[str, int], mesh: Sizes) -> dict[str, Any]:
    """The parameters, without what they promise of the indices where those are padded: a padded tail is anything."""
    if all(sizes[x] % parts(cut.get(x, ()), mesh) == 0 for x in batch):
        return dict(op.params)
    return {**op.params, "indices_are_sorted": False, "unique_indices": False}


def _gather_windows(op: Op) -> Windows:
    numbers, shape, sizes = op.params["dimension_numbers"], op.operands[0].shape, op.params["slice_sizes"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    removed = (*numbers.collapsed_slice_dims, *batching)
    spanned = tuple(d for d, size in enumerate(shape) if d not in removed and sizes[d] == size)
    if is_opaque(op.operands[0].dtype):
        spanned = tuple(d for d in spanned if d not in numbers.start_index_map)  # a fill value needs a select
    return Windows(shape, tuple(sizes), tuple(numbers.start_index_map), spanned, batching)


def survives(fill: Any) -> tuple[str, ...]:
    """The kinds of reduction in which a constant that every device contributes stays what it is."""
    if fill is None or fill == 0 or fill != fill:
        return ANY
    return tuple(k for k in ANY if k not in ("sum", "prod") or (k == "prod" and fill == 1))


def gather(op: Op) -> Factored:
    """Batch dims of the indices, dims that slices span, and dims looked up by index (which leaves a Partial)."""
    numbers, windows = op.params["dimension_numbers"], _gather_windows(op)
    filling = op.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    fill = op.params["fill_value"] if filling else None
    kind = nothing(op.operands[0].dtype)
    batch = names(op.operands[1].ndim, "i")
    letters = windows.letters(batch)
    result, fixed = names(op.results[0].ndim, "r"), {batch[-1]}
    removed = (*numbers.collapsed_slice_dims, *windows.batching)
    kept = [d for d in range(len(letters)) if d not in removed]
    for r, d in zip(numbers.offset_dims, kept, strict=True):
        if d in windows.spanned:
            result[r] = letters[d]
        else:
            fixed.add(result[r])
    places = tuple(r for r in range(len(result)) if r not in numbers.offset_dims)  # of the indices' dims in the result
    for r, letter in zip(places, batch[:-1], strict=True):
        result[r] = letter
    points = windows.points if kind is not None else ()
    free = (*windows.spanned, *windows.batching, *points)
    fixed.update(x for d, x in enumerate(letters) if d not in free)
    sizes = dict(
        zip((*result, *letters, *batch), (*op.results[0].shape, *windows.shape, *op.operands[1].shape), strict=True)
    )

    def local(cut: Cut, mesh: Sizes) -> Local:
        block = tuple(
            -(-s // parts(cut.get(letters[d], ()), mesh)) if d in windows.spanned else s
            for d, s in enumerate(windows.sizes)
        )
        params = unhinted(op, batch, cut, sizes, mesh) | {"slice_sizes": block}
        if not any(letters[d] in cut for d in windows.columns):
            return Local(params)
        pieces = windows.pieces(letters, cut, mesh)
        clip = params | {
            "mode": lax.GatherScatterMode.CLIP,
            "fill_value": None,
            "indices_are_sorted": False,
            "unique_indices": False,
        }

        def run(here: Any, table: jax.Array, starts: jax.Array) -> Sequence[Any]:
            at, mine, _ = to_block(here, starts, windows, pieces)
            found = op.primitive.bind(table, at, **clip)

            def spread(flags: jax.Array) -> jax.Array:
                return lax.broadcast_in_dim(flags, found.shape, places)

            if pieces:
                found = jnp.where(spread(mine), found, found.dtype.type(0))
            if filling:
                # Once, by the first of those whose contributions add up.
                alone = here.index([a for axes, _ in pieces.values() for a in axes]) == 0
                filler = jnp.where(alone, jnp.asarray(fill, found.dtype), found.dtype.type(0))
                found = jnp.where(spread(within(starts, windows.last)), found, filler)
            return [found]

        return Local(run=run, why="masked lookup" if pieces else "")

    return Factored(
        operands=one_letter_each(letters, batch),
        results=one_letter_each(result),
        sizes=sizes,
        whole=frozenset(fixed),
        contracted={letters[d]: kind for d in points if kind is not None},
        linear=(Together(frozenset({0}), survives(fill)),) if kind is not None else (),
        local=local,
        uneven=True,
    )


# Of each scatter: what combines updates that only some devices have (None: the last one counts); what may be Partial.
_SCATTERS = {
    "scatter": (None, (Together(frozenset({0, 2}), ANY),)),
    "scatter-add": ("sum", (Together(frozenset({0, 2}), SUMS),)),
    "scatter-sub": ("sum", (Together(frozenset({0, 2}), SUMS),)),
    "scatter-mul": ("prod", (Together(frozenset({0, 2}), ("prod",)), Together(frozenset({0}), SUMS))),
    "scatter-min": ("min", (Together(frozenset({0, 2}), ("min",)),)),
    "scatter-max": ("max", (Together(frozenset({0, 2}), ("max",)),)),
}


def _scatter_windows(op: Op) -> Windows:
    numbers, shape, updates = op.params["dimension_numbers"], op.operands[0].shape, op.operands[2].shape
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    removed = (*numbers.inserted_window_dims, *batching)
    kept = [d for d in range(len(shape)) if d not in removed]
    sizes = [1] * len(shape)
    for d, u in zip(kept, numbers.update_window_dims, strict=True):
        sizes[d] = updates[u]
    spanned = tuple(d for d in kept if sizes[d] == shape[d])
    return Windows(shape, tuple(sizes), tuple(numbers.scatter_dims_to_operand_dims), spanned, batching)


def _scatter_kinds(op: Op) -> tuple[str | None, tuple[Together, ...]]:
    """The row of ``_SCATTERS``, less what the operand's elements or an own update function don't allow."""
    kind, linear = _SCATTERS[op.name]
    dtype = op.operands[0].dtype
    if is_opaque(dtype) or (op.name == "scatter" and op.params["update_jaxpr"] is not None):
        return None, ()
    if np.dtype(dtype) == np.bool_ and kind in ("sum", "prod"):
        return None, ()
    return kind, linear


def scatter(op: Op) -> Custom:
    """Batch dims, dims that windows span, dims written by index, and (for sums, extremes) the dims of the updates.

    Devices that each have some of the updates leave a Partial; what was there before must then be Partial as well, or
    it would count once for every device. For one that is replicated (zeros, in a gradient) that costs nothing.
    """
    numbers, windows = op.params["dimension_numbers"], _scatter_windows(op)
    dropping = op.params["mode"] != lax.GatherScatterMode.CLIP  # a promise that's broken drops as well
    kind, linear = _scatter_kinds(op)
    batch = names(op.operands[1].ndim, "i")
    letters = windows.letters(batch)
    updates, fixed = names(op.operands[2].ndim, "u"), {batch[-1]}
    removed = (*numbers.inserted_window_dims, *windows.batching)
    kept = [d for d in range(len(letters)) if d not in removed]
    for u, d in zip(numbers.update_window_dims, kept, strict=True):
        if d in windows.spanned:
            updates[u] = letters[d]
        else:
            fixed.add(updates[u])
    rest = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    for u, letter in zip(rest, batch[:-1], strict=True):
        updates[u] = letter
    free = (*windows.spanned, *windows.batching, *windows.points)
    fixed.update(x for d, x in enumerate(letters) if d not in free)
    spread = [i for i in range(len(batch) - 1) if i not in windows.batching.values()]
    if kind is None:
        fixed.update(batch[i] for i in spread)
    sizes = dict(
        zip((*updates, *letters, *batch), (*op.operands[2].shape, *windows.shape, *op.operands[1].shape), strict=True)
    )

    def local(cut: Cut, mesh: Sizes) -> Local:
        params = unhinted(op, batch, cut, sizes, mesh)
        pieces = windows.pieces(letters, cut, mesh)
        if not pieces:
            return Local(params)
        drop = params | {
            "mode": lax.GatherScatterMode.FILL_OR_DROP,
            "indices_are_sorted": False,
            "unique_indices": False,
        }

        def run(here: Any, target: jax.Array, starts: jax.Array, new: jax.Array) -> Sequence[Any]:
            at, mine, outside = to_block(here, starts, windows, pieces)
            if dropping:
                mine &= within(starts, windows.last)
            return [op.primitive.bind(target, jnp.where(mine[..., None], at, outside), new, **drop)]

        return Local(run=run, why="masked update")

    rule = Factored(
        operands=one_letter_each(letters, batch, updates),
        results=one_letter_each(letters),
        sizes=sizes,
        whole=frozenset(fixed),
        contracted={batch[i]: kind for i in spread} if kind is not None else {},
        linear=linear,
        local=local,
        uneven=True,
    )

    def more(case: Case) -> Sequence[Strategy]:
        return [_with_partial_target(s, spread, case.sizes) for s in strategies(case, rule)]

    return Custom(None, more)


def _with_partial_target(strategy: Strategy, spread: Sequence[int], sizes: Sizes) -> Strategy:
    """The same, the target Partial over the axes along which devices have different updates."""
    target, indices = strategy.operands[:2]
    axes = {a for i in spread for a in indices.dims[i]}
    if not axes:
        return strategy
    placed = Placed(target.dims, in_mesh_order({*target.partial, *axes}, sizes), strategy.results[0].reduce)
    return dataclasses.replace(strategy, operands=(placed, *strategy.operands[1:]))


def _along(array: Any, dim: int, ndim: int) -> Any:
    """A vector as an array of rank ``ndim``, along one of its dims."""
    return array.reshape(tuple(-1 if d == dim else 1 for d in range(ndim)))


def dynamic_slice(op: Op) -> Factored:
    """Dims taken entirely; of a dim that's cut, every device takes what it has of the slice, which leaves a Partial."""
    shape, taken = op.operands[0].shape, op.params["slice_sizes"]
    kind = nothing(op.operands[0].dtype)
    before, after = names(len(shape)), names(len(shape))
    part = [d for d, size in enumerate(shape) if taken[d] != size]
    for d in part:
        after[d] = f"part{d}"
    sizes = dict(zip((*before, *after), (*shape, *op.results[0].shape), strict=True))
    fixed = {after[d] for d in part}
    if kind is None:
        fixed.update(before[d] for d in part)
    dtype = index_dtype(shape)

    def local(cut: Cut, mesh: Sizes) -> Local:
        block = [-(-s // parts(cut.get(x, ()), mesh)) for s, x in zip(shape, before, strict=True)]
        pieces = [d for d in part if before[d] in cut]
        inner = [block[d] if d in pieces or d not in part else taken[d] for d in range(len(shape))]

        def run(here: Any, array: jax.Array, *starts: jax.Array) -> Sequence[Any]:
            # Clamped here, though the operation does it, too: of two slices in a row, one of which a reshard may have
            # put there, XLA (of jaxlib 0.10) adds the starts as they are, and clamps the sum.
            at = [clamped(jnp.asarray(s), shape[d] - taken[d], dtype) for d, s in enumerate(starts)]
            zero = jnp.zeros((), dtype)
            found = lax.dynamic_slice(array, [zero if d in pieces else at[d] for d in range(len(at))], inner)
            for d in pieces:
                first = jnp.asarray(here.index(cut[before[d]]) * block[d], dtype)
                wanted = at[d] - first + np.arange(taken[d], dtype=dtype)
                mine = _along((wanted >= 0) & (wanted < block[d]), d, len(shape))
                found = jnp.where(mine, jnp.take(found, wanted, axis=d, mode="clip"), found.dtype.type(0))
            return [found]

        return Local(run=run, why="masked slice" if pieces else "")

    return Factored(
        operands=one_letter_each(before, *[[]] * len(shape)),
        results=one_letter_each(after),
        sizes=sizes,
        whole=frozenset(fixed),
        contracted={before[d]: kind for d in part} if kind is not None else {},
        linear=(Together(frozenset({0}), ANY),) if kind is not None else (),
        local=local,
        uneven=True,
    )


def dynamic_update_slice(op: Op) -> Factored:
    """Dims replaced entirely; of a dim that's cut, every device replaces what it has of the window."""
    shape, window = op.operands[0].shape, op.operands[1].shape
    opaque = is_opaque(op.operands[0].dtype)
    letters, update = names(len(shape)), names(len(shape))
    part = [d for d, size in enumerate(shape) if window[d] != size]
    for d in part:
        update[d] = f"part{d}"
    fixed = {update[d] for d in part}
    if opaque:
        fixed.update(letters[d] for d in part)
    dtype = index_dtype(shape)

    def local(cut: Cut, mesh: Sizes) -> Local:
        pieces = [d for d in part if letters[d] in cut]
        if not pieces:
            return Local(op.params)

        def run(here: Any, array: jax.Array, new: jax.Array, *starts: jax.Array) -> Sequence[Any]:
            at = [clamped(jnp.asarray(s), shape[d] - window[d], dtype) for d, s in enumerate(starts)]
            size, mine = list(new.shape), jnp.ones((), bool)
            for d in pieces:
                # As much of the window as a block can hold, as near to the window as the block reaches: what is
                # touched is the size of the update, not of the block.
                first = jnp.asarray(here.index(cut[letters[d]]) * array.shape[d], dtype)
                size[d] = min(window[d], array.shape[d])
                start, at[d] = at[d] - first, jnp.clip(at[d] - first, 0, array.shape[d] - size[d])
                source = at[d] - start + np.arange(size[d], dtype=dtype)
                mine = mine & _along((source >= 0) & (source < window[d]), d, len(shape))
                new = jnp.take(new, source, axis=d, mode="clip")
            old = lax.dynamic_slice(array, at, size)
            return [lax.dynamic_update_slice(array, jnp.where(mine, new, old), at)]

        return Local(run=run, why="masked update")

    return Factored(
        operands=one_letter_each(letters, update, *[[]] * len(shape)),
        results=one_letter_each(letters),
        sizes=dict(zip((*letters, *update), (*shape, *window), strict=True)),
        whole=frozenset(fixed),
        linear=() if opaque else (Together(frozenset({0, 1}), ANY),),
        local=local,
        uneven=True,
    )


RULES = {
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
} | dict.fromkeys(_SCATTERS, scatter)
