"""Plans between meshes of other devices: what travels, and in which order things are done."""

import itertools
import math
import random

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import Partial, Replicate, Shard

R = Replicate()
SHAPE = (8, 16)  # 512 bytes of float32


def mesh_on(positions, shape=None, names="xyz"):
    """A mesh on the devices at these positions, in this order."""
    shape = shape or (len(positions),)
    devices = np.array(jax.devices())[list(positions)].reshape(shape)
    return Mesh(devices, tuple(names[: len(shape)]))


def plan(src, here, dst, there, shape=SHAPE, dtype=np.float32):
    return sk.plan_reshard(shape, dtype, src, dst, here, there)


def lines(found):
    return [(step.kind, step.bytes) for step in found.steps]


def boxes(layout, shape):
    """{device: [(start, stop) of each dim]} of a layout without contributions, without the padding."""
    mesh = layout.mesh
    found = {}
    for at in np.ndindex(*mesh.devices.shape):
        box = []
        for d, length in enumerate(shape):
            axes = layout.dim_axes(len(shape)).get(d, ())
            index, parts = 0, 1
            for axis in axes:
                size = mesh.shape[axis]
                index, parts = index * size + at[mesh.axis_names.index(axis)], parts * size
            block = -(-length // parts)
            box.append((min(index * block, length), min((index + 1) * block, length)))
        found[mesh.devices[at]] = box
    return found


def volume(box):
    return math.prod(max(high - low, 0) for low, high in box)


def lacks(source, goal, shape):
    """The most bytes of float32 that a device of the goal needs and doesn't hold."""
    held, wanted = boxes(source, shape), boxes(goal, shape)
    return max(
        4 * (volume(box) - volume([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, held[device], strict=True)]))
        if device in held
        else 4 * volume(box)
        for device, box in wanted.items()
    )


# --- cases --------------------------------------------------------------------------------------------

HALF, OTHER = range(4), range(4, 8)


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ([Shard(0)], [Shard(0)], [("transfer", 128)]),
        ([Shard(0)], [Shard(1)], [("transfer", 128)]),
        ([R], [R], [("transfer", 128), ("all_gather", 384)]),  # 512 in any case, but only 128 between the meshes
        ([R], [Shard(0)], [("transfer", 128)]),
        ([Partial()], [Shard(0)], [("psum_scatter", 384), ("transfer", 128)]),
        ([Partial()], [R], [("psum_scatter", 384), ("transfer", 128), ("all_gather", 384)]),
        ([Partial("max")], [Shard(1)], [("all_to_all", 384), ("transfer", 128)]),
        ([Shard(0)], [Partial()], [("transfer", 128), ("contribute", 0)]),
        ([R], [Partial("max")], [("transfer", 128), ("contribute", 0)]),
        ([Partial()], [Partial()], [("psum_scatter", 384), ("transfer", 128), ("contribute", 0)]),
    ],
    ids=str,
)
def test_disjoint_halves(src, dst, steps):
    for here, there in [(HALF, OTHER), (OTHER, HALF), (HALF, [7, 5, 4, 6])]:
        assert lines(plan(src, mesh_on(here), dst, mesh_on(there, names="a"))) == steps


@pytest.mark.parametrize(
    ("src", "dst", "received"),
    [
        ([Shard(0)], [Shard(0)], 64),  # devices 1 to 3 hold other rows than they need
        ([R], [Shard(0)], 64),  # the other four have nothing
        ([Shard(0)], [Partial()], 64),
    ],
    ids=str,
)
def test_from_a_sub_mesh(src, dst, received):
    assert plan(src, mesh_on(HALF), dst, mesh_on(range(8), names="a")).bytes_per_device == received


@pytest.mark.parametrize(
    ("src", "dst", "received"),
    [
        ([Shard(0)], [Shard(0)], 128),  # rows 2 and 3 of device 1 lay on devices 2 and 3
        ([Shard(0)], [R], 448),
        ([R], [R], 0),
        ([R], [Shard(0)], 0),
        ([Partial()], [Shard(0)], 448 + 112),  # reduced by columns, of which each device has some of its rows
    ],
    ids=str,
)
def test_to_a_sub_mesh(src, dst, received):
    assert plan(src, mesh_on(range(8)), dst, mesh_on(HALF, names="a")).bytes_per_device == received


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ([Shard(0)], [Shard(0)], [("transfer", 64)]),
        ([R], [R], [("transfer", 0)]),
        ([R], [Shard(1)], [("transfer", 0)]),
        ([Shard(0)], [Shard(1)], [("transfer", 56)]),  # 1/8 of it is there
    ],
    ids=str,
)
def test_reversed_devices(src, dst, steps):
    found = plan(src, mesh_on(range(8)), dst, mesh_on(range(7, -1, -1)))
    assert [line for line in lines(found) if line[0] != "slice"] == steps
    assert "mesh {'x': 8} to mesh {'x': 8} of other devices" in str(found)


def test_the_same_devices_in_order_cross_nothing():
    found = plan([Shard(0)], mesh_on(range(8)), [Shard(0), Shard(0)], mesh_on(range(8), (2, 4), "ab"))
    assert found.steps == ()


def test_meshes_of_incommensurable_shapes():
    """No factors build both 2 x 3 and 3 x 2, so the array is transferred, though the devices are the same."""
    here, there = mesh_on(range(6), (2, 3)), mesh_on(range(6), (3, 2), "ab")
    found = plan([Shard(0), R], here, [Shard(0), R], there, (12, 2))
    assert "transfer" in [step.kind for step in found.steps]
    assert found.bytes_per_device == lacks(found.source, found.destination, (12, 2)) == 4 * 2 * 2


