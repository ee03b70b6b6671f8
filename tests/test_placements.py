"""Placements in all their forms, and their way to PartitionSpec and back."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._compat import unreduced_kinds
from shardkit.placements import REDUCE_KINDS, layout_of

pytestmark = pytest.mark.smoke

NAMES = ("dp", "sp", "tp")
MESH = AbstractMesh((2, 4, 1), NAMES, axis_types=(AxisType.Explicit,) * 3)
R = sk.Replicate()


def refuses(message, kind=ValueError):
    return pytest.raises(kind, match=re.escape(message))


# --- forms ----------------------------------------------------------------------------------------

FORMS = [
    # sequence, mapping, spec
    ([R, R, R], {}, P()),
    ([sk.Shard(0), R, R], {"dp": sk.Shard(0)}, P("dp")),
    ([R, sk.Shard(2), R], {"sp": sk.Shard(2)}, P(None, None, "sp")),
    ([sk.Shard(1), sk.Shard(0), R], {"sp": sk.Shard(0), "dp": sk.Shard(1)}, P("sp", "dp")),
    ([sk.Shard(0), sk.Shard(0), R], {"sp": sk.Shard(0), "dp": sk.Shard(0)}, P(("dp", "sp"))),
    ([sk.Shard(0), R, sk.Shard(0)], {"tp": sk.Shard(0), "dp": sk.Shard(0)}, P(("dp", "tp"))),
    ([sk.Partial(), sk.Shard(0), R], {"dp": sk.Partial("sum"), "sp": sk.Shard(0)}, P("sp", unreduced={"dp"})),
    ([sk.Partial(), sk.Partial(), R], {"dp": sk.Partial(), "sp": sk.Partial()}, P(unreduced={"dp", "sp"})),
]


@pytest.mark.parametrize(("sequence", "mapping", "spec"), FORMS)
def test_every_form_says_the_same(sequence, mapping, spec):
    for form in (sequence, tuple(sequence), mapping, spec, NamedSharding(MESH, spec), sk.Layout(MESH, mapping)):
        layout = sk.Layout(MESH, form)
        assert layout.placements == tuple(sequence)
        assert layout.spec == spec
        assert layout.sharding == NamedSharding(MESH, spec)
        assert sk.to_partition_spec(form, MESH) == spec
        assert sk.to_named_sharding(form, MESH) == NamedSharding(MESH, spec)
        assert sk.placements(layout) == sk.placements(layout.sharding) == tuple(sequence)


def test_a_spec_may_put_the_later_axis_first():
    layout = sk.Layout(MESH, P(None, ("sp", "dp")))
    assert layout.placements == (sk.Shard(1), sk.Shard(1), R)
    assert layout.dim_axes() == {1: ("sp", "dp")}
    assert layout.spec == P(None, ("sp", "dp")) != sk.Layout(MESH, layout.placements).spec
    # The order is part of the layout, whichever way it's handed on.
    assert sk.Layout(MESH, layout).spec == sk.to_partition_spec(layout.sharding, MESH) == layout.spec
    assert layout != sk.Layout(MESH, P(None, ("dp", "sp")))


@pytest.mark.parametrize(
    ("placements", "ndim", "spec"),
    [
        ({"dp": sk.Shard(-1)}, 1, P("dp")),
        ({"dp": sk.Shard(-1)}, 3, P(None, None, "dp")),
        ({"dp": sk.Shard(-3), "sp": sk.Shard(-1)}, 3, P("dp", None, "sp")),
        ({"dp": sk.Shard(1), "sp": sk.Shard(-1)}, 2, P(None, ("dp", "sp"))),
        ({"dp": sk.Shard(0)}, 3, P("dp", None, None)),
        (P("dp"), 2, P("dp", None)),
        ({}, 0, P()),
    ],
)
def test_ndim_resolves_negative_dims_and_fills_the_spec(placements, ndim, spec):
    assert sk.to_partition_spec(placements, MESH, ndim) == spec


def test_placements_are_values():
    assert sk.Shard(np.int64(1)) == sk.Shard(1)
    assert isinstance(sk.Shard(np.int64(1)).dim, int)
    assert sk.Partial() == sk.Partial("sum") != sk.Partial("mean")
    assert len({sk.Shard(0), sk.Shard(0), sk.Shard(1), R, sk.Replicate(), sk.Partial("max")}) == 4
    assert hash(sk.Layout(MESH, [sk.Shard(0), R, R])) == hash(sk.Layout(MESH, {"dp": sk.Shard(0)}))


@pytest.mark.parametrize("reduce", REDUCE_KINDS)
def test_partial_axes(reduce):
    layout = sk.Layout(MESH, {"tp": sk.Partial(reduce), "sp": sk.Shard(0)})
    assert layout.partial_axes == ("tp",)
    if reduce in unreduced_kinds():
        assert sk.Layout(MESH, layout.spec).placements == layout.placements
    else:
        with refuses(f"not ['{reduce}']; reduce first"):
            _ = layout.spec


def test_two_kinds_of_partial_fit_in_no_spec():
    with refuses("a PartitionSpec can only say one Partial"):
        _ = sk.Layout(MESH, {"dp": sk.Partial("sum"), "sp": sk.Partial("max")}).spec


# --- PartitionSpec -> Layout -> PartitionSpec ------------------------------------------------------


@st.composite
def specs(draw):
    """Any spec on MESH: each axis cuts a dim, is unreduced, is reduced, or is absent; any order on a dim."""
    ndim = draw(st.integers(0, 4))
    jobs = ["nothing", "unreduced", "reduced", *range(ndim)]
    entries = [[] for _ in range(ndim)]
    extra = {}
    for name in draw(st.permutations(NAMES)):
        job = draw(st.sampled_from(jobs))
        if isinstance(job, int):
            entries[job].append(name)
        elif job != "nothing":
            extra.setdefault(job, set()).add(name)
    return P(*[tuple(e) if len(e) > 1 else (e[0] if e else None) for e in entries], **extra)


@given(specs())
def test_the_round_trip_loses_nothing(spec):
    layout = sk.Layout(MESH, spec)
    assert layout.spec == spec
    assert sk.Layout(MESH, layout.sharding).spec == spec
    ndim = len(getattr(spec, "partitions", spec))
    assert layout.spec_for(ndim) == spec  # trailing None included
    for dim, axes in layout.dim_axes().items():
        assert [layout.placements[NAMES.index(a)] for a in axes] == [sk.Shard(dim)] * len(axes)


# --- local shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "shape", "local"),
    [
        ({}, (5, 7), (5, 7)),
        ({"dp": sk.Shard(0)}, (6, 7), (3, 7)),
        ({"dp": sk.Shard(-1), "sp": sk.Shard(0)}, (8, 6), (2, 3)),
        ({"dp": sk.Shard(1), "sp": sk.Shard(1)}, (3, 16), (3, 2)),
        ({"dp": sk.Partial(), "tp": sk.Shard(0)}, (5,), (5,)),
    ],
)
def test_local_shape(placements, shape, local):
    assert sk.Layout(MESH, placements).local_shape(shape) == local


@pytest.mark.parametrize(("size", "block"), [(1, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
def test_local_shape_of_a_padded_array(size, block):
    assert sk.Layout(MESH, {"sp": sk.Shard(0)}).local_shape((size, 3), uneven="pad") == (block, 3)


@pytest.mark.parametrize("spec", [P("dp", "sp"), P(("sp", "dp")), P(None, ("dp", "sp")), P()])
def test_local_shape_is_jax_own(mesh_for, spec):
    mesh = mesh_for({"dp": 2, "sp": 4})
    assert sk.Layout(mesh, spec).local_shape((16, 24)) == NamedSharding(mesh, spec).shard_shape((16, 24))


# --- reading the placements of arrays -------------------------------------------------------------


def test_placements_of_arrays(mesh_for, axis_types):
    mesh = mesh_for({"dp": 2, "sp": 4}, axis_types)
    x = jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P(None, ("sp", "dp"))))
    assert sk.placements(x) == (sk.Shard(1), sk.Shard(1))
    assert layout_of(x).spec == P(None, ("sp", "dp"))
    padded = sk.shard_tensor(np.zeros((5, 2)), {"sp": sk.Shard(0)}, mesh, uneven="pad")
    assert sk.placements(padded) == (R, sk.Shard(0))


def test_placements_under_jit_are_read_from_explicit_types(mesh_for):
    mesh = mesh_for({"dp": 2, "sp": 4}, "explicit")
    seen = []
    x = jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P("sp", "dp")))
    jax.jit(lambda v: seen.append(sk.placements(v.T)) or v)(x)
    assert seen == [(sk.Shard(0), sk.Shard(1))]


def test_placements_under_jit_on_auto_axes_are_the_compilers(mesh_for):
    x = jax.device_put(np.zeros(8), NamedSharding(mesh_for({"dp": 2}), P("dp")))
    with refuses("the compiler's to choose and can't be read; ask outside jit, or use Explicit axes"):
        jax.jit(lambda v: sk.placements(v) and v)(x)


def test_an_array_without_a_mesh_has_no_placements():
    with refuses("carries no NamedSharding, so no mesh axis can be named; place it with sk.shard_tensor"):
        sk.placements(jnp.ones(3))


# --- bad input ------------------------------------------------------------------------------------

BAD = [
    ({"xx": sk.Shard(0)}, ValueError, "name mesh axes ['xx'], but the mesh has ('dp', 'sp', 'tp'); use those names"),
    (P("dp", "xx"), ValueError, "name mesh axes ['xx']"),
    (P(unreduced={"xx"}), ValueError, "name mesh axes ['xx']"),
    ([sk.Shard(0)], ValueError, "got 1 placements [Shard(dim=0)] for a mesh with 3 axes"),
    ([R] * 4, ValueError, "give one an axis in mesh order, or a mapping by axis name (absent axes replicate)"),
    (sk.Shard(0), TypeError, "placements must be a sequence in mesh-axis order, a mapping by axis name"),
    ("dp", TypeError, "got str: 'dp'"),
    (None, TypeError, "got NoneType: None"),
    ({"dp": 0}, TypeError, "0 is no placement; use Shard(dim), Replicate() or Partial(reduce)"),
    ({"dp": None}, TypeError, "None is no placement"),
    ([R, R, "sp"], TypeError, "'sp' is no placement"),
    (P("dp", "dp"), ValueError, "uses mesh axis 'dp' twice; an axis can cut one dim only"),
    (P(P.UNCONSTRAINED), ValueError, "leaves dim 0 UNCONSTRAINED; a layout must say where it lives"),
]


@pytest.mark.parametrize(("placements", "kind", "message"), BAD)
def test_bad_placements(placements, kind, message):
    with refuses(message, kind):
        sk.Layout(MESH, placements)


@pytest.mark.parametrize("dim", [True, 0.0, "0", None])
def test_bad_dims(dim):
    with refuses(f"Shard(dim) takes an integer array dim, got {dim!r}", TypeError):
        sk.Shard(dim)


@pytest.mark.parametrize("reduce", ["avg", "SUM", None, ""])
def test_bad_reductions(reduce):
    with refuses(f"Partial(reduce={reduce!r}): reduce must be one of ('sum', 'mean', "):
        sk.Partial(reduce)


@pytest.mark.parametrize(
    ("placements", "ndim", "message"),
    [
        ({"dp": sk.Shard(2)}, 2, "Shard(2) on mesh axis 'dp': the array has 2 dims, so dim must lie in [-2, 1]"),
        ({"sp": sk.Shard(-3)}, 2, "Shard(-3) on mesh axis 'sp': the array has 2 dims, so dim must lie in [-2, 1]"),
        ({"dp": sk.Shard(0)}, 0, "the array has 0 dims, so it can only be replicated"),
        ({"dp": sk.Shard(-1)}, None, "Shard(-1) counts from the last dim; say how many there are (ndim=)"),
        (P("dp", None, None), 2, "speaks of 3 dims, but the array has 2; leave the last ones out"),
    ],
)
def test_dims_out_of_range(placements, ndim, message):
    with refuses(message):
        sk.to_partition_spec(placements, MESH, ndim)


def test_a_layout_of_another_mesh():
    other = AbstractMesh((8, 1, 1), NAMES)
    with refuses("layout on mesh {'dp': 2, 'sp': 4, 'tp': 1} used on mesh {'dp': 8, 'sp': 1, 'tp': 1}"):
        sk.Layout(other, sk.Layout(MESH, P("dp")))
    with refuses("the sharding lives on mesh {'dp': 2, 'sp': 4, 'tp': 1}, not on the given mesh"):
        sk.to_partition_spec(NamedSharding(MESH, P("dp")), other)


def test_sizes_that_do_not_divide():
    layout = sk.Layout(MESH, P(None, ("sp", "dp")))
    with refuses("dim 1 of shape (3, 12) has 12 elements, which mesh axis 'sp' x 'dp' of size 8 does not divide"):
        layout.local_shape((3, 12))
    with refuses('uneven=\'round\' is unknown; use "error" or "pad"'):
        layout.local_shape((3, 12), uneven="round")


def test_unreduced_needs_explicit_axes(mesh_for):
    layout = sk.Layout(mesh_for({"dp": 2}), [sk.Partial()])
    assert layout.spec == P(unreduced={"dp"})
    with refuses("JAX can say unreduced only on Explicit mesh axes"):
        _ = layout.sharding


# --- other layouts from one -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shape", "padded"),
    [
        (P("sp"), (5, 3), (8, 3)),
        (P(), (5, 3), (5, 3)),
        (P("tp", "dp"), (5, 3), (5, 4)),
        (P(("sp", "dp")), (8,), (8,)),
        (P(("sp", "dp")), (9,), (16,)),
        (P(), (), ()),
    ],
)
def test_padded_shape(spec, shape, padded):
    assert sk.Layout(MESH, spec).padded_shape(shape) == padded


def test_the_axes_that_cut():
    layout = sk.Layout(MESH, {"sp": sk.Shard(1), "dp": sk.Shard(0), "tp": sk.Partial()})
    assert layout.shard_axes == tuple(n for n in MESH.axis_names if n in ("dp", "sp"))
    assert sk.Layout(MESH, {}).shard_axes == ()


def test_but():
    """Other placements on some axes; the order of the others on a dim stays."""
    layout = sk.Layout(MESH, P(("sp", "dp"), None))
    assert layout.but({}).spec == P(("sp", "dp"), None)
    assert layout.but({"tp": sk.Shard(1)}).spec == P(("sp", "dp"), "tp")
    assert layout.but({"tp": sk.Shard(0)}).spec == P(("sp", "dp", "tp"), None)
    assert layout.but({"sp": R}).spec == P("dp", None)
    later = sk.Layout(layout.mesh, P("tp", None))
    assert later.but({"dp": sk.Shard(0)}).spec == P(("tp", "dp"), None)  # though mesh order is another
    assert later.but({"dp": sk.Shard(0), "tp": R}).spec == P("dp", None)
    assert layout.but({"dp": sk.Shard(1)}).spec == P("sp", "dp")
    assert layout.but({"sp": sk.Partial("max")}).partial_axes == ("sp",)
    with refuses("name mesh axes ['pp']"):
        layout.but({"pp": R})


def test_reduce():
    assert sk.Layout(MESH, {"dp": sk.Partial("max"), "tp": sk.Partial("max")}).reduce == "max"
    assert sk.Layout(MESH, P("dp")).reduce is None
    with refuses("wait for different reductions, {'dp': 'max', 'sp': 'sum'}"):
        _ = sk.Layout(MESH, {"dp": sk.Partial("max"), "sp": sk.Partial()}).reduce


def test_without_partial():
    layout = sk.Layout(MESH, [sk.Partial(), sk.Shard(0), R]).without_partial()
    assert layout.placements == (R, sk.Shard(0), R)


def test_stack_spec():
    layout = sk.Layout(MESH, {"tp": sk.Partial(), "dp": sk.Partial(), "sp": sk.Shard(-1)})
    assert layout.stack_spec(2) == P("dp", "tp", None, "sp")
    assert layout.resolved(2).placements == (sk.Partial(), sk.Shard(1), sk.Partial())
