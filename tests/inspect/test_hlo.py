"""The parser of HLO text, on small hand-written modules in which each trap is plain to see."""

import pytest

from shardkit.inspect import hlo

TRAPS = """HloModule jit_f, is_scheduled=true, num_partitions=8

%all-reduce_region (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %maximum.1 = f32[] maximum(%x, %y)
}

%all-gather-computation (p: f32[4,<=8]) -> f32[4,<=8] {
  %p = f32[4,<=8]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %n = f32[4,<=8]{1,0} negate(%p)
}

ENTRY %main (p: f32[4,8]) -> (f32[4,8], f32[4,8]) {
  %p = f32[4,8]{1,0} parameter(0), metadata={op_name="all-reduce(%x), calls=%nothing"}
  %all-gather.3 = f32[4,8]{1,0} fusion(%p), kind=kLoop, calls=%all-gather-computation
  %all-reduce.1 = (f32[4,8]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/u32[]{:S(2)}) \
all-reduce(%p, /*index=1*/u32[] %c), channel_id=3, replica_groups={{0,1},{2,3}}, \
to_apply=%all-reduce_region, metadata={op_name="f(\\"a, b}\\")/psum" stack_frame_id=2}, \
backend_config="{\\"x\\":{\\"n\\":\\"1\\"}}"
  %get-tuple-element.all-to-all = f32[4,8]{1,0} get-tuple-element(%all-reduce.1), index=0
  ROOT %t = (f32[4,8]{1,0}, f32[4,8]{1,0}) tuple(%all-gather.3, %get-tuple-element.all-to-all)
}
"""


def test_keeps_collectives_by_opcode_not_by_name():
    main = hlo.parse_module(TRAPS).computations["main"]
    assert [(i.name, i.opcode) for i in main.instructions] == [
        ("all-gather.3", "fusion"),
        ("all-reduce.1", "all-reduce"),
    ]


def test_takes_an_instruction_apart():
    instruction = hlo.parse_module(TRAPS).computations["main"].instructions[1]
    assert instruction.operands == ("p", "c")
    assert instruction.attributes["replica_groups"] == "{{0,1},{2,3}}"
    assert instruction.attributes["channel_id"] == "3"
    assert hlo.op_name(instruction) == 'f("a, b}")/psum'


def test_module_facts():
    module = hlo.parse_module(TRAPS)
    assert (module.name, module.entry, module.num_partitions, module.num_replicas) == ("jit_f", "main", 8, 1)
    assert module.computations["all-reduce_region"].root_opcode == "maximum"


def test_entry_may_stand_first():
    text = "HloModule m\n\nENTRY %e (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n}\n\n%z () -> f32[] {\n}\n"
    assert hlo.parse_module(text).entry == "e"


def test_refuses_text_without_a_computation():
    with pytest.raises(ValueError, match=r"compiled\.as_text"):
        hlo.parse_module("module @jit_f { func.func public @main() { return } }")


HEAD = """HloModule m

FileNames
1 "/home/user/model.py"
2 "/lib/site-packages/flax/linen.py"

FunctionNames
1 "train"
2 "__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=8}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=2 end_column=8}

StackFrames
%s


ENTRY %%e (p: f32[]) -> f32[] {
  ROOT %%a = f32[] all-reduce(%%p), metadata={stack_frame_id=2}
}
"""


@pytest.mark.parametrize(
    "frames",
    [
        "1 {file_location_id=1}\n2 {file_location_id=2 parent_frame_id=1}",
        "1 {file_location_id=1 parent_frame_id=0}\n2 {file_location_id=2 parent_frame_id=1}",
        # As jaxlib 0.10 - 0.12 print it: one too many.
        "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}",
    ],
)
def test_stack_of_a_frame_id(frames):
    module = hlo.parse_module(HEAD % frames)
    (instruction,) = module.computations["e"].instructions
    found = hlo.source_frames(instruction, module)
    assert [(f.file.split("/")[-1], f.line, f.function) for f in found] == [
        ("linen.py", 99, "__call__"),
        ("model.py", 12, "train"),
    ]


def test_a_table_with_a_cycle_ends():
    module = hlo.parse_module(
        HEAD % "1 {file_location_id=1 parent_frame_id=3}\n2 {file_location_id=2 parent_frame_id=2}"
    )
    assert len(module.frames(2)) <= 2
    assert module.frames(7) == ()


@pytest.mark.parametrize(
    ("config", "trips"),
    [
        ('backend_config={"known_trip_count":{"n":"8"},"known_init_step":{"init":"0","step":"1"}}', 8),
        (r'backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"', 12),
        ("metadata={}", None),
    ],
)
def test_trip_count_and_loop_computations(config, trips):
    text = f"""HloModule m
ENTRY %e (p: (s32[], f32[2])) -> (s32[], f32[2]) {{
  ROOT %w = (s32[]{{:T(128)}}, f32[2]{{0}}) while(%p), condition=%c.1, body=%b.2, {config}
}}
"""
    (loop,) = hlo.parse_module(text).computations["e"].instructions
    assert hlo.known_trip_count(loop) == trips
    assert hlo.loop_computations(loop) == ("b.2", "c.1")
    assert hlo.called_computations(loop) == ()


@pytest.mark.parametrize(
    ("line", "called"),
    [
        ("%f = f32[] fusion(%p), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%a", ("a",)),
        ("%c = f32[] call(%p), to_apply=%a", ("a",)),
        ("%c = f32[] conditional(%i, %p, %p), branch_computations={%a, %b}", ("a", "b")),
        ("%c = f32[] conditional(%i, %p, %p), true_computation=%a, false_computation=%b", ("a", "b")),
        ("%s = ((f32[]), f32[], u32[]) async-start(%p), calls=%a", ("a",)),
        ('%c = f32[] custom-call(%p), custom_call_target="x", called_computations={%a}', ("a",)),
        ("%r = f32[] all-reduce(%p), to_apply=%a", ()),
    ],
)
def test_called_computations(line, called):
    module = hlo.parse_module(f"ENTRY %e (p: f32[]) -> f32[] {{\n  {line}\n}}\n")
    (instruction,) = module.computations["e"].instructions
    assert hlo.called_computations(instruction) == called


@pytest.mark.parametrize("opcode", ["async-done", "async-update", "reduce", "sort", "all-gather-done"])
def test_instructions_that_lead_nowhere_are_not_kept(opcode):
    module = hlo.parse_module(f"ENTRY %e (p: f32[]) -> f32[] {{\n  %x = f32[] {opcode}(%p), calls=%a\n}}\n")
    assert module.computations["e"].instructions == ()
    assert module.computations["e"].opcodes == {opcode}
