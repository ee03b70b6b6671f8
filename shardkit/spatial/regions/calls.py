"""Operations that are functions: derivatives of their own, checkpoints, loops."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh

from shardkit._compat import scan_counts, varying_axes
from shardkit.spatial.exchange import Index
from shardkit.spatial.regions.block import ANYTHING, Block, Cuts, InChunks, cropped, into_chunks, out_of_chunks, part_of
from shardkit.spatial.regions.graph import Graph, Node, bound, chained, graph_of
from shardkit.spatial.regions.margins import NONE
from shardkit.spatial.regions.step import LOCAL, OWN, Ensure, Held, Step, Wants, Whole, same_links
from shardkit.varying import varying

PlanGraph = Callable[..., Any]

_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "outside_call", "debug_print"})


def refuse(node: Node) -> None:
    """What no layout can be left for.

    Raises:
      NotImplementedError: host callbacks; a ``shard_map``, which would cut what is cut already.
    """
    where = node.source or "an unknown line"
    if node.name in _CALLBACKS:
        raise NotImplementedError(
            f"region: {node.name} at {where} calls back to the host: in a region once a device and in no "
            "order; take it out of the function, or return the value and look at it outside"
        )
    if node.name == "shard_map":
        raise NotImplementedError(
            f"region: {node.name} at {where} (a sk.ring_* function, or one of your own) cuts a value that the region "
            "has cut already; call the plain function (lax.conv_general_dilated, jax.image.resize, nnx.Conv) there: "
            "the region shards it"
        )


def call(node: Node, lies: Sequence[Cuts], setting: Any, plan_graph: PlanGraph) -> Step | None:
    """The step of an operation that is a function; None where it has to leave the layout."""
    if node.name == "custom_jvp_call":
        return _custom_jvp(node, lies, setting, plan_graph)
    if node.name == "scan":
        return _scan(node, lies, setting, plan_graph)
    return _remat(node, lies, setting, plan_graph)


# --- arrays of held values --------------------------------------------------------------------------------------


def _array(held: Held) -> Array:
    return held.array


def _like(held: Held, array: Array) -> Held:
    return dataclasses.replace(held, array=array)


def _execute(plan: Any, here: Any, inputs: Sequence[Held]) -> list[Held]:
    from shardkit.spatial.regions.run import execute

    return execute(plan, here, inputs)


class _Shown:
    """Held values as arrays for a function of JAX's, and back."""

    def __init__(self, inputs: Sequence[Held]):
        self.inputs = tuple(inputs)
        self.outputs: list[Held] = []

    def run(self, plan: Any, here: Any, arrays: Sequence[Array]) -> list[Array]:
        held = [_like(h, a) for h, a in zip(self.inputs, arrays, strict=True)]
        self.outputs = _execute(plan, here, held)
        return [_array(o) for o in self.outputs]


# --- derivatives of its own -------------------------------------------------------------------------------------


def _custom_jvp(node: Node, lies: Sequence[Cuts], setting: Any, plan_graph: PlanGraph) -> Step | None:
    assert node.body is not None
    plan = plan_graph(node.body, lies, setting)
    if plan.left:
        return None
    differentiable = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in node.inputs]
    twice = [*lies, *(c for c, d in zip(lies, differentiable, strict=True) if d)]

    def planned(asked: Any = None) -> tuple[Graph, Any]:
        """The rule of the derivative: often it calls the function again, whose own isn't asked for before that."""
        with _within_a_derivative():
            tangents = _tangents(node, differentiable)
            return tangents, plan_graph(tangents, [{}] * len(tangents.consts) + twice, setting, asked)

    cuts = [plan.lies.get(v.number, {}) for v in node.body.outputs]
    stays = plan.stays and all(c == cuts[0] for c in cuts) and all(not c or c == cuts[0] for c in lies)
    if not _deriving.get():
        both = planned()[1]
        if both.left:
            return None
        stays = stays and both.stays

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        held = list(operands)
        for i, links in enumerate(step.links):
            if isinstance(held[i], Block):
                block = ensure(i) if stays else held[i]
                held[i] = cropped(block, {k.source: wants.get(k.result, NONE) for k in links} if stays else {})
        asked = [{d: wants.get(d, NONE) for d in c} if stays else {} for c in cuts]
        again = plan_graph(node.body, lies, setting, asked)
        shown = _Shown(held)
        axes = sorted({c.axes for lie in lies for c in lie.values()} | {(n,) for n in here.names})
        given = {a: here.where(a) for a in axes}
        fixed_at = {a: i for a, i in given.items() if isinstance(i, int)}
        moving_at = [a for a in axes if a not in fixed_at]

        # The rule is asked for later, when a position that it closed over may be known no more.
        def there(positions: Sequence[Any]) -> _There:
            at = fixed_at | dict(zip(moving_at, positions, strict=True))
            return _There(here.platform, here.free, here.names, at)

        @jax.custom_jvp
        def function(positions: list[Any], *arrays: Array) -> list[Array]:
            return shown.run(again, there(positions), arrays)

        @function.defjvp
        def derivative(primals: Any, dots: Any) -> Any:
            positions, *primals = primals
            dots = dots[1:]
            tangents, grown = planned([*asked, *asked])
            moving = [(h, d) for h, d, yes in zip(shown.inputs, dots, differentiable, strict=True) if yes]
            fixed = [Whole(jnp.asarray(c), tuple(np.shape(c))) for c in tangents.consts]
            values = [_like(h, p) for h, p in zip(shown.inputs, primals, strict=True)]
            outs = _execute(grown, there(positions), [*fixed, *values, *(_like(h, d) for h, d in moving)])
            half = len(node.outputs)
            shown.outputs = outs[:half]  # nothing else may run, where it is differentiated at once
            return [_array(o) for o in outs[:half]], [_array(o) for o in outs[half:]]

        arrays = function([given[a] for a in moving_at], *(_array(h) for h in held))
        return [_like(o, a) for o, a in zip(shown.outputs, arrays, strict=True)]

    links = tuple(same_links(c) for c in lies)
    kind = LOCAL if stays else OWN
    note = f"{node.params.get('name') or 'a function'} with a derivative of its own"
    step = Step(node, kind, node.inputs, tuple(cuts), links, run, node.outputs, note, ((plan, 1),))
    return step


