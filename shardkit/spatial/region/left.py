"""Leaving the layout: blocks put together, so that an operation nobody has a rule for runs on whole values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from shardkit import scopes
from shardkit._compat import varying_axes
from shardkit.spatial.region import graph
from shardkit.spatial.region.block import Cuts, cropped, out_of_chunks
from shardkit.spatial.region.graph import Node
from shardkit.spatial.region.step import LEFT, Ensure, Held, Step, Wants, Whole
from shardkit.varying import alike


def put_together(here: Any, x: Held) -> Whole:
    """A value that every device holds; its type doesn't say that they're equal (see ``everywhere``)."""
    if isinstance(x, Whole):
        return x
    block = out_of_chunks(cropped(x, {}), here.where)
    array, shape = block.array, list(block.array.shape)
    for dim, cut in block.cuts.items():
        with scopes.scope(scopes.RESHARD):
            array = lax.all_gather(array, cut.axis_name, axis=dim, tiled=True)
        array = lax.slice_in_dim(array, 0, cut.size, axis=dim)
        shape[dim] = cut.size
    return Whole(array, tuple(shape))


def everywhere(x: Array, names: Sequence[str], here: Any) -> Array:
    """A value that is equal on all devices along mesh axes, of a type that says so."""
    names = [n for n in names if n in varying_axes(x)]
    if not names:
        return x
    mine = jnp.ones((), bool)
    for name in names:
        mine = mine & (here.where((name,)) == 0)
    wide = x.astype(np.int32) if x.dtype == np.bool_ else x
    with scopes.scope(scopes.RESHARD):
        return lax.psum(jnp.where(mine, wide, jnp.zeros((), wide.dtype)), tuple(names)).astype(x.dtype)


def leave(node: Node, inputs: Sequence[Any], lies: Sequence[Cuts], why: str) -> Step:
    """The operation on whole values, all of it on every device."""

    traced = node.body is not None or any(map(_is_function, node.params.values()))

    def run(here: Any, operands: Sequence[Held], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        arrays = [put_together(here, o).value for o in operands]
        if traced:  # for whole values, whose types said so
            arrays = [everywhere(a, here.names, here) for a in arrays]
        return bound(node, arrays)

    return Step(node, LEFT, tuple(inputs), ({},) * len(node.outputs), ((),) * len(inputs), run, node.outputs, why)


def _is_function(param: Any) -> bool:
    """A parameter that is a traced function, or several."""
    parts = param if isinstance(param, tuple | list) else (param,)
    return any(hasattr(p, "eqns") or hasattr(p, "jaxpr") for p in parts)


def bound(node: Node, arrays: Sequence[Array]) -> list[Whole]:
    """The primitive on whole arrays."""
    return [Whole(o, tuple(o.shape)) for o in graph.bound(node, alike(arrays))]
