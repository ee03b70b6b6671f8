"""Carrying out a plan on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from shardkit.spatial.regions.block import ZEROS, Block, holds, widened
from shardkit.spatial.regions.graph import Value
from shardkit.spatial.regions.margins import NONE, wider
from shardkit.spatial.regions.plan import Plan, mode_of, wanted
from shardkit.spatial.regions.step import Held, Step, Wants, Whole


def execute(plan: Plan, here: Any, inputs: Sequence[Held]) -> list[Held]:
    """The outputs, each as it comes."""
    env: dict[int, Held] = dict(zip([v.number for v in plan.graph.inputs], inputs, strict=True))

    def held(value: Value) -> Held:
        if value.number in env:
            return env[value.number]
        assert value.constant is not None
        return Whole(jnp.asarray(value.constant), tuple(np.shape(value.constant)))

    for step in plan.steps:
        want = wanted(plan, step)
        operands = [held(v) for v in step.inputs]
        outs = step.run(here, operands, want, _Ensure(plan, here, step, want, operands, env))
        env.update(zip([v.number for v in step.outputs], outs, strict=True))
    return [held(v) for v in plan.graph.outputs]


@dataclasses.dataclass(eq=False)
class _Ensure:
    plan: Plan
    here: Any
    step: Step
    want: Wants
    operands: Sequence[Any]
    env: dict[int, Held]

    def _needs(self, operand: int) -> tuple[dict[int, Any], dict[int, str]]:
        links = self.step.links[operand]
        needs = {k.source: k.needs(self.want.get(k.result, NONE)) for k in links}
        return needs, {k.source: mode_of(self.plan, self.step, k) for k in links}

    def planned(self, operand: int) -> Wants:
        """See ``Ensure``."""
        fetched = self.plan.fetched.get(self.step.inputs[operand].number, {})
        return {d: m for d, (m, _) in fetched.items()}

    def __call__(self, operand: int, laid_out: Block | None = None) -> Block:
        """See ``Ensure``; what was fetched stays for the next who reads it."""
        number = self.step.inputs[operand].number
        block = self.operands[operand] if laid_out is None else laid_out
        assert isinstance(block, Block)
        needs, modes = self._needs(operand)
        fetched = self.plan.fetched.get(number, {})
        all_of_it = {d: wider(m, fetched[d][0]) if d in fetched else m for d, m in needs.items()}
        kinds = {d: modes.get(d, ZEROS) for d in needs}
        kinds |= {d: mode for d, (_, mode) in fetched.items() if mode != ZEROS and d in kinds}
        if _has(block, needs, modes):
            return block
        wide = widened(block, all_of_it, kinds, self.here.where)
        if number in self.env:
            self.env[number] = wide
        return wide


def _has(block: Block, needs: Wants, modes: dict[int, str]) -> bool:
    return all(holds(block, d, m, modes.get(d, ZEROS)) for d, m in needs.items())
