"""How often to exchange: the cheapest plan by a model of links and of the work that the rim takes twice.

Every exchange costs a message's latency and its bytes; a margin that serves several layers saves exchanges, and is paid
for in elements that two devices both work out. Arithmetic only; ``platforms.py`` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardkit.spatial.regions.graph import Value
from shardkit.spatial.regions.margins import NONE, Margin
from shardkit.spatial.regions.plan import Plan, wanted
from shardkit.spatial.regions.platforms import Platform, platform_figures
from shardkit.spatial.regions.step import REDUCTION, WINDOW, Step

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16)
# A plan of fewer exchanges must be cheaper by this much: the model knows orders of magnitude.
_WORTH = 0.97
# Bytes of a block above which messages aren't what takes the time, and copies with wide margins only take memory.
_SMALL = 1 << 20
# Operations above which a loop's turns aren't chained: they'd all be compiled.
_LONG = 1000


def choose_every(make: Callable[[int, bool], Plan], mesh: Any, platform: str) -> Plan:
    """The cheapest plan among some.

    Args:
      make: plans for a number of layers between exchanges; in loops of turns, or (False) of layers too.
      mesh, platform: what it will run on.
    """
    figures = platform_figures(mesh, platform)
    best = make(1, False)
    cheapest = seconds(best, figures)
    if not best.exchanges or _largest(best) > _SMALL:
        return best
    loops = any(s.inner and s.node.name == "scan" for s in best.steps)
    worse = 0
    for every in CANDIDATES if loops else CANDIDATES[1:]:
        if every > 2 * deepest(best):
            break
        plan = make(every, True)
        if _steps(plan) > _LONG or _reaches_beyond_neighbours(plan):
            break
        cost = seconds(plan, figures)
        worse = worse + 1 if cost > cheapest else 0
        if cost < _WORTH * cheapest:
            best, cheapest = plan, cost
        if worse == 2:
            break
    return best


def _largest(plan: Plan) -> int:
    """Bytes of the largest block whose margins are fetched."""
    own = [_held(plan.values[n], plan, {}) * plan.values[n].aval.dtype.itemsize for n in plan.fetched]
    return max([*own, *(_largest(p) for s in plan.steps for p, _ in s.inner)], default=0)


def _steps(plan: Plan) -> int:
    """Operations of the program, the turns of loops that it chains counted."""
    return len(plan.steps) + sum(_steps(p) for s in plan.steps for p, _ in s.inner)


def _reaches_beyond_neighbours(plan: Plan) -> bool:
    wide = any(
        max(margin) > plan.lies[n][dim].block for n, dims in plan.fetched.items() for dim, (margin, _) in dims.items()
    )
    return wide or any(_reaches_beyond_neighbours(p) for s in plan.steps for p, _ in s.inner)


def deepest(plan: Plan) -> int:
    """Most windows one after the other; of a loop, its turns."""
    inner = [max(times, 1) * p.every for s in plan.steps for p, times in s.inner]
    return max([sum(s.eats for s in plan.steps), *inner], default=1)


def seconds(plan: Plan, figures: Platform) -> float:
    """What a device takes forward and backward, by the model: work three times, exchanges twice."""
    total = 0.0
    for step in plan.steps:
        if step.inner:
            total += sum(times * seconds(p, figures) for p, times in step.inner)
            continue
        total += 3 * _work(plan, step, figures)
    return total + sum(2 * _exchange(plan, number, figures) for number in plan.fetched)


def _work(plan: Plan, step: Step, figures: Platform) -> float:
    margins = wanted(plan, step)
    made = sum(_held(v, plan, margins) for v in step.outputs)
    name = step.node.name
    if name == "conv_general_dilated":
        kernel, numbers = step.node.inputs[1].shape, step.node.params["dimension_numbers"]
        features = kernel[numbers.rhs_spec[1]], kernel[numbers.rhs_spec[0]]
        flops = 2.0 * made * math.prod(kernel) / features[1] * math.prod(_filled(f, figures) for f in features)
    elif name == "dot_general":
        (left, _), _ = step.node.params["dimension_numbers"]
        flops = 2.0 * made * math.prod(step.node.inputs[0].shape[d] for d in left)
    else:
        flops = float(made)
    moved = 0.0
    if step.kind in (WINDOW, REDUCTION) or name == "dot_general":  # the rest is fused with what is around it
        read = sum(_held(v, plan, plan.wants.get(v.number, {})) for v in step.inputs if v.number in plan.lies)
        moved = (made + read) * step.outputs[0].aval.dtype.itemsize
    # Peaks are those of 16-bit floats.
    flops *= max(1.0, step.outputs[0].aval.dtype.itemsize / 2) if figures.lanes > 1 else 1.0
    return max(flops / figures.flops, moved / figures.memory)


def _filled(features: int, figures: Platform) -> float:
    """How much more than its share a narrow layer takes of a unit that is ``lanes`` wide."""
    return -(-features // figures.lanes) * figures.lanes / features


def _held(value: Value, plan: Plan, margins: Mapping[int, Margin]) -> int:
    """Elements of a value on a device."""
    shape = list(value.shape)
    for dim, cut in plan.lies.get(value.number, {}).items():
        shape[dim] = cut.block + sum(margins.get(dim, NONE))
    return math.prod(shape)


def _exchange(plan: Plan, number: int, figures: Platform) -> float:
    """Both sides of a dim travel at once; dims one after the other."""
    total, value = 0.0, plan.values[number]
    cuts = plan.lies[number]
    shape = [cuts[d].block if d in cuts else s for d, s in enumerate(value.shape)]
    for dim, (margin, _) in plan.fetched[number].items():
        if margin == NONE or cuts[dim].shards == 1:
            continue
        slab = math.prod(s for d, s in enumerate(shape) if d != dim) * value.aval.dtype.itemsize
        total += figures.latency * -(-max(margin) // cuts[dim].block) + max(margin) * slab / figures.link
        shape[dim] += sum(margin)
    return total
