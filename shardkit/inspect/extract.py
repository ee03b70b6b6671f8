"""From the text of a compiled program to the collectives in it. No JAX here."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from shardkit import sources
from shardkit.inspect import groups as groups_lib
from shardkit.inspect import hlo, shapes
from shardkit.inspect.groups import Groups
from shardkit.inspect.report import Collective
from shardkit.reshard.cost import wire_bytes

_REDUCTIONS = {
    "add": "add",
    "maximum": "max",
    "minimum": "min",
    "multiply": "mul",
    "and": "and",
    "or": "or",
    "xor": "xor",
}
# The instructions that have a flag `use_global_device_ids`.
_FLAGGED = ("all_gather", "all_reduce", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the walk through the program stands."""

    in_loop: bool = False
    trip_count: int | None = 1
    # The instructions that led here since the last loop, nearest first: where the collective itself
    # records no source, that of the fusion or async-start around it will do.
    callers: tuple[hlo.Instruction, ...] = ()

    def inside(self, caller: hlo.Instruction) -> _Place:
        return dataclasses.replace(self, callers=(caller, *self.callers))

    def looped(self, trips: int | None) -> _Place:
        known = None if trips is None or self.trip_count is None else self.trip_count * trips
        return _Place(in_loop=True, trip_count=known)


def extract(module: hlo.Module, mesh_axes: tuple[tuple[Hashable, int], ...] | None = None) -> tuple[Collective, ...]:
    """The collectives of a module, each place from which one is run counted once.

    Args:
      module: a compiled program.
      mesh_axes: (name, size) of each axis of the mesh whose `devices.flat` is the program's device
        assignment; None leaves `axes` unmapped.

    Returns:
      The collectives in the order in which the program, followed from its entry, names them. Those
      over groups of one device, which move nothing, are left out.

    Example:
      >>> module = hlo.parse_module('''HloModule m, num_partitions=2
      ... ENTRY %main (p: f32[2]) -> f32[4] {
      ...   %p = f32[2]{0} parameter(0)
      ...   ROOT %g = f32[4]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}},
      ... }''')
      >>> [(c.kind, c.axes, c.bytes) for c in extract(module, (("x", 2),))]
      [('all_gather', ('x',), 8)]
    """
    live = _computations_with_collectives(module)
    continued = _continued_chains(module)
    found: list[Collective] = []

    def walk(name: str, place: _Place) -> None:
        computation = module.computations[name]
        for instruction in computation.instructions:
            if instruction.opcode in hlo.COLLECTIVE_OPCODES:
                if (name, instruction.name) not in continued:
                    found.extend(_read(instruction, computation, place, module, mesh_axes))
                continue
            trips = hlo.known_trip_count(instruction) if instruction.opcode == "while" else None
            for callee in hlo.loop_computations(instruction):
                if callee in live:
                    walk(callee, place.looped(trips))
            for callee in hlo.called_computations(instruction):
                if callee in live:
                    walk(callee, place.inside(instruction))

    if module.entry in live:
        walk(module.entry, _Place())
    return tuple(found)


def _computations_with_collectives(module: hlo.Module) -> frozenset[str]:
    """Names of the computations in or below which there is a collective; the rest need no visit."""
    callers: dict[str, list[str]] = {}
    live: list[str] = []
    for name, computation in module.computations.items():
        if not computation.opcodes.isdisjoint(hlo.COLLECTIVE_OPCODES):
            live.append(name)
        for instruction in computation.instructions:
            for callee in hlo.called_computations(instruction) + hlo.loop_computations(instruction):
                callers.setdefault(callee, []).append(name)
    seen = set(live)
    while live:
        for caller in callers.get(live.pop(), ()):
            if caller not in seen:
                seen.add(caller)
                live.append(caller)
    return frozenset(seen)


def _continued_chains(module: hlo.Module) -> frozenset[tuple[str, str]]:
    """Collectives that only carry on one already begun, as (computation, instruction).

    TPU programs spread an asynchronous collective over several fusions: one begins it (the collective
    is the operand of a custom call "AsyncCollectiveStart"), matrix multiplications carry it along, one
    ends it. Each repeats the whole collective, marked with the chain's id.
    """
    chains: dict[tuple[str, str, str], list[tuple[bool, str, str]]] = {}
    for name, computation in module.computations.items():
        started: set[str] = set()
        members: list[tuple[tuple[str, str, str], str]] = []
        for instruction in computation.instructions:
            attributes = instruction.attributes
            if instruction.opcode == "custom-call":
                if "AsyncCollectiveStart" in attributes.get("custom_call_target", ""):
                    started.update(instruction.operands)
            elif instruction.opcode in hlo.COLLECTIVE_OPCODES:
                chain = _quoted(attributes.get("frontend_attributes", ""), "chain_id")
                if chain:
                    key = (instruction.opcode, attributes.get("channel_id", ""), chain)
                    members.append((key, instruction.name))
        for key, member in members:
            chains.setdefault(key, []).append((member in started, name, member))
    continued: set[tuple[str, str]] = set()
    for links in chains.values():
        if any(starts for starts, _, _ in links):
            continued.update((name, member) for starts, name, member in links if not starts)
        else:
            continued.update((name, member) for _, name, member in links[1:])
    return frozenset(continued)


