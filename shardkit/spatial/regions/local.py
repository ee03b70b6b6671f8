"""Running operations that act on margins as on all else: operands made alike, the primitive bound to what is held."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array
from jax import numpy as jnp

from shardkit.spatial.regions.block import (
    ANYTHING,
    CIRCULAR,
    Block,
    Cuts,
    InChunks,
    chunked_alike,
    cropped,
    inside,
    local_shape,
    out_of_chunks,
    part_along,
    part_of,
)
from shardkit.spatial.regions.margins import NONE, Margin
from shardkit.spatial.regions.step import LOCAL, Ensure, Held, Link, Step, Wants, Whole
from shardkit.varying import alike

# Operations with a pole or an infinite slope somewhere, and a number at which they have none. Where no element stands,
# they're given that: a derivative of zero times infinity would reach whatever else the value came of.
SMOOTH_AT = {
    **dict.fromkeys(
        ("acos", "asin", "atan2", "atanh", "cbrt", "digamma", "div", "erf_inv", "igamma", "igammac", "igamma_grad_a"),
        0.5,
    ),
    **dict.fromkeys(
        ("lgamma", "log", "log1p", "polygamma", "pow", "regularized_incomplete_beta", "rsqrt", "sqrt"), 0.5
    ),
    **dict.fromkeys(("acosh", "zeta"), 2.0),
    "integer_pow": 0.5,
    "rem": 0.5,
}

# ``apply(here, arrays, shape)``: local arrays in, one local array a result out. ``shape`` is what a device holds of the
# (first) result.
Apply = Callable[[Any, Sequence[Array], tuple[int, ...]], Sequence[Array]]


def local_step(
    node: Any,
    cuts: Sequence[Cuts],
    links: Sequence[Sequence[Link]],
    apply: Apply,
    *,
    spread: str = "",
    chunks: bool = True,
    note: str = "",
) -> Step:
    """A step that acts on each element of the blocked dims alone.

    Args:
      node: the operation.
      cuts: of each result.
      links: of each operand.
      apply: see ``Apply``.
      spread: what a device's part of a whole operand is: "" all of it, "parts" what lies where the blocks do, "shape"
        that, and laid out in the result's shape, "moved" what becomes a part of the results (as its ``Links`` say; not
        on chunks).
      chunks: also runs on chunks.
      note: for people.
    """

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        at = [i for i, o in enumerate(operands) if isinstance(o, Block)]
        found = {}
        for i in at:
            block = ensure(i)
            block = cropped(block, {link.source: wants.get(link.result, NONE) for link in links[i]})
            found[i] = block if chunks else out_of_chunks(block, here.where)
            # Chunks go where links take their dims; where they take only one of them, they can't stay.
            if found[i].chunks is not None and _moved(found[i], links[i]) is False:
                found[i] = out_of_chunks(found[i], here.where)
        if len(found) > 1:
            found = _alike(found, links, here)
        # Where chunks were put together, margins went with them.
        widths = {link.result: _width(found, links, link.result) for i in at for link in links[i]}
        for i in at:
            found[i] = cropped(found[i], {link.source: widths[link.result] for link in links[i]})
        first = found[at[0]]
        moved = _moved(first, links[at[0]])
        nothing = jnp.zeros(())
        results = [
            Block(
                nothing,
                lies,
                {d: widths.get(d, NONE) for d in lies},
                {d: _beyond(found, links, d) for d in lies},
                moved if isinstance(moved, InChunks) else None,
            )
            for lies in cuts
        ]
        shape = local_shape(node.outputs[0].shape, results[0])
        arrays = []
        blocks = [found[i].array for i in at]
        for i, operand in enumerate(operands):
            if isinstance(operand, Whole):
                # Before it's spread: what its gradient is summed over the mesh axes of is then as small as it is.
                operand = Whole(alike([operand.array], *blocks)[0], operand.shape)
            if i in found:
                same = {d: d for d in results[0].cuts if spread == "shape" and d not in found[i].cuts}
                arrays.append(part_along(found[i].array, results[0], same, here.where))
            elif spread == "moved":
                gone = links[i]
                others = gone.others if isinstance(gone, Links) else {}
                arrays.append(part_along(operand.value, results[0], others, here.where))
            elif spread:
                x = operand.array if spread == "shape" else operand.value
                if x.ndim and x.ndim == len(node.outputs[0].shape):
                    x = part_of(_each_image(x, node.outputs[0].shape, results[0].chunks), results[0], here.where)
                arrays.append(jnp.broadcast_to(x, shape) if spread == "shape" else x)
            else:
                arrays.append(operand.value)
        if spread == "shape":
            arrays = _smooth(node, arrays, results[0], here)
        outs = apply(here, arrays, shape)
        return [_with(r, o) for r, o in zip(results, outs, strict=True)]

    return Step(node, LOCAL, node.inputs, tuple(cuts), tuple(tuple(k) for k in links), run, node.outputs, note)


def _each_image(x: Array, shape: tuple[int, ...], chunks: InChunks | None) -> Array:
    """One image that stands for all, once for each where it is cut into chunks: these lie in the batch."""
    if chunks is None or x.shape[chunks.dim] == 1 or x.shape[chunks.batch] == shape[chunks.batch]:
        return x
    return jnp.broadcast_to(x, (*x.shape[: chunks.batch], shape[chunks.batch], *x.shape[chunks.batch + 1 :]))


def _smooth(node: Any, arrays: Sequence[Array], like: Block, here: Any) -> list[Array]:
    """Operands with a harmless number where no element stands, for operations that need one."""
    number = SMOOTH_AT.get(node.name)
    if number is None or (node.name == "integer_pow" and node.params["y"] >= 0):
        return list(arrays)
    shaped = dataclasses.replace(like, array=arrays[0])
    real = [inside(shaped, d, here.where) for d in like.cuts if like.has_outside(d)]
    if not real or not jnp.issubdtype(arrays[0].dtype, jnp.inexact):
        return list(arrays)
    everything = functools.reduce(jnp.logical_and, real)
    # The last one is enough of a quotient, of all others any may be what matters.
    first = len(arrays) - 1 if node.name == "div" else 0
    return [
        jnp.where(jnp.broadcast_to(everything, a.shape), a, jnp.asarray(number, a.dtype))
        if i >= first and a.ndim and jnp.issubdtype(a.dtype, jnp.inexact)
        else a
        for i, a in enumerate(arrays)
    ]


def _with(block: Block, array: Array) -> Block:
    return Block(array, block.cuts, block.margins, block.beyond, block.chunks)


def _moved(block: Block, links: Sequence[Link]) -> InChunks | bool | None:
    """Where chunks are in the results; False where they can't be."""
    chunks = block.chunks
    if chunks is None:
        return None
    dims = {link.source: link.result for link in links}
    batch = links.others.get(chunks.batch) if isinstance(links, Links) else chunks.batch
    if chunks.dim not in dims or batch is None:
        return False
    return InChunks(dims[chunks.dim], batch, chunks.count, chunks.major)


