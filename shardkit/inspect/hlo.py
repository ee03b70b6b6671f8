"""The text of a compiled XLA module, read into small plain objects. No JAX here.

Only what the other files of this package ask about is kept: collectives, and the instructions
that lead from one computation into another. Modules of tens of megabytes are common, so the text is
walked once, line by line; every line is matched at its front only (name, shape, opcode), and the rest
is taken apart for the few instructions that matter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from shardkit.sources import Frame

# HLO opcode -> the name this package gives it. `-start` forms are the same collective, begun early.
COLLECTIVE_KINDS: Mapping[str, str] = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_broadcast",
    "ragged-all-to-all": "ragged_all_to_all",
}
COLLECTIVE_OPCODES: Mapping[str, str] = {
    **COLLECTIVE_KINDS,
    **{f"{opcode}-start": kind for opcode, kind in COLLECTIVE_KINDS.items()},
}

# Opcodes whose computations run as part of the program. (`reduce`, `sort`, `map` ... also name a
# computation, but a scalar one in which XLA allows no collective.) `async-done` and `async-update`
# repeat the `calls=` of their `async-start` in some versions, and so must not be followed.
_CALLER_OPCODES = frozenset({"while", "conditional", "call", "fusion", "async-start", "custom-call"})

# The shape is either a tuple, `(...)`, or one word. Inside a tuple a `)` is followed by `,`, `)`, `}`
# or `(` but never by a space and a word, so the first `) opcode(` ends it.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([^\s(]+)\s*(?:\(.*)?\{\s*$")
_CALLS = re.compile(r", calls=%?([\w.\-]+)")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\],]')
_NAME = re.compile(r"%?([\w.\-]+)")
_TABLES = frozenset({"FileNames", "FunctionNames", "FileLocations", "StackFrames"})
_TABLE_ROW = re.compile(r"(\d+)\s+(.*)")
_NUMBERS = re.compile(r"(\w+)=(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `%name = shape opcode(operands), key=value, ...`."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """A named list of instructions; of these only collectives and callers are kept.

    Attributes:
      opcodes: every opcode that occurs in it.
      root_opcode: the opcode of its result ("" if none is marked).
    """

    name: str
    instructions: tuple[Instruction, ...]
    opcodes: frozenset[str]
    root_opcode: str


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A compiled module.

    Attributes:
      entry: name of the computation that runs first.
      num_partitions, num_replicas: their product is the number of devices.
      stacks: stack frame id -> (frame, id of the caller's frame or 0).
    """

    name: str
    entry: str
    num_partitions: int
    num_replicas: int
    computations: Mapping[str, Computation]
    stacks: Mapping[int, tuple[Frame, int]]

    def frames(self, frame_id: int) -> tuple[Frame, ...]:
        """The stack of a `stack_frame_id`, innermost first; empty if the id is not in the tables."""
        found: list[Frame] = []
        while frame_id in self.stacks and len(found) < len(self.stacks):
            frame, frame_id = self.stacks[frame_id]
            found.append(frame)
        return tuple(found)


def parse_module(text: str) -> Module:
    """Reads the text of `compiled.as_text()`.

    Args:
      text: HLO text of one module, as any of the CPU, GPU and TPU compilers prints it.

    Returns:
      The module. Instructions other than collectives and callers of computations are not kept.

    Raises:
      ValueError: `text` has no computation in it (for example StableHLO text was given).

    Example:
      >>> module = parse_module('''HloModule m, num_partitions=2
      ...
      ... ENTRY %main (p: f32[2]) -> f32[4] {
      ...   %p = f32[2]{0} parameter(0)
      ...   ROOT %g = f32[4]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}
      ... }''')
      >>> module.computations["main"].instructions[0].opcode
      'all-gather'
    """
    header = ""
    entry = ""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] | None = None
    current: _Builder | None = None
    # Not splitlines(): that also splits at characters that may stand inside a quoted name.
    for line in text.split("\n"):
        if current is not None:
            if line.startswith("}") and not line.startswith("})"):  # `})` can end a long literal
                computations[current.name] = current.build()
                current = None
            else:
                current.add(line)
            continue
        if not line or line[0].isspace():
            continue
        if line.startswith("HloModule"):
            header = line
        elif line in _TABLES:
            table = tables.setdefault(line, {})
        elif table is not None and (row := _TABLE_ROW.match(line)):
            table[int(row[1])] = row[2]
        elif opened := _COMPUTATION.match(line):
            table = None
            current = _Builder(opened[2])
            if opened[1] or not entry:
                entry = opened[2]
    if not computations:
        raise ValueError(
            "no HLO computation found in the text; give the text of a compiled program "
            f"(`compiled.as_text()`), not of a lowered one. It begins with: {text[:80]!r}"
        )
    return Module(
        name=_header_word(header),
        entry=entry,
        num_partitions=_header_number(header, "num_partitions"),
        num_replicas=_header_number(header, "replica_count"),
        computations=computations,
        stacks=_stacks(tables),
    )


