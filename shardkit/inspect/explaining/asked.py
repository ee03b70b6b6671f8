"""What the user's function says of itself: which arguments are parameters, which values it places somewhere."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._compat import spec_entries
from shardkit.inspect.compiling import functions_in
from shardkit.inspect.explaining.leaf import Leaf, root_of
from shardkit.placements import axes_size, entry_names


def named_arguments(
    fun: Any, args: Sequence[Any], inputs: Sequence[Leaf], argnums: int | Sequence[int]
) -> frozenset[str]:
    """The names that paths of the arguments begin with.

    Args:
      fun: the function; of a compiled program, positions count its arguments that have arrays.
      args: of the call.
      inputs: of the program.
      argnums: positions, as ``jax.grad`` takes them.

    Raises:
      TypeError: not integers.
      ValueError: there is no such argument, or there are no arrays in it.
    """
    try:
        wanted = [operator.index(n) for n in (argnums if isinstance(argnums, Sequence) else (argnums,))]
    except TypeError as error:
        raise TypeError(
            f"explain: param_argnums must be an int or several, as for jax.grad; got {argnums!r}"
        ) from error
    roots = list(dict.fromkeys(root_of(leaf.name) for leaf in inputs))
    names = _names(fun, len(args)) if args else roots
    bad = [n for n in wanted if not -len(names) <= n < len(names) or names[n] not in roots]
    if bad:
        raise ValueError(
            f"explain: param_argnums={argnums!r} names argument {bad[0]}, but those with arrays are "
            + ", ".join(f"{names.index(root)} ({root})" if root in names else root for root in roots)
        )
    return frozenset(names[n] for n in wanted)


def _names(fun: Any, count: int) -> list[str]:
    """What JAX calls the positional arguments of a call."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return [f"args[{n}]" for n in range(count)]
    names = []
    for n in range(count):
        if n < len(parameters) and parameters[n].kind != inspect.Parameter.VAR_POSITIONAL:
            names.append(parameters[n].name)
        else:
            first = next((i for i, p in enumerate(parameters) if p.kind == inspect.Parameter.VAR_POSITIONAL), n)
            names.append(f"{parameters[first].name if first < len(parameters) else 'args'}[{n - first}]")
    return names


def _on_one_device(shape: tuple[int, ...], sharding: NamedSharding) -> int:
    """Elements of a value that are here; dims that are left to the compiler (or inside a manual region) count whole."""
    entries = spec_entries(sharding.spec)
    parts = [1 if e is PartitionSpec.UNCONSTRAINED else axes_size(sharding.mesh, entry_names(e)) for e in entries]
    return math.prod(-(-size // n) for size, n in zip(shape, (*parts, *[1] * len(shape)), strict=False))


def constrained_sizes(jaxpr: Any) -> frozenset[int]:
    """Elements, on one device, of the values that a traced program constrains or reshards."""
    return frozenset(_sizes(jaxpr))


def _sizes(jaxpr: Any) -> Iterator[int]:
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    for equation in jaxpr.eqns:
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if equation.primitive.name in ("sharding_constraint", "reshard") and isinstance(sharding, NamedSharding):
            yield _on_one_device(equation.outvars[0].aval.shape, sharding)
        for function in functions_in(equation.params):
            yield from _sizes(function)