@dataclasses.dataclass(frozen=True)
class _There:
    """This device, in a function that is handed its positions."""

    platform: str
    free: bool
    names: tuple[str, ...]
    at: Mapping[tuple[str, ...], Index]

    def where(self, axes: tuple[str, ...]) -> Index:
        """As ``Here``."""
        return self.at[axes]


_deriving: contextvars.ContextVar[bool] = contextvars.ContextVar("deriving", default=False)


@contextlib.contextmanager
def _within_a_derivative() -> Generator[None]:
    token = _deriving.set(True)
    try:
        yield
    finally:
        _deriving.reset(token)


def _tangents(node: Node, differentiable: Sequence[bool]) -> Graph:
    """The rule of the derivative, traced: inputs and tangents in, outputs and theirs out."""
    types = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in node.inputs]

    def both(primals: Any, dots: Any) -> Any:
        rest = iter(dots)
        given = [
            next(rest) if yes else np.zeros(p.shape, jax.dtypes.float0)
            for p, yes in zip(primals, differentiable, strict=True)
        ]

        def function(*arrays: Array) -> Any:
            return bound(node, arrays)

        values, tangents = jax.jvp(function, tuple(primals), tuple(given))
        return list(values), list(tangents)

    moving = [t for t, yes in zip(types, differentiable, strict=True) if yes]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return graph_of(jax.make_jaxpr(both)(types, moving))


# --- checkpoints ------------------------------------------------------------------------------------------------


def _remat(node: Node, lies: Sequence[Cuts], setting: Any, plan_graph: PlanGraph) -> Step:
    assert node.body is not None
    plan = plan_graph(node.body, lies, setting)
    cuts = tuple(plan.lies.get(v.number, {}) for v in node.body.outputs)

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        held = [cropped(o, {}) if isinstance(o, Block) else o for o in operands]
        shown = _Shown(held)

        def function(*arrays: Array) -> list[Array]:
            return shown.run(plan, here, arrays)

        options = {k: node.params[k] for k in ("policy", "prevent_cse") if k in node.params}
        arrays = jax.checkpoint(function, **options)(*(_array(h) for h in held))
        return [_like(o, a) for o, a in zip(shown.outputs, arrays, strict=True)]

    links = tuple(same_links(c) for c in lies)
    return Step(node, OWN, node.inputs, cuts, links, run, node.outputs, "computed again on the way back", ((plan, 1),))


# --- loops ------------------------------------------------------------------------------------------------------


