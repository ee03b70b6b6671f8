"""``explain``: one page on what a program will do, on the machine it is meant for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardkit.inspect import compiling, hlo
from shardkit.inspect.collectives import text_of
from shardkit.inspect.explaining.asked import constrained_sizes, named_arguments
from shardkit.inspect.explaining.estimate import estimate, seconds
from shardkit.inspect.explaining.explained import Explained
from shardkit.inspect.explaining.flops import count_flops
from shardkit.inspect.explaining.leaf import Leaf
from shardkit.inspect.explaining.leaves import inputs_before, inputs_of, outputs_of
from shardkit.inspect.explaining.machine import TooLargeError, compile_for
from shardkit.inspect.explaining.page import Explanation
from shardkit.inspect.explaining.purposes import Reason
from shardkit.inspect.explaining.read import read_reasons
from shardkit.inspect.memory import MemoryReport, memory
from shardkit.inspect.report import Collective
from shardkit.inspect.targets.hardware import Hardware, hardware_of


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
        with these axes take this one. An AbstractMesh only names axes. By default: where the arguments are.
      param_argnums: the arguments that are parameters, whose gathers and gradients are to be called so. By default
        those arrays that come out again in the same shape and dtype, where there is a backward pass.
      **kwargs: keyword arguments of ``fun``.

    Returns:
      An ``Explanation``: print it, leave it at the end of a notebook cell, or take ``.to_dict()``.

    Raises:
      TypeError: ``fun`` isn't a function or program, or looks at the values of its arguments, so that shapes don't
        suffice to compile it.
      ValueError: placements that don't fit ``mesh``; a function that names devices of another mesh; no such parameters.

    Moves that a jitted function's ``out_shardings`` ask for are called unexplained: the compiled program doesn't tell.

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
    try:
        program = compile_for(fun, args, kwargs, mesh, name)
    except TooLargeError as error:
        return _too_large(error, mesh, name, time.perf_counter() - start)
    took = time.perf_counter() - start
    text = text_of(program.compiled)
    module = hlo.parse_module(text)
    devices = module.num_partitions * module.num_replicas
    axes = compiling.find_mesh(program, devices, mesh)
    inputs, outputs = inputs_of(program), outputs_of(program)
    parameters = None if param_argnums is None else named_arguments(fun, args, inputs, param_argnums)
    asked = frozenset() if program.jaxpr is None else constrained_sizes(program.jaxpr)
    reasons = read_reasons(text, module, axes, inputs, outputs, parameters, asked)
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
        notes=_notes(inputs, outputs, axes, branches=hlo.has_branches(module)),
    )


def _too_large(error: TooLargeError, mesh: Any, name: str, took: float) -> Explanation:
    """What can be said of a program that its compiler refuses for want of memory."""
    staged = error.staged
    inputs = inputs_before(staged)
    own = next((m for m in compiling.meshes_of(staged) if isinstance(m, Mesh)), None)
    on = mesh if isinstance(mesh, Mesh) else own
    assignment = [] if on is None else list(on.devices.flat)
    kind = assignment[0].device_kind if assignment else "unknown device"
    hardware, devices = hardware_of(kind), max(len(assignment), 1)
    flops = None if staged.jaxpr is None else count_flops(staged.jaxpr)
    share = None if flops is None else flops.total / devices
    return Explanation(
        name=name,
        device_kind=kind,
        devices=devices,
        hosts=len({getattr(device, "process_index", 0) for device in assignment}) or 1,
        mesh_axes=None if on is None else compiling.mesh_axes(on),
        inputs=inputs,
        outputs=(),
        collectives=(),
        memory=None,
        capacity=_capacity(assignment, hardware),
        flops=share,
        flops_exact=flops is None or flops.exact,
        compiler_flops=None,
        estimate=None if hardware is None else estimate(hardware, share, None, None, ()),
        compile_seconds=took,
        notes=_notes(inputs, (), "known"),
        refusal=error.said,
    )


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


def _notes(inputs: Sequence[Leaf], outputs: Sequence[Leaf], axes: Any, *, branches: bool = False) -> tuple[str, ...]:
    notes = []
    if branches:
        notes.append("Of a conditional, the collectives of all branches are in the totals.")
    if axes is None:
        notes.append("No mesh is known: axes are shown as ?. Pass mesh=.")
    unused = [leaf.name for leaf in inputs if not leaf.used]
    if unused:
        names = ", ".join(unused[:4]) + (f" and {len(unused) - 4} more" if len(unused) > 4 else "")
        notes.append(f"Not used by the program: {names}.")
    if not inputs and not outputs:
        notes.append("The program doesn't say how its inputs and outputs are placed.")
    return tuple(notes)
