"""What a collective is for, read from what the program says of it. No JAX here.

Ours say so themselves (``shardkit.scopes``). Those that the user wrote carry their primitive's name. Those that XLA's
partitioner inserted carry the name of the operation they serve, and where that's a convolution it can only be a halo,
where it's a contraction in the backward pass with a result as large as a parameter it's a gradient's sum, and so on.
What fits nothing is unexplained: a move that neither the program nor its placements ask for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from shardkit import scopes
from shardkit.inspect.report import Collective
from shardkit.inspect.shapes import array_bytes

HALO = "halo"
GRADIENT = "gradient reduction"
PARAMETER = "parameter gather"
ATTENTION = "attention"
REDUCTION = "reduction"
RESHARD = "reshard"
UNEXPLAINED = "unexplained"

PURPOSES: Mapping[str, str] = {
    HALO: "edges of neighbours' blocks, which windows reach into",
    GRADIENT: "sums of gradients over devices that saw other examples, or other parts of them",
    PARAMETER: "parameters, or their updates, that are cut and put together for use",
    ATTENTION: "keys, values and their gradients on their way between devices that each have a part of the sequence",
    REDUCTION: "sums and maxima over a cut dim: contractions, means, norms, statistics, the loss",
    RESHARD: "from one placement to another, as the program or its arguments' placements ask",
    UNEXPLAINED: "nothing in the program asks for it: look here first",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_REDUCING = _words("all_reduce reduce_scatter")
# Primitives by what XLA may have to move for them where a dim is cut.
_WINDOWED = _words(
    "conv_general_dilated reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_scatter_add select_and_gather_add pad slice dynamic_slice"
)
# What brings elements to other places along a cut dim, however far.
_SHIFTING = _words("concatenate rev roll dynamic_update_slice")
_SUMMING = _words(
    "dot_general ragged_dot conv_general_dilated reduce reduce_sum reduce_max reduce_min reduce_prod "
    "reduce_and reduce_or reduce_xor argmax argmin cumsum cumlogsumexp cummax cummin cumprod scatter "
    "scatter-add scatter_add gather sort dynamic_slice add_any"
)
# What a sum may be moved past.
_LINEAR = _words(
    "transpose reshape squeeze convert_element_type broadcast_in_dim mul div neg sub add integer_pow square select_n"
)
# Placements in the program: a constraint, the specs of a region.
_ASKING = _words("sharding_constraint reshard device_put sk_reshard mesh_cast shard_map")
_WRITTEN = _words(
    "psum psum_invariant psum2 pmax pmin pmean all_gather all_gather_invariant all_to_all ppermute "
    "psum_scatter reduce_scatter pbroadcast ragged_all_to_all all_gather_reduced unreduced_psum "
    "unreduced_psum_scatter unreduced_reduce_scatter"
)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A leaf that the program is given and gives back in the same shape: a parameter, or state of an optimizer.

    Attributes:
      name: its path.
      shape: of the whole array.
      local_shape: of one device's block.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]

    def has(self, elements: int, in_loop: bool) -> bool:
        """The array, or one device's block of it, has so many elements; in a loop, a slice of it that one run takes."""
        shapes = [self.shape, self.local_shape]
        if in_loop and self.shape:
            shapes += [shape[1:] for shape in shapes]
        return elements in map(math.prod, shapes)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of the program besides the collective.

    Attributes:
      parameters: the leaves that parameters are taken to be.
      data_axes: the mesh axes along which devices see different examples, or parts of them; empty: unknown.
      inputs: by the name of an HLO instruction, the input that it moves, where that's an input as it came.
      makers: by the name of an HLO instruction that hasn't one name for each of its results, what made its operands:
        names and numbers of elements.
      backward: there is a backward pass in it, so that parameters are updated after it.
      asked: elements, on one device, of values that the program places somewhere.
    """

    parameters: Sequence[Parameter] = ()
    data_axes: Collection[Hashable] = ()
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    makers: Mapping[str, Sequence[tuple[str, int]]] = dataclasses.field(default_factory=dict)
    backward: bool = True
    asked: Collection[int] = ()

    def as_large(self, elements: int, in_loop: bool) -> Parameter | None:
        """A parameter with so many elements."""
        return next((p for p in self.parameters if p.has(elements, in_loop)), None) if elements > 1 else None

    def named(self, name: str) -> bool:
        """The input is a parameter."""
        return any(p.name == name for p in self.parameters)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One of ``PURPOSES``, and a few words on what exactly."""

    purpose: str
    what: str


