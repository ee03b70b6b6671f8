"""Compiling a function for the machine that is asked about, and what goes wrong in it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
from jax.sharding import Mesh

from shardkit.inspect import compiling
from shardkit.inspect.explaining.retarget import retarget
from shardkit.meshes import ambient_mesh, standing_in
from shardkit.spmd.looking import LOOKED

# What JAX says where a function's own devices aren't those of its arguments.
_ELSEWHERE = ("incompatible devices", "context mesh", "cannot change the size of the mesh")


class TooLargeError(Exception):
    """The compiler refuses the program for want of memory.

    Attributes:
      staged: the program before it.
      said: the compiler's words.
    """

    def __init__(self, staged: compiling.Staged, said: str):
        super().__init__(said)
        self.staged = staged
        self.said = said


def compile_for(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any, name: str) -> compiling.Program:
    """The program for a machine.

    Args:
      fun, args, kwargs: as of ``explain``.
      mesh: the machine, or None: where the arguments are.
      name: of the function, for messages.

    Raises:
      TypeError, ValueError: as of ``explain``.
      TooLargeError: it doesn't fit the machine's memory.
    """
    if not isinstance(mesh, Mesh) or not (args or kwargs):
        return _compile(fun, args, kwargs, mesh, name)
    try:
        there, named = retarget((args, kwargs), mesh)
        return _compile(fun, there, named, mesh, name)
    except ValueError as error:
        if "does not match the sharding" not in str(error):
            raise
        # The function says itself where arguments shall be that don't say.
        there, named = retarget((args, kwargs), mesh, place_all=False)
        return _compile(fun, there, named, mesh, name)


def _compile(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any, name: str) -> compiling.Program:
    on = mesh if isinstance(mesh, Mesh) else _mesh_of((args, kwargs)) if ambient_mesh() is not None else None
    try:
        with _as_if_on(on):
            staged = compiling.lower_program(fun, args, kwargs)
            return staged if isinstance(staged, compiling.Program) else _compiled(staged)
    except LOOKED as error:
        raise TypeError(
            f"explain: {name} looks at the values of its arguments, so that it can't be compiled from their shapes: "
            f"{str(error).splitlines()[0]} Arguments that must be known (sizes, flags) go into functools.partial, or "
            "are static (jax.jit(fun, static_argnums=...)); branches on values are jax.lax.cond."
        ) from error
    except ValueError as error:
        if not any(words in str(error) for words in _ELSEWHERE):
            raise
        raise ValueError(
            f"explain: {name} names devices of another mesh than its arguments are on"
            + (f" (or than mesh={dict(mesh.shape)})" if mesh is not None else "")
            + ": a sharding, a shard_map or in_shardings in it was made for that mesh. Make it for this one, or leave "
            f"the mesh open (a PartitionSpec under jax.set_mesh). JAX says: {str(error).splitlines()[0]}"
        ) from error


def _compiled(staged: compiling.Staged) -> compiling.Program:
    try:
        return staged.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TooLargeError(staged, str(error).splitlines()[0]) from error


@contextlib.contextmanager
def _as_if_on(mesh: Mesh | None) -> Generator[None]:
    """The mesh is ambient, and stands in for those of its axes that functions of this library were bound to."""
    if mesh is None:
        yield
        return
    # The ambient mesh is part of what JAX remembers traces by, too: one for another mesh isn't taken for this one.
    with standing_in(mesh), jax.set_mesh(mesh):
        yield


def _mesh_of(tree: Any) -> Mesh | None:
    """That of the first array that is placed on devices."""
    return next((mesh for mesh in compiling.meshes_of_leaves(tree) if isinstance(mesh, Mesh)), None)
