"""A program as a list of operations on values: a jaxpr without its nesting. Nothing of where anything is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.sources import Frame, short_location, user_frame
from shardkit.spmd.rules.strategy import Op, Type

_ids = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """What an operation makes or a function is given.

    Attributes:
      aval: its JAX type.
      constant: its value, where that's known when the program is made (literals, captured arrays).
      name: for people, of an input.
      number: unique.
    """

    aval: Any
    constant: Any = None
    name: str = ""
    number: int = dataclasses.field(default_factory=lambda: next(_ids))

    @property
    def type(self) -> Type:
        """Shape and dtype."""
        return Type(tuple(self.aval.shape), self.aval.dtype)

    @functools.cached_property
    def entry(self) -> Any:
        """The number that a constant of one element is, such that 0, 0.0, -0.0 and False differ; None for all else."""
        return None if self.scalar is None else (type(self.scalar).__name__, np.asarray(self.scalar).tobytes())

    @property
    def scalar(self) -> Any:
        """The number that a constant of one element is; None for all else."""
        if (
            self.constant is None
            or np.ndim(self.constant)
            or not isinstance(self.constant, int | float | np.generic | np.ndarray)
        ):
            return None
        return self.constant


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation.

    Attributes:
      op: what rules see of it.
      inputs, outputs: values.
      bodies: the functions that it calls (of a scan, while, cond, remat).
      tracebacks: of the operation and of the calls it was inlined for, the innermost first.
      stack: JAX's name stack of the operation, that of the calls included; None: unknown.
    """

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    bodies: tuple[Graph, ...] = ()
    tracebacks: tuple[Any, ...] = ()
    stack: Any = None

    @functools.cached_property
    def frame(self) -> Frame | None:
        """The user's line."""
        return user_frame([frame for at in range(len(self.tracebacks)) for frame in self._frames(at)])

    @functools.cached_property
    def traceback(self) -> Any:
        """That of the user's line; None: unknown."""
        if len(self.tracebacks) < 2:
            return self.tracebacks[0] if self.tracebacks else None
        return next((t for at, t in enumerate(self.tracebacks) if self.frame in self._frames(at)), None)

    def _frames(self, at: int) -> Sequence[Frame]:
        traceback = self.tracebacks[at]
        frames = [Frame(f.file_name, f.line_num) for f in traceback.frames] if traceback is not None else []
        # JAX keeps what it traced of a function: beyond its own frames are those of another call, maybe.
        return frames if at == len(self.tracebacks) - 1 else _within(frames)

    @functools.cached_property
    def key(self) -> Any:
        """Operations of equal keys do the same to values of the same types: whole layers of a network are alike."""
        op = self.op
        scalars = tuple(v.entry for v in self.inputs)
        try:
            matrices = tuple(c.tobytes() for c in op.constants if isinstance(c, np.ndarray) and c.ndim)
            found = (op.name, tuple(sorted(op.params.items())), op.operands, op.results, scalars, matrices)
            hash(found)
        except TypeError:  # a parameter that doesn't hash, or functions that don't sort
            return self
        return found if not self.bodies else self

    @functools.cached_property
    def source(self) -> str:
        """The user's line, as text."""
        return short_location(self.frame)


_CALLING = re.compile(r"[/\\\\]jax[/\\\\]_src[/\\\\](?:pjit|custom_derivatives)\.py$")


def _within(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames of the function that was called, without those of its caller."""
    ends = (i for i, frame in enumerate(frames) if _CALLING.search(frame.file))
    return frames[: next(ends, len(frames))]


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A function.

    Attributes:
      inputs: what it's given.
      captured: constants that are arrays, which are given to it, too.
      nodes: in order.
      outputs: what it returns; an input or constant may be among them.
      custom: it called functions with derivatives of their own, of which nothing is left.
    """

    inputs: tuple[Value, ...]
    captured: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    custom: bool = False

    @property
    def size(self) -> int:
        """Operations, those in bodies counted."""
        return sum(1 + sum(body.size for body in node.bodies) for node in self.nodes)


def without_unused(graph: Graph) -> Graph:
    """The same without operations whose results nobody uses."""
    used = {v.number for v in graph.outputs}
    nodes = []
    back: set[Any] = set()  # of cotangents that cross meshes, which value's way back they take
    for node in reversed(graph.nodes):
        token = node.op.params.get("token") if node.op.name == "sk_on_mesh" else None
        if any(v.number in used for v in node.outputs) or (token is not None and token in back):
            back.add(token)
            used.update(v.number for v in node.inputs)
            nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(reversed(nodes)))
