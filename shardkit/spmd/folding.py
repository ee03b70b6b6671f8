"""Matrices that depend on nothing, worked out when the program is made: rules can read them.

Resizing an image is traced to products with matrices of a few entries a column, built of counters and constants. Only
who sees the entries knows that a device needs a few rows of its neighbours, not a sum over all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from shardkit.spmd.graph import Graph, Node, Value
from shardkit.spmd.rules.collectives import RULES as COLLECTIVES

MARKS = frozenset({"sk_constrain", "sharding_constraint", "sk_on_mesh", "shard_map"})
LARGEST = 1 << 22  # elements of a matrix that is worked out


def with_matrices(graph: Graph) -> Graph:
    """The graph with the constant matrices of its products among their ``op.constants``."""
    made_of_constants = _made_of_constants(graph)
    wanted: dict[int, Value] = {}
    for node in graph.nodes:
        for value in _matrices(node):
            if value.number in made_of_constants:
                wanted[value.number] = value
    if not wanted:
        return graph
    found = _worked_out(graph, made_of_constants, list(wanted.values()))
    nodes = tuple(_told(node, found) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def _made_of_constants(graph: Graph) -> set[int]:
    known: set[int] = set()
    for node in graph.nodes:
        if node.op.name in COLLECTIVES or node.op.name in MARKS:
            continue  # another number on every device; the user's
        if not node.bodies and all(v.number in known or v.scalar is not None for v in node.inputs):
            known.update(v.number for v in node.outputs)
    return known


def _matrices(node: Node) -> Sequence[Value]:
    if node.op.name != "dot_general":
        return ()
    return [v for v in node.inputs if len(v.aval.shape) == 2 and 0 < np.prod(v.aval.shape) <= LARGEST]


def _worked_out(graph: Graph, made_of_constants: set[int], wanted: Sequence[Value]) -> Mapping[int, np.ndarray]:
    """Their entries, by number; by one compiled function on the default device."""
    makers = {v.number: node for node in graph.nodes for v in node.outputs if v.number in made_of_constants}
    needed: set[Node] = set()
    todo = [makers[v.number] for v in wanted]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [makers[v.number] for v in node.inputs if v.number in makers]

    def run() -> list[Any]:
        env: dict[int, Any] = {}
        for node in graph.nodes:
            if node in needed:
                values = [env[v.number] if v.number in env else np.asarray(v.scalar, v.aval.dtype) for v in node.inputs]
                out = node.op.primitive.bind(*values, **node.op.params)
                env.update(
                    zip(
                        (v.number for v in node.outputs),
                        out if node.op.primitive.multiple_results else [out],
                        strict=True,
                    )
                )
        return [env[v.number] for v in wanted]

    # Apart from whatever is being traced, and from the mesh that is ambient there.
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return {v.number: np.asarray(x) for v, x in zip(wanted, jax.jit(run)(), strict=True)}


def _told(node: Node, found: Mapping[int, np.ndarray]) -> Node:
    if not any(v.number in found for v in _matrices(node)):
        return node
    constants = tuple(found.get(v.number, c) for v, c in zip(node.inputs, node.op.constants, strict=True))
    return dataclasses.replace(node, op=dataclasses.replace(node.op, constants=constants))
