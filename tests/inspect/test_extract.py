"""Programs compiled for CPU, GPU (H100) and TPU (v5e:2x4), read back from stored texts.

Each file of `hlo/` is the unedited text of a program compiled with jax 0.10.2 or 0.12.0.1 (as its name
says) on a 2 x 4 mesh ("dp", "sp"), but for paths of source files. The rows are in the program's order.
"""

import dataclasses
from pathlib import Path

import pytest

from shardkit.inspect import hlo
from shardkit.inspect.extract import extract

FOLDER = Path(__file__).parent / "hlo"
MESH = (("dp", 2), ("sp", 4))

# name | kind | axes | shapes | bytes | in loop x trips | reduction | source
STORED = {
    "cpu_010_shard_map": """
        ppermute.3 | collective_permute | sp | f32[512,128] | 262144 | x5 | - | model.py:26
        psum.7 | all_reduce | dp | f32[512,128] | 262144 | x5 | add | model.py:27
        all_gather.3 | all_gather | sp | f32[2048,128] | 786432 | - | - | model.py:29
        reduce_scatter.7 | reduce_scatter | sp | f32[512,128] | 786432 | - | add | model.py:30
        all-to-all | all_to_all | sp | 4 x f32[128,128] | 196608 | - | - | model.py:31
        pmax.7 | all_reduce | dp,sp | f32[128,512] | 458752 | - | max | model.py:32
    """,
    "cpu_012_shard_map": """
        ppermute.2 | collective_permute | sp | f32[512,128] | 262144 | x5 | - | model.py:26
        psum.6 | all_reduce | dp | f32[512,128] | 262144 | x5 | add | model.py:27
        all_gather.3 | all_gather | sp | f32[2048,128] | 786432 | - | - | model.py:29
        reduce_scatter.7 | reduce_scatter | sp | f32[512,128] | 786432 | - | add | model.py:30
        all-to-all | all_to_all | sp | 4 x f32[128,128] | 196608 | - | - | model.py:31
        pmax.7 | all_reduce | dp,sp | f32[128,512] | 458752 | - | max | model.py:32
    """,
    "gpu_010_combined": """
        reduce-scatter-start | reduce_scatter | dp,sp | bf16[256,2048] bf16[256,1024] | 11010048 | - | add | -
    """,
    "gpu_010_cond_in_while": """
        all-reduce-start | all_reduce | sp | f32[128,128] | 98304 | xNone | add | model.py:69
        all-reduce-start.1 | all_reduce | dp | f32[128,128] | 65536 | xNone | max | model.py:69
    """,
    "gpu_010_overlap": """
        all-gather-start | all_gather | dp | f32[2048,512] | 2097152 | - | - | model.py:62
        collective-permute-start.1 | collective_permute | sp | f32[1024,512] | 2097152 | - | - | model.py:60
        collective-permute-start | collective_permute | sp | f32[1024,512] | 2097152 | - | - | model.py:59
        reduce-scatter-start | reduce_scatter | dp | f32[512,512] | 1048576 | - | add | model.py:63
    """,
    "gpu_010_ragged": """
        ragged-all-to-all-start | ragged_all_to_all | sp | f32[16,256] | 12288 | - | - | -
    """,
    "gpu_010_shard_map": """
        collective-permute-start | collective_permute | sp | f32[512,128] | 262144 | x5 | - | model.py:26
        all-reduce-start | all_reduce | dp | f32[512,128] | 262144 | x5 | add | model.py:27
        all-gather-start | all_gather | sp | f32[2048,128] | 786432 | - | - | model.py:29
        reduce-scatter-start | reduce_scatter | sp | f32[512,128] | 786432 | - | add | model.py:30
        all-to-all-start | all_to_all | sp | f32[512,128] | 196608 | - | - | model.py:31
        all-reduce-start.1 | all_reduce | dp,sp | f32[128,512] | 458752 | - | max | model.py:32
    """,
    "tpu_010_all_to_all": """
        all-to-all | all_to_all | sp | f32[256,4,256] | 786432 | - | - | model.py:55
    """,
    "tpu_010_async_fusion": """
        all-gather.18 | all_gather | sp | bf16[4096,8192] | 50331648 | - | - | model.py:29
        all-gather.13 | all_gather | sp | bf16[8192,4096] | 50331648 | - | - | model.py:30
    """,
    "tpu_010_reduce_scatter_fusion": """
        fusion | reduce_scatter | dp,sp | bf16[256,2048] | 7340032 | - | add | model.py:4
        fusion.1 | reduce_scatter | dp,sp | bf16[256,1024] | 3670016 | - | add | model.py:5
    """,
    "tpu_010_shard_map": """
        collective-permute-start | collective_permute | sp | f32[512,128] | 262144 | xNone | - | model.py:26
        psum.9 | all_reduce | dp | f32[1,512,128] | 262144 | xNone | add | model.py:27
        all-gather.4 | all_gather | sp | f32[2048,128] | 786432 | - | - | model.py:29
        reduce_scatter.7 | reduce_scatter | sp | f32[512,128] | 786432 | - | add | model.py:30
        all_to_all.15 | all_to_all | sp | f32[4,128,128] | 196608 | - | - | model.py:31
        pmax.7 | all_reduce | dp,sp | f32[128,512] | 458752 | - | max | model.py:32
    """,
    "tpu_010_tuple_all_reduce": """
        all-reduce.2 | all_reduce | dp,sp | bf16[2048,2048] bf16[2048,1024] | 22020096 | - | add | model.py:9
    """,
    "tpu_012_overlap": """
        collective-permute-start | collective_permute | sp | f32[1024,512] | 2097152 | - | - | model.py:59
        collective-permute-start.1 | collective_permute | sp | f32[1024,512] | 2097152 | - | - | model.py:60
        all-gather.4 | all_gather | dp | bf16[2048,512] | 1048576 | - | - | model.py:62
        reduce_scatter.7 | reduce_scatter | dp | f32[512,512] | 1048576 | - | add | model.py:63
    """,
}


