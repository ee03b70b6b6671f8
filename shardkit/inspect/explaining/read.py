"""From a compiled program's text and what is known of its arrays to its collectives, each with a reason. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence

from shardkit import sources
from shardkit.inspect import hlo
from shardkit.inspect.explaining.leaf import Leaf, data_axes_of, parameters_of, root_of
from shardkit.inspect.explaining.origins import Lines
from shardkit.inspect.explaining.purposes import UNEXPLAINED, Facts, Parameter, Reason, op_names, reason
from shardkit.inspect.extract import extract
from shardkit.inspect.report import Collective


def read_reasons(
    text: str,
    module: hlo.Module,
    mesh_axes: tuple[tuple[Hashable, int], ...] | None,
    inputs: tuple[Leaf, ...],
    outputs: tuple[Leaf, ...],
    parameters: Collection[str] | None = None,
    asked: Collection[int] = (),
) -> list[tuple[Collective, Reason]]:
    """Each collective of a program, and what it is for.

    Args:
      text: of a compiled module.
      module: the same, read.
      mesh_axes: see `extract`.
      inputs, outputs: of the program.
      parameters: the arguments (roots of inputs' names) that are parameters. None: of a program with a backward pass
        the inputs that come out again in shape and dtype; of another, nothing is known to be one.
      asked: elements, on one device, of values that the traced program places somewhere.
    """
    lines = Lines(text, module)
    found = tuple(_with_source(c, lines) for c in extract(module, mesh_axes))
    unsure = [c for c in found if len(op_names(c.op_name)) != len(c.shapes)]
    makers = {c.name: [(m.op_name, m.elements) for m in lines.makers(c.name)] for c in unsure}
    backward = "transpose(" in text
    known = _parameters(inputs, outputs, parameters, backward)
    facts = Facts(known, data_axes_of(inputs, known), _moved(lines, found, inputs), makers, backward, asked)
    reasons: dict[str, Reason] = {}
    for collective in found:
        why = reason(collective, facts)
        earlier = (
            lines.before(collective.name, reasons) if why.purpose == UNEXPLAINED and not collective.op_name else None
        )
        if earlier is not None and (first := reasons[earlier]).purpose != UNEXPLAINED:
            # Compilers take some apart: a reduce-scatter of uneven parts ends in a permute.
            why = Reason(first.purpose, f"goes on with {first.what}")
        reasons[collective.name] = why
    return [(collective, reasons[collective.name]) for collective in found]


def _parameters(
    inputs: tuple[Leaf, ...], outputs: tuple[Leaf, ...], named: Collection[str] | None, backward: bool
) -> tuple[Parameter, ...]:
    if named is None:
        return parameters_of(inputs, outputs) if backward else ()
    chosen = tuple(leaf for leaf in inputs if root_of(leaf.name) in named)
    return parameters_of(chosen, chosen)


def _with_source(collective: Collective, lines: Lines) -> Collective:
    """The line of what made its operand, where the compiler dropped its own."""
    if collective.source:
        return collective
    frames = next((m.frames for m in lines.makers(collective.name) if m.frames), ())
    return dataclasses.replace(collective, source=sources.short_location(sources.user_frame(frames)))


def _moved(lines: Lines, found: Sequence[Collective], inputs: Sequence[Leaf]) -> dict[str, str]:
    """By collective, the name of the input that it moves as it came."""
    known = {leaf.name: leaf for leaf in inputs}
    kept = [leaf for leaf in inputs if leaf.used]
    result = {}
    for collective in found:
        if collective.kind in ("all_gather", "all_to_all", "collective_permute") and (
            given := lines.origin(collective.name)
        ):
            leaf = known.get(given.name) or (kept[given.number] if given.number < len(kept) else None)
            result[collective.name] = leaf.name if leaf is not None else given.name
    return result
