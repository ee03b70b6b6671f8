"""The operations of a traced function in a row: calls inlined, functions with a meaning of their own kept apart."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh

from shardkit.sources import Frame, short_location, user_frame

_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
# Operations that are functions themselves, and the parameter that holds them.
_BODIES = {"custom_jvp_call": "call_jaxpr", "scan": "jaxpr", "remat2": "jaxpr", "remat": "jaxpr", "checkpoint": "jaxpr"}
_numbers = itertools.count()


class Value:
    """One value: an input, a constant, or a result.

    Attributes:
      number: its own.
      aval: type, logical.
      constant: of a literal, its value.
      maker: the node it comes from.
    """

    __slots__ = ("aval", "constant", "maker", "number")
    number: int
    aval: Any
    constant: Any
    maker: Node | None

    def __init__(self, aval: Any, constant: Any = None, maker: Node | None = None):
        self.number, self.aval, self.constant, self.maker = next(_numbers), aval, constant, maker

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return tuple(self.aval.shape)


@dataclasses.dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
      name, primitive, params: of JAX.
      inputs, outputs: its values.
      body: of one that is a function, its graph.
      frames: the lines it comes from, innermost first.
    """

    name: str
    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    body: Graph | None
    frames: tuple[Frame, ...]

    @property
    def source(self) -> str:
        """``file.py:12`` of the user's line."""
        return short_location(user_frame(self.frames))


@dataclasses.dataclass(eq=False)
class Graph:
    """A function: inputs (of those it closes over, first the constants), nodes in order, outputs."""

    inputs: tuple[Value, ...]
    consts: tuple[Any, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]


def graph_of(closed: Any) -> Graph:
    """The graph of a closed jaxpr; its constants become the first inputs."""
    reader = _Reader()
    jaxpr = closed.jaxpr if hasattr(closed, "jaxpr") else closed
    consts = list(closed.consts) if hasattr(closed, "consts") else []
    env = {var: Value(var.aval) for var in [*jaxpr.constvars, *jaxpr.invars]}
    inputs = [env[var] for var in [*jaxpr.constvars, *jaxpr.invars]]
    reader.read(jaxpr, env, ())
    outputs = tuple(reader.value(v, env) for v in jaxpr.outvars)
    consts += [const for _, const in reader.captured]
    place = len(jaxpr.constvars)
    inputs[place:place] = [value for value, _ in reader.captured]
    return Graph(tuple(inputs), tuple(consts), _used(reader.nodes, outputs), outputs)


