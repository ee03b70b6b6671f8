"""What the compilers of three backends made of one step: totals equal a recount by other means, purposes as by eye.

The texts are whole outputs of our own runs (``example_step.py``).
"""

import collections
import gzip
import math
import re

import pytest

from shardkit.inspect import hlo
from shardkit.inspect.explaining.leaf import Leaf
from shardkit.inspect.explaining.read import read_reasons
from tests.inspect.explaining.example_step import AXES, FOLDER

BACKENDS = ("cpu", "tpu", "gpu")
F32 = 4
INPUTS = (
    Leaf("params['kernel']", "float32", (3, 3, 4, 16), (3, 3, 4, 16), "[-, -, -, -]", 576 * F32),
    Leaf("params['layers']", "float32", (3, 16, 16), (3, 8, 16), "[-, dp, -]", 384 * F32, ("dp",)),
    Leaf("x", "float32", (8, 8, 32, 8), (4, 8, 8, 8), "[dp, -, sp, -]", 2048 * F32, ("dp", "sp")),
)
OUTPUTS = (*INPUTS[:2], Leaf("result[1]", "float32", (), (), "[]", F32))


@pytest.fixture(scope="module", params=[f"{b}_{f}" for b in BACKENDS for f in ("ring", "plain")])
def stored(request):
    text = gzip.decompress((FOLDER / f"{request.param}.txt.gz").read_bytes()).decode()
    reasons = read_reasons(text, hlo.parse_module(text), tuple(AXES.items()), INPUTS, OUTPUTS)
    return request.param, text, reasons


def recount(text):
    """Number and bytes of each kind of collective, by regular expressions on single lines and nothing of ours."""
    widths = {"f32": 4, "bf16": 2, "pred": 1, "s32": 4, "u32": 4}
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = collections.defaultdict(lambda: [0, 0])
    seen = set()  # a TPU repeats one that runs beside several fusions in each of them
    for line in text.split("\n"):
        match = re.match(rf"\s+(?:ROOT )?%\S+ = (.*?) ({kinds})(-start)?\(", line)
        if match is None:
            continue
        shape, kind, start = match.groups()
        if "chain_id=" in line:
            channel = re.search(r"channel_id=\d+", line)[0]
            if channel in seen:
                continue
            seen.add(channel)
        arrays = re.findall(r"(f32|bf16|pred|s32|u32)\[([\d,]*)\]", shape)
        if start and kind != "all-reduce":  # (operands, results, counters)
            arrays = [array for array in arrays if array != ("u32", "")]
            arrays = arrays[len(arrays) // 2 :]
        size = sum(widths[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in arrays)
        if kind == "collective-permute":
            received = size
        else:
            n = members(line)
            received = {"all-reduce": 2 * size * (n - 1) // n, "reduce-scatter": size * (n - 1)}.get(
                kind, size * (n - 1) // n
            )
        found[kind.replace("-", "_")][0] += 1
        found[kind.replace("-", "_")][1] += received
    return {kind: tuple(total) for kind, total in found.items()}


def members(line):
    """Devices in a group."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(iota[2])
    named = re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line)
    assert named, line
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))


def test_totals_are_those_of_the_text(stored):
    _, text, reasons = stored
    totals = collections.defaultdict(lambda: [0, 0])
    for collective, _ in reasons:
        totals[collective.kind][0] += 1
        totals[collective.kind][1] += collective.bytes
    assert {kind: tuple(total) for kind, total in totals.items()} == recount(text)


def by_purpose(reasons, where):
    found = collections.Counter()
    for collective, why in reasons:
        if collective.in_loop == (where == "loop"):
            found[why.purpose, collective.kind, collective.axes] += 1
    return found


def test_purposes_of_halos_and_gradients(stored):
    name, _, reasons = stored
    outside = by_purpose(reasons, "outside")
    assert outside["halo", "collective_permute", ("sp",)] == 2
    # The kernel's gradient, over both axes of the data: together, or one after the other.
    over = {axes for (purpose, _, axes) in outside if purpose == "gradient reduction"}
    assert over in ({("sp",), ("dp",)}, {("dp", "sp")}, {("dp",)} if name == "tpu_plain" else ())
    assert {k for p, k, _ in outside if p == "reduction"} <= {"all_reduce"}
    assert by_purpose(reasons, "loop")["gradient reduction", "all_reduce", ("dp",)] == 1


def test_only_what_nobody_asked_for_is_unexplained(stored):
    name, _, reasons = stored
    strange = [c for c, why in reasons if why.purpose == "unexplained" and not c.in_loop]
    # A convolution in groups: XLA puts the whole activation together, the ring doesn't.
    assert [c.kind for c in strange] == ([] if name.endswith("ring") else ["all_gather"] * len(strange))
    assert bool(strange) == name.endswith("plain")
    # In the loop a matrix that "dp" cuts meets rows that "dp" cuts: what XLA makes of it has no better reason.
    assert {why.what.split(":")[0] for c, why in reasons if why.purpose == "unexplained" and c.in_loop} <= {
        "XLA, for dot_general",
        "XLA, for transpose",
    }


def test_loops_are_counted_where_the_compiler_says_how_often(stored):
    name, _, reasons = stored
    trips = {c.trip_count for c, _ in reasons if c.in_loop}
    assert trips == ({None} if name.startswith("tpu") else {3})


def test_every_collective_has_a_line_of_the_program(stored):
    _, _, reasons = stored
    assert {c.source.split(":")[0] for c, _ in reasons} == {"example_step.py"}
