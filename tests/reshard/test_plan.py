"""``sk.plan_reshard``: what it prints, counts and accepts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import Partial, Replicate, Shard

R = Replicate()
SHAPE = (8, 16)  # 512 bytes of float32


def abstract(*sizes, names="xyz"):
    return AbstractMesh(sizes, tuple(names[: len(sizes)]))


def plan(src, dst, mesh, shape=SHAPE, dtype=np.float32, **others):
    return sk.plan_reshard(shape, dtype, src, dst, mesh, **others)


def lines(found):
    """(kind, axes, bytes) of each step."""
    return [(step.kind, step.axes, step.bytes) for step in found.steps]


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


# --- printing ---------------------------------------------------------------------------------------


def test_printed():
    assert str(plan(P("x", "y"), P("y", "x"), abstract(2, 4))) == (
        "float32[8,16] on mesh {'x': 2, 'y': 4}: 96 bytes a device in 2 collectives\n"
        "  1. all_to_all        y/1:2        [x, y] -> [x*y/1:2, y/2:2]   32 bytes\n"
        "  2. ppermute          x y/2:2      [x*y/1:2, y/2:2] -> [y, x]   64 bytes"
    )


def test_printed_partial():
    assert str(plan([Partial("max"), Shard(1)], [Shard(0), R], abstract(2, 4), (800, 1600), jnp.bfloat16)) == (
        "bfloat16[800,1600] on mesh {'x': 2, 'y': 4}: 1,280,000 bytes a device in 2 collectives\n"
        "  1. all_to_all + max  x            [-, y] max over x -> [x, y]   320,000 bytes\n"
        "  2. all_gather        y            [x, y] -> [x, -]   960,000 bytes"
    )


def test_printed_two_meshes(mesh_for):
    devices = jax.devices()
    there = sk.make_mesh({"a": 4}, devices=devices[4:])
    here = sk.make_mesh({"x": 4}, devices=devices[:4])
    assert str(plan([Partial()], [Shard(0)], here, dst_mesh=there)) == (
        "float32[8,16] on mesh {'x': 4} to mesh {'a': 4} of other devices: 512 bytes a device in 1 collective\n"
        "  1. psum_scatter      x            [-, -] sum over x -> [x, -]   384 bytes\n"
        "  2. transfer                       {'x': 4} [x, -] -> {'a': 4} [a, -]   128 bytes"
    )


def test_printed_other_names():
    assert str(plan([Shard(0)], [Shard(0), R], abstract(8), dst_mesh=abstract(2, 4, names="ab"))) == (
        "float32[8,16] on mesh {'x': 8} to mesh {'a': 2, 'b': 4}: 192 bytes a device in 1 collective\n"
        "  1. all_gather        x.1          [x.0*x.1, -] -> [x.0, -]   192 bytes"
    )


def test_printed_nothing():
    assert str(plan([R], [R], abstract(4))) == (
        "float32[8,16] on mesh {'x': 4}: 0 bytes a device in 0 collectives\n  nothing to do"
    )


def test_slices_are_one_line():
    (step,) = plan([R, R], [Shard(0), Shard(1)], abstract(2, 4)).steps
    assert (step.kind, set(step.axes), step.bytes) == ("slice", {"x", "y"}, 0)
    assert (step.before, step.after) == ("[-, -]", "[x, y]")


# --- numbers ----------------------------------------------------------------------------------------


def test_numbers_of_a_plan():
    found = plan([Partial(), Shard(0)], [Shard(1), R], abstract(2, 4))
    assert lines(found) == [("psum_scatter", ("x",), 64), ("all_gather", ("y",), 192)]
    assert found.bytes_per_device == 256
    assert found.collectives == ("reduce_scatter", "all_gather")
    assert [step.peak_bytes for step in found.steps] == [128 + 2 * 64, 64 + 256]
    assert found.peak_bytes == 320
    assert (found.shape, found.dtype) == (SHAPE, np.dtype("float32"))
    assert found.source.placements == (Partial(), Shard(0))
    assert found.destination.placements == (Shard(1), R)


def test_numbers_of_an_empty_plan():
    found = plan([Shard(0)], [Shard(0)], abstract(4))
    assert (found.steps, found.bytes_per_device, found.peak_bytes, found.collectives) == ((), 0, 0, ())


@pytest.mark.parametrize(("dtype", "size"), [(np.int8, 1), (jnp.bfloat16, 2), (np.float64, 8), (np.complex128, 16)])
def test_bytes_are_of_the_dtype(dtype, size):
    assert plan([Shard(0)], [R], abstract(4), dtype=dtype).bytes_per_device == 96 * size


# --- named examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "shape", "src", "dst", "steps"),
    [
        # 7/8 of the local 256 bytes
        ((4, 2), (8, 16, 4), P("y", None, "x"), P(None, ("x", "y")), [("all_to_all", ("x", "y"), 224)]),
        ((4,), SHAPE, [Shard(0)], [Shard(1)], [("all_to_all", ("x",), 96)]),
        ((4,), SHAPE, [Shard(0)], [R], [("all_gather", ("x",), 384)]),
        ((4,), SHAPE, [R], [Shard(1)], [("slice", ("x",), 0)]),
        ((2, 2), SHAPE, P("x", "y"), P("y", "x"), [("ppermute", ("x", "y"), 128)]),
        # one local block of 64 bytes, and half of one
        ((2, 4), SHAPE, P("x", "y"), P("y", "x"), [("all_to_all", ("y/1:2",), 32), ("ppermute", ("x", "y/2:2"), 64)]),
        ((2, 4), SHAPE, P(("x", "y")), P(("y", "x")), [("ppermute", ("x", "y"), 64)]),
        ((2, 4), SHAPE, [Partial(), Partial()], [R, R], [("psum", ("x", "y"), 896)]),
        ((2, 4), SHAPE, [Partial(), R], [R, R], [("psum", ("x",), 512)]),
        ((4,), SHAPE, [Partial()], [Shard(0)], [("psum_scatter", ("x",), 384)]),
        ((4,), SHAPE, [Partial("max")], [Shard(1)], [("all_to_all", ("x",), 384)]),
        ((4,), SHAPE, [Partial("max")], [R], [("pmax", ("x",), 768)]),
        ((4,), SHAPE, [Partial("min")], [R], [("pmin", ("x",), 768)]),
        ((4,), SHAPE, [Partial("mean")], [R], [("psum", ("x",), 768)]),
        # gathering the contributions would receive 1536
        ((4,), SHAPE, [Partial("prod")], [R], [("all_to_all", ("x",), 384), ("all_gather", ("x",), 384)]),
        ((2,), (), [Partial("prod")], [R], [("all_gather", ("x",), 4)]),
        # a part of the whole is as good a contribution, and smaller
        ((4,), SHAPE, [R], [Partial()], [("slice", ("x",), 0), ("contribute", ("x",), 0)]),
        ((4,), SHAPE, [Shard(0)], [Partial("max")], [("contribute", ("x",), 0)]),
        ((4,), SHAPE, [Shard(0)], [Partial("mean")], [("all_gather", ("x",), 384), ("contribute", ("x",), 0)]),
        ((4,), SHAPE, [Partial()], [Partial("max")], [("psum_scatter", ("x",), 384), ("contribute", ("x",), 0)]),
        ((4,), (5, 7), [Shard(0)], [R], [("all_gather", ("x",), 3 * 56)]),
        ((2, 2), (5,), [R, R], [Shard(0), Shard(0)], [("slice", ("x", "y"), 0)]),
        ((4,), (1,), [R], [Shard(0)], [("slice", ("x",), 0)]),
    ],
    ids=str,
)
def test_examples(sizes, shape, src, dst, steps):
    assert lines(plan(src, dst, abstract(*sizes), shape)) == steps


@pytest.mark.parametrize(
    ("kind", "dtype", "dst", "reduce", "collective"),
    [
        ("sum", "f4", [Shard(0)], None, "reduce_scatter"),
        ("mean", "f4", [Shard(0)], "divide", "reduce_scatter"),
        ("mean", "f4", [R], "divide", "all_reduce"),
        ("max", "f4", [Shard(0)], "max", "all_to_all"),
        ("min", "f4", [Shard(0)], "min", "all_to_all"),
        ("prod", "f4", [Shard(0)], "prod", "all_to_all"),
        ("any", "?", [Shard(0)], "any", "all_to_all"),
        ("any", "?", [R], None, "all_reduce"),
        ("all", "?", [Shard(0)], "all", "all_to_all"),
        ("sum", "f4", [R], None, "all_reduce"),
    ],
)
def test_what_a_device_does_with_contributions(kind, dtype, dst, reduce, collective):
    (step,) = plan([Partial(kind)], dst, abstract(4), dtype=dtype).steps
    assert (step.reduce, step.collective) == (reduce, collective)


@pytest.mark.parametrize(
    ("src", "dst"),
    [([Shard(0), R], [R, R]), ([R, R], [Shard(1), R]), ([Partial(), R], [Shard(0), R]), ([R, R], [Partial(), R])],
    ids=str,
)
def test_axes_of_size_one_cost_nothing(src, dst):
    assert plan(src, dst, abstract(1, 4)).steps == ()


@pytest.mark.parametrize(
    "given",
    [[Shard(0), Shard(1)], [R, R], [Partial("max"), R], [Shard(0), Partial()], P(("y", "x")), P(None, "y")],
    ids=str,
)
def test_equal_layouts_need_no_steps(given):
    assert plan(given, given, abstract(2, 4)).steps == ()


def test_equal_layouts_in_other_words():
    assert plan([Shard(0), Shard(-1)], P("x", "y"), abstract(2, 4)).steps == ()


# --- placements and meshes in every form --------------------------------------------------------------


def forms(mesh):
    return [
        [Shard(0), R],
        (Shard(-2), R),
        {"x": Shard(0)},
        P("x"),
        P("x", None),
        NamedSharding(mesh, P("x")),
        sk.Layout(mesh, P("x")),
    ]


def test_every_form_of_placements(mesh_for, axis_types):
    mesh = mesh_for({"x": 2, "y": 4}, axis_types)
    expected = plan([Shard(0), R], {"y": Shard(1)}, mesh)
    for given in forms(mesh):
        assert lines(plan(given, P(None, "y"), mesh)) == lines(expected)
        back = plan(P(None, "y"), given, mesh)
        assert back.destination.dim_axes() == {0: ("x",)}
        assert back.steps == plan(P(None, "y"), P("x"), mesh).steps


def test_the_mesh_may_come_with_the_source(mesh_for):
    mesh = mesh_for({"x": 2, "y": 4})
    for given in (NamedSharding(mesh, P("x")), sk.Layout(mesh, P("x"))):
        found = sk.plan_reshard(SHAPE, np.float32, given, [R, R])
        assert lines(found) == [("all_gather", ("x",), 256)]
        assert found.source.mesh == found.destination.mesh == mesh


def test_ambient_mesh(mesh_for, axis_types):
    with jax.set_mesh(mesh_for({"x": 4}, axis_types)):
        assert lines(sk.plan_reshard(SHAPE, np.float32, [Shard(0)], [R])) == [("all_gather", ("x",), 384)]


def test_no_mesh():
    with refuses("plan_reshard found no mesh"):
        sk.plan_reshard(SHAPE, np.float32, [Shard(0)], [R])


def test_devices_do_not_matter(mesh_for):
    """The same steps on Auto, Explicit and abstract meshes."""
    meshes = [abstract(2, 4), mesh_for({"x": 2, "y": 4}), mesh_for({"x": 2, "y": 4}, "explicit")]
    for src, dst in [(P("x", "y"), P("y", "x")), ([Partial(), Shard(0)], [R, Shard(1)])]:
        found = [plan(src, dst, mesh) for mesh in meshes]
        assert found[0].steps == found[1].steps == found[2].steps
        assert str(found[0]) == str(found[1]) == str(found[2])


def test_more_axes_than_devices_here():
    found = plan([Shard(0), R], [R, Shard(0)], abstract(64, 32), (4096, 8))
    assert found.bytes_per_device > 0


def test_plans_are_cached():
    mesh = abstract(2, 4)
    one = sk.plan_reshard(SHAPE, np.float32, [Shard(0), R], P(None, "x"), mesh)
    assert sk.plan_reshard(list(SHAPE), "float32", [Shard(0), R], P(None, "x"), mesh) is one
    assert sk.plan_reshard(SHAPE, jnp.float32, [Shard(0), R], P(None, "x"), abstract(2, 4)) is one
    assert sk.plan_reshard(SHAPE, np.float64, [Shard(0), R], P(None, "x"), mesh) is not one


# --- meshes over the same devices -------------------------------------------------------------------


@pytest.mark.parametrize("concrete", [False, True])
@pytest.mark.parametrize(
    ("here", "there", "src", "dst", "steps"),
    [
        ((8,), (2, 4), [Shard(0)], [Shard(0), Shard(0)], []),
        ((8,), (2, 4), [Shard(1)], [Shard(1), Shard(1)], []),
        ((8,), (2, 4), [Partial()], [Partial(), Partial()], []),
        ((2, 4), (4, 2), [Shard(0), Shard(0)], [Shard(0), Shard(0)], []),
        ((2, 4), (4, 2), [R, R], [R, R], []),
        ((2, 4), (4, 2), [Shard(0), R], [Shard(0), R], ["slice"]),
        ((4, 2), (2, 4), [Shard(0), R], [Shard(0), R], ["all_gather"]),
        ((8,), (2, 4), [Shard(0)], [Shard(0), Shard(1)], ["all_to_all"]),
        ((2, 4), (8,), [Shard(0), Partial()], [Shard(0)], ["psum_scatter"]),
        ((2, 4), (2, 2, 2), [Shard(0), Shard(1)], [Shard(0), Shard(1), Shard(1)], []),
        ((2, 1, 4), (8,), [Shard(0), R, Shard(0)], [Shard(0)], []),
    ],
    ids=str,
)
def test_meshes_of_other_shape(mesh_for, concrete, here, there, src, dst, steps):
    ends = [abstract(*here, names="xyz"), abstract(*there, names="abc")]
    if concrete:
        ends = [mesh_for(dict(mesh.shape)) for mesh in ends]
    found = plan(src, dst, ends[0], dst_mesh=ends[1])
    assert [step.kind for step in found.steps] == steps
    if not {"slice", *steps} - {"slice"}:
        assert found.bytes_per_device == 0


def test_names_alone_cost_nothing():
    assert (
        plan([Shard(0), Shard(1)], [Shard(0), Shard(1)], abstract(2, 4), dst_mesh=abstract(2, 4, names="ab")).steps
        == ()
    )


def test_one_mesh_without_devices(mesh_for):
    """It's taken to have the devices of the other."""
    mesh = mesh_for({"a": 4, "b": 2})
    found = plan([Shard(0), Shard(0)], [Shard(0), Shard(0)], abstract(2, 4), dst_mesh=mesh)
    assert found.steps == ()
    assert "other devices" not in str(found)


