"""Decompositions, solves and Fourier transforms: cut by batch."""

import numpy as np
import pytest
from jax import lax

from tests.spmd.rule_cases import check, found, placed

SIZES = {"dp": 2, "tp": 4}
rng = np.random.default_rng(0)
A = rng.normal(size=(4, 2, 3, 3))
SYMMETRIC = A + A.swapaxes(-1, -2) + 6 * np.eye(3)
B = rng.normal(size=(4, 2, 3, 8))
CUT = placed("tp", "dp", None, None)

DECOMPOSITIONS = {
    "cholesky": lax.linalg.cholesky_p.bind,
    "qr": lambda a: lax.linalg.qr_p.bind(a, full_matrices=True, pivoting=False, use_magma=None),
    "svd": lambda a: lax.linalg.svd(a, compute_uv=False),
    "eigh": lambda a: tuple(lax.linalg.eigh(a, symmetrize_input=False)),
    "eig": lambda a: lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False),
    "lu": lax.linalg.lu,
    "schur": lax.linalg.schur,
    "hessenberg": lax.linalg.hessenberg,
}


@pytest.mark.parametrize("name", sorted(DECOMPOSITIONS))
def test_decompositions(name):
    fun = DECOMPOSITIONS[name]
    _, node, ways = found(fun, (SYMMETRIC,), [placed("dp", "tp", "tp", None)], SIZES)
    assert node.op.name == name
    assert all(w.operands[0].dims[2:] == ((), ()) for w in ways)
    ways = check(fun, (SYMMETRIC[:, 0],), [placed("tp", None, None)], {"tp": 4})
    assert len(ways) == 2 and all(r.dims[0] == ("tp",) for r in ways[0].results)


def test_what_iterates_is_not_padded():
    for name, uneven in (("eigh", False), ("cholesky", True)):
        _, _, ways = found(DECOMPOSITIONS[name], (SYMMETRIC[:3, 0],), [placed("tp", None, None)], SIZES)
        assert any(w.operands[0].dims[0] for w in ways) is uneven


def test_householder_product():
    ways = check(lax.linalg.householder_product, (A, B[..., 0]), [CUT, placed("tp", None, None)], SIZES)
    assert CUT in {w.results[0] for w in ways}


@pytest.mark.parametrize("left", [True, False])
def test_triangular_solve(left):
    def fun(a, b):
        return lax.linalg.triangular_solve(a, b, left_side=left, lower=True)

    a, b = SYMMETRIC[:, 0], B[:, 0, :, :5] if left else B[:, 0, :, :5].swapaxes(1, 2)
    cut = placed("dp", None, "tp") if left else placed("dp", "tp", None)
    ways = check(fun, (a, b), [placed("dp", None, None), cut], SIZES)
    assert any(w.operands == (placed("dp", None, None), cut) and w.results[0] == cut for w in ways)
    waits = placed(None, None, None, partial=("tp",))
    ways = check(fun, (a, b), [placed(None, None, None), waits], SIZES)
    assert waits in {w.results[0] for w in ways}


def test_tridiagonal_solve():
    low, main, high = (rng.normal(size=(2, 3)) + c for c in (0, 6, 0))
    low[:, 0] = high[:, -1] = 0
    cut = placed("dp", None, "tp")
    ways = check(
        lambda *a: lax.linalg.tridiagonal_solve(*a), (low, main, high, B[0]), [*[placed("dp", None)] * 3, cut], SIZES
    )
    assert cut in {w.results[0] for w in ways}


def test_fourier_transforms():
    def real(x):
        return lax.fft_p.bind(x, fft_type=lax.FftType.RFFT, fft_lengths=(4, 6))

    def back(x):
        return lax.fft_p.bind(x, fft_type=lax.FftType.IRFFT, fft_lengths=(10,))

    x = rng.normal(size=(4, 4, 6))
    assert placed("dp", None, None) in {w.results[0] for w in check(real, (x[:3],), [placed("dp", "tp", None)], SIZES)}
    waits = placed("dp", None, None, partial=("tp",))
    assert waits in {w.results[0] for w in check(real, (x,), [waits], SIZES)}
    cut = placed("dp", "tp", None)
    assert cut in {w.results[0] for w in check(back, (x + 1j * x[::-1],), [cut], SIZES)}