def reason(collective: Collective, facts: Facts) -> Reason:
    """What a collective is for.

    One that XLA combined out of several has their names; what most of its bytes are for is its purpose.

    Example:
      >>> from shardkit.inspect.collectives import read_collectives
      >>> text = '''HloModule m, num_partitions=2
      ... ENTRY %main (p: f32[2]) -> f32[4] {
      ...   %p = f32[2]{0} parameter(0)
      ...   ROOT %g = f32[4]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}, metadata={op_name="jit(f)/cos"}
      ... }'''
      >>> reason(read_collectives(text).entries[0], Facts()).purpose
      'unexplained'
    """
    # A name without a path is that of an input, which newer compilers give to what moves it: no operation's.
    names, shapes = [n for n in op_names(collective.op_name) if "/" in n], collective.shapes
    made = [(name, count) for name, count in facts.makers.get(collective.name, ()) if name]
    one_of_several = len(names) == 1 < len(shapes) and scopes.scope_of(names[0]) is None and made
    if not names or one_of_several:  # the compiler dropped it, or all but one
        parts = [(sum(counts), _reason(collective, name, counts, facts)) for name, counts in _by_name(made).items()]
    elif len(names) == len(shapes):
        parts = [
            (sum(map(array_bytes, same)), _reason(collective, name, [_count(collective, s) for s in same], facts))
            for name, same in _by_name(zip(names, shapes, strict=True)).items()
        ]
    else:  # which is which isn't known
        counts = [_count(collective, shape) for shape in shapes]
        parts = [(1, _reason(collective, name, counts, facts)) for name in names]
        parts = [part for part in parts if part[1].purpose != UNEXPLAINED] or parts
    return _main(parts) if parts else _reason(collective, "", [_count(collective, s) for s in shapes], facts)


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for name, item in pairs:
        groups.setdefault(name, []).append(item)
    return groups


def _main(parts: Sequence[tuple[int, Reason]]) -> Reason:
    """What most bytes are for."""
    weights: dict[str, int] = {}
    for weight, part in parts:
        weights[part.purpose] = weights.get(part.purpose, 0) + weight
    main = max(weights, key=lambda p: weights[p])
    words = list(dict.fromkeys(part.what for _, part in parts if part.purpose == main))
    others = [p for p in weights if p != main]
    more = f", and {len(words) - 1} more" if len(words) > 1 else ""
    return Reason(main, words[0] + more + (f" (with it: {', '.join(others)})" if others else ""))


def op_names(text: str) -> list[str]:
    """The names in an instruction's name: "prefix/(a:b)" is what XLA writes for several that it combined.

    Example:
      >>> op_names("jit(f)/(jvp(x)/psum:psum)"), op_names("jit(f)/cos")
      (['jit(f)/jvp(x)/psum', 'jit(f)/psum'], ['jit(f)/cos'])
    """
    if not text.endswith(")") or not (text.startswith("(") or "/(" in text):
        return [text] if text else []
    prefix, _, inner = ("", "", text[1:]) if text.startswith("(") else text.partition("/(")
    names, depth, begin = [], 0, 0
    inner = inner[:-1]
    for at, letter in enumerate(inner):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ":" and depth == 0:
            names.append(inner[begin:at])
            begin = at + 1
    names.append(inner[begin:])
    return [f"{prefix}/{name}" if prefix else name for name in names]


def primitive(op_name: str) -> str:
    """The operation at the end of a name, without its parameters.

    Example:
      >>> primitive("jit(f)/transpose(jvp(Net))/dot_general[dimension_numbers=x]")
      'dot_general'
    """
    return re.split(r"[\[;]", op_name.rsplit("/", 1)[-1])[0]


def _count(collective: Collective, shape: tuple[Any, ...]) -> int:
    """Elements of what was to be reduced or of what was put together: of a reduce-scatter, more than its result."""
    count = math.prod(shape[1])
    return count * collective.group_size if collective.kind == "reduce_scatter" else count


def _reason(collective: Collective, name: str, elements: Sequence[int], facts: Facts) -> Reason:
    scope, operation = scopes.scope_of(name), primitive(name)
    if scope is not None:
        return _ours(scope, collective, name, elements, facts)
    if operation in _WRITTEN:
        return _written(operation, collective, name, elements, facts)
    return _inserted(operation, collective, name, elements, facts)