class _Builder:
    """Collects the lines of one computation."""

    def __init__(self, name: str):
        self.name = name
        self.instructions: list[Instruction] = []
        self.opcodes: set[str] = set()
        self.root_opcode = ""

    def add(self, line: str) -> None:
        found = _INSTRUCTION.match(line)
        if found is None:
            return
        root, name, shape, opcode = found.groups()
        self.opcodes.add(opcode)
        if root:
            self.root_opcode = opcode
        if opcode == "fusion":
            # The most frequent caller by far: its one interesting attribute comes before any quoted
            # text, so that it need not be taken apart.
            if calls := _CALLS.search(line, found.end()):
                attributes = {"calls": calls[1], **_lazy_metadata(line, calls.end())}
                self.instructions.append(Instruction(name, opcode, shape, (), attributes))
        elif opcode in COLLECTIVE_OPCODES or opcode in _CALLER_OPCODES:
            if opcode == "custom-call" and "AsyncCollective" not in line and "computations=" not in line:
                return
            operands, attributes = _split_call(line, found.end())
            self.instructions.append(Instruction(name, opcode, shape, operands, attributes))

    def build(self) -> Computation:
        return Computation(self.name, tuple(self.instructions), frozenset(self.opcodes), self.root_opcode)


def _lazy_metadata(line: str, start: int) -> dict[str, str]:
    begin = line.find(", metadata={", start)
    if begin < 0:
        return {}
    begin += len(", metadata=")
    depth = 0
    for token in _BRACKETS.finditer(line, begin):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return {"metadata": line[begin : token.end()]}
    return {}


