"""A graph whose values live on several meshes, cut into stages that each run on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardkit.placements import AnyMesh, Layout
from shardkit.reshard.regions import same_place
from shardkit.spmd.graph import Graph, Node, Value, without_unused


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """A value that goes from one mesh to another.

    Attributes:
      source, result: the value, and its name on the other side.
      layout: where it goes; None: back to where another value came from.
      back: that value.
      node: the user's operation.
    """

    source: Value
    result: Value
    layout: Layout | None
    back: Value | None
    node: Node


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """What runs on one mesh between two crossings.

    Attributes:
      mesh: the mesh.
      graph: inputs are those of the program, results of earlier stages and of crossings; outputs those of the program,
        then what others need.
      results: of the program's outputs, the positions of those that this stage returns first.
    """

    mesh: AnyMesh
    graph: Graph
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Home:
    mesh: int
    level: int


def split(graph: Graph, meshes: Sequence[AnyMesh], default: AnyMesh) -> tuple[list[Stage], list[Crossing]]:
    """The stages in the order they run, and the crossings between them.

    Args:
      graph: of the whole function.
      meshes: of each input, the mesh it's on.
      default: where values are that are made of constants only.

    Raises:
      ValueError: values of two meshes that meet in one operation; a crossing in a loop or branch.
    """
    return _Splitter(graph, meshes, default).run()


class _Splitter:
    def __init__(self, graph: Graph, meshes: Sequence[AnyMesh], default: AnyMesh):
        self.graph = graph
        self.known: list[AnyMesh] = [default]
        self.homes: dict[int, _Home] = {}  # of values that aren't made of constants only
        self.maker: dict[int, Node] = {v.number: node for node in graph.nodes for v in node.outputs}
        self.crossings: dict[int, Crossing] = {}
        self.forward: dict[int, Value] = {}  # by token, what crossed
        for value, mesh in zip(graph.inputs, meshes, strict=True):
            self.homes[value.number] = _Home(self.index(mesh), 0)

    def index(self, mesh: AnyMesh) -> int:
        found = (i for i, known in enumerate(self.known) if same_place(known, mesh))
        at = next(found, None)
        if at is None:
            self.known.append(mesh)
            at = len(self.known) - 1
        return at

    def run(self) -> tuple[list[Stage], list[Crossing]]:
        placed: list[tuple[_Home, Node]] = []
        for node in self.graph.nodes:
            _refuse_within(node)
            if node.op.name == "sk_on_mesh" and self.cross(node):
                continue
            home = self.home_of(node)
            if home is not None:
                self.homes.update((v.number, home) for v in node.outputs)
                placed.append((home, node))
        last = [self.homes.get(v.number, _Home(0, 0)) for v in self.graph.outputs]
        sources = [self.homes.get(c.source.number, _Home(0, 0)) for c in self.crossings.values()]
        wanted = sorted({*last, *sources, *(h for h, _ in placed)}, key=lambda h: (h.level, h.mesh))
        alone = len(wanted) == 1 and len(self.known) == 1
        return [self.stage(home, placed, last, alone) for home in wanted], list(self.crossings.values())

    def cross(self, node: Node) -> bool:
        """Whether it leads to another mesh (else it's a mark like others)."""
        (source,), (result,) = node.inputs, node.outputs
        layout, token = node.op.params["layout"], node.op.params["token"]
        came = self.homes.get(source.number, _Home(0, 0))
        back = None
        if layout is None:
            back = self.forward.get(token)
            goes = came.mesh if back is None else self.homes.get(back.number, _Home(0, 0)).mesh
        else:
            self.forward[token] = source
            goes = self.index(layout.mesh)
        if goes == came.mesh:
            return False
        self.homes[result.number] = _Home(goes, came.level + 1)
        self.crossings[result.number] = Crossing(source, result, layout, back, node)
        return True

    def home_of(self, node: Node) -> _Home | None:
        """The one mesh of its operands, after the last of them; None: they're constants."""
        homes = [(v, self.homes[v.number]) for v in node.inputs if v.number in self.homes]
        if not homes:
            return None
        if len({h.mesh for _, h in homes}) > 1:
            places = sorted({str(dict(self.known[h.mesh].shape)) for _, h in homes})
            raise ValueError(
                f"partition: {node.op.name} at {node.source or 'an unknown line'} has operands on different meshes, "
                f"{' and '.join(places)}; take one to the other's mesh with sk.on_mesh(x, mesh, placements)"
            )
        return _Home(homes[0][1].mesh, max(h.level for _, h in homes))

    def stage(self, home: _Home, placed: Sequence[tuple[_Home, Node]], last: Sequence[_Home], alone: bool) -> Stage:
        mine = [node for where, node in placed if where == home]
        made = {v.number for node in mine for v in node.outputs}
        here = {n for n, h in self.homes.items() if h == home}
        results = tuple(i for i, where in enumerate(last) if where == home)
        outputs = [self.graph.outputs[i] for i in results]
        outputs += self.exported(home, placed, here)
        needed = {v.number for node in mine for v in node.inputs} | {v.number for v in outputs}
        constants = self.constants(needed - made)
        inner = {v.number for node in constants for v in node.outputs} | made
        every = [v for node in (*constants, *mine) for v in node.inputs] + outputs
        outer = {v.number: v for v in every if v.number in self.homes and v.number not in inner}
        # Those of the program in its order; where all is one stage, those that nobody uses, too.
        first = {v.number: v for v in self.graph.inputs if v.number in outer or alone}
        inputs = first | outer
        used = {v.number for v in every}
        captured = {v.number: v for v in self.graph.captured if v.number in used}
        chosen = {*constants, *mine}
        nodes = tuple(n for n in self.graph.nodes if n in chosen)
        graph = Graph(tuple(inputs.values()), tuple(captured.values()), nodes, tuple(outputs))
        return Stage(self.known[home.mesh], without_unused(graph), results)

    def exported(self, home: _Home, placed: Sequence[tuple[_Home, Node]], here: set[int]) -> list[Value]:
        """What later stages, and crossings, take from this one."""
        program = {v.number for v in self.graph.inputs}
        used = [v for where, node in placed if where != home for v in node.inputs]
        arrivals = {c.result.number for c in self.crossings.values()}
        kept = {v.number: v for v in used if v.number in here and v.number not in program | arrivals}
        for crossing in self.crossings.values():
            home_ = self.homes.get(crossing.source.number, _Home(0, 0))
            if home_ == home:
                kept[crossing.source.number] = crossing.source
        return list(kept.values())

    def constants(self, needed: set[int]) -> list[Node]:
        """The operations on constants that these values come from."""
        found: dict[Node, None] = {}
        todo = list(needed)
        while todo:
            number = todo.pop()
            node = self.maker.get(number)
            if node is not None and number not in self.homes and node not in found:
                found[node] = None
                todo += [v.number for v in node.inputs]
        return list(found)


def _refuse_within(node: Node) -> None:
    for body in node.bodies:
        for inner in body.nodes:
            if inner.op.name == "sk_on_mesh":
                raise ValueError(
                    f"partition: sk.on_mesh at {inner.source or 'an unknown line'} is within a {node.op.name}, whose "
                    "carry and results can't change their mesh; cross outside of it"
                )
            _refuse_within(inner)
