import dataclasses
import io
import json

import pytest
import rich.console

from shardkit.inspect import Collective, CollectiveReport
from shardkit.inspect.report import KINDS
from shardkit.inspect.tables import Table, format_bytes
from shardkit.reshard.cost import wire_bytes

GATHER = Collective(
    kind="all_gather",
    axes=("sp",),
    shapes=(("f32", (32, 16)),),
    result_bytes=2048,
    bytes=1536,
    group_size=4,
    groups=((0, 1, 2, 3), (4, 5, 6, 7)),
    in_loop=False,
    trip_count=1,
    reduction=None,
    op_name="jit(f)/all_gather",
    source="model.py:12",
    name="all-gather.1",
)
REDUCE = dataclasses.replace(
    GATHER,
    kind="all_reduce",
    axes=("dp", "sp"),
    in_loop=True,
    trip_count=8,
    reduction="add",
    source="",
    bytes=10,
)
UNMAPPED = dataclasses.replace(REDUCE, axes=None, trip_count=None)
MESH = (("dp", 2), ("sp", 4))
REPORT = CollectiveReport((GATHER, GATHER, REDUCE), MESH)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 750),
        ("all_reduce", 1500),
        ("reduce_scatter", 3000),
        ("all_to_all", 750),
        ("ragged_all_to_all", 750),
        ("collective_permute", 1000),
        ("collective_broadcast", 1000),
    ],
)
def test_bytes_on_the_wire(kind, expected):
    assert wire_bytes(kind, 1000, 4) == expected
    assert isinstance(wire_bytes(kind, 1001, 3), int)


def test_every_kind_has_its_bytes():
    assert all(wire_bytes(kind, 8, 2) > 0 for kind in KINDS)


def test_counting():
    assert len(REPORT) == REPORT.count() == 3
    assert list(REPORT) == list(REPORT.entries)
    assert REPORT.by_kind() == {"all_gather": 2, "all_reduce": 1}
    assert [REPORT.count(kind) for kind in ("all_gather", "all_reduce", "all_to_all")] == [2, 1, 0]
    assert [REPORT.count(in_loop=where) for where in (None, True, False)] == [3, 1, 2]
    assert REPORT.bytes() == 2 * 1536 + 10
    assert REPORT.bytes("all_gather", in_loop=True) == 0


@pytest.mark.parametrize(
    ("axis", "count"),
    [("sp", 3), ("dp", 1), (("sp",), 2), (("dp",), 0), (("dp", "sp"), 1), (("sp", "dp"), 1)],
)
def test_a_name_means_among_others_a_tuple_exactly(axis, count):
    assert REPORT.count(axis=axis) == count


@pytest.mark.parametrize(
    ("report", "arguments", "message"),
    [
        (REPORT, {"kind": "allgather"}, "unknown kind of collective 'allgather'; the kinds are all_gather"),
        (REPORT, {"axis": "tp"}, "axis 'tp' is not in the mesh; its axes are dp=2, sp=4"),
        (REPORT, {"axis": ("dp", "tp")}, "axis 'tp' is not in the mesh"),
        (CollectiveReport((UNMAPPED,)), {"axis": "sp"}, "no mesh is known.*Pass mesh="),
    ],
)
def test_what_cannot_be_counted(report, arguments, message):
    with pytest.raises(ValueError, match=message):
        report.count(**arguments)


def test_no_collectives_over_any_axis_of_no_mesh():
    assert CollectiveReport(()).count(axis="sp") == 0


TEXT = """\
3 collectives on mesh (dp=2, sp=4)
  kind        axes   count  result      bytes/device  in loop  source
  all_gather  sp         2  f32[32,16]       3.0 KiB  no       model.py:12
  all_reduce  dp,sp      1  f32[32,16]          10 B  yes x8   -
Total 3.0 KiB/device. bytes/device: what one device receives, all of the row's collectives together;
those in a loop ("yes x8": its body runs 8 times) are counted once."""


def test_text():
    assert str(REPORT) == TEXT


def test_text_of_what_is_not_known():
    text = str(CollectiveReport((UNMAPPED,)))
    assert text.startswith("1 collective\n")
    assert "all_reduce  ?" in text
    assert "axes ?: no mesh is known; pass mesh=." in text
    assert "axes ?: the groups fit no set of axes." in str(CollectiveReport((UNMAPPED,), MESH))
    assert str(CollectiveReport((), MESH)) == "No collectives on mesh (dp=2, sp=4): every device works alone."


def test_one_line_of_an_entry():
    assert str(GATHER) == ("all_gather over sp: f32[32,16], 1.5 KiB/device, in loop: no at model.py:12 (%all-gather.1)")
    many = dataclasses.replace(GATHER, shapes=GATHER.shapes * 3)
    assert "f32[32,16] +2 more" in str(many)


def test_dict_is_json():
    data = json.loads(json.dumps(REPORT.to_dict()))
    assert data["mesh"] == {"dp": 2, "sp": 4}
    assert data["collectives"][0]["shapes"] == [["f32", [32, 16]]]
    assert data["collectives"][2]["trip_count"] == 8
    assert len(data["collectives"]) == 3
    assert CollectiveReport(()).to_dict() == {"mesh": None, "collectives": []}


def test_html_is_escaped():
    page = CollectiveReport((dataclasses.replace(GATHER, source="<b>.py:1"),), MESH)._repr_html_()
    assert "&lt;b&gt;.py:1" in page
    assert "<b>" not in page
    assert page.count("<tr>") == 2


def test_rich():
    stream = io.StringIO()
    rich.console.Console(file=stream, width=120, color_system=None).print(REPORT)
    shown = stream.getvalue()
    assert "3 collectives" in shown
    assert "f32[32,16]" in shown
    assert "yes x8" in shown


def test_reports_are_values():
    again = CollectiveReport((GATHER, GATHER, REDUCE), MESH)
    assert again == REPORT
    assert hash(again) == hash(REPORT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.entries = ()  # pyright: ignore[reportAttributeAccessIssue]


def test_tables():
    table = Table("t", ("a", "b"), [("x", "1"), ("yy", "22")], frozenset({"b"}), ["note"])
    assert table.to_text() == "t\n  a    b\n  x    1\n  yy  22\nnote"
    assert Table("t").to_text() == "t"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048575, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**42, "4.0 TiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_negative_bytes():
    assert format_bytes(-2048) == "-2.0 KiB"
