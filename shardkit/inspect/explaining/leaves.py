"""The inputs and outputs of a compiled program, with their places, as JAX tells them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardkit._compat import spec_entries
from shardkit.inspect.compiling import Program, Staged
from shardkit.inspect.explaining.leaf import Leaf
from shardkit.placements import entry_names


def inputs_of(program: Program) -> tuple[Leaf, ...]:
    """The inputs, in order; empty where the program doesn't say."""
    infos, shardings = _paired(program.compiled, "args_info", "input_shardings")
    names = program.names[0] or _debug(program, "arg_names")
    given = [_argument(path) for path, _ in infos] if len(names) != len(infos) else names
    return tuple(
        _leaf(name, info, sharding, dropped=sharding is None)
        for name, (_, info), sharding in zip(given, infos, shardings, strict=True)
    )


def inputs_before(staged: Staged) -> tuple[Leaf, ...]:
    """The inputs of a program that XLA hasn't compiled, where its arguments are placed."""
    infos = jax.tree_util.tree_flatten_with_path(getattr(staged.lowered, "args_info", None))[0]
    given = dict(jax.tree_util.tree_flatten_with_path(staged.arguments)[0])
    names = staged.names[0] or _debug(staged, "arg_names")
    names = names if len(names) == len(infos) else [_argument(path) for path, _ in infos]
    return tuple(
        _leaf(name, info, getattr(given.get(path), "sharding", None))
        for name, (path, info) in zip(names, infos, strict=True)
    )


def outputs_of(program: Program) -> tuple[Leaf, ...]:
    """The outputs, in order; empty where the program doesn't say."""
    infos, shardings = _paired(program.compiled, "out_info", "output_shardings")
    names = program.names[1] or _debug(program, "result_paths")
    given = names if len(names) == len(infos) else ["result" + jax.tree_util.keystr(path) for path, _ in infos]
    return tuple(_leaf(name, info, sharding) for name, (_, info), sharding in zip(given, infos, shardings, strict=True))


def _paired(compiled: Any, infos: str, shardings: str) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """(path, type) of each leaf, and its sharding; None for one that the program dropped."""
    leaves = jax.tree_util.tree_flatten_with_path(getattr(compiled, infos, None))[0]
    found = jax.tree_util.tree_flatten_with_path(getattr(compiled, shardings, None))[0]
    places = dict(found)
    return leaves, [places.get(path) for path, _ in leaves]


def _debug(program: Program | Staged, field: str) -> list[str]:
    """Names that JAX kept from the trace."""
    info = getattr(getattr(program.jaxpr, "jaxpr", None), "debug_info", None)
    return list(getattr(info, field, None) or ())


def _argument(path: Any) -> str:
    kind, *rest = path
    at_call = getattr(kind, "idx", 0) == 0
    return ("args" if at_call else "kwargs") + jax.tree_util.keystr(tuple(rest))


def _leaf(name: str, info: Any, sharding: Any, *, dropped: bool = False) -> Leaf:
    aval = getattr(info, "_aval", info)
    shape, dtype = tuple(info.shape), info.dtype
    local, where, axes = shape, "?", ()
    if dropped:
        where = "not used"
    elif sharding is not None and hasattr(sharding, "shard_shape"):
        local = tuple(sharding.shard_shape(shape))
        where, axes = place(sharding, len(shape))
    size = 0 if dropped else math.prod(local) * int(getattr(dtype, "itemsize", 0) or 0)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return Leaf(name, str(getattr(aval, "dtype", dtype)), shape, local, where, size, axes, inexact, not dropped)


def place(sharding: Any, ndim: int) -> tuple[str, tuple[str, ...]]:
    """A sharding in short, and the axes it cuts by.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "tp"))
      >>> place(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp")), 2)
      ('[dp, -]', ('dp',))
    """
    if not isinstance(sharding, NamedSharding):
        whole = getattr(sharding, "is_fully_replicated", False)
        return ("[" + ", ".join(["-"] * ndim) + "]", ()) if whole else (type(sharding).__name__, ())
    entries = [tuple(entry_names(e)) for e in spec_entries(sharding.spec)]
    entries += [()] * (ndim - len(entries))
    sizes = dict(sharding.mesh.shape)
    entries = [tuple(a for a in e if sizes[a] > 1) for e in entries]
    text = "[" + ", ".join("*".join(map(str, e)) if e else "-" for e in entries) + "]"
    unreduced = tuple(getattr(sharding.spec, "unreduced", ()))
    if unreduced:
        text += f" Partial over {', '.join(map(str, unreduced))}"
    return text, tuple(a for e in entries for a in e)