def read(text, mesh=MESH):
    return extract(hlo.parse_module(text), mesh)


def row(entry):
    texts = [f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in entry.shapes]
    shapes = f"{len(texts)} x {texts[0]}" if len(set(texts)) < len(texts) else " ".join(texts)
    loop = f"x{entry.trip_count}" if entry.in_loop else "-"
    cells = (entry.name, entry.kind, ",".join(entry.axes), shapes, str(entry.bytes), loop)
    return " | ".join([*cells, entry.reduction or "-", entry.source or "-"])


@pytest.mark.parametrize("name", STORED)
def test_stored_programs(name):
    found = read((FOLDER / f"{name}.txt").read_text())
    assert [row(entry) for entry in found] == [line.strip() for line in STORED[name].strip().splitlines()]
    assert all(entry.in_loop or entry.trip_count == 1 for entry in found)


def test_every_stored_program_has_its_rows():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(STORED)


def test_without_a_mesh_only_the_axes_are_missing():
    text = (FOLDER / "gpu_010_shard_map.txt").read_text()
    assert [dataclasses.replace(e, axes=None) for e in read(text)] == list(read(text, None))


def test_op_name_and_groups():
    first, second, *_ = read((FOLDER / "tpu_010_shard_map.txt").read_text())
    assert first.op_name == "jit(smap)/shard_map/while/body/closed_call/ppermute"
    assert first.groups == ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4))
    assert (first.group_size, second.group_size) == (4, 2)
    assert second.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %a = f32[] add(%x, %y)
}
"""


def module(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    head = "HloModule m, num_partitions=8\n"
    entry = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)"
    return f"{head}{ADD}{before}\n{entry}\n{body}\n}}\n"


SP = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"


@pytest.mark.parametrize(
    ("line", "kind", "shapes", "size"),
    [
        (f"%s = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%p), {SP}", "all_gather", [(32,)], 96),
        (
            f"%s = ((f32[8]{{0}}, f32[2]{{0}}), (f32[32]{{0}}, f32[8]{{0}})) all-gather-start(%p, %q), {SP}",
            "all_gather",
            [(32,), (8,)],
            120,
        ),
        (f"%s = (f32[32]{{0}}, f32[8]{{0}}) all-gather(%p, %q), {SP}", "all_gather", [(32,), (8,)], 120),
        (f"%s = f32[8]{{0}} all-reduce-start(%p), {SP}, to_apply=%add", "all_reduce", [(8,)], 48),
        (
            f"%s = (f32[8]{{0}}, f32[4]{{0}}) all-reduce-start(%p, %q), {SP}, to_apply=%add",
            "all_reduce",
            [(8,), (4,)],
            72,
        ),
        (
            f"%s = ((f32[8]{{0}}), f32[2]{{0}}) reduce-scatter-start(%p), {SP}, to_apply=%add",
            "reduce_scatter",
            [(2,)],
            24,
        ),
        (
            "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
            "source_target_pairs={{0,1},{1,0}}",
            "collective_permute",
            [(8,)],
            32,
        ),
        (
            "%s = ((f32[8]{0}, f32[2]{0}), (f32[8]{0}, f32[2]{0}), u32[]) collective-permute-start(%p, %q), "
            "channel_id=1, source_target_pairs={{0,1},{1,0}}",
            "collective_permute",
            [(8,), (2,)],
            40,
        ),
        (
            "%s = f32[8]{0} collective-broadcast(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}",
            "collective_broadcast",
            [(8,)],
            32,
        ),
    ],
)
def test_results_of_starts_and_tuples(line, kind, shapes, size):
    (entry,) = read(module(line, "%d = f32[8]{0} bitcast(%s)"))
    assert entry.kind == kind
    assert [dims for _, dims in entry.shapes] == shapes
    assert entry.bytes == size
    assert entry.axes == ("sp",)


def test_an_async_wrapper_counts_once_and_lends_its_source():
    wrapped = """