def _split_call(line: str, start: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Splits `operands), key=value, ...` at the commas that stand in no bracket and no string."""
    depth = 1
    piece = start
    operands: list[str] = []
    attributes: list[str] = []
    into = operands
    for token in _BRACKETS.finditer(line, start):
        character = token[0]
        if character in "{([":
            depth += 1
        elif character in "})]":
            depth -= 1
            if depth == 0 and into is operands:
                operands.append(line[piece : token.start()])
                into = attributes
                piece = token.end()
        elif character == "," and depth == (1 if into is operands else 0):
            into.append(line[piece : token.start()])
            piece = token.end()
    if into is attributes:
        attributes.append(line[piece:])
    names = (re.sub(r"/\*.*?\*/", "", operand).split() for operand in operands)
    # An operand is `%name`, or `shape %name` where shapes are printed: the name is the last word.
    operand_names = tuple(words[-1].lstrip("%") for words in names if words)
    pairs = (attribute.strip().partition("=") for attribute in attributes)
    return operand_names, {key: value.strip() for key, equals, value in pairs if equals}


def read_instruction(line: str) -> Instruction:
    """One line of a computation, with all of its attributes.

    Raises:
      ValueError: it's no instruction.

    Example:
      >>> read_instruction("  %p = f32[2]{0} parameter(0), sharding={replicated}").opcode
      'parameter'
    """
    found = _INSTRUCTION.match(line)
    if found is None:
        raise ValueError(f"not an instruction as XLA prints it: {line[:80]!r}")
    _, name, shape, opcode = found.groups()
    return Instruction(name, opcode, shape, *_split_call(line, found.end()))


def called_computations(instruction: Instruction) -> tuple[str, ...]:
    """Names of the computations that run as part of `instruction`, loops excepted.

    The computations of a `while` are given by `loop_computations`; the scalar reduction of a
    collective is no part of the program's flow and is left out.
    """
    attributes = instruction.attributes
    if instruction.opcode in ("fusion", "async-start", "custom-call"):
        keys = ("calls", "called_computations")
    elif instruction.opcode == "call":
        keys = ("to_apply", "calls")
    elif instruction.opcode == "conditional":
        keys = ("branch_computations", "true_computation", "false_computation")
    else:
        return ()
    return tuple(name for key in keys if key in attributes for name in _NAME.findall(attributes[key]))


def has_branches(module: Module) -> bool:
    """Whether a conditional in it has collectives in one of its branches."""
    return any(
        not module.computations[name].opcodes.isdisjoint(COLLECTIVE_OPCODES)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "conditional"
        for name in called_computations(instruction)
        if name in module.computations
    )


def loop_computations(instruction: Instruction) -> tuple[str, ...]:
    """Names of the body and the condition of a `while`; empty for any other instruction."""
    if instruction.opcode != "while":
        return ()
    keys = ("body", "condition")
    return tuple(instruction.attributes[key].lstrip("%") for key in keys if key in instruction.attributes)


# In older versions the configuration is a quoted string, with the quotes inside it escaped.
_TRIP_COUNT = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"?(\d+)')


def known_trip_count(instruction: Instruction) -> int | None:
    """How often a `while` runs, if the compiler knew and says so (TPU programs never say)."""
    found = _TRIP_COUNT.search(instruction.attributes.get("backend_config", ""))
    return int(found[1]) if found else None


_STRING = r'"((?:[^"\\]|\\.)*)"'
_OP_NAME = re.compile(r"\bop_name=" + _STRING)
_SOURCE_FILE = re.compile(r"\bsource_file=" + _STRING)
_SOURCE_LINE = re.compile(r"\bsource_line=(\d+)")
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")


def op_name(instruction: Instruction) -> str:
    """The name JAX gave the operation, `jit(f)/.../psum`, or ""."""
    found = _OP_NAME.search(instruction.attributes.get("metadata", ""))
    return _unescape(found[1]) if found else ""


def source_frames(instruction: Instruction, module: Module) -> tuple[Frame, ...]:
    """The lines of Python that made the instruction, innermost first; empty if not recorded.

    Both spellings are understood: `stack_frame_id=N` into the tables at the head of the module, and
    `source_file="..." source_line=N` in place, which holds one frame only.
    """
    metadata = instruction.attributes.get("metadata", "")
    if (frame_id := _FRAME_ID.search(metadata)) and (frames := module.frames(int(frame_id[1]))):
        return frames
    file, line = _SOURCE_FILE.search(metadata), _SOURCE_LINE.search(metadata)
    return (Frame(_unescape(file[1]), int(line[1])),) if file and line else ()


def _unescape(quoted: str) -> str:
    return re.sub(r"\\(.)", r"\1", quoted) if "\\" in quoted else quoted


def _header_word(header: str) -> str:
    words = header.split(None, 2)
    return words[1].rstrip(",") if len(words) > 1 else ""


def _header_number(header: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found[1]) if found else 1


def _stacks(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[Frame, int]]:
    files = {key: value.strip().strip('"') for key, value in tables.get("FileNames", {}).items()}
    functions = {key: value.strip().strip('"') for key, value in tables.get("FunctionNames", {}).items()}
    places: dict[int, Frame] = {}
    for key, row in tables.get("FileLocations", {}).items():
        numbers = {name: int(value) for name, value in _NUMBERS.findall(row)}
        file = files.get(numbers.get("file_name_id", 0), "")
        function = functions.get(numbers.get("function_name_id", 0), "")
        places[key] = Frame(_unescape(file), numbers.get("line", 0), function)
    rows = {
        key: {name: int(value) for name, value in _NUMBERS.findall(row)}
        for key, row in tables.get("StackFrames", {}).items()
    }
    # A caller is entered into the table before what it calls, so its id is smaller. Where it is not, the
    # printer has added one to all of them (jaxlib 0.10 - 0.12 do), and 1 stands for "none".
    shift = 1 if any(row.get("parent_frame_id", 0) >= key for key, row in rows.items()) else 0
    nowhere = Frame("", 0)
    return {
        key: (
            places.get(row.get("file_location_id", 0), nowhere),
            max(row.get("parent_frame_id", 0) - shift, 0),
        )
        for key, row in rows.items()
    }
