"""Leaving the layout: blocks put together, so that an operation nobody has a rule for runs on whole values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from shardkit import scopes
from shardkit._compat import varying_axes
from shardkit.spatial.regions import graph
from shardkit.spatial.regions.block import Cuts, cropped, out_of_chunks
from shardkit.spatial.regions.graph import Node
from shardkit.spatial.regions.step import LEFT, Ensure, Held, Step, Wants, Whole
from shardkit.varying import alike


def put_together(here: Any, x: Held) -> Whole:
    """A value that every device holds, and whose type says so: what is traced for whole values needs that.

    Blocks are summed, each with zeros around it: one all-reduce, and nothing on the way back.
    """
    if isinstance(x, Whole):
        return x
    block = out_of_chunks(cropped(x, {}), here.where)
    shape, offsets = list(block.array.shape), [0] * block.array.ndim
    for dim, cut in block.cuts.items():
        shape[dim], offsets[dim] = cut.block * cut.shards, here.where(cut.axes) * cut.block
    offsets = [jnp.asarray(o, np.int32) for o in offsets]
    zeros, array, *offsets = alike([jnp.zeros(shape, block.array.dtype), block.array, *offsets])
    names = tuple(a for cut in block.cuts.values() for a in cut.axes)
    array = everywhere(_sum(lax.dynamic_update_slice(zeros, array, offsets), names), here.names, here)
    array = lax.slice(
        array, [0] * array.ndim, [block.cuts[d].size if d in block.cuts else n for d, n in enumerate(shape)]
    )
    return Whole(array, tuple(array.shape))


def _sum(x: Array, names: tuple[str, ...]) -> Array:
    """Over mesh axes, where all but one device have zeros: no type is too narrow."""
    kinds = [(np.bool_, np.int32), (np.float16, np.float32), (jnp.bfloat16, np.float32)]
    wide = next((w for narrow, w in kinds if x.dtype == narrow), x.dtype)
    with scopes.scope(scopes.RESHARD):
        return lax.psum(x.astype(wide), names).astype(x.dtype)


def everywhere(x: Array, names: Sequence[str], here: Any) -> Array:
    """A value that is equal on all devices along mesh axes, of a type that says so."""
    names = [n for n in names if n in varying_axes(x)]
    if not names:
        return x
    mine = jnp.ones((), bool)
    for name in names:
        mine = mine & (here.where((name,)) == 0)
    return _sum(jnp.where(mine, x, jnp.zeros((), x.dtype)), tuple(names))


def leave(node: Node, inputs: Sequence[Any], lies: Sequence[Cuts], why: str) -> Step:
    """The operation on whole values, all of it on every device."""

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        return bound(node, [put_together(here, o).value for o in operands])

    return Step(node, LEFT, tuple(inputs), ({},) * len(node.outputs), ((),) * len(inputs), run, node.outputs, why)


def bound(node: Node, arrays: Sequence[Array]) -> list[Whole]:
    """The primitive on whole arrays."""
    return [Whole(o, tuple(o.shape)) for o in graph.bound(node, alike(arrays))]