%wrapped_all-to-all (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %all-to-all.2 = f32[8]{0} all-to-all(%q), channel_id=1, replica_groups=[2,4]<=[8]
}, execution_thread="parallel"
"""
    text = module(
        '%async-start = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%p), async_execution_thread="parallel", '
        'calls=%wrapped_all-to-all, metadata={op_name="jit(f)/a2a" '
        'source_file="/home/user/model.py" source_line=7}',
        "%update = ((f32[8]{0}), f32[8]{0}, s32[]) async-update(%async-start), calls=%wrapped_all-to-all",
        "ROOT %async-done = f32[8]{0} async-done(%update), calls=%wrapped_all-to-all",
        before=wrapped,
    )
    (entry,) = read(text)
    assert row(entry) == "all-to-all.2 | all_to_all | sp | f32[8] | 24 | - | - | model.py:7"
    assert entry.op_name == "jit(f)/a2a"


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, "
        "use_global_device_ids=true, to_apply=%add",
        "%r = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[8,1]<=[8], use_global_device_ids=true",
        "%r = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add",  # over replicas: one
        "%r = f32[8]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,0},{1,1}}",
        "%r = f32[8]{0} collective-permute(%p), channel_id=1, source_target_pairs={}",
    ],
)
def test_what_moves_nothing_is_not_counted(line):
    assert read(module(line)) == ()


def test_pairs_that_stay_are_left_out():
    (entry,) = read(module("%r = f32[8]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,0},{1,5}}"))
    assert (entry.groups, entry.axes, entry.group_size) == (((1, 5),), ("dp",), 2)


def test_groups_of_no_axes_are_counted_unmapped():
    line = f"%r = f32[8]{{0}} all-reduce(%p), {SP.replace('[2,4]', '[4,2]')}, to_apply=%add"
    (entry,) = read(module(line))
    assert (entry.axes, entry.group_size, entry.bytes) == (None, 2, 32)


def trips(count):
    return f'backend_config={{"known_trip_count":{{"n":"{count}"}}}}'


def test_loops_in_loops_conditions_branches_and_calls():
    before = f"""
%leaf (q: f32[8]) -> f32[8] {{
  ROOT %ar.leaf = f32[8]{{0}} all-reduce(%q), {SP}, to_apply=%add
}}

%branch (q: f32[8]) -> f32[8] {{
  ROOT %call = f32[8]{{0}} call(%q), to_apply=%leaf
}}

%other (q: f32[8]) -> f32[8] {{
  ROOT %n = f32[8]{{0}} negate(%q)
}}

