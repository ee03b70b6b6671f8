"""Operations that rearrange, cut, join or contract dims which aren't blocked: blocked dims go along."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array
from jax import numpy as jnp

from shardkit.spatial.regions.block import CutDim, Cuts
from shardkit.spatial.regions.graph import Node
from shardkit.spatial.regions.local import Links, local_step
from shardkit.spatial.regions.step import WHOLE, Link, Step, Whole
from shardkit.varying import alike

Moves = Mapping[int, int]  # dim of an operand -> dim of the results, where it is kept as it is


def _step(
    node: Node,
    lies: Sequence[Cuts],
    moves: Sequence[Moves],
    params: Callable[[Any, Sequence[Array]], dict[str, Any]],
    **more: Any,
) -> Step | None:
    """A local step, if all blocked dims are kept; ``params`` gives the primitive's for local arrays."""
    if all(0 in v.shape for v in node.outputs):
        return _empty(node)
    result: dict[int, CutDim] = {}
    for cuts, move in zip(lies, moves, strict=True):
        for dim, cut in cuts.items():
            if dim not in move or result.setdefault(move[dim], cut) != cut:
                return None
    for cuts, move in zip(lies, moves, strict=True):
        if cuts and any(to in result and d not in cuts for d, to in move.items()):
            return None  # blocked in one operand, whole in another
    if any(not cuts and any(to in result for to in move.values()) for cuts, move in zip(lies, moves, strict=True)):
        more = {"spread": "moved", "chunks": False} | more
    links = [
        Links([Link(d, move[d], c.shards) for d, c in cuts.items()], {d: to for d, to in move.items() if d not in cuts})
        for cuts, move in zip(lies, moves, strict=True)
    ]

    def apply(here: Any, arrays: Sequence[Array], shape: tuple[int, ...]) -> Sequence[Array]:
        out = node.primitive.bind(*alike(arrays), **{**node.params, **params(shape, arrays)})
        return out if node.primitive.multiple_results else [out]

    return local_step(node, [result] * len(node.outputs), links, apply, **more)


def _empty(node: Node) -> Step:
    def run(here: Any, operands: Any, wants: Any, ensure: Any) -> Sequence[Whole]:
        return [Whole(jnp.zeros(v.shape, v.aval.dtype), v.shape) for v in node.outputs]

    nowhere = ({},) * len(node.outputs)
    return Step(node, WHOLE, node.inputs, nowhere, ((),) * len(node.inputs), run, node.outputs, "empty")


def _nothing(shape: Any, arrays: Any) -> dict[str, Any]:
    return {}


def _without(ndim: int, dims: Sequence[int]) -> Moves:
    """What is left when dims go."""
    kept = [d for d in range(ndim) if d not in {x % ndim for x in dims}]
    return {d: i for i, d in enumerate(kept)}


def _all_but(ndim: int, dims: Sequence[int]) -> Moves:
    """Dims that stay where they are."""
    return {d: d for d in range(ndim) if d not in {x % ndim for x in dims}}


