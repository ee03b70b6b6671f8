"""Running every strategy of a rule by itself, on real blocks, against the operation on one device."""

import jax
import numpy as np

import shardkit as sk
from shardkit.spmd.local import Here
from shardkit.spmd.placed import Placed, replicated, to_layout
from shardkit.spmd.rules import RULES, Case, strategies
from shardkit.spmd.trace import trace


def placed(*dims, partial=(), reduce=None):
    """``placed("dp", None)``: dim 0 is cut by "dp"; several axes of one dim as a tuple."""
    cut = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
    return Placed(cut, tuple(partial), reduce or ("sum" if partial else None))


def node_of(fun, *args):
    """The one operation that a function traces to."""
    graph, _ = trace(fun, *args)
    assert len(graph.nodes) == 1, [n.op.name for n in graph.nodes]
    return graph, graph.nodes[0]


def found(fun, args, places, sizes, wishes=None):
    """The strategies of the operation ``fun`` is. ``places``: of each of its array arguments, by position."""
    graph, node = node_of(fun, *args)
    where = dict(zip([v.number for v in graph.inputs], places, strict=True))
    operands = tuple(where.get(v.number, replicated(len(v.aval.shape))) for v in node.inputs)
    wishes = tuple(wishes) if wishes is not None else (None,) * len(node.outputs)
    case = Case(node.op, operands, sizes, wishes)
    return graph, node, strategies(case, RULES[node.op.name](node.op))


def check(fun, args, places, sizes, wishes=None, *, atol=1e-9):
    """Runs every strategy; values must be those of one device, whatever way is taken.

    Returns:
      The strategies.
    """
    graph, node, ways = found(fun, args, places, sizes, wishes)
    assert ways, f"{node.op.name} has no strategy for {places}"
    mesh = sk.make_mesh(sizes)
    expected = jax.tree.leaves(fun(*args))
    given = dict(zip([v.number for v in graph.inputs], args, strict=True))
    for way in ways:
        got = run(node, way, [given.get(v.number, v.constant) for v in node.inputs], mesh, sizes)
        for want, value in zip(expected, got, strict=True):
            np.testing.assert_allclose(
                np.asarray(value, np.asarray(want).dtype),
                want,
                atol=atol,
                rtol=atol,
                err_msg=f"{way.operands} -> {way.results} {way.why}",
            )
    return ways


def run(node, way, values, mesh, sizes):
    """The results of one strategy, whole. Dims that don't divide are padded with nan (or a large number)."""
    layouts = [to_layout(p, mesh) for p in way.operands]
    stacks = [_enter(v, layout) for v, layout in zip(values, layouts, strict=True)]
    outs = [to_layout(p, mesh) for p in way.results]

    def body(*blocks):
        blocks = [b.reshape(b.shape[len(la.partial_axes) :]) for b, la in zip(blocks, layouts, strict=True)]
        found = Here(sizes).run(node.op, way, blocks)
        return [f.reshape((1,) * len(la.partial_axes) + f.shape) for f, la in zip(found, outs, strict=True)]

    specs = [la.stack_spec(la.ndim) for la in layouts]
    results = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=tuple(specs), out_specs=[la.stack_spec(la.ndim) for la in outs], check_vma=False
        )
    )(*stacks)
    return [_leave(r, la, v.aval.shape) for r, la, v in zip(results, outs, node.outputs, strict=True)]


def _enter(value, layout):
    value = np.asarray(value)
    whole = layout.without_partial()
    padded = whole.padded_shape(value.shape)
    pads = [(0, p - s) for p, s in zip(padded, value.shape, strict=True)]
    if any(p for _, p in pads):
        assert not layout.partial_axes
        junk = np.nan if np.issubdtype(value.dtype, np.inexact) else 1
        value = np.pad(value, pads, constant_values=junk)
    x = sk.shard_tensor(value, whole)
    if not layout.partial_axes:
        return x
    return sk.reshard(x, layout).stack


def _leave(result, layout, shape):
    if layout.partial_axes:
        result = sk.unshard(sk.PartialArray(result, layout))
    return np.asarray(result)[tuple(slice(0, s) for s in shape)]
