"""From a function and its arguments to a compiled program, and to the mesh it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

AnyMesh = Mesh | AbstractMesh
MeshAxes = tuple[tuple[Hashable, int], ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, and what led to it as far as it is known.

    Attributes:
      compiled: a `jax.stages.Compiled`.
      jaxpr: the traced program, or None if a program already lowered or compiled was given.
      arguments: the (args, kwargs) it was traced with.
      names: the paths of the arrays that go in and of those that come out, where the function says them itself.
    """

    compiled: Any
    jaxpr: Any
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    names: tuple[Sequence[str], Sequence[str]] = ((), ())


@dataclasses.dataclass(frozen=True)
class Staged:
    """A program before XLA has seen it; fields as of `Program`."""

    lowered: Any
    jaxpr: Any
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    names: tuple[Sequence[str], Sequence[str]] = ((), ())

    def compile(self) -> Program:
        """The program that XLA makes of it."""
        return Program(_plain(self.lowered.compile()), self.jaxpr, self.arguments, self.names)


def compile_program(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
    """Compiles `fun` for the given arguments; nothing is run.

    Args:
      fun: a function, a jitted function, or a `jax.stages` Traced, Lowered or Compiled (then without
        arguments).
      args, kwargs: for `fun`: arrays, `jax.ShapeDtypeStruct`s with shardings, pytrees of these.

    Raises:
      TypeError: `fun` is nothing of that kind, or arguments were given for a program that has them.
    """
    staged = lower_program(fun, args, kwargs)
    return staged if isinstance(staged, Program) else staged.compile()


def lower_program(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Staged | Program:
    """The same up to XLA; a program that is compiled already stays so."""
    stage = _stage(fun)
    if stage is not None:
        if args or kwargs:
            raise TypeError(
                f"arguments were given together with a {stage} program, which was made for its own already; pass "
                "it alone, or pass the function and the arguments."
            )
        if stage == "compiled":
            return Program(_plain(fun), None, ((), {}))
        if stage == "lowered":
            return Staged(fun, None, ((), {}))
        return Staged(fun.lower(), fun.jaxpr, ((), {}))
    if not callable(fun):
        raise TypeError(
            "expected a function, a jitted function, or a jax.stages Traced, Lowered or Compiled; "
            f"got {type(fun).__name__}."
        )
    staged: Any = fun if hasattr(fun, "lower") else jax.jit(fun)
    arguments = (tuple(args), kwargs)
    if hasattr(staged, "trace"):
        traced = staged.trace(*args, **kwargs)
        named: Any = fun
        names = named.leaf_names(*args, **kwargs) if hasattr(fun, "leaf_names") else ((), ())
        return Staged(traced.lower(), getattr(traced, "jaxpr", None), arguments, names)
    return Staged(staged.lower(*args, **kwargs), None, arguments)


def _plain(compiled: Any) -> Any:
    """JAX's own program, where Flax has wrapped it."""
    inner = getattr(compiled, "compiled", None)
    return inner if isinstance(inner, jax.stages.Compiled) else compiled


def _stage(fun: Any) -> str | None:
    """ "traced", "lowered" or "compiled" for a program at that stage, JAX's own or Flax's wrapper of it."""
    if isinstance(fun, jax.stages.Traced):
        return "traced"
    if hasattr(fun, "as_text") and hasattr(fun, "memory_analysis"):
        return "compiled"
    if hasattr(fun, "as_text") and hasattr(fun, "compile"):
        return "lowered"
    return None


def mesh_axes(mesh: AnyMesh) -> MeshAxes:
    """(name, size) of each axis of a mesh."""
    return tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def find_mesh(program: Program, num_devices: int, mesh: AnyMesh | None = None) -> MeshAxes | None:
    """The axes of the mesh that a program runs on.

    Taken is the first that has as many devices as the program: the given one, else that of an
    argument's NamedSharding, of an input or output of the compiled program, of a shard_map or a sharding
    in the traced program, and last the ambient one (`jax.set_mesh`).

    Args:
      program: from `compile_program`.
      num_devices: partitions times replicas of the compiled program.
      mesh: what the caller gave.

    Returns:
      The axes in mesh order, or None if no mesh fits.

    Raises:
      TypeError: `mesh` is not a mesh.
      ValueError: `mesh` has another number of devices than the program, which runs on several.
    """
    if mesh is not None:
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh or AbstractMesh; got {type(mesh).__name__}.")
        if mesh.size != num_devices and num_devices > 1:
            raise ValueError(
                f"mesh={dict(mesh.shape)} has {mesh.size} devices, but the program was compiled for "
                f"{num_devices}; pass the mesh of its arguments, or leave mesh= out to have it found."
            )
        return mesh_axes(mesh)
    for candidate in meshes_of(program):
        if not candidate.empty and candidate.size == num_devices:
            return mesh_axes(candidate)
    return None


def meshes_of(program: Program | Staged) -> Iterator[AnyMesh]:
    """The meshes that a program mentions, those that say most first."""
    yield from meshes_of_leaves(program.arguments)
    yield from meshes_of_leaves(_shardings(getattr(program, "compiled", None)))
    if program.jaxpr is not None:
        yield from _meshes_of_jaxpr(program.jaxpr)
    yield jax.sharding.get_abstract_mesh()


def _shardings(compiled: Any) -> list[Any]:
    # A program that is no jax.stages.Compiled (Flax wraps its own) need not have these.
    names = ("input_shardings", "output_shardings")
    return [getattr(compiled, name, None) for name in names]


def meshes_of_leaves(tree: Any) -> Iterator[AnyMesh]:
    """Those that shardings, or arrays with shardings, in a pytree are on."""
    for leaf in jax.tree.leaves(tree):
        sharding = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh


def functions_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex_core.Jaxpr | jex_core.ClosedJaxpr):
                yield item


def _meshes_of_jaxpr(jaxpr: Any) -> Iterator[AnyMesh]:
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            yield from _meshes_of_value(value)


def _meshes_of_value(value: Any) -> Iterator[AnyMesh]:
    if isinstance(value, Mesh | AbstractMesh):
        yield value
    elif isinstance(value, NamedSharding):
        yield value.mesh
    elif isinstance(value, jex_core.Jaxpr | jex_core.ClosedJaxpr):
        yield from _meshes_of_jaxpr(value)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _meshes_of_value(item)