def transpose(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Dims in another order."""
    return _step(node, lies, [{d: i for i, d in enumerate(node.params["permutation"])}], _nothing)


def broadcast_in_dim(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """New dims around those there are."""
    shape, given = node.params["shape"], node.inputs[0].shape
    move = {d: to for d, to in enumerate(node.params["broadcast_dimensions"]) if given[d] == shape[to]}
    return _step(node, lies, [move], lambda local, arrays: {"shape": local})


def squeeze(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Without dims of size 1."""
    return _step(node, lies, [_without(len(node.inputs[0].shape), node.params["dimensions"])], _nothing)


def reshape(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Other dims split or merged: a blocked one must be one before and after, with as much before it."""
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if node.params["dimensions"] is not None:
        return None
    places = {math.prod(after[:i]): i for i in reversed(range(len(after))) if after[i] != 1}
    move = {}
    for dim, size in enumerate(before):
        to = places.get(math.prod(before[:dim])) if size != 1 else None
        if to is not None and after[to] == size:
            move[dim] = to
    if list(before).count(1) and before[0] == 1 and after and after[0] == 1:
        move.setdefault(0, 0)  # one image is a batch, too
    return _step(node, lies, [move], lambda local, arrays: {"new_sizes": local})


def slicing(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """A slice of dims that aren't blocked."""
    p, shape = node.params, node.inputs[0].shape
    strides = p["strides"] or (1,) * len(shape)
    whole = [
        d for d, size in enumerate(shape) if (p["start_indices"][d], p["limit_indices"][d], strides[d]) == (0, size, 1)
    ]

    def params(local: tuple[int, ...], arrays: Sequence[Array]) -> dict[str, Any]:
        limits = [arrays[0].shape[d] if d in whole else p["limit_indices"][d] for d in range(len(shape))]
        return {"limit_indices": tuple(limits)}

    return _step(node, lies, [{d: d for d in whole}], params)


def pad(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Padding of dims that aren't blocked."""
    config = node.params["padding_config"]
    same = {d: d for d, widths in enumerate(config) if tuple(widths) == (0, 0, 0)}
    return None if lies[1] else _step(node, lies, [same, {}], _nothing)


def along(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Work along dims that aren't blocked, which keep their place: reversal, running sums, sorting, splitting."""
    p, ndim = node.params, len(node.inputs[0].shape)
    names = {"rev": "dimensions", "sort": "dimension", "split": "axis", "top_k": "axis"}
    dims = p.get(names.get(node.name, "axis"), -1)
    dims = dims if isinstance(dims, tuple) else (dims,)
    return _step(node, lies, [_all_but(ndim, dims)] * len(node.inputs), _nothing)


def reduction(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """A reduction of dims that aren't blocked."""
    return _step(node, lies, [_without(len(v.shape), node.params["axes"]) for v in node.inputs], _nothing)


def concatenate(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Side by side along a dim that isn't blocked."""
    dim, ndim = node.params["dimension"], len(node.outputs[0].shape)
    return _step(node, lies, [_all_but(ndim, [dim])] * len(node.inputs), _nothing, spread="parts")


def stack(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Side by side along a new dim."""
    new, ndim = node.params["axis"], len(node.inputs[0].shape)
    return _step(node, lies, [{d: d + (d >= new) for d in range(ndim)}] * len(node.inputs), _nothing)


def tile(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Repeated along dims that aren't blocked."""
    same = {d: d for d, times in enumerate(node.params["reps"]) if times == 1}
    return _step(node, lies, [same], _nothing)


def dot_general(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """Products over dims that aren't blocked: a dense layer, a 1 x 1 convolution written so."""
    (left, right), (left_batch, right_batch) = node.params["dimension_numbers"]
    shapes = [v.shape for v in node.inputs]
    free = [
        [d for d in range(len(shape)) if d not in (*contracted, *batch)]
        for shape, contracted, batch in zip(shapes, (left, right), (left_batch, right_batch), strict=True)
    ]
    first = len(left_batch)
    moves = [
        {d: i for i, d in enumerate(left_batch)} | {d: first + i for i, d in enumerate(free[0])},
        {d: i for i, d in enumerate(right_batch)} | {d: first + len(free[0]) + i for i, d in enumerate(free[1])},
    ]
    return _step(node, lies, moves, _nothing)


def gather(node: Node, lies: Sequence[Cuts]) -> Step | None:
    """``jnp.take`` along a dim that isn't blocked."""
    p, (x, positions) = node.params, node.inputs
    numbers, sizes = p["dimension_numbers"], p["slice_sizes"]
    if lies[1] or numbers.operand_batching_dims or len(positions.shape) < 1:
        return None
    kept = [d for d in range(len(x.shape)) if d not in numbers.collapsed_slice_dims]
    move = {d: to for d, to in zip(kept, numbers.offset_dims, strict=True) if sizes[d] == x.shape[d]}
    move = {d: to for d, to in move.items() if d not in numbers.start_index_map}

    def params(local: tuple[int, ...], arrays: Sequence[Array]) -> dict[str, Any]:
        return {"slice_sizes": tuple(arrays[0].shape[d] if d in move else s for d, s in enumerate(sizes))}

    return _step(node, lies, [move, {}], params)


_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_REDUCTIONS = tuple(f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or", "xor"))
RULES: dict[str, Callable[[Node, Sequence[Cuts]], Step | None]] = {
    "transpose": transpose,
    "broadcast_in_dim": broadcast_in_dim,
    "squeeze": squeeze,
    "reshape": reshape,
    "slice": slicing,
    "pad": pad,
    "concatenate": concatenate,
    "stack": stack,
    "tile": tile,
    "dot_general": dot_general,
    "gather": gather,
    **dict.fromkeys((*_REDUCTIONS, "argmax", "argmin"), reduction),
    **dict.fromkeys((*_CUMULATIVE, "rev", "sort", "split", "top_k"), along),
}
