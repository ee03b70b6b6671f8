"""What halos bring to each device: tables of integers, and the convolution's own reach."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

import shardkit as sk
from shardkit.inspect.drawing import show
from shardkit.inspect.drawing.halos import pieces_of, runs_of
from shardkit.spatial.windows import Window, shard_halo, shard_window

S = sk.Shard
MESH = jax.sharding.AbstractMesh((2, 4), ("dp", "sp"))


def received(drawing, dim=0):
    """Per position: the elements of one dim that come along it alone, with where from."""
    return [
        [(r["dims"][0]["start"], r["dims"][0]["stop"], r["from_position"]) for r in d["receives"]]
        for d in drawing.to_dict()["devices"]
        if d["coordinates"]["dp"] == 0
    ]


def test_edges_receive_nothing_from_beyond():
    drawing = show({"sp": S(0)}, MESH, shape=(16,), halo={0: (1, 2)})
    assert received(drawing) == [
        [(4, 6, 1)],
        [(3, 4, 0), (8, 10, 2)],
        [(7, 8, 1), (12, 14, 3)],
        [(11, 12, 2)],
    ]
    assert "dp=0 sp=1 receives dim 0 3:4 from dp=0 sp=0, dim 0 8:10 from dp=0 sp=2" in str(drawing)


def test_circular_edges_receive_from_the_other_end():
    drawing = show({"sp": S(0)}, MESH, shape=(16,), halo={0: (1, 0, "circular")})
    assert received(drawing) == [[(15, 16, 3)], [(3, 4, 0)], [(7, 8, 1)], [(11, 12, 2)]]


def test_sources_are_on_the_same_row_of_the_mesh():
    told = show({"sp": S(0)}, MESH, shape=(16,), halo={0: (1, 0)}).to_dict()["devices"]
    assert [r["from_position"] for d in told for r in d["receives"]] == [0, 1, 2, 4, 5, 6]


def test_wide_halos_come_from_several_blocks():
    drawing = show({"sp": S(0)}, MESH, shape=(8,), halo={0: (3, 0)})
    assert received(drawing) == [[], [(0, 2, 0)], [(1, 2, 0), (2, 4, 1)], [(3, 4, 1), (4, 6, 2)]]


def test_stride_equal_to_the_kernel_needs_nothing():
    drawing = show({"sp": S(0)}, MESH, shape=(16,), halo={0: {"kernel": 2, "window_strides": 2}})
    assert received(drawing) == [[], [], [], []]
    assert "receives nothing" in str(drawing) and "no halo" in str(drawing)


def test_stride_two_reaches_to_one_side():
    halo = {"kernel": 3, "window_strides": 2, "padding": "SAME"}
    drawing = show({"sp": S(0)}, MESH, shape=(16,), halo={0: halo})
    assert received(drawing) == [[(4, 5, 1)], [(8, 9, 2)], [(12, 13, 3)], []]


def test_plans_and_arguments_say_the_same():
    window = Window(16, 5, 1, 2, 2, 1, 1)
    plan = shard_window(window, 4)
    given = {"kernel": 5, "padding": (2, 2)}
    drawings = [show({"sp": S(0)}, MESH, shape=(16,), halo={0: h}) for h in (given, window, plan, plan.exchange)]
    assert len({str(d) for d in drawings}) == 1


def test_corners():
    mesh = jax.sharding.AbstractMesh((2, 2), ("h", "w"))
    x = jax.ShapeDtypeStruct(
        (8, 8, 3), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, sk.to_partition_spec([S(0), S(1)], mesh))
    )
    first = show(x, halo={0: (1, 1), 1: (1, 1)}).to_dict()["devices"][0]["receives"]
    assert [(r["from_position"], len(r["dims"]), r["bytes"]) for r in first] == [
        (1, 1, 4 * 1 * 3 * 4),
        (2, 1, 1 * 4 * 3 * 4),
        (3, 2, 1 * 1 * 3 * 4),
    ]


def test_padding_that_travels_is_not_told():
    x = sk.shard_tensor(jnp.zeros((13,)), {"sp": S(0)}, sk.make_mesh({"dp": 2, "sp": 4}), uneven="pad")
    assert received(show(x, halo={0: (0, 2)})) == [[(4, 6, 1)], [(8, 10, 2)], [(12, 13, 3)], []]


@hypothesis.given(
    size=st.integers(1, 24),
    shards=st.integers(2, 5),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    pad=st.integers(0, 3),
    dilation=st.integers(1, 2),
)
def test_with_its_halos_a_part_has_all_that_its_outputs_read(size, shards, kernel, stride, pad, dilation):
    window = Window(size, kernel, stride, pad, pad, 1, dilation)
    plan = shard_window(window, shards)
    runs = runs_of(plan.exchange)
    block = -(-size // shards)
    for shard in range(shards):
        held = set(range(shard * block, min((shard + 1) * block, size)))
        for run in runs[shard]:
            assert run.source * block <= run.start < run.stop <= (run.source + 1) * block
            held |= set(range(run.start, run.stop))
        for output in range(shard * plan.out_block, min((shard + 1) * plan.out_block, window.output_size)):
            taps = {window.start(output) + dilation * tap for tap in range(kernel)}
            assert {t for t in taps if 0 <= t < size} <= held


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("size", [12, 10])
def test_runs_of_all_modes_come_from_their_sources(mode, size):
    for part, runs in enumerate(runs_of(shard_halo(size, 4, 2, 2, mode))):
        for run in runs:
            assert run.source != part and run.source * 3 <= run.start < run.stop <= min(size, (run.source + 1) * 3)


def test_a_part_receives_each_run_and_each_corner():
    runs = runs_of(shard_halo(9, 3, 1, 1))
    assert len(pieces_of((1, 1), {0: runs, 1: runs})) == 8
    assert len(pieces_of((0, 0), {0: runs, 1: runs})) == 3


@pytest.mark.parametrize(
    ("halo", "error", "message"),
    [
        ([(1, 1)], TypeError, "maps array dims"),
        ({"W": (1, 1)}, TypeError, "got key 'W'"),
        ({5: (1, 1)}, ValueError, "names dim 5, but the array has 2 dims"),
        ({1: (1, 1)}, ValueError, r"names dim 1, which isn't cut.*cut: \[0\]"),
        ({0: (-1, 1)}, ValueError, "at least 0 elements"),
        ({0: (1,)}, TypeError, r"takes \(before, after\)"),
        ({0: (1, 1, "zeros", 2)}, TypeError, r"takes \(before, after\)"),
        ({0: 3}, TypeError, r"takes \(before, after\)"),
        ({0: (1, 1, "mirror")}, ValueError, "padding_mode='mirror' is unknown"),
        ({0: {"padding": "SAME"}}, ValueError, "no 'kernel'"),
        ({0: {"kernel": 3, "strides": 2}}, ValueError, r"unknown \['strides'\]"),
        ({0: {"kernel": 0}}, ValueError, "at least 1"),
        ({0: {"kernel": 3, "padding": "FULL"}}, ValueError, "'FULL' is unknown"),
        ({0: {"kernel": 99}}, ValueError, "no output in dim 0"),
        ({0: Window(7, 3)}, ValueError, "is for 7 elements, but dim 0 has 16"),
        ({0: shard_halo(16, 2, 1, 1)}, ValueError, "over 2 shards, but dim 0 has 16 over 4"),
        ({0: (1, 1), -2: (1, 1)}, ValueError, "names dim 0 twice"),
    ],
    ids=str,
)
def test_halos_that_are_refused(halo, error, message):
    with pytest.raises(error, match=message):
        show({"sp": S(0)}, MESH, shape=(16, 4), halo=halo)


def test_halos_need_sizes():
    with pytest.raises(ValueError, match="give shape="):
        show({"sp": S(0)}, MESH, halo={0: (1, 1)})


def test_halos_need_blocks_as_an_exchange_has_them():
    sharding = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("sp"))
    x = sk.Padded(jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding), (5,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stored in blocks of 4"):
        show(x, halo={0: (1, 1)})