def _scan(node: Node, lies: Sequence[Cuts], setting: Any, plan_graph: PlanGraph) -> Step | None:
    assert node.body is not None
    consts, carry = scan_counts(node.params)
    length, reverse = node.params["length"], node.params["reverse"]
    consts += len(node.body.consts)
    over = lies[consts + carry :]
    if any(0 in c for c in over):
        return None
    slices = [{d - 1: c for d, c in cuts.items()} for cuts in over]
    held = _settled(node.body, lies[:consts], list(lies[consts : consts + carry]), slices, setting, plan_graph)
    if held is None:
        return None
    # Of layers: exchanges in every turn, as often as elsewhere. Of turns: one exchange for all their windows together.
    every = max(1, min(setting.every, length)) if setting.turns else 1
    one = dataclasses.replace(setting, every=_TOGETHER) if setting.turns else setting
    turns, rest = divmod(length, every)
    graphs = {n: chained(node.body, consts, carry, n) for n in {every, rest} if n}
    plans = {n: plan_graph(g, [*lies[:consts], *held, *slices * n], one) for n, g in graphs.items()}
    first = plans[every]
    made = [first.lies.get(v.number, {}) for v in first.graph.outputs[carry : carry + len(node.outputs) - carry]]
    made = made if length else [{} for _ in made]
    cuts = (*held, *({d + 1: c for d, c in m.items()} for m in made))

    def run(here: Any, operands: Sequence[Any], wants: Wants, ensure: Ensure) -> Sequence[Held]:
        loop = _Loop(here, consts, carry, reverse, node.params["unroll"])
        shapes = [v.shape for v in node.outputs[carry:]]
        dtypes = [v.aval.dtype for v in node.outputs[carry:]]
        return loop.run(plans, operands, held, shapes, dtypes, turns, every, rest)

    inner = ((first, turns), *((plans[rest], 1) for _ in range(bool(rest))))
    links = tuple(same_links(c) for c in lies)
    note = f"{length} turns, {every} for each exchange" if every > 1 else f"{length} turns"
    return Step(node, OWN, node.inputs, cuts, links, run, node.outputs, note, inner)


_TOGETHER = 1 << 20  # levels in one group: all of a loop's chained turns


def _settled(
    body: Graph, consts: Sequence[Cuts], held: list[Cuts], slices: Sequence[Cuts], setting: Any, plan_graph: PlanGraph
) -> list[Cuts] | None:
    """How what is carried lies, the same before and after a turn; None where it finds no rest."""
    for _ in range(len(held) + 1):
        plan = plan_graph(body, [*consts, *held, *slices], setting)
        after = [plan.lies.get(v.number, {}) for v in body.outputs[: len(held)]]
        if any(a and b and a != b for a, b in zip(held, after, strict=True)):
            return None
        joined = [a or b for a, b in zip(held, after, strict=True)]
        if any(j and not a for j, a in zip(joined, after, strict=True)):
            return None  # carried in blocks, made whole: it left the layout
        if joined == held:
            return held
        held = joined
    return None