@pytest.mark.parametrize("there", [range(1, 2), range(1), range(8)], ids=str)
@pytest.mark.parametrize("here", [range(1), range(2, 3), range(3, 7)], ids=str)
def test_meshes_of_one_device(here, there):
    found = plan([R], mesh_on(here), [R], mesh_on(there, names="a"))
    least = lacks(found.source, found.destination, SHAPE)
    assert found.bytes_per_device == least == (0 if set(there) <= set(here) else 512)


def test_the_transfer_is_described():
    (step,) = plan([Shard(0)], mesh_on(HALF), [Shard(1)], mesh_on(OTHER, names="a")).steps
    assert (step.kind, step.axes, step.collective, step.reduce) == ("transfer", (), None, None)
    assert (step.bytes, step.peak_bytes) == (128, 256)
    assert (step.before, step.after) == ("{'x': 4} [x, -]", "{'a': 4} [-, a]")


def test_axes_of_size_one_are_no_matter():
    here, there = mesh_on(HALF, (1, 4)), mesh_on(OTHER, (4, 1), "ab")
    found = plan([Partial(), Shard(0)], here, [Shard(0), Partial()], there)
    assert lines(found) == [("transfer", 128)]


# --- all of them ----------------------------------------------------------------------------------------

MESHES = [
    (range(4), (4,)),
    (range(4, 8), (4,)),
    (range(8), (8,)),
    (range(7, -1, -1), (8,)),
    (range(8), (2, 4)),
    (range(7, -1, -1), (4, 2)),
    ([0, 2, 4, 6], (2, 2)),
    ([3, 1], (2,)),
    ([5], (1,)),
]
CROSSINGS = [
    (here, there)
    for here, there in itertools.permutations(MESHES, 2)
    if list(here[0]) != list(there[0])  # in the same order, nothing is crossed
]


def layouts(mesh, ndim, kinds):
    options = [R, *map(Shard, range(ndim))]
    plain = [list(p) for p in itertools.product(options, repeat=mesh.devices.ndim)]
    partial = [
        [*before, Partial(kind), *after]
        for at in range(mesh.devices.ndim)
        for before in itertools.product(options, repeat=at)
        for after in itertools.product(options, repeat=mesh.devices.ndim - 1 - at)
        for kind in kinds
    ]
    return plain + partial


def cases(here, there, shape, kinds, count):
    pairs = list(itertools.product(layouts(here, len(shape), kinds), layouts(there, len(shape), kinds)))
    return random.Random(0).sample(pairs, min(count, len(pairs)))


@pytest.mark.parametrize("shape", [(8, 16), (5, 7)], ids=str)
@pytest.mark.not_smoke
def test_no_device_receives_less_than_it_lacks(shape):
    """Brute force, element by element of what each device holds before and needs after."""
    for (here, mine), (there, theirs) in CROSSINGS:
        ends = mesh_on(here, mine), mesh_on(there, theirs, "abc")
        for src, dst in cases(*ends, shape, [], 6):
            found = plan(src, ends[0], dst, ends[1], shape)
            transferred = [step.bytes for step in found.steps if step.kind == "transfer"]
            assert len(transferred) == 1
            least = lacks(found.source, found.destination, shape)
            # To transfer everything at once, from where it lies, is one of the ways.
            assert found.bytes_per_device == least, (src, dst, str(found))


@pytest.mark.parametrize("shape", [(8, 16), (5, 7)], ids=str)
@pytest.mark.not_smoke
def test_order_of_steps(shape):
    """Reductions before the transfer, on the source's axes; contributions after it, on the destination's, and last."""
    reduces = {"psum", "pmax", "psum_scatter"}
    for (here, mine), (there, theirs) in CROSSINGS:
        ends = mesh_on(here, mine), mesh_on(there, theirs, "abc")
        for src, dst in cases(*ends, shape, ["sum", "max"], 6):
            found = plan(src, ends[0], dst, ends[1], shape)
            kinds = [step.kind for step in found.steps]
            assert kinds.count("transfer") == 1
            cut = kinds.index("transfer")
            before, after = found.steps[:cut], found.steps[cut + 1 :]
            assert all(axis[0] in "xyz" for step in before for axis in step.axes)
            assert all(axis[0] in "abc" for step in after for axis in step.axes)
            assert not reduces & {step.kind for step in after} and not any(step.reduce for step in after)
            assert "contribute" not in kinds[: cut + 1]
            wants = any(isinstance(p, Partial) and ends[1].devices.shape[i] > 1 for i, p in enumerate(dst))
            assert kinds.count("contribute") == wants
            assert not wants or kinds[-1] == "contribute"
            waits = any(isinstance(p, Partial) and ends[0].devices.shape[i] > 1 for i, p in enumerate(src))
            assert waits == any(step.kind in reduces or step.reduce for step in before)


def test_what_the_transfer_receives():
    """Between the states it names, exactly what the device that lacks most lacks."""
    for (here, mine), (there, theirs) in CROSSINGS:
        ends = mesh_on(here, mine), mesh_on(there, theirs, "abc")
        for src, dst in cases(*ends, SHAPE, ["sum"], 4):
            (step,) = [s for s in plan(src, ends[0], dst, ends[1]).steps if s.kind == "transfer"]
            leave, enter = (
                sk.Layout(mesh, P(*[tuple(e.split("*")) if e != "-" else None for e in text[1:-1].split(", ")]))
                for mesh, text in zip(ends, [step.before.split("} ")[1], step.after.split("} ")[1]], strict=True)
            )
            assert step.bytes == lacks(leave, enter, SHAPE)
