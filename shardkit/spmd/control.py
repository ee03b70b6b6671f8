"""Operations that call functions: loops, branches, remat, a region that the user wrote.

Their strategies are arrangements of the functions they call. A loop's carry must be at one place at both ends of its
body: it's looked for by running the body from where the carry begins, and again from where it ends, until nothing
changes; of the places seen the cheapest is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from shardkit._compat import made_manual, scan_counts
from shardkit.placements import Layout
from shardkit.spmd import costs, moving
from shardkit.spmd.arrangement import Arrangement
from shardkit.spmd.execute import execute
from shardkit.spmd.graph import Graph, Node
from shardkit.spmd.placed import Placed, from_layout, replicated
from shardkit.spmd.propagate import arrange
from shardkit.spmd.rules.strategy import Strategy, Type
from shardkit.spmd.setting import ANYWHERE, Goal, Setting
from shardkit.spmd.trace import graph_of

ROUNDS = 3  # in which a carry may change before it's given up to be what it was

Places = tuple[Placed, ...]
Wishes = tuple[Placed | None, ...]


def _types(graph: Graph) -> list[Type]:
    return [v.type for v in graph.inputs]


def _goals(wishes: Wishes) -> list[Goal]:
    return [ANYWHERE] * len(wishes)


def _later(types: Sequence[Type], places: Places, setting: Setting) -> float:
    """What it will cost to reduce what is left Partial."""
    return _entering(types, places, _reduced(places), setting)


def _entering(types: Sequence[Type], before: Places, after: Places, setting: Setting) -> float:
    return float(sum(moving.cost(t, a, b, setting.sizes)[0] for t, a, b in zip(types, before, after, strict=True)))


def _reduced(places: Places) -> Places:
    return tuple(p.without_partial() for p in places)


def _distinct(candidates: Sequence[Places]) -> list[Places]:
    return list(dict.fromkeys(candidates))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop in one form: constants, carry and, for a scan, slices of what it runs over.

    Attributes:
      body: the function.
      consts, carry: how many inputs are constants, carried; the others are slices.
      times: how often it runs.
    """

    body: Graph
    consts: int
    carry: int
    times: int


def _settle(loop: _Loop, consts: Places, carry: Places, extra: Places, wishes: Wishes, setting: Setting):
    """The cheapest (consts, carry, extra, arrangement) of a loop, and its price."""
    types = _types(loop.body)
    carried = types[loop.consts : loop.consts + loop.carry]
    outs = len(loop.body.outputs) - loop.carry

    def run(consts: Places, carry: Places, extra: Places, goals: Sequence[Goal]) -> Arrangement:
        return arrange(loop.body, (*consts, *carry, *extra), goals, setting, hints=wishes)

    def price(consts_: Places, carry_: Places, extra_: Places, found: Arrangement) -> float:
        total = loop.times * (found.bytes + costs.work(found.flops)) + _entering(carried, carry, carry_, setting)
        total += _entering(types[: loop.consts], consts, consts_, setting)
        total += loop.times * _entering(types[loop.consts + loop.carry :], extra, extra_, setting)
        total += _later([v.type for v in loop.body.outputs], found.outputs, setting)
        return total

    seen = [carry, _reduced(carry)]
    now = carry
    for _ in range(ROUNDS):
        natural = run(consts, now, extra, [ANYWHERE] * (loop.carry + outs)).outputs[: loop.carry]
        if natural in seen:
            break
        seen.append(natural)
        now = natural
    wished = tuple(w if w is not None else p for w, p in zip(wishes[: loop.carry], now, strict=True))
    best = None
    for candidate in _distinct([*seen, wished]):
        for slices in _distinct([extra, _reduced(extra)]):
            found = run(consts, candidate, slices, [*candidate, *[ANYWHERE] * outs])
            # A constant that the body moves is moved once, before the loop; so may be one that it works around.
            others = [_hoisted(loop, consts, found), _put_together(consts)] if found.bytes else []
            for kept in _distinct([consts, *others]):
                arrangement = (
                    found if kept == consts else run(kept, candidate, slices, [*candidate, *[ANYWHERE] * outs])
                )
                if arrangement.flops > 1.01 * found.flops:
                    continue  # every device would do what they now share
                cost = price(kept, candidate, slices, arrangement)
                if best is None or cost < best[0]:
                    best = cost, kept, candidate, slices, arrangement
    assert best is not None
    return best


