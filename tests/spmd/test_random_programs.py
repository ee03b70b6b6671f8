"""Random programs, partitioned, against the same function on one device.

Several programs of one mesh are traced and compiled as one function. What fails is run again alone, and the message
has its seed and its text, which runs in ``random_programs.SPACE``. Half of the time is XLA's compiler:
``--xla_cpu_use_fusion_emitters=false`` in XLA_FLAGS makes it four times as fast, where XLA has it (jax 0.10).
"""

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.spmd import partition
from tests.spmd.random_programs import MESHES, program

TOGETHER = 4  # programs that are compiled as one
FEW = {0, 3, 6, 7, 9, 11, 12}  # every mesh, both types of axes, with traffic and without
MANY = 400


def programs_of(case):
    """The programs of one case; each has a mesh and seeds of its own."""
    sizes = MESHES[case % len(MESHES)]
    return [program(seed, sizes) for seed in range(case * TOGETHER, (case + 1) * TOGETHER)]


def reduced(result):
    """The value that a result stands for, with NumPy alone."""
    if isinstance(result, sk.PartialArray):
        stack, axes = np.asarray(result.stack), tuple(range(len(result.layout.partial_axes)))
        by = {
            "sum": np.sum,
            "mean": np.mean,
            "max": np.max,
            "min": np.min,
            "prod": np.prod,
            "any": np.any,
            "all": np.all,
        }
        whole = np.asarray(by[result.layout.reduce](stack, axis=axes), stack.dtype)
        return whole[tuple(slice(0, s) for s in result.shape)]
    if isinstance(result, sk.Padded):
        return np.asarray(result.array)[tuple(slice(0, s) for s in result.shape)]
    return np.asarray(result)


def expected(programs, noise=0):
    """The results of one device."""

    def fun(*args):
        return [p.function(marks=False)(*mine) for p, mine in zip(programs, args, strict=True)]

    return jax.jit(fun)(*[[i.value(noise) for i in p.inputs] for p in programs])


def close(got, want, exact):
    """Compared to the largest element: sums are in another order."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype.kind in "ib":
        return np.array_equal(got, want)
    tolerance = (1e-9 if exact else 1e-4) * (1 + np.max(np.abs(np.where(np.isfinite(want), want, 0)), initial=0))
    return np.allclose(got, want, rtol=0, atol=tolerance, equal_nan=True)


def partitioned(programs):
    """The programs as one partitioned function, and its arguments."""
    explicit = programs[0].seed // TOGETHER % 4 == 3
    mesh = sk.make_mesh(programs[0].sizes, axis_types="explicit" if explicit else "auto")
    functions = [p.function() for p in programs]

    def fun(*args):
        return [f(*mine) for f, mine in zip(functions, args, strict=True)]

    places = tuple(tuple(i.placements for i in p.inputs) for p in programs)
    goals = [p.goals for p in programs]
    args = [tuple(i.placed(mesh) for i in p.inputs) for p in programs]
    return partition(fun, places, goals, mesh=mesh), args


def verify(programs, traffic=False):
    """Values, placements, and that every operation has a rule; with ``traffic`` the bytes, too."""
    run, args = partitioned(programs)
    plan = run.program(*args)
    assert not plan.replicated, f"without a rule: {[s.op for s in plan.replicated]}"
    got = run(*args)
    whole = [isinstance(x, sk.PartialArray | sk.Padded) for x in jax.tree.leaves(got, is_leaf=_is_whole)]
    assert len(whole) == len(plan.out_placements)
    for result, places in zip(jax.tree.leaves(got, is_leaf=_is_whole), plan.out_placements, strict=True):
        assert sk.placements(result) == places, f"{sk.placements(result)}, but the program says {places}"
    for p, mine, want in zip(programs, got, expected(programs), strict=True):
        for name, goal, x, y in zip(p.outputs, p.goals, mine, want, strict=True):
            said = (
                sk.Layout(run._find_mesh((), {}), goal).resolved(np.ndim(y)) if goal not in (None, "inferred") else None
            )
            assert said is None or said.placements == sk.placements(x), (
                f"{name}: asked for {said}, got {sk.placements(x)}"
            )
            assert goal == "inferred" or said is not None or not isinstance(x, sk.PartialArray), f"{name} is Partial"
            if not close(reduced(x), y, p.exact):
                raise Wrong(f"{name} ({sk.placements(x)}):\n{reduced(x)}\nbut on one device\n{np.asarray(y)}")
    if traffic:
        report = sk.collectives(run, *args)
        total = sum(c.bytes * (c.trip_count or 1) for c in report)
        assert total <= plan.bytes_per_device, f"{total} bytes in the compiled program, {plan.bytes_per_device} planned"


class Wrong(AssertionError):  # noqa: N818 - it's the values that are
    """Other values than on one device."""


def _is_whole(x):
    return isinstance(x, sk.PartialArray | sk.Padded)


def unstable(p):
    """Whether rounding alone changes the results much, as where what should be equal is compared."""
    first = expected([p])[0]
    for noise in (1, 2, 3):
        again = expected([p], noise)[0]
        if not all(close(b, a, p.exact) for a, b in zip(first, again, strict=True)):
            return True
    return False


def check(programs, traffic=False):
    """All programs at once; where that fails, each alone, to name it."""
    try:
        verify(programs, traffic)
    except Exception as together:
        failed = []
        for p in programs:
            try:
                verify([p], traffic)
            except Exception as err:
                if not (isinstance(err, Wrong) and unstable(p)):
                    failed.append(f"{p}\n{type(err).__name__}: {err}")
        if not failed and not isinstance(together, Wrong):
            failed = [f"only together: {together}"]
        assert not failed, "\n\n".join(failed)


SMOKE = 11  # a quick one


@pytest.mark.not_smoke
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.smoke) if c == SMOKE else c for c in sorted(FEW)])
def test_as_on_one_device(case):
    check(programs_of(case), traffic=case % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in range(MANY) if c not in FEW])
def test_many_as_on_one_device(case):
    check(programs_of(case), traffic=case % 3 == 0)