def _used(nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[Node, ...]:
    """Without what nobody reads (effects aside: those are refused later)."""
    wanted, kept = {v.number for v in outputs}, []
    for node in reversed(nodes):
        if any(v.number in wanted for v in node.outputs) or not node.outputs:
            kept.append(node)
            wanted.update(v.number for v in node.inputs)
    return tuple(reversed(kept))


class _Reader:
    def __init__(self):
        self.nodes: list[Node] = []
        self.captured: list[tuple[Value, Any]] = []

    def value(self, atom: Any, env: Mapping[Any, Value]) -> Value:
        if isinstance(atom, jex_core.Literal):
            kind: Any = atom.aval
            return Value(kind, constant=np.asarray(atom.val, kind.dtype))
        return env[atom]

    def read(self, jaxpr: Any, env: dict[Any, Value], outer: tuple[Frame, ...]) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            frames = (*_frames(eqn.source_info.traceback), *outer)
            inputs = tuple(self.value(v, env) for v in eqn.invars)
            params = _one_dim_at_a_time(name, eqn.params, inputs[0].shape) if name in _SPLIT else []
            if len(params) > 1:
                outputs = self._split(eqn, params, inputs, frames)
            elif name in _INLINED:
                outputs = self._inline(eqn.params[_INLINED[name]], inputs, frames)
            else:
                body = graph_of(eqn.params[_BODIES[name]]) if name in _BODIES else None
                outputs = tuple(Value(v.aval) for v in eqn.outvars)
                if body is not None:  # constants of the body are inputs like others
                    extra = tuple(Value(v.aval) for v in body.inputs[: len(body.consts)])
                    self.captured += zip(extra, body.consts, strict=True)
                    inputs = (*extra, *inputs)
                node = Node(name, eqn.primitive, eqn.params, inputs, outputs, body, frames)
                for value in outputs:
                    value.maker = node
                self.nodes.append(node)
            env.update(zip(eqn.outvars, outputs, strict=True))

    def _split(
        self, eqn: Any, params: Sequence[Mapping[str, Any]], inputs: tuple[Value, ...], frames: tuple[Frame, ...]
    ) -> tuple[Value, ...]:
        x, rest = inputs[0], inputs[1:]
        for each in params:
            aval = jax.eval_shape(functools.partial(eqn.primitive.bind, **each), *map(_shape_of, (x, *rest)))
            out = Value(x.aval.update(shape=aval.shape))
            node = Node(eqn.primitive.name, eqn.primitive, each, (x, *rest), (out,), None, frames)
            out.maker = node
            self.nodes.append(node)
            x = out
        return (x,)

    def _inline(self, called: Any, inputs: Sequence[Value], frames: tuple[Frame, ...]) -> tuple[Value, ...]:
        jaxpr, consts = (called.jaxpr, called.consts) if hasattr(called, "jaxpr") else (called, ())
        env = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = value = Value(var.aval)
            self.captured.append((value, const))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        self.read(jaxpr, env, frames)
        return tuple(self.value(v, env) for v in jaxpr.outvars)


_SPLIT = frozenset({"slice", "pad", "rev"})


def _one_dim_at_a_time(name: str, params: Mapping[str, Any], shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Slices, paddings and reversals of several dims as such of one: each dim may lie in another way."""
    found = []
    if name == "rev":
        return [{**params, "dimensions": (d,)} for d in params["dimensions"]]
    if name == "pad":
        config = params["padding_config"]
        for dim, widths in enumerate(config):
            if tuple(widths) != (0, 0, 0):
                found.append(
                    {**params, "padding_config": tuple(w if d == dim else (0, 0, 0) for d, w in enumerate(config))}
                )
        return found
    begins, ends, strides = params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(shape)
    held = list(shape)
    for dim, one in enumerate(zip(begins, ends, strides, strict=True)):
        if one == (0, held[dim], 1):
            continue
        limits = [ends[d] if d == dim else n for d, n in enumerate(held)]
        starts, steps = ([v[d] if d == dim else n for d in range(len(shape))] for v, n in ((begins, 0), (strides, 1)))
        found.append(
            {**params, "start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": tuple(steps)}
        )
        held[dim] = -(-(ends[dim] - begins[dim]) // strides[dim])
    return found


def _shape_of(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.aval.dtype)


def _frames(traceback: Any) -> tuple[Frame, ...]:
    if traceback is None:
        return ()
    return tuple(Frame(f.file_name, f.line_num, f.function_name) for f in traceback.frames)


def bound(node: Node, arrays: Sequence[Any]) -> list[Any]:
    """The operation as JAX has it, on arrays. One that is a function has the constants of its body already."""
    own = len(node.body.consts) if node.body is not None else 0
    # Of one with a derivative of its own, functions are made of what is traced.
    out = node.primitive.bind(*arrays[own:], **node.primitive.get_bind_params(dict(node.params)))
    return list(out) if node.primitive.multiple_results else [out]


def chained(body: Graph, consts: int, carry: int, times: int) -> Graph:
    """``times`` turns of a loop as one: inputs are constants, what is carried, then each turn's slices."""
    fixed = body.inputs[:consts]
    held: Sequence[Value] = tuple(Value(v.aval) for v in body.inputs[consts : consts + carry])
    inputs, nodes, results = [*fixed, *held], list[Node](), list[Value]()
    for _ in range(times):
        slices = [Value(v.aval) for v in body.inputs[consts + carry :]]
        inputs += slices
        env = dict(zip([v.number for v in body.inputs], [*fixed, *held, *slices], strict=True))
        for node in body.nodes:
            outs = tuple(Value(v.aval) for v in node.outputs)
            copy = dataclasses.replace(node, inputs=tuple(env.get(v.number, v) for v in node.inputs), outputs=outs)
            for value in outs:
                value.maker = copy
            nodes.append(copy)
            env.update(zip([v.number for v in node.outputs], outs, strict=True))
        last = [env.get(v.number, v) for v in body.outputs]
        held, results = last[:carry], [*results, *last[carry:]]
    return Graph(tuple(inputs), (), tuple(nodes), (*held, *results))


def known(value: Value, largest: int = 1 << 22) -> np.ndarray | None:
    """What a value is, where it depends on no input; None otherwise (and where it is too large to be worked out)."""
    if value.constant is not None:
        return value.constant
    needed: dict[int, Node] = {}
    todo = [value]
    while todo:
        v = todo.pop()
        if v.constant is not None or (v.maker is not None and id(v.maker) in needed):
            continue
        if v.maker is None or v.maker.body is not None or v.maker.name in _NEVER or np.prod(v.shape) > largest:
            return None
        needed[id(v.maker)] = v.maker
        todo += v.maker.inputs

    order = sorted(needed.values(), key=lambda n: n.outputs[0].number)

    def run() -> Any:
        env: dict[int, Any] = {}
        for node in order:
            given = [v.constant if v.constant is not None else env[v.number] for v in node.inputs]
            out = node.primitive.bind(*given, **node.params)
            out = out if node.primitive.multiple_results else [out]
            env.update(zip([v.number for v in node.outputs], out, strict=True))
        return env[value.number]

    # Apart from whatever is being traced, and from the mesh that is ambient there.
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return np.asarray(jax.jit(run)())


_NEVER = frozenset(
    {"axis_index", "psum", "shard_map", "custom_vjp_call", "while", "cond", "pure_callback", "io_callback"}
)
