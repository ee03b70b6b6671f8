"""`collectives` on programs compiled here, for 8 simulated devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.inspect import Collective, CollectiveReport, collectives
from shardkit.inspect.collectives import read_collectives

NAMES = ("dp", "sp")
SIZES = {"dp": 2, "sp": 4}


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    kind = AxisType.Auto if request.param == "auto" else AxisType.Explicit
    return jax.make_mesh((2, 4), NAMES, axis_types=(kind, kind))


@pytest.fixture
def auto_mesh():
    return jax.make_mesh((2, 4), NAMES, axis_types=(AxisType.Auto,) * 2)


def array(mesh, *spec, shape=(16, 16)):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


GRID = P("dp", "sp")


def mapped(mesh, body, in_spec=GRID, out_spec=GRID):
    return jax.shard_map(body, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)


def ring(axis):
    return [(i, (i + 1) % SIZES[axis]) for i in range(SIZES[axis])]


def size(axes):
    return int(np.prod([SIZES[axis] for axis in axes]))


# kind -> (body, bytes received from the bytes of the block and the size of the group)
BODIES = {
    "all_reduce": (lambda x, a: lax.psum(x, a), lambda block, n: 2 * block * (n - 1) // n),
    "all_gather": (lambda x, a: lax.all_gather(x, a, tiled=True), lambda block, n: block * (n - 1)),
    "reduce_scatter": (
        lambda x, a: lax.psum_scatter(x, a, scatter_dimension=0, tiled=True),
        lambda block, n: block // n * (n - 1),
    ),
    "all_to_all": (
        lambda x, a: lax.all_to_all(x, a, 0, 1, tiled=True),
        lambda block, n: block * (n - 1) // n,
    ),
}


@pytest.mark.parametrize("axes", [("dp",), ("sp",), ("dp", "sp")])
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.every(2)
def test_kinds_over_axes(mesh, kind, axes):
    body, received = BODIES[kind]
    x = array(mesh, "dp", "sp", shape=(64, 64))
    report = collectives(mapped(mesh, lambda x: body(x, axes)), x)
    (entry,) = report
    assert (entry.kind, entry.axes, entry.group_size) == (kind, axes, size(axes))
    assert entry.bytes == received(64 * 64 * 4 // 8, size(axes))
    assert (entry.in_loop, entry.trip_count) == (False, 1)
    assert entry.reduction == ("add" if kind in ("all_reduce", "reduce_scatter") else None)
    assert entry.source.startswith("test_collectives.py:")
    assert report.mesh_axes == (("dp", 2), ("sp", 4))


@pytest.mark.parametrize("axis", NAMES)
def test_permutes(mesh, axis):
    (entry,) = collectives(mapped(mesh, lambda x: lax.ppermute(x, axis, ring(axis))), array(mesh, "dp", "sp"))
    assert (entry.kind, entry.axes, entry.group_size, entry.bytes) == (
        "collective_permute",
        (axis,),
        SIZES[axis],
        8 * 4 * 4,
    )


def scan(step, x):
    return lax.scan(lambda c, _: (step(c), None), x, None, length=5)[0]


def fori(step, x):
    return lax.fori_loop(0, 5, lambda _, c: step(c), x)


def while_loop(step, x):
    return lax.while_loop(lambda c: jnp.sum(c) < 100, step, x)


@pytest.mark.parametrize(("loop", "trips"), [(scan, 5), (fori, 5), (while_loop, None)])
def test_in_loops(auto_mesh, loop, trips):
    def body(x):
        x = loop(lambda c: lax.ppermute(c, "sp", ring("sp")) + 1, x)
        return lax.pmax(x, "dp")

    report = collectives(mapped(auto_mesh, body), array(auto_mesh, "dp", "sp"))
    permute, reduce = sorted(report, key=lambda e: e.kind, reverse=True)
    assert (permute.in_loop, permute.trip_count) == (True, trips)
    assert (reduce.in_loop, reduce.trip_count, reduce.reduction) == (False, 1, "max")
    assert report.count(in_loop=True) == report.count("collective_permute", axis="sp") == 1
    assert report.bytes(in_loop=False) == reduce.bytes


def test_nested_loops_multiply(auto_mesh):
    def body(x):
        return scan(lambda c: fori(lambda d: lax.ppermute(d, "sp", ring("sp")) * 2, c), x)

    (entry,) = collectives(mapped(auto_mesh, body), array(auto_mesh, "dp", "sp"))
    assert entry.trip_count == 25


def test_a_collective_in_the_condition_is_in_the_loop(auto_mesh):
    def body(x):
        return lax.while_loop(lambda c: lax.psum(jnp.sum(c), "sp") < 100, lambda c: c + 1, x)

    (entry,) = collectives(mapped(auto_mesh, body), array(auto_mesh, "dp", "sp"))
    assert (entry.kind, entry.axes, entry.in_loop) == ("all_reduce", ("sp",), True)


def test_the_partitioner_s_own(auto_mesh):
    def f(x, w):
        return lax.with_sharding_constraint(x @ w, NamedSharding(auto_mesh, P("dp")))

    report = collectives(f, array(auto_mesh, "dp", "sp"), array(auto_mesh, "sp"))
    assert report.by_kind() == {"all_reduce": 1}
    assert report.count("all_reduce", axis=("sp",)) == 1
    report = collectives(
        lambda x: lax.with_sharding_constraint(x, NamedSharding(auto_mesh, P())), array(auto_mesh, "dp", "sp")
    )
    assert set(report.by_kind()) == {"all_gather"}
    assert {axis for entry in report for axis in entry.axes or ()} == set(NAMES)


def test_the_user_s_line_and_name(auto_mesh):
    def body(x):
        with jax.named_scope("halo"):
            return lax.psum(x, "sp")  # this line

    (entry,) = collectives(mapped(auto_mesh, body), array(auto_mesh, "dp", "sp"))
    line = body.__code__.co_firstlineno + 2
    assert entry.source == f"test_collectives.py:{line}"
    assert entry.op_name.endswith("halo/psum")


def over_sp(mesh):
    return mapped(mesh, lambda x: lax.psum(x, "sp"))


def test_forms_of_programs(auto_mesh):
    f, x = over_sp(auto_mesh), array(auto_mesh, "dp", "sp")
    jitted = jax.jit(f)
    forms = [
        collectives(f, x),
        collectives(jitted, x),
        collectives(jitted.trace(x)),
        collectives(jitted.lower(x)),
        collectives(jitted.lower(x).compile()),
        collectives(lambda tree, *, y: f(tree["x"]) + y, {"x": x}, y=x),
        collectives(f, jax.device_put(np.ones((16, 16), np.float32), x.sharding)),
    ]
    assert {report.count("all_reduce", axis="sp") for report in forms} == {1}
    assert {len(report) for report in forms} == {1}


def test_mesh_from_the_shard_map_alone(auto_mesh):
    # The argument has no sharding at all; the mesh stands only in the shard_map.
    (entry,) = collectives(over_sp(auto_mesh), np.ones((16, 16), np.float32))
    assert entry.axes == ("sp",)


def test_mesh_from_the_context(auto_mesh):
    with jax.set_mesh(auto_mesh):
        f = jax.shard_map(lambda x: lax.psum(x, "sp"), in_specs=P("dp", "sp"), out_specs=P("dp"))
        (entry,) = collectives(f, np.ones((16, 16), np.float32))
    assert entry.axes == ("sp",)


def test_a_given_mesh_renames_the_axes(auto_mesh):
    other = Mesh(auto_mesh.devices.reshape(2, 2, 2), ("a", "b", "c"))
    x = array(auto_mesh, "dp", "sp")
    (entry,) = collectives(over_sp(auto_mesh), x, mesh=other)
    assert entry.axes == ("b", "c")
    (entry,) = collectives(over_sp(auto_mesh), x, mesh=other.abstract_mesh)
    assert entry.axes == ("b", "c")


def test_a_mesh_of_permuted_devices():
    mesh = Mesh(np.array(jax.devices())[[3, 1, 4, 0, 5, 7, 2, 6]].reshape(2, 4), NAMES)
    for axis in NAMES:
        (entry,) = collectives(mapped(mesh, functools.partial(lax.psum, axis_name=axis)), array(mesh, "dp", "sp"))
        assert entry.axes == (axis,)


def test_a_three_dimensional_mesh():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    f = mapped(mesh, lambda x: lax.psum(lax.ppermute(x, "b", [(0, 1)]), ("a", "c")), P("a", "b"), P("a", "b"))
    found = {entry.kind: entry.axes for entry in collectives(f, array(mesh, "a", "b"))}
    assert found == {"collective_permute": ("b",), "all_reduce": ("a", "c")}


def test_axes_of_size_one_exchange_nothing():
    mesh = jax.make_mesh((1, 4), NAMES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    f = mapped(mesh, lambda x: lax.psum(lax.ppermute(x, "dp", [(0, 0)]), "dp"))
    assert len(collectives(f, array(mesh, "dp", "sp"))) == 0


def test_one_device():
    report = collectives(lambda x: x @ x, np.ones((4, 4)))
    assert (len(report), report.mesh_axes) == (0, None)
    assert str(report) == "No collectives: every device works alone."


def test_a_mesh_of_another_size(auto_mesh):
    small = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"has 2 devices, but the program was compiled for 8"):
        collectives(over_sp(auto_mesh), array(auto_mesh, "dp", "sp"), mesh=small)


@pytest.mark.parametrize(("arguments", "message"), [((3,), "got int"), (("f", 1), "got str")])
def test_what_is_no_program(arguments, message):
    with pytest.raises(TypeError, match=message):
        collectives(*arguments)


def test_mesh_of_another_type(auto_mesh):
    with pytest.raises(TypeError, match=r"mesh must be .* got tuple"):
        collectives(over_sp(auto_mesh), array(auto_mesh, "dp", "sp"), mesh=("dp", "sp"))  # pyright: ignore[reportArgumentType]


def test_arguments_for_a_finished_program(auto_mesh):
    x = array(auto_mesh, "dp", "sp")
    lowered = jax.jit(over_sp(auto_mesh)).lower(x)
    with pytest.raises(TypeError, match="a lowered program, which was made for its own"):
        collectives(lowered, x)
    with pytest.raises(TypeError, match="a compiled program, which was made for its own"):
        collectives(lowered.compile(), x)


def test_text_at_hand(auto_mesh):
    x = array(auto_mesh, "dp", "sp")
    text = jax.jit(over_sp(auto_mesh)).lower(x).compile().as_text()
    assert text is not None
    assert read_collectives(text, auto_mesh) == collectives(over_sp(auto_mesh), x)
    assert isinstance(read_collectives(text), CollectiveReport)
    assert all(isinstance(entry, Collective) and entry.axes is None for entry in read_collectives(text))
