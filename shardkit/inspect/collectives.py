"""`collectives`: which communication a compiled program really does."""

from __future__ import annotations

from typing import Any

from shardkit.inspect import compiling, hlo
from shardkit.inspect.extract import extract
from shardkit.inspect.report import CollectiveReport


def collectives(fun: Any, *args: Any, mesh: compiling.AnyMesh | None = None, **kwargs: Any) -> CollectiveReport:
    """Lists the collectives of `fun`, compiled for these arguments. Nothing is run.

    What counts is the program after XLA's optimizations, on whatever hardware the arguments' devices
    are: simulated CPU devices, GPUs, TPUs, or devices that are only described
    (`jax.experimental.topologies`). An asynchronous collective counts once, a combined one counts once
    with all of its results, and one over groups of a single device, which moves nothing, does not count.

    Args:
      fun: a function, a jitted function, or a `jax.stages` Traced, Lowered or Compiled (then without
        arguments).
      *args: arguments of `fun`: arrays, `jax.ShapeDtypeStruct`s with shardings, pytrees of these.
      mesh: the mesh whose axes to name. By default that of the arguments, else of the compiled program's
        inputs and outputs, of a `shard_map` in it, or the ambient one; where none is found, `axes` is None.
      **kwargs: keyword arguments of `fun`.

    Returns:
      A report: `print` it for a table, iterate it for the entries, ask it for `.count(...)`, `.bytes(...)`.

    Raises:
      TypeError: `fun` is not a function or program.
      ValueError: `mesh` does not have the program's number of devices.
      RuntimeError: the backend gives no text of the compiled program.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> print(sk.collectives(jnp.sum, jnp.ones(8)))
      No collectives: every device works alone.
    """
    program = compiling.compile_program(fun, args, kwargs)
    module = hlo.parse_module(text_of(program.compiled))
    axes = compiling.find_mesh(program, module.num_partitions * module.num_replicas, mesh)
    return CollectiveReport(extract(module, axes), axes)


def read_collectives(text: str, mesh: compiling.AnyMesh | None = None) -> CollectiveReport:
    """The same for HLO text at hand (`compiled.as_text()`, or an `--xla_dump_to` file after optimizations).

    Args:
      text: one module.
      mesh: the mesh whose axes to name; None leaves them unnamed.
    """
    axes = None if mesh is None else compiling.mesh_axes(mesh)
    return CollectiveReport(extract(hlo.parse_module(text), axes), axes)


def text_of(compiled: Any) -> str:
    """The HLO text of a compiled program."""
    text = compiled.as_text()
    if not text:
        raise RuntimeError("the backend that compiled this program gives no text of it, so it cannot be read.")
    return text