class Links(tuple[Any, ...]):
    """Links of an operand whose other dims move, too: ``others`` says where those that stay whole go."""

    others: Mapping[int, int]

    def __new__(cls, links: Sequence[Link], others: Mapping[int, int]) -> Links:
        made = super().__new__(cls, tuple(links))
        made.others = dict(others)
        return made


def _alike(found: dict[int, Block], links: Sequence[Sequence[Link]], here: Any) -> dict[int, Block]:
    """Equal chunks, where results' dims are counted."""
    if all(all(link.source == link.result for link in links[i]) for i in found):
        return dict(zip(found, chunked_alike(list(found.values()), here.where), strict=True))
    if len({_moved(b, links[i]) for i, b in found.items()}) > 1:
        return {i: out_of_chunks(b, here.where) for i, b in found.items()}
    return found


def _width(found: Mapping[int, Block], links: Sequence[Sequence[Link]], result: int) -> Margin:
    held = [b.margins[link.source] for i, b in found.items() for link in links[i] if link.result == result]
    return min(m[0] for m in held), min(m[1] for m in held)


def _beyond(found: Mapping[int, Block], links: Sequence[Sequence[Link]], result: int) -> str:
    kinds = {b.beyond[link.source] for i, b in found.items() for link in links[i] if link.result == result}
    return CIRCULAR if kinds == {CIRCULAR} else ANYTHING