def _ours(scope: str, collective: Collective, name: str, elements: Sequence[int], facts: Facts) -> Reason:
    reducing = collective.kind in _REDUCING
    if scope == scopes.HALO:
        return Reason(HALO, "halo exchange")
    if scope == scopes.ATTENTION:
        return Reason(ATTENTION, "a cut sequence")
    if scope == scopes.GRADIENTS or (scope == scopes.PARAMETERS and reducing):
        return Reason(GRADIENT, "gradients summed together" if scope == scopes.GRADIENTS else "transpose of a gather")
    if scope == scopes.PARAMETERS:
        return Reason(PARAMETER, "put together for use")
    if scope == scopes.REDUCTION:
        return _gradient(collective, name, elements, facts) or Reason(REDUCTION, "sum over devices")
    if reducing:
        return _gradient(collective, name, elements, facts) or Reason(REDUCTION, "Partial value reduced")
    if collective.kind == "all_gather" and (gathered := _parameter(collective, name, elements, facts)):
        return gathered
    return Reason(RESHARD, "sk.reshard")


def _written(operation: str, collective: Collective, name: str, elements: Sequence[int], facts: Facts) -> Reason:
    if collective.kind in _REDUCING:
        return _gradient(collective, name, elements, facts) or Reason(REDUCTION, f"written in the program: {operation}")
    if collective.kind == "all_gather" and (gathered := _parameter(collective, name, elements, facts)):
        return gathered
    return Reason(RESHARD, f"written in the program: {operation}")


def _inserted(operation: str, collective: Collective, name: str, elements: Sequence[int], facts: Facts) -> Reason:
    by = f"XLA, for {operation}" if operation else "XLA"
    if collective.kind == "collective_permute" and operation in _WINDOWED:
        return _passed_on(collective, name, elements, facts) or Reason(HALO, by)
    if collective.kind == "collective_permute" and operation in _SHIFTING:
        return Reason(RESHARD, f"{by}, along a cut dim")
    if operation in _ASKING and collective.kind not in _REDUCING:
        moved = facts.inputs.get(collective.name, "")
        return Reason(PARAMETER, moved) if facts.named(moved) else Reason(RESHARD, by)
    if collective.kind in _REDUCING:
        if found := _gradient(collective, name, elements, facts):
            return found
        if operation in _SUMMING | _LINEAR | _ASKING or _is_reduction(collective, operation):
            return Reason(REDUCTION, by)
        if name and not collective.op_name:
            return Reason(REDUCTION, f"sum of what {operation} made (the compiler dropped its name)")
    if collective.kind == "all_gather" and (gathered := _parameter(collective, name, elements, facts)):
        return gathered
    moved = facts.inputs.get(collective.name)
    if not name and collective.kind not in _REDUCING and any(count in facts.asked for count in elements):
        return Reason(
            RESHARD, "as large as a value that the program places" + (f": moves input {moved}" if moved else "")
        )
    return Reason(UNEXPLAINED, by + (f": moves input {moved}" if moved else ""))


def _is_reduction(collective: Collective, operation: str) -> bool:
    """A sum of few elements (a count, a loss) that XLA moved into an operation with another name."""
    return (
        collective.reduction is not None
        and operation != ""
        and max((_count(collective, s) for s in collective.shapes), default=0) <= 1
    )


def _gradient(collective: Collective, name: str, elements: Sequence[int], facts: Facts) -> Reason | None:
    over_data = bool(set(collective.axes or ()) & set(facts.data_axes))
    if "transpose(" in name:
        if not over_data and facts.data_axes and collective.axes is not None:
            return None  # an activation's gradient
    elif "jvp(" in name or not over_data or primitive(name) not in _WRITTEN | _LINEAR | {"reduce_sum"}:
        return None  # forward; or a norm of the update, its matrix products
    # A gradient may be made in equal pieces, one a group of a grouped convolution.
    counts = [*elements, *(count * elements.count(count) for count in dict.fromkeys(elements))]
    found = dict.fromkeys(p for count in counts if (p := facts.as_large(count, collective.in_loop)))
    if not found:
        return None
    first, *others = found
    return Reason(GRADIENT, f"as large as {first.name}" + (f" (or {len(others)} other)" if others else ""))


def _passed_on(collective: Collective, name: str, elements: Sequence[int], facts: Facts) -> Reason | None:
    """A gradient's sum that a TPU's compiler takes by turns in a loop: a part goes from device to device, and grows."""
    if not collective.in_loop or "transpose(" not in name:
        return None
    found = _gradient(collective, name, [count * collective.group_size for count in elements], facts)
    return found and Reason(GRADIENT, f"passed on in parts, {found.what}")


def _parameter(collective: Collective, name: str, elements: Sequence[int], facts: Facts) -> Reason | None:
    moved = facts.inputs.get(collective.name)
    if moved is not None and facts.named(moved):
        return Reason(PARAMETER, moved)
    updated = next((p for count in elements if (p := facts.as_large(count, collective.in_loop))), None)
    if updated is not None and facts.backward and "jvp(" not in name and "transpose(" not in name:
        return Reason(PARAMETER, f"{updated.name}, updated")
    return None