# --- what it refuses ----------------------------------------------------------------------------------

BAD = [
    ([Shard(2)], [R], ValueError, "Shard(2) on mesh axis 'x': the array has 2 dims, so dim must lie in [-2, 1]"),
    ([R], [Shard(-3)], ValueError, "Shard(-3) on mesh axis 'x': the array has 2 dims, so dim must lie in [-2, 1]"),
    (P(None, None, "x"), [R], ValueError, "speaks of 3 dims, but the array has 2; leave the last ones out"),
    ({"q": Shard(0)}, [R], ValueError, "name mesh axes ['q'], but the mesh has ('x',); use those names"),
    ([R], P("q"), ValueError, "name mesh axes ['q'], but the mesh has ('x',); use those names"),
    ([R, R], [R], ValueError, "got 2 placements [Replicate(), Replicate()] for a mesh with 1 axes ('x',)"),
    ("x", [R], TypeError, "placements must be a sequence in mesh-axis order"),
    ([0], [R], TypeError, "0 is no placement; use Shard(dim), Replicate() or Partial(reduce)"),
]


@pytest.mark.parametrize(("src", "dst", "kind", "message"), BAD, ids=str)
def test_bad_placements(src, dst, kind, message):
    with refuses(message, kind):
        plan(src, dst, abstract(4))