%inner (q: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %c = f32[8]{{0}} conditional(%i, %a, %b), branch_computations={{%branch, %other}}
}}

%inner_condition (q: (s32[], f32[8])) -> pred[] {{
  %ar.condition = pred[]{{0}} all-reduce(%x), {SP}, to_apply=%add
}}

%outer (q: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %ar.outer = f32[8]{{0}} all-reduce(%x), {SP}, to_apply=%add
  %w = (s32[], f32[8]{{0}}) while(%q), condition=%inner_condition, body=%inner, {trips(3)}
}}

%outer_condition (q: (s32[], f32[8])) -> pred[] {{
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}}

%unknown (q: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %w2 = (s32[], f32[8]{{0}}) while(%q), condition=%outer_condition, body=%known, {trips(2)}
}}

%known (q: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %ar.known = f32[8]{{0}} all-reduce(%x), {SP}, to_apply=%add
}}

%dead (q: f32[8]) -> f32[8] {{
  %ar.dead = f32[8]{{0}} all-reduce(%q), {SP}, to_apply=%add
}}
"""
    text = module(
        f"%w = (s32[], f32[8]{{0}}) while(%t), condition=%outer_condition, body=%outer, {trips(5)}",
        "%u = (s32[], f32[8]{0}) while(%w), condition=%outer_condition, body=%unknown",
        f"%ar.entry = f32[8]{{0}} all-reduce(%p), {SP}, to_apply=%add",
        "%once = f32[8]{0} call(%p), to_apply=%leaf",
        before=before,
    )
    assert [(e.name, e.in_loop, e.trip_count) for e in read(text)] == [
        ("ar.outer", True, 5),
        ("ar.leaf", True, 15),
        ("ar.condition", True, 15),
        ("ar.known", True, None),
        ("ar.entry", False, 1),
        ("ar.leaf", False, 1),
    ]


def test_a_chain_without_a_start_counts_once():
    chained = f'{SP}, frontend_attributes={{chain_id="0"}}'
    fused = "".join(
        f"\n%f{i} (q: f32[8]) -> f32[32] {{\n  %all-gather.{i} = f32[32]{{0}} all-gather(%q), {chained}\n}}\n"
        for i in range(3)
    )
    calls = [f"%x{i} = f32[32]{{0}} fusion(%p), kind=kCustom, calls=%f{i}" for i in range(3)]
    assert [e.name for e in read(module(*calls, before=fused))] == ["all-gather.0"]


@pytest.mark.parametrize(
    ("root", "reduction"),
    [
        ("%r = f32[] maximum(%x, %y)", "max"),
        ("%r = f32[] minimum(%x, %y)", "min"),
        ("%r = f32[] multiply(%x, %y)", "mul"),
        ("%r = pred[] or(%x, %y)", "or"),
        ("%c = bf16[] convert(%a)", "add"),  # promoted: the add stands before
        ("%s = f32[] subtract(%x, %y)", None),
    ],
)
def test_reductions(root, reduction):
    add = "  %a = f32[] add(%x, %y)\n" if reduction == "add" else ""
    region = f"\n%region (x: f32[], y: f32[]) -> f32[] {{\n{add}  ROOT {root}\n}}\n"
    (entry,) = read(module(f"%ar = f32[8]{{0}} all-reduce(%p), {SP}, to_apply=%region", before=region))
    assert entry.reduction == reduction


def test_a_large_program_is_read_whole():
    # About 12 MB. Nothing is timed here; a quadratic scan would not come back.
    padding = ", ".join(f'"key{i}":"{i}"' for i in range(40))
    lines = []
    for i in range(6000):
        lines.append(f"%f{i} = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%leaf, backend_config={{{padding}}}")
        lines.append(f"%n{i} = f32[8]{{0}} negate(%f{i}), backend_config={{{padding}}}")
        if i % 10 == 0:
            lines.append(f"%ar{i} = f32[8]{{0}} all-reduce(%n{i}), {SP}, to_apply=%add, backend_config={{{padding}}}")
    leaf = "\n%leaf (q: f32[8]) -> f32[8] {\n  ROOT %n = f32[8]{0} negate(%q)\n}\n"
    assert len(read(module(*lines, before=leaf))) == 600
