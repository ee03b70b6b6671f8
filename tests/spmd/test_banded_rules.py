"""Products with known matrices of few entries a column: images resized along cut dims."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk

rng = np.random.default_rng(0)
S = sk.Shard


def check(fun, x, mesh, place):
    """Values of one device; the program, and what the compiled one has."""
    partitioned = sk.partition(fun, place, mesh=mesh)
    for got, want in zip(jax.tree.leaves(partitioned(x)), jax.tree.leaves(fun(x)), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-9, atol=1e-9)
    report = sk.collectives(partitioned, x)
    program = partitioned.program(x)
    assert sum(c.bytes for c in report) == program.bytes_per_device
    return program, {c.kind for c in report}


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        ((16, 32), "linear"),
        pytest.param((32, 16), "linear", marks=pytest.mark.slow),
        ((32, 24), "cubic"),
        pytest.param((16, 20), "lanczos3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.not_smoke
def test_only_edges_travel(mesh_for, sizes, method):
    before, after = sizes
    x = rng.normal(size=(2, before, 5))
    resize = lambda x: jax.image.resize(x, (2, after, 7), method)  # noqa: E731
    program, kinds = check(resize, x, mesh_for({"sp": 4}), {"sp": S(1)})
    assert kinds == {"collective_permute"}
    assert program.out_placements == ((S(1),),)


@pytest.mark.not_smoke
def test_backward_and_twice_sharded(mesh_for):
    x = rng.normal(size=(2, 16, 24))
    loss = lambda x: (jax.image.resize(x, (2, 32, 12), "linear") ** 2).sum()  # noqa: E731
    _, kinds = check(jax.value_and_grad(loss), x, mesh_for({"h": 2, "w": 4}), {"h": S(1), "w": S(2)})
    assert kinds == {"collective_permute", "all_reduce"}  # the loss itself is a sum


@pytest.mark.not_smoke
def test_uneven(mesh_for):
    mesh = mesh_for({"sp": 4})
    x = rng.normal(size=(2, 13, 3))
    fun = lambda x: jax.image.resize(x, (2, 26, 3), "linear")  # noqa: E731
    out = sk.partition(fun, {"sp": S(1)}, mesh=mesh)(sk.shard_tensor(x, {"sp": S(1)}, mesh, uneven="pad"))
    np.testing.assert_allclose(sk.unshard(out), fun(x), rtol=1e-9, atol=1e-9)


def test_a_difference_along_a_cut_dim(mesh_for):
    def fun(x):
        i = jnp.arange(16)
        matrix = jnp.where(i[:, None] == i, -2.0, jnp.where(abs(i[:, None] - i) == 1, 1.0, 0.0))
        return jnp.einsum("xy,by->bx", matrix, x)

    _, kinds = check(fun, rng.normal(size=(3, 16)), mesh_for({"sp": 4}), {"sp": S(1)})
    assert kinds == {"collective_permute"}


def test_a_full_matrix_is_a_sum(mesh_for):
    def fun(x):
        i = jnp.arange(16.0)
        return jnp.cos(i[:, None] * i) @ x

    _, kinds = check(fun, rng.normal(size=(16, 3)), mesh_for({"sp": 4}), {"sp": S(0)})
    assert "collective_permute" not in kinds