@pytest.mark.parametrize("reverse", [False, True])
def test_two_kinds_on_one_array(reverse):
    ends = [[Partial(), Partial("max")], [R, R]]
    with refuses("wait for different reductions, {'x': 'sum', 'y': 'max'}, and in which order they apply would change"):
        plan(*ends[:: -1 if reverse else 1], abstract(2, 4))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("mean", np.int32, "Partial('mean') of dtype int32 isn't defined; this dtype can wait for ['sum', 'max', "),
        ("mean", np.int32, 'an integer mean isn\'t exact: cast to float first, or use Partial("sum")'),
        ("sum", np.bool_, "Partial('sum') of dtype bool isn't defined; this dtype can wait for ['max', 'min', "),
        ("sum", np.bool_, 'use Partial("any"), or cast to an integer to count'),
        ("max", np.complex64, "complex numbers have no order"),
        ("any", np.float32, "Partial('any') of dtype float32 isn't defined"),
    ],
)
def test_dtypes_without_the_reduction(kind, dtype, message, reverse):
    ends = [[Partial(kind)], [R]]
    with refuses(message, TypeError):
        plan(*ends[:: -1 if reverse else 1], abstract(4), dtype=dtype)


def test_a_sharding_of_another_mesh(mesh_for):
    with refuses("the sharding lives on mesh {'x': 8}, not on the given mesh {'x': 4}"):
        plan(NamedSharding(mesh_for({"x": 8}), P("x")), [R], mesh_for({"x": 4}))
