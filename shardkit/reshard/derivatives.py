"""Derivatives, transposes and batches of programs of steps: programs of steps again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from shardkit._compat import spec_entries
from shardkit.arrays.placing import constrain
from shardkit.reshard.linear import LINEAR, End, Program, apply, reshard_p
from shardkit.reshard.local import Step, as_steps
from shardkit.reshard.search import cheapest
from shardkit.reshard.states import State


def _transpose(cotangent: Any, x: Any, *, program: Program) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval)]
    return [apply(program.transpose(), cotangent)]


def _jvp(primals: Any, tangents: Any, *, program: Program) -> Any:
    (x,), (tangent,) = primals, tangents
    if isinstance(tangent, ad.Zero):
        out = apply(program, x)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    kind = program.problem.reduce
    reduces = any(step.kind in ("reduce", "reduce_scatter") for step in program.steps)
    if not reduces or kind in LINEAR:
        return apply(program, x), apply(program.tangent(), tangent)
    if program.goal.state.partial:
        raise NotImplementedError(
            f"the derivative of a reshard that reduces some axes of Partial({kind!r}) and leaves others is not known; "
            "reduce first: sk.reshard(x, ...) to Shard or Replicate, then to Partial"
        )
    if kind == "prod":
        return jax.jvp(lambda stack: _product(program, stack), (x,), (tangent,))
    return apply(program, x), apply(program.tangent(), _shares(program, x) * tangent)


def _whole(program: Program) -> End:
    """The source's blocks, once reduced."""
    source = program.source
    spec = PartitionSpec(*spec_entries(source.spec)[len(source.lead) :])
    return End(State(source.state.dims, ()), (), spec)


def _shares(program: Program, x: jax.Array) -> jax.Array:
    """How much of each contribution's tangent is in that of a maximum or minimum: of those equal to it, their share.

    As in jnp.max.
    """
    source, end = program.source, _whole(program)

    def reduced(values: jax.Array, kind: str | None) -> jax.Array:
        problem = dataclasses.replace(program.problem, reduce=kind, wanted=None)
        steps = (Step("reduce", source.state, end.state),)
        found = apply(dataclasses.replace(program, problem=problem, goal=end, steps=steps), values)
        return found.reshape((1,) * len(source.lead) + found.shape)

    chosen = (x == reduced(x, program.problem.reduce)).astype(x.dtype)
    return chosen / reduced(chosen, "sum")


def _product(program: Program, stack: jax.Array) -> jax.Array:
    """The same by gathering all contributions and jnp.prod, which knows its derivatives even where factors are 0."""
    source, end = program.source, _whole(program)
    lead = len(source.lead)
    # The stack is itself an array, whose first dims the Partial axes cut.
    cut = iter(source.state.partial)
    firsts = tuple(_factors_of(program, size, cut) for size in source.lead)
    shape = (*source.lead, *program.problem.shape)
    problem = dataclasses.replace(program.problem, shape=shape, reduce=None, wanted=None)
    given = End(State((*firsts, *source.state.dims), ()), (), source.spec)
    gathered = End(
        State(((),) * lead + source.state.dims, ()),
        (),
        PartitionSpec(*[None] * lead, *spec_entries(end.spec)),
    )
    steps = (Step("all_gather", given.state, gathered.state),)
    whole = apply(dataclasses.replace(program, problem=problem, source=given, goal=gathered, steps=steps), stack)
    value = jnp.prod(whole, axis=tuple(range(lead)))
    plain = dataclasses.replace(program.problem, reduce=None)
    steps = as_steps(end.state, cheapest(plain, end.state, program.goal.state))
    return apply(dataclasses.replace(program, problem=plain, source=end, steps=steps), value)


def _factors_of(program: Program, size: int, factors: Any) -> tuple[int, ...]:
    """The next factors that make up an axis of this size."""
    found: tuple[int, ...] = ()
    while program.problem.parts(found) < size:
        found = (*found, next(factors))
    return found


def _batch(args: Any, dims: Any, *, program: Program) -> Any:
    (x,), (dim,) = args, dims
    x = jnp.moveaxis(x, dim, -1)
    batched = program.batched(x.shape[-1])
    out = apply(batched, constrain(x, program.mesh, batched.source.spec))
    return out, out.ndim - 1


ad.primitive_jvps[reshard_p] = _jvp
ad.primitive_transposes[reshard_p] = _transpose
batching.primitive_batchers[reshard_p] = _batch
