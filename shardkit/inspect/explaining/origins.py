"""Where the operands of a collective come from: an input of the program, or the operation that made them. No JAX here.

A parameter that is cut reaches its all-gather through copies, casts and reshapes, or in a loop as an element of what
the loop carries or slices. Those are followed backwards, through the text, until an input of the program is met.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container

from shardkit.inspect import hlo
from shardkit.inspect.shapes import arrays, parse_shape
from shardkit.sources import Frame

# What leaves a value the value it is, or a slice of it.
_PASSING = frozenset(
    (
        *("copy", "copy-start", "copy-done", "convert", "bitcast", "bitcast-convert", "reshape", "transpose"),
        *("slice", "dynamic-slice", "all-gather", "all-gather-start", "all-gather-done"),
        *("async-start", "async-done", "async-update"),
    )
)
_HARMLESS = _PASSING | {"parameter", "constant", "tuple", "get-tuple-element"}
_STEPS = 400  # a chain is never so long; a cycle would be
_NEAR = 12  # how far up the line a name says anything about an operand


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of the program.

    Attributes:
      number: its position among those that the compiled program still has.
      name: JAX's name of it, such as "params['w']"; "" if not recorded.
    """

    number: int
    name: str


@dataclasses.dataclass(frozen=True)
class Maker:
    """What made an operand of a collective.

    Attributes:
      op_name: JAX's name of the operation; "" if none up the line has one.
      elements: of the operand.
      frames: the lines of Python behind it, innermost first.
    """

    op_name: str
    elements: int
    frames: tuple[Frame, ...]


class Lines:
    """The definitions in a module's text, to be followed backwards."""

    def __init__(self, text: str, module: hlo.Module):
        self.module = module
        self.of: dict[str, dict[str, str]] = {}  # computation -> instruction -> its line
        self.home: dict[str, str] = {}  # instruction -> computation (names are unique in a module)
        current: dict[str, str] | None = None
        name = ""
        for line in text.split("\n"):
            if current is not None:
                if line.startswith("}"):
                    current = None
                    continue
                left, equals, _ = line.partition(" = ")
                if equals:
                    defined = left.strip().removeprefix("ROOT ").lstrip("%")
                    current[defined] = line
                    self.home[defined] = name
            elif line.endswith("{") and not line.startswith((" ", "HloModule")):
                name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0].split("(", 1)[0]
                current = self.of.setdefault(name, {})
        self.callers: dict[str, tuple[str, str]] = {
            callee: (computation.name, instruction.name)
            for computation in module.computations.values()
            for instruction in computation.instructions
            for callee in (*hlo.called_computations(instruction), *hlo.loop_computations(instruction))
        }

    def makers(self, name: str) -> tuple[Maker, ...]:
        """Of each operand of an instruction, the nearest operation up the line that has a name.

        XLA drops the names of collectives when it combines several into one, or writes them anew.
        """
        computation = self.home.get(name, "")
        instruction = self._read(computation, name)
        if instruction is None:
            return ()
        return tuple(maker for operand in instruction.operands for maker in self._makers(computation, operand))

    def _makers(self, computation: str, name: str) -> tuple[Maker, ...]:
        here = self._read(computation, name)
        if here is not None and self._joins(here):
            return tuple(maker for operand in here.operands for maker in self._makers(computation, operand))
        elements = 0 if here is None else sum(math.prod(dims) for _, dims in arrays(parse_shape(here.shape)))
        op_name, frames = self._named(computation, name)
        return (Maker(op_name, elements, frames),)

    def _joins(self, here: hlo.Instruction) -> bool:
        """It puts arrays one after another, as a GPU does with what it reduces together."""
        if here.opcode != "fusion":
            return here.opcode == "concatenate"
        called = self._called(here)
        return called is not None and "concatenate" in called.opcodes and called.opcodes <= _HARMLESS | {"concatenate"}

    def _named(self, at: str, name: str) -> tuple[str, tuple[Frame, ...]]:
        """The nearest name up the line, and its stack."""
        for _ in range(_NEAR):
            here = self._read(at, name)
            if here is None:
                break
            if here.opcode == "parameter" and at != self.module.entry and at in self.callers:
                at, caller = self.callers[at]
                around = self._read(at, caller)
                if around is None or int(here.operands[0]) >= len(around.operands):
                    break
                name = around.operands[int(here.operands[0])]
                continue
            # The name of an input is no operation's.
            if here.opcode != "parameter" and "/" in (found := hlo.op_name(here)):
                return found, hlo.source_frames(here, self.module)
            if not here.operands or here.opcode == "parameter":
                break
            name = here.operands[0]
        return "", ()

    def before(self, name: str, collectives: Container[str]) -> str | None:
        """The collective whose result, as it came or a slice of it, an instruction's first operand is."""
        at = self.home.get(name, "")
        here = self._read(at, name)
        for _ in range(_NEAR):
            if here is None or not here.operands:
                return None
            if here.operands[0] in collectives:
                return here.operands[0]
            here = self._read(at, here.operands[0])
            if here is not None and here.opcode not in _PASSING and not here.opcode.endswith(("-done", "-update")):
                return None
        return None

    def origin(self, name: str) -> Input | None:
        """The input of the program that an instruction moves as it came; None: something else."""
        computation = self.home.get(name, "")
        first = self._read(computation, name)
        if first is None or not first.operands:
            return None
        at, name = computation, first.operands[0]
        element: int | None = None  # of the tuple that ``name`` is
        for _ in range(_STEPS):
            here = self._read(at, name)
            if here is None:
                return None
            if here.opcode == "parameter":
                number = int(here.operands[0])
                if at == self.module.entry:
                    return Input(number, hlo.op_name(here)) if element is None else None
                if at not in self.callers:
                    return None
                at, caller = self.callers[at]
                around = self._read(at, caller)
                # A loop's body has one parameter: the tuple that the loop carries.
                if around is None or number >= len(around.operands):
                    return None
                name = around.operands[number]
            elif here.opcode == "get-tuple-element":
                name, element = here.operands[0], int(here.attributes["index"])
            elif here.opcode == "tuple" and element is not None:
                name, element = here.operands[element], None
            elif here.opcode in ("while", "optimization-barrier"):
                name = here.operands[0]
            elif here.opcode in _PASSING or (here.opcode == "fusion" and self._passes(here)):
                name, element = here.operands[0], None
            else:
                return None
        return None

    def _passes(self, fusion: hlo.Instruction) -> bool:
        called = self._called(fusion)
        return called is not None and called.opcodes <= _HARMLESS and bool(fusion.operands)

    def _called(self, fusion: hlo.Instruction) -> hlo.Computation | None:
        return self.module.computations.get(fusion.attributes.get("calls", "").lstrip("%"))

    def _read(self, computation: str, name: str) -> hlo.Instruction | None:
        line = self.of.get(computation, {}).get(name)
        return None if line is None else hlo.read_instruction(line)
