"""From a compiled program's text and what is known of its arrays to its collectives, each with a reason. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

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
    param_argnums: int | Sequence[int] | None = None,
) -> list[tuple[Collective, Reason]]:
    """Each collective of a program, and what it is for.

    Args:
      text: of a compiled module.
      module: the same, read.
      mesh_axes: see `extract`.
      inputs, outputs: of the program.
      param_argnums: the arguments that are parameters; None: the inputs that come out again in shape and dtype.

    Raises:
      ValueError: `param_argnums` names an argument that there isn't.
    """
    lines = Lines(text, module)
    found = tuple(_with_source(c, lines) for c in extract(module, mesh_axes))
    unsure = [c for c in found if len(op_names(c.op_name)) != len(c.shapes)]
    makers = {c.name: [(m.op_name, m.elements) for m in lines.makers(c.name)] for c in unsure}
    parameters = _parameters(inputs, outputs, param_argnums)
    facts = Facts(parameters, data_axes_of(inputs, parameters), _moved(lines, found, inputs), makers)
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


def _parameters(inputs: tuple[Leaf, ...], outputs: tuple[Leaf, ...], argnums: Any) -> tuple[Parameter, ...]:
    if argnums is None:
        return parameters_of(inputs, outputs)
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    roots = list(dict.fromkeys(root_of(leaf.name) for leaf in inputs))
    bad = [n for n in wanted if not -len(roots) <= n < len(roots)]
    if bad:
        raise ValueError(
            f"explain: param_argnums={argnums!r} names argument {bad[0]}, but those with arrays are {len(roots)}: "
            f"{', '.join(roots)}"
        )
    names = {roots[n] for n in wanted}
    chosen = tuple(leaf for leaf in inputs if root_of(leaf.name) in names)
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
