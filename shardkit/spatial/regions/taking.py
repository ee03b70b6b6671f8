"""Laying out what a view shows: shifts, strides and repetitions in place, the rest by an exchange of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from shardkit.spatial.pad import Padding
from shardkit.spatial.regions.banded import Matrix, matrix_step_run
from shardkit.spatial.regions.block import (
    ANYTHING,
    CIRCULAR,
    ZEROS,
    Block,
    Cuts,
    cleared,
    cropped,
    out_of_chunks,
)
from shardkit.spatial.regions.graph import Node, Value
from shardkit.spatial.regions.margins import NONE, on_a_line
from shardkit.spatial.regions.step import OWN, WINDOW, Ensure, Held, Link, Step, Wants
from shardkit.spatial.regions.views import ZERO, as_extension, as_repeat, as_stride, repeating
from shardkit.spatial.regions.windows import after, on_blocks, ready
from shardkit.spatial.windows import Window


def taken(node: Node, base: Value, cuts: Cuts, dim: int, index: np.ndarray, output: Value) -> Step | None:
    """A step that lays out ``base`` with positions ``index`` of its blocked ``dim``; None where only a gather does."""
    cut, size = cuts[dim], cuts[dim].size
    result = {**cuts, dim: dataclasses.replace(cut, size=len(index))}
    found = as_extension(index, size)
    stride, times = as_stride(index, size), as_repeat(index, size)
    if times is not None and on_blocks(repeating(size, times), cut, ZEROS):
        return _in_place(node, base, cuts, result, dim, repeating(size, times), ZEROS, output, times)
    if stride is not None and stride.output_size == len(index) and on_blocks(stride, cut, ZEROS):
        return _in_place(node, base, cuts, result, dim, stride, ZEROS, output)
    if found is not None:
        shift = Window(size, 1, 1, -found.offset, found.offset + found.length - size)
        if found.mode in (ZEROS, CIRCULAR) and on_blocks(shift, cut, found.mode):
            return _in_place(node, base, cuts, result, dim, shift, found.mode, output)
        padding = Padding(
            dim, cut.axis_name, cut.shards, size, -found.offset, found.offset + found.length - size, found.mode, (0, 0)
        )
        return _by_itself(node, base, cuts, result, lambda here, x: padding(here.where(cut.axes), x), output)
    if (index == ZERO).any():
        return None
    matrix = Matrix.taking(index, size)
    if not matrix.worthwhile(cut.shards):
        return None
    run = matrix_step_run(matrix, cut, dim, None)
    return _by_itself(node, base, cuts, result, run, output)


def _in_place(
    node: Node,
    base: Value,
    cuts: Cuts,
    result: Cuts,
    dim: int,
    window: Window,
    mode: str,
    output: Value,
    times: int = 1,
) -> Step:
    moving = Link(dim, dim, cuts[dim].shards, window, mode)
    links = tuple(moving if d == dim else Link(d, d, c.shards) for d, c in cuts.items())

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        x = ensure(0)
        others = {link.source: link for link in links}
        x = ready(x, others, wants, x.chunks.batch if x.chunks else -1, here)
        want = wants.get(dim, NONE)
        if times > 1:
            first = x.margins[dim][0] * times - want[0]
            line = jnp.repeat(x.array, times, axis=dim)
            count = want[0] + x.unit(dim) * times + want[1]
            out = lax.slice_in_dim(line, first, first + count, axis=dim)
        else:
            line = on_a_line(window, x.parts(dim), x.margins[dim], want)
            stop = -line.pad_lo + (line.output_size - 1) * line.stride + 1
            out = lax.slice_in_dim(x.array, -line.pad_lo, stop, stride=line.stride, axis=dim)
        margins = {d: wants.get(d, NONE) for d in cuts}
        beyond = {link.result: after(link, x) for link in links}
        return [Block(out, result, margins, beyond, x.chunks)]

    return Step(node, WINDOW, (base,), (result,), (links,), run, (output,), "seen through a view")


def _by_itself(node: Node, base: Value, cuts: Cuts, result: Cuts, work: Any, output: Value) -> Step:
    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        x = operands[0]
        assert isinstance(x, Block)
        x = cleared(out_of_chunks(cropped(x, {}), here.where), here.where)
        out = work(here, x.array)
        return [Block(out, result, dict.fromkeys(result, NONE), dict.fromkeys(result, ANYTHING))]

    links = tuple(Link(d, d, c.shards) for d, c in cuts.items())
    return Step(node, OWN, (base,), (result,), (links,), run, (output,), "laid out anew")
