"""``explain``: one page on what a program will do, on the machine it is meant for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardkit.inspect import compiling, hlo
from shardkit.inspect.collectives import text_of
from shardkit.inspect.explaining.estimate import estimate, seconds
from shardkit.inspect.explaining.flops import count_flops
from shardkit.inspect.explaining.leaf import Leaf
from shardkit.inspect.explaining.leaves import inputs_of, outputs_of
from shardkit.inspect.explaining.page import Explained, Explanation
from shardkit.inspect.explaining.purposes import Reason
from shardkit.inspect.explaining.read import read_reasons
from shardkit.inspect.explaining.retarget import retarget
from shardkit.inspect.memory import MemoryReport, memory
from shardkit.inspect.report import Collective
from shardkit.inspect.targets.hardware import Hardware, hardware_of
from shardkit.meshes import standing_in

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def explain(
    fun: Any,
    *args: Any,
    mesh: compiling.AnyMesh | None = None,
    param_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Explanation:
    """One page on what a program will do: placements, collectives and what each is for, memory, work. Nothing is run.

    The program is compiled by the compiler of the hardware that its arguments are placed on, or that ``mesh`` is made
    of: devices that are here, or described ones (``sk.target_mesh``). What is said of collectives and memory is the
    compiler's result; times are estimates from data sheets, and called so.

    Args:
      fun: a function, a jitted function, an ``sk.partition``, or a ``jax.stages`` Traced, Lowered or Compiled (then
        without arguments).
      *args: arguments of ``fun``: arrays, ``jax.ShapeDtypeStruct``, pytrees of these.
      mesh: the machine to ask about. Arguments that are placed on another mesh with these axes are taken to be placed
        alike on this one, those that say nothing to be replicated; functions of this library that were given a mesh
        with these axes take this one. By default: where the arguments are.
      param_argnums: the arguments that are parameters, whose gathers and gradients are to be called so. By default
        those arrays that come out again in the same shape and dtype.
      **kwargs: keyword arguments of ``fun``.

    Returns:
      An ``Explanation``: print it, leave it at the end of a notebook cell, or take ``.to_dict()``.

    Raises:
      TypeError: ``fun`` isn't a function or program, or looks at the values of its arguments, so that shapes don't
        suffice to compile it.
      ValueError: placements that don't fit ``mesh``; a function that names devices of another mesh.

    Example:
      >>> import jax, jax.numpy as jnp, shardkit as sk
      >>> mesh = sk.make_mesh({"dp": 1})
      >>> x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=sk.to_named_sharding({"dp": sk.Shard(0)}, mesh))
      >>> page = sk.explain(lambda x: x @ x.T, x)
      >>> page.bytes_per_device, page.flops
      (0, 512.0)
    """
    name = getattr(fun, "__name__", None) or type(fun).__name__
    start = time.perf_counter()
    program = _compile(fun, args, kwargs, mesh, name)
    took = time.perf_counter() - start
    text = text_of(program.compiled)
    module = hlo.parse_module(text)
    devices = module.num_partitions * module.num_replicas
    axes = compiling.find_mesh(program, devices, mesh)
    inputs, outputs = inputs_of(program), outputs_of(program)
    reasons = read_reasons(text, module, axes, inputs, outputs, param_argnums)
    found = tuple(collective for collective, _ in reasons)
    assignment = _devices(program, mesh, devices)
    hosts = [getattr(device, "process_index", 0) for device in assignment] or [0] * devices
    kind = assignment[0].device_kind if assignment else "unknown device"
    hardware = hardware_of(kind)
    used = _memory(program.compiled)
    flops = None if program.jaxpr is None else count_flops(program.jaxpr)
    share = None if flops is None else flops.total / devices
    moved = None if used is None else used.arguments + used.outputs + 2 * used.temporaries
    return Explanation(
        name=name if args or kwargs else module.name.removeprefix("jit_"),
        device_kind=kind,
        devices=devices,
        hosts=len(set(hosts)),
        mesh_axes=axes,
        inputs=inputs,
        outputs=outputs,
        collectives=tuple(_explained(c, why, hardware, hosts) for c, why in reasons),
        memory=used,
        capacity=_capacity(assignment, hardware),
        flops=share,
        flops_exact=flops is None or flops.exact,
        compiler_flops=_compiler_flops(program.compiled),
        estimate=None if hardware is None else estimate(hardware, share, moved, found, hosts),
        compile_seconds=took,
        notes=_notes(inputs, outputs, axes),
    )


def _compile(fun: Any, args: tuple, kwargs: dict, mesh: Any, name: str) -> compiling.Program:
    if isinstance(mesh, Mesh) and (args or kwargs):
        args, kwargs = retarget((args, kwargs), mesh)
    try:
        with _as_if_on(mesh):
            return compiling.compile_program(fun, args, kwargs)
    except _NEEDS_VALUES as error:
        raise TypeError(
            f"explain: {name} looks at the values of its arguments, so that it can't be compiled from their shapes: "
            f"{str(error).splitlines()[0]} Arguments that must be known (sizes, flags) go into functools.partial, or "
            "are static (jax.jit(fun, static_argnums=...)); branches on values are jax.lax.cond."
        ) from error
    except ValueError as error:
        if "incompatible devices" not in str(error):
            raise
        raise ValueError(
            f"explain: {name} names devices of another mesh than its arguments are on"
            + (f" (or than mesh={dict(mesh.shape)})" if mesh is not None else "")
            + ": a sharding, a shard_map or in_shardings in it was made for that mesh. Make it for this one, or leave "
            f"the mesh open (a PartitionSpec under jax.set_mesh). JAX says: {str(error).splitlines()[0]}"
        ) from error


@contextlib.contextmanager
def _as_if_on(mesh: Any) -> Iterator[None]:
    """The mesh is ambient, and stands in for those of its axes that functions of this library were bound to."""
    if not isinstance(mesh, Mesh):
        yield
        return
    # The ambient mesh is part of what JAX remembers traces by, too: one for another mesh isn't taken for this one.
    with standing_in(mesh), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def _explained(collective: Collective, why: Reason, hardware: Hardware | None, hosts: Sequence[int]) -> Explained:
    took = None if hardware is None else seconds(collective, hardware, hosts)
    return Explained(collective, why.purpose, why.what, took)


def _devices(program: compiling.Program, mesh: Any, count: int) -> list[Any]:
    """The device assignment, or [] where it isn't known."""
    if isinstance(mesh, Mesh) and mesh.size == count:
        return list(mesh.devices.flat)
    shardings = [getattr(program.compiled, name, None) for name in ("input_shardings", "output_shardings")]
    for sharding in jax.tree.leaves(shardings):
        own = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(own, Mesh) and own.size == count:
            return list(own.devices.flat)
        if not isinstance(own, AbstractMesh) and len(getattr(sharding, "device_set", ())) == count:
            return sorted(sharding.device_set, key=lambda device: device.id)
    return list(jax.devices()[:count]) if count <= jax.device_count() else []


