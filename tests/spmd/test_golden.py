"""The two-layer net of the design, and its variants: programs derived by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk

R, S, P = sk.Replicate(), sk.Shard, sk.Partial()
rng = np.random.default_rng(0)
X, W0, W1 = (rng.normal(size=s).astype("float32") for s in [(4, 16), (16, 16), (16, 8)])
LABEL = rng.normal(size=(4, 8)).astype("float32")
relu = jax.nn.relu


def loss(x, w0, w1, label):
    hidden = relu(x) @ w0
    out = relu(hidden) @ w1
    return jnp.mean((relu(out) - label) ** 2)


def step(x, w0, w1, label):
    value, (gx, g0, g1) = jax.value_and_grad(loss, (0, 1, 2))(x, w0, w1, label)
    return value, gx, w0 - 0.1 * g0, w1 - 0.1 * g1


def step_of_weights(x, w0, w1, label):
    value, (g0, g1) = jax.value_and_grad(loss, (1, 2))(x, w0, w1, label)
    return value, w0 - 0.1 * g0, w1 - 0.1 * g1


def listed(program):
    """(shape, kinds of step, before, after, bytes) of every reshard that communicates."""
    return [
        (r.plan.shape, tuple(s.kind for s in r.steps), r.src, r.dst, r.bytes) for r in program.reshards if r.collectives
    ]


def check(fun, places, mesh):
    """Values of one device, bytes as planned; gives the program."""
    partitioned = sk.partition(fun, places, mesh=mesh)
    args = (X, W0, W1, LABEL)
    for got, want in zip(partitioned(*args), fun(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    program = partitioned.program(*args)
    report = sk.collectives(partitioned, *args)
    assert sum(c.bytes for c in report) == program.bytes_per_device
    assert len(report) <= program.collectives  # XLA puts some together
    return program


@pytest.fixture
def mp(mesh_for):
    return mesh_for({"mp": 2})


class TestColumnThenRow:
    places = ([R], [S(1)], [S(0)], [R])

    def test_exactly_two_reshards(self, mp):
        program = check(step, self.places, mp)
        assert len(program.reshards) == 2
        # The second product forward, the input's gradient backward.
        assert listed(program) == [
            ((4, 8), ("psum",), (P,), (R,), 128),
            ((4, 16), ("psum",), (P,), (R,), 256),
        ]
        assert program.out_placements == ((R,), (R,), (S(1),), (S(0),))

    def test_one_where_the_input_needs_no_gradient(self, mp):
        program = check(step_of_weights, self.places, mp)
        assert [(r.src, r.dst) for r in program.reshards] == [((P,), (R,))]

    def test_what_is_printed(self, mp):
        text = str(sk.partition(step, self.places, mesh=mp).program(X, W0, W1, LABEL))
        before, after = text.split("after:")
        assert "psum" not in before and after.count("psum(") == 2
        assert "384 bytes a device in 2 collectives, 2 reshards inserted" in before
        marked = [line for line in after.splitlines() if line.startswith("  *")]
        assert len(marked) == 2 and all("Partial by dot_general at test_golden.py" in line for line in marked)
        assert "float32[16,16]  [16,8]" in after  # a global and a local type
        assert "test_golden.py:" in before

    def test_on_one_device_nothing_is_inserted(self, mesh_for):
        program = check(step, self.places, mesh_for({"mp": 1}))
        assert program.reshards == () and program.bytes_per_device == 0


def test_column_then_column(mp):
    # The hidden activation is put together, and its gradient scattered again.
    program = check(step, ([R], [S(1)], [S(1)], [R]), mp)
    assert listed(program) == [
        ((4, 16), ("all_gather",), (S(1),), (R,), 128),
        ((4, 16), ("psum_scatter",), (P,), (S(1),), 128),
        ((4, 16), ("psum",), (P,), (R,), 256),
        ((), ("psum",), (P,), (R,), 4),
    ]
    assert program.out_placements[2:] == ((S(1),), (S(1),))


def test_row_then_row(mp):
    # The first product is scattered, for the second one wants it cut; its gradient must be whole for both matrices.
    program = check(step, ([R], [S(0)], [S(0)], [R]), mp)
    assert listed(program) == [
        ((4, 16), ("psum_scatter",), (P,), (S(1),), 128),
        ((4, 8), ("psum",), (P,), (R,), 128),
        ((4, 16), ("all_gather",), (S(1),), (R,), 128),
    ]
    assert program.out_placements[2:] == ((S(0),), (S(0),))


def test_data_parallel(mesh_for):
    program = check(step, ([S(0)], [R], [R], [S(0)]), mesh_for({"dp": 2}))
    assert sorted(listed(program)) == sorted(
        [
            ((16, 16), ("psum",), (P,), (R,), 1024),
            ((16, 8), ("psum",), (P,), (R,), 512),
            ((), ("psum",), (P,), (R,), 4),
        ]
    )
    assert program.out_placements == ((R,), (S(0),), (R,), (R,))


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_both(mesh_for, ambient, axis_types):
    mesh = mesh_for({"dp": 2, "mp": 2}, axis_types)
    with ambient(mesh):
        program = check(step, ({"dp": S(0)}, {"mp": S(1)}, {"mp": S(0)}, {"dp": S(0)}), mesh)
    assert sorted((shape, kinds, size) for shape, kinds, _, _, size in listed(program)) == sorted(
        [
            ((4, 8), ("psum",), 64),  # over mp: the second product of half of the examples
            ((4, 16), ("psum",), 128),  # over mp: the input's gradient
            ((16, 16), ("psum",), 512),  # over dp: the gradients of half a matrix
            ((16, 8), ("psum",), 256),
            ((), ("psum",), 4),
        ]
    )
    assert program.out_placements == ((R, R), (S(0), R), (R, S(1)), (R, S(0)))