def _quoted(attributes: str, key: str) -> str:
    _, found, rest = attributes.partition(f'{key}="')
    return rest.partition('"')[0] if found else ""


def _read(
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    place: _Place,
    module: hlo.Module,
    mesh_axes: tuple[tuple[Hashable, int], ...] | None,
) -> list[Collective]:
    kind = hlo.COLLECTIVE_OPCODES[instruction.opcode]
    groups = _groups(instruction, kind, module)
    if kind == "collective_permute":
        groups = tuple(pair for pair in groups if pair[0] != pair[1])
        group_size = groups_lib.largest_chain(groups)
    else:
        group_size = max(map(len, groups), default=0)
    if group_size < 2:
        return []
    named, shape = instruction, _result_shape(instruction, kind)
    if kind == "all_reduce" and _is_reduce_scatter(computation, place):
        # Only the fusion's result is ever written: this is how TPU programs spell a reduce-scatter.
        kind, named = "reduce_scatter", place.callers[0]
        shape = shapes.arrays(shapes.parse_shape(named.shape))
    result_bytes = sum(map(shapes.array_bytes, shape))
    tellers = (instruction, *place.callers)
    frame = next(filter(None, (sources.user_frame(hlo.source_frames(t, module)) for t in tellers)), None)
    return [
        Collective(
            kind=kind,
            axes=_axes(groups, kind, mesh_axes),
            shapes=shape,
            result_bytes=result_bytes,
            bytes=wire_bytes(kind, result_bytes, group_size),
            group_size=group_size,
            groups=groups,
            in_loop=place.in_loop,
            trip_count=place.trip_count,
            reduction=_reduction(instruction, module.computations),
            op_name=next(filter(None, map(hlo.op_name, tellers)), ""),
            source=sources.short_location(frame),
            name=named.name,
        )
    ]


def _is_reduce_scatter(computation: hlo.Computation, place: _Place) -> bool:
    if not place.callers or place.callers[0].opcode != "fusion":
        return False
    slices_own_part = computation.root_opcode == "dynamic-slice" and "partition-id" in computation.opcodes
    return slices_own_part or computation.name.startswith("all-reduce-scatter")


def _groups(instruction: hlo.Instruction, kind: str, module: hlo.Module) -> Groups:
    attributes = instruction.attributes
    if kind == "collective_permute":
        text = attributes.get("source_target_pairs", "{}")
        # No pair at all moves nothing; it does not stand for "all".
        if not (pairs := groups_lib.parse_groups(text)):
            return ()
    else:
        text = attributes.get("replica_groups", "{}")
        if text.startswith("mesh[") and "device_ids" in attributes:
            text += f", device_ids={attributes['device_ids']}"  # the comma had it split off
        pairs = groups_lib.parse_groups(text)
    return groups_lib.device_groups(
        pairs,
        num_replicas=module.num_replicas,
        num_partitions=module.num_partitions,
        has_channel="channel_id" in attributes,
        global_ids=attributes.get("use_global_device_ids") == "true" if kind in _FLAGGED else None,
    )


def _axes(groups: Groups, kind: str, mesh_axes: tuple[tuple[Hashable, int], ...] | None) -> tuple[Hashable, ...] | None:
    if mesh_axes is None:
        return None
    names, sizes = tuple(name for name, _ in mesh_axes), tuple(size for _, size in mesh_axes)
    of = groups_lib.axes_of_pairs if kind == "collective_permute" else groups_lib.axes_of_groups
    return of(groups, names, sizes)


def _result_shape(instruction: hlo.Instruction, kind: str) -> tuple[shapes.Array, ...]:
    """The arrays that the collective gives, without what a `-start` carries besides.

    A start's shape is `(operand, result, ...)`, with tuples for either where several collectives were
    combined, and counters after them; but that of an all-reduce-start is the result itself.
    """
    shape = shapes.parse_shape(instruction.shape)
    starts_tuple = instruction.opcode.endswith("-start") and not shapes.is_array(shape) and len(shape) > 1
    if starts_tuple and (kind != "all_reduce" or not shapes.is_array(shape[0])):
        shape = shape[1]
    return shapes.arrays(shape)


def _reduction(instruction: hlo.Instruction, computations: Mapping[str, hlo.Computation]) -> str | None:
    computation = computations.get(instruction.attributes.get("to_apply", "").lstrip("%"))
    if computation is None:
        return None
    if computation.root_opcode in _REDUCTIONS:
        return _REDUCTIONS[computation.root_opcode]
    # A reduction of several arrays at once has a tuple at its root; a promoted one, a conversion.
    inside = {_REDUCTIONS[opcode] for opcode in computation.opcodes if opcode in _REDUCTIONS}
    return inside.pop() if len(inside) == 1 else None