def _put_together(places: Places) -> Places:
    return tuple(replicated(len(p.dims)) for p in places)


def _hoisted(loop: _Loop, consts: Places, found: Arrangement) -> Places:
    numbers = {v.number: i for i, v in enumerate(loop.body.inputs[: loop.consts])}
    places = list(consts)
    for move in found.moves:
        at = numbers.pop(move.value.number, None)
        if at is not None and move.bytes:
            places[at] = move.goal
    return tuple(places)


# --- scan -----------------------------------------------------------------------------------------


def _sliced(placed: Placed) -> Placed:
    return Placed(placed.dims[1:], placed.partial, placed.reduce)


def _stacked(placed: Placed) -> Placed:
    return Placed(((), *placed.dims), placed.partial, placed.reduce)


def scan(node: Node, placed: Places, wishes: Wishes, setting: Setting) -> Sequence[Strategy]:
    """Carries at one place; what it runs over is whole along the dim it runs over."""
    params, body = node.op.params, node.bodies[0]
    consts, carry = scan_counts(params)
    loop = _Loop(body, consts, carry, params["length"])
    over = tuple(_sliced(p) for p in placed[consts + carry :])
    inner = tuple(w if w is None or i < carry else _sliced(w) for i, w in enumerate(wishes))
    _, kept, held, slices, found = _settle(loop, placed[:consts], placed[consts : consts + carry], over, inner, setting)

    def run(here: Any, *blocks: Any) -> Sequence[Any]:
        fixed, init, xs = blocks[:consts], blocks[consts : consts + carry], blocks[consts + carry :]

        def step(state: Any, x: Any) -> Any:
            out = execute(found, (*fixed, *state, *x))
            return tuple(out[:carry]), tuple(out[carry:])

        last, ys = lax.scan(
            step, tuple(init), tuple(xs), params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        return [*last, *ys]

    return [
        Strategy(
            operands=(*kept, *held, *(_stacked(p) for p in slices)),
            results=(*held, *(_stacked(p) for p in found.outputs[carry:])),
            run=run,
            flops=found.flops * loop.times,
            bodies=(("body", found, loop.times),),
        )
    ]


# --- while ----------------------------------------------------------------------------------------


def while_loop(node: Node, placed: Places, wishes: Wishes, setting: Setting) -> Sequence[Strategy]:
    """Whether it goes on must be the same on every device, so that the condition is whole."""
    params = node.op.params
    test, body = node.bodies
    tests, consts = params["cond_nconsts"], params["body_nconsts"]
    carry = len(placed) - tests - consts
    loop = _Loop(body, consts, carry, costs.UNKNOWN_TRIPS)
    _, kept, held, _, found = _settle(
        loop, placed[tests : tests + consts], _reduced(placed[tests + consts :]), (), wishes, setting
    )
    asks = arrange(test, (*placed[:tests], *held), [replicated(0)], setting)

    def run(here: Any, *blocks: Any) -> Sequence[Any]:
        for_test, for_body, init = blocks[:tests], blocks[tests : tests + consts], blocks[tests + consts :]
        return lax.while_loop(
            lambda state: execute(asks, (*for_test, *state))[0],
            lambda state: tuple(execute(found, (*for_body, *state))),
            tuple(init),
        )

    times = costs.UNKNOWN_TRIPS
    return [
        Strategy(
            operands=(*placed[:tests], *kept, *held),
            results=held,
            run=run,
            flops=(found.flops + asks.flops) * times,
            why=f"counted as {times} runs, for nobody knows",
            bodies=(("condition", asks, times), ("body", found, times)),
        )
    ]


# --- cond -----------------------------------------------------------------------------------------


def cond(node: Node, placed: Places, wishes: Wishes, setting: Setting) -> Sequence[Strategy]:
    """Every branch leaves its results at the same places, those that cost least over all branches."""
    index, operands = placed[0].without_partial(), placed[1:]
    types = [v.type for v in node.outputs]
    free = [arrange(b, operands, _goals(wishes), setting, hints=wishes) for b in node.bodies]
    candidates = [f.outputs for f in free] + [_reduced(f.outputs) for f in free]
    candidates.append(tuple(w if w is not None else p for w, p in zip(wishes, _reduced(free[0].outputs), strict=True)))
    best: Any = None
    for outs in _distinct(candidates):
        found = [arrange(b, operands, outs, setting, hints=wishes) for b in node.bodies]
        price = sum(f.bytes + costs.work(f.flops) for f in found) / len(found) + _later(types, outs, setting)
        if best is None or price < best[0]:
            best = price, outs, found
    _, outs, found = best

    def run(here: Any, which: Any, *blocks: Any) -> Sequence[Any]:
        def branch(f: Arrangement) -> Callable[..., Any]:
            return lambda *given: tuple(execute(f, given))

        return lax.switch(jnp.asarray(which, jnp.int32), [branch(f) for f in found], *blocks)

    return [
        Strategy(
            operands=(index, *operands),
            results=tuple(outs),
            run=run,
            flops=max(f.flops for f in found),
            bodies=tuple((f"branch {i}", f, 1) for i, f in enumerate(found)),
        )
    ]


# --- remat ----------------------------------------------------------------------------------------


def remat(node: Node, placed: Places, wishes: Wishes, setting: Setting) -> Sequence[Strategy]:
    """What is computed again on the way back stays apart from what was computed forward."""
    params = node.op.params
    found = arrange(node.bodies[0], placed, _goals(wishes), setting, hints=wishes)
    apart = params.get("differentiated") and params.get("prevent_cse")

    def run(here: Any, *blocks: Any) -> Sequence[Any]:
        # As JAX itself does when it compiles this operation.
        if apart and blocks:
            blocks = tuple(lax.optimization_barrier(blocks))
        return execute(found, blocks)

    return [
        Strategy(placed, found.outputs, run=run, flops=found.flops, bodies=(("body", found, 1),), why="computed again")
    ]


# --- a region of the user's own -------------------------------------------------------------------


def shard_map(node: Node, placed: Places, wishes: Wishes, setting: Setting) -> Sequence[Strategy]:
    """What the user already wrote for devices runs as it is, on the blocks that its specs name.

    Along axes that it leaves to the compiler its operands are whole.
    """
    params = node.op.params
    mesh = params["mesh"]
    if any(setting.mesh.shape.get(name) != size for name, size in mesh.shape.items()):
        raise ValueError(
            f"partition: the shard_map at {node.source or 'an unknown line'} runs on mesh {dict(mesh.shape)}, but "
            f"the program on {dict(setting.mesh.shape)}; use the same axes"
        )

    def places(specs: Sequence[Any], values: Sequence[Any]) -> Places:
        return tuple(
            from_layout(Layout(setting.mesh, spec), len(v.aval.shape), setting.sizes)
            for spec, v in zip(specs, values, strict=True)
        )

    # Inside, its axes cut nothing any more: values are blocks, and collectives the user's own. Along others (of a
    # region that takes but some) blocks are whole, until an inner region cuts them.
    body = graph_of(jex_core.ClosedJaxpr(params["jaxpr"], ()))
    taken = made_manual(params)
    manual = {a: n for a, n in setting.sizes.items() if a in taken} | dict(setting.manual)
    left = {a: n for a, n in setting.sizes.items() if a not in taken}
    within = Setting(setting.mesh, left, setting.unknown, setting.control, manual)
    ins, outs = ([replicated(len(v.aval.shape)) for v in values] for values in (body.inputs, body.outputs))
    found = arrange(body, ins, outs, within)

    def run(here: Any, *blocks: Any) -> Sequence[Any]:
        return execute(found, blocks)

    return [
        Strategy(
            places(params["in_specs"], node.inputs),
            places(params["out_specs"], node.outputs),
            run=run,
            flops=found.flops,
            why="as written",
            bodies=(("region", found, 1),),
        )
    ]


CONTROL = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "remat2": remat,
    "remat": remat,
    "checkpoint": remat,
    "shard_map": shard_map,
}