def _memory(compiled: Any) -> MemoryReport | None:
    try:
        return memory(compiled)
    except RuntimeError:
        return None


def _capacity(assignment: Sequence[Any], hardware: Hardware | None) -> int | None:
    """What the device itself says it may use, else what its data sheet says it has."""
    with contextlib.suppress(jax.errors.JaxRuntimeError, NotImplementedError, IndexError, AttributeError):
        limit = (assignment[0].memory_stats() or {}).get("bytes_limit")
        if limit:
            return int(limit)
    return None if hardware is None else hardware.memory


def _compiler_flops(compiled: Any) -> float | None:
    with contextlib.suppress(jax.errors.JaxRuntimeError, NotImplementedError):
        return (compiled.cost_analysis() or {}).get("flops")
    return None


def _notes(inputs: Sequence[Leaf], outputs: Sequence[Leaf], axes: Any) -> tuple[str, ...]:
    notes = []
    if axes is None:
        notes.append("No mesh is known: axes are shown as ?. Pass mesh=.")
    unused = [leaf.name for leaf in inputs if not leaf.used]
    if unused:
        names = ", ".join(unused[:4]) + (f" and {len(unused) - 4} more" if len(unused) > 4 else "")
        notes.append(f"Not used by the program: {names}.")
    if not inputs and not outputs:
        notes.append("The program doesn't say how its inputs and outputs are placed.")
    return tuple(notes)
