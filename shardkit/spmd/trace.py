"""From a function to its graph: traced once, calls inlined, what nobody uses left out, effects refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend import source_info_util

from shardkit.spmd.folding import with_matrices
from shardkit.spmd.graph import Graph, Node, Value, without_unused
from shardkit.spmd.rules.strategy import Op

# Primitives that only call a function, and the parameter it is in.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)
# Primitives with functions that run in their own way, and the parameters those are in.
_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "remat": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}
_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "outside_call", "debug_print"})


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Graph, Any]:
    """The graph of a function, and the pytree of its results (of ``jax.ShapeDtypeStruct``).

    Args:
      fun: of pytrees of arrays.
      args: arrays, or anything with shape and dtype.

    Raises:
      NotImplementedError: host callbacks and other effects, by name and source line.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return graph_of(closed), shapes


def graph_of(closed: Any) -> Graph:
    """The graph of a closed jaxpr."""
    reader = _Reader()
    jaxpr = closed.jaxpr
    env: dict[Any, Value] = {}
    captured = []
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        env[var] = value = Value(var.aval, constant=const)
        captured.append(value)
    inputs = tuple(Value(var.aval) for var in jaxpr.invars)
    env.update(zip(jaxpr.invars, inputs, strict=True))
    reader.read(jaxpr, env, _Calls())
    outputs = tuple(reader.value(v, env) for v in jaxpr.outvars)
    graph = with_matrices(without_unused(Graph(inputs, (), tuple(reader.nodes), outputs, reader.custom)))
    used = {v.number for node in graph.nodes for v in node.inputs} | {v.number for v in graph.outputs}
    kept = [v for v in (*captured, *reader.captured) if v.number in used]
    return dataclasses.replace(graph, captured=tuple(kept))


@dataclasses.dataclass(frozen=True)
class _Calls:
    """The calls that an operation is inlined for, and the operation itself.

    Attributes:
      tracebacks: the innermost first.
      stack: JAX's name stacks put together.
    """

    tracebacks: tuple[Any, ...] = ()
    stack: Any = dataclasses.field(default_factory=source_info_util.new_name_stack)

    def with_one(self, source_info: Any) -> _Calls:
        """One more, inside those there are."""
        return _Calls((source_info.traceback, *self.tracebacks), self.stack + source_info.name_stack)


class _Reader:
    def __init__(self):
        self.nodes: list[Node] = []
        self.captured: list[Value] = []
        self.custom = False

    def value(self, atom: Any, env: dict[Any, Value]) -> Value:
        if isinstance(atom, jex_core.Literal):
            return Value(atom.aval, constant=atom.val)
        return env[atom]

    def read(self, jaxpr: Any, env: dict[Any, Value], outer: _Calls) -> None:
        """The equations of a jaxpr, added to the nodes.

        Args:
          jaxpr: open.
          env: has its inputs and constants.
          outer: the calls it's inlined for.
        """
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            calls = outer.with_one(eqn.source_info)
            inputs = [self.value(v, env) for v in eqn.invars]
            self.custom = self.custom or name.startswith("custom_")
            if name in _INLINED:
                outputs = self._inline(_called(eqn), inputs, calls)
            else:
                outputs = [Value(v.aval) for v in eqn.outvars]
                self._add(eqn, tuple(inputs), tuple(outputs), calls)
            env.update((v, o) for v, o in zip(eqn.outvars, outputs, strict=True))

    def _inline(self, called: Any, inputs: Sequence[Value], calls: _Calls) -> list[Value]:
        jaxpr, consts = (called.jaxpr, called.consts) if hasattr(called, "jaxpr") else (called, ())
        env: dict[Any, Value] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = value = Value(var.aval, constant=const)
            self.captured.append(value)
        env.update(zip(jaxpr.invars, inputs, strict=True))
        self.read(jaxpr, env, calls)
        return [self.value(v, env) for v in jaxpr.outvars]

    def _add(self, eqn: Any, inputs: tuple[Value, ...], outputs: tuple[Value, ...], calls: _Calls) -> None:
        name = eqn.primitive.name
        bodies = tuple(graph_of(_closed(b)) for key in _BODIES.get(name, ()) for b in _listed(eqn.params[key]))
        op = Op(
            name,
            eqn.params,
            tuple(v.type for v in inputs),
            tuple(v.type for v in outputs),
            tuple(v.constant for v in inputs),
            eqn.primitive,
        )
        node = Node(op, inputs, outputs, bodies, calls.tracebacks, calls.stack)
        if name in _CALLBACKS:
            raise NotImplementedError(
                f"partition: {name} at {node.source or 'an unknown line'} calls back to the host, once a device and "
                "in no order; take it out of the function, or return the value and look at it outside"
            )
        # A collective's only effect is to name a mesh axis.
        effects = [e for e in eqn.effects if type(e).__name__ != "NamedAxisEffect"]
        kinds = ", ".join(sorted({type(e).__name__ for e in effects}))
        if effects and not bodies and name != "shard_map":
            raise NotImplementedError(
                f"partition: {name} at {node.source or 'an unknown line'} has effects ({kinds}), "
                "and every device would have them; take it out of the function"
            )
        self.custom = self.custom or any(body.custom for body in bodies)
        self.nodes.append(node)


def _called(eqn: Any) -> Any:
    for key in _CALLS:
        if key in eqn.params:
            return eqn.params[key]
    raise NotImplementedError(f"partition: {eqn.primitive.name} has no function among {sorted(eqn.params)}")


def _listed(body: Any) -> Sequence[Any]:
    return body if isinstance(body, tuple | list) else (body,)


def _closed(body: Any) -> Any:
    return body if hasattr(body, "consts") else jex_core.ClosedJaxpr(body, ())