@dataclasses.dataclass(frozen=True)
class _Loop:
    here: Any
    consts: int
    carry: int
    reverse: bool
    unroll: Any

    def run(
        self,
        plans: Any,
        operands: Sequence[Any],
        lies: Sequence[Cuts],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[Any],
        turns: int,
        every: int,
        rest: int,
    ) -> list[Held]:
        fixed = list(operands[: self.consts])
        state = [
            self._blocked(o, c) for o, c in zip(operands[self.consts : self.consts + self.carry], lies, strict=True)
        ]
        xs = [self._sliced(o) for o in operands[self.consts + self.carry :]]
        state = self._laid_out(plans[every], fixed, state, xs, every)
        whole = turns * every
        # Backwards the last elements come first, and what is left over is at the front.
        parts = [(rest, 1, slice(0, rest)), (every, turns, slice(rest, None))] if self.reverse else []
        parts = parts[::-1] or [(every, turns, slice(0, whole)), (rest, 1, slice(whole, None))]
        pieces = []
        for size, count, where in parts:
            if size and count:
                state, made = self._turns(plans[size], fixed, state, xs, where, size, count)
                pieces.append(made)
        if self.reverse:
            pieces.reverse()
        ys = []
        for i, shape in enumerate(shapes):
            if not pieces:  # no turn
                ys.append(Whole(jnp.zeros(shape, dtypes[i]), shape))
                continue
            first = pieces[0][i]
            array = first.array if len(pieces) == 1 else jnp.concatenate([p[i].array for p in pieces], 0)
            ys.append(_stacked(first, array, shape))
        return [*state, *ys]

    def _blocked(self, held: Held, cuts: Cuts) -> Held:
        if not cuts:
            return held
        if isinstance(held, Block):
            return cropped(held, {})
        like = Block(held.array, cuts, dict.fromkeys(cuts, NONE), dict.fromkeys(cuts, ANYTHING))
        return dataclasses.replace(like, array=part_of(held.value, like, self.here.where))

    def _sliced(self, held: Held) -> Held:
        if isinstance(held, Whole):
            return Whole(held.value, held.shape)
        return out_of_chunks(cropped(held, {}), self.here.where)

    def _laid_out(self, plan: Any, fixed: Any, state: list[Held], xs: Sequence[Held], every: int) -> list[Held]:
        """What is carried in the chunks that a turn leaves it in."""
        seen: list[Held] = []

        def turn(arrays: Any, slices: Any) -> Any:
            held = [_like(h, a) for h, a in zip(state, arrays, strict=True)]
            parts = [_part(x, s) for x, s in zip([*xs] * every, slices, strict=True)]
            seen[:] = _execute(plan, self.here, [*fixed, *held, *parts])[: self.carry]
            return [_array(s) for s in seen]

        jax.eval_shape(turn, [_array(h) for h in state], [x.array[0] for x in xs] * every)
        return [
            self._in_chunks(h, s.chunks if isinstance(s, Block) else None) for h, s in zip(state, seen, strict=True)
        ]

    def _in_chunks(self, held: Held, chunks: InChunks | None) -> Held:
        if not isinstance(held, Block) or held.chunks == chunks:
            return held
        return out_of_chunks(held, self.here.where) if chunks is None else into_chunks(held, chunks, self.here.where)

    def _turns(
        self, plan: Any, fixed: Any, state: list[Held], xs: Sequence[Held], where: slice, size: int, count: int
    ) -> tuple[list[Held], list[Held]]:
        """``count`` turns of ``size`` each; results stacked."""
        layouts: list[Held] = []
        order = range(size - 1, -1, -1) if self.reverse else range(size)

        def turn(arrays: Any, groups: Any) -> Any:
            held = [_like(h, a) for h, a in zip(state, arrays, strict=True)]
            parts = [_part(x, g[i]) for i in order for x, g in zip(xs, groups, strict=True)]
            outs = _execute(plan, self.here, [*fixed, *held, *parts])
            after = [
                self._in_chunks(
                    cropped(o, {}) if isinstance(o, Block) else o, h.chunks if isinstance(h, Block) else None
                )
                for o, h in zip(outs[: self.carry], held, strict=True)
            ]
            made = [
                out_of_chunks(cropped(o, {}), self.here.where) if isinstance(o, Block) else Whole(o.value, o.shape)
                for o in outs[self.carry :]
            ]
            each = len(made) // size
            layouts[:] = made[:each]
            rows = [made[i * each : (i + 1) * each] for i in order]
            stacked = [jnp.stack([_array(row[j]) for row in rows]) for j in range(each)]
            return [_array(a) if isinstance(a, Block) else a.value for a in after], stacked  # type: ignore[union-attr]

        groups = [x.array[where].reshape(count, size, *x.array.shape[1:]) for x in xs]
        start = [_array(h) if isinstance(h, Block) else h.value for h in state]
        if count == 1:
            last, ys = turn(start, [g[0] for g in groups])
            ys = [y[None] for y in ys]
        else:
            start = _varying_alike(turn, start, [g[0] for g in groups])
            last, ys = lax.scan(turn, start, groups, count, reverse=self.reverse, unroll=min(self.unroll, count))
        after = [
            dataclasses.replace(h, array=a) if isinstance(h, Block) else Whole(a, h.shape)
            for h, a in zip(state, last, strict=True)
        ]
        flat = [y.reshape(count * size, *y.shape[2:]) for y in ys]
        return after, [dataclasses.replace(m, array=y) for m, y in zip(layouts, flat, strict=True)]


def _varying_alike(turn: Any, start: list[Array], groups: Any) -> list[Array]:
    """What is carried, of types that vary over the mesh axes that a turn makes it vary over."""
    for _ in range(3):
        seen: list[frozenset[str]] = []

        def probe(state: list[Array], slices: Any, seen: list[frozenset[str]] = seen) -> Any:
            out, _ = turn(state, slices)
            seen[:] = [varying_axes(o) for o in out]
            return out

        jax.eval_shape(probe, start, groups)
        grown = [varying(s, sorted(axes)) for s, axes in zip(start, seen, strict=True)]
        if all(varying_axes(a) == varying_axes(b) for a, b in zip(start, grown, strict=True)):
            return grown
        start = grown
    return start


def _part(x: Held, array: Array) -> Held:
    if isinstance(x, Whole):
        return Whole(array, tuple(array.shape))
    return Block(
        array,
        {d - 1: c for d, c in x.cuts.items()},
        {d - 1: m for d, m in x.margins.items()},
        {d - 1: b for d, b in x.beyond.items()},
    )


def _stacked(one: Held, array: Array, shape: tuple[int, ...]) -> Held:
    if isinstance(one, Whole):
        return Whole(array, shape)
    return Block(
        array,
        {d + 1: c for d, c in one.cuts.items()},
        {d + 1: m for d, m in one.margins.items()},
        {d + 1: b for d, b in one.beyond.items()},
    )
