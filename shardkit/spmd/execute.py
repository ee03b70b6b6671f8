"""Running an arrangement on one device's blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util

from shardkit.spmd import moving
from shardkit.spmd.arrangement import Arrangement, Move
from shardkit.spmd.graph import Node, Value
from shardkit.spmd.local import Here
from shardkit.spmd.placed import Placed
from shardkit.spmd.rules.halos import AfterReading, read_key


def execute(arrangement: Arrangement, blocks: Sequence[Any], captured: Sequence[Any] = ()) -> list[Any]:
    """The blocks of the outputs.

    Args:
      arrangement: what to do.
      blocks: of the inputs.
      captured: of the captured arrays.
    """
    here = Here(arrangement.sizes)
    held: dict[tuple[int, Placed], Any] = {}
    halos: dict[Any, Any] = {}
    graph = arrangement.graph
    for value, placed, block in zip(graph.inputs, arrangement.inputs, blocks, strict=True):
        held[value.number, placed] = block
    for value, placed, block in zip(graph.captured, arrangement.captured, captured, strict=True):
        held[value.number, placed] = block

    def get(value: Value, placed: Placed) -> Any:
        root = arrangement.root(value)
        if (root.number, placed) not in held and root.constant is not None and placed.whole:
            return jnp.asarray(root.constant, root.aval.dtype)
        return held[root.number, placed]

    for step in arrangement.steps:
        if isinstance(step, Move):
            with _said_of(_reason(arrangement, step)):
                block = moving.move(step.route, arrangement.sizes, get(step.value, step.source))
            held[step.value.number, step.goal] = block
            continue
        node, strategy = step.node, step.strategy
        operands = [get(v, p) for v, p in zip(node.inputs, strategy.operands, strict=True)]
        with _said_of(node):
            if isinstance(strategy.run, AfterReading):
                for read in strategy.run.reads:
                    root, placed = arrangement.root(node.inputs[read.operand]), strategy.operands[read.operand]
                    key = read_key(root, placed, read)
                    if key not in halos:
                        halos[key] = read.extended(here, operands[read.operand])
                    operands[read.operand] = halos[key]
                results = [strategy.run.work(here, *operands)]
            else:
                results = here.run(node.op, strategy, operands)
        for value, placed, block in zip(node.outputs, strategy.results, results, strict=True):
            held[value.number, placed] = block
    return [get(v, p) for v, p in zip(graph.outputs, arrangement.outputs, strict=True)]


def _reason(arrangement: Arrangement, move: Move) -> Node | None:
    """The operation to name for a move: the one that left the value Partial, if it's reduced; else the user."""
    reduced = set(move.source.partial) - set(move.goal.partial)
    makers = arrangement.origins.get(move.value.number, {})
    return next((makers[axis] for axis in move.source.partial if axis in reduced and makers.get(axis)), move.user)


def _said_of(node: Node | None) -> contextlib.AbstractContextManager[Any]:
    """Operations in it have the names and lines of ``node``, which reports of the compiled program then show."""
    if node is None or node.stack is None:
        return contextlib.nullcontext()
    stack = source_info_util.current_name_stack() + node.stack
    return source_info_util.user_context(node.traceback, name_stack=stack)
