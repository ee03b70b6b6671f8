"""Plan objects: argument forms, what they mean for arrays of any rank, and bad input."""

from __future__ import annotations

import numpy as np
import pytest

import shardkit as sk


@pytest.mark.parametrize(
    ("plan", "dims"),
    [
        (sk.ConvParallel(), (("sp", "W"),)),
        (sk.ConvParallel("tp"), (("tp", "W"),)),
        (sk.ConvParallel("sp", "H"), (("sp", "H"),)),
        (sk.ConvParallel(axis="sp", dim=-2), (("sp", -2),)),
        (sk.ConvParallel("sp", dim=0), (("sp", 0),)),
        (sk.ConvParallel(("sh", "sw"), "W"), ((("sh", "sw"), "W"),)),
        (sk.ConvParallel({"sh": "H", "sw": "W"}), (("sh", "H"), ("sw", "W"))),
        (sk.ConvParallel({("a", "b"): "D", "c": 2}), ((("a", "b"), "D"), ("c", 2))),
    ],
)
def test_argument_forms(plan, dims):
    assert plan.dims == dims


def test_equal_plans_are_equal_and_hashable():
    assert sk.ConvParallel("sp", "W") == sk.ConvParallel({"sp": "W"})
    assert sk.ConvParallel("sp", "W") != sk.ConvParallel("sp", "H")
    assert sk.ConvParallel("sp", np.int64(2)) == sk.ConvParallel("sp", 2)
    assert len({sk.ConvParallel(), sk.ConvParallel("sp"), sk.ConvParallel("tp")}) == 2


def test_every_mesh_axis_is_listed():
    assert sk.ConvParallel({("a", "b"): "H", "c": "W"}).mesh_axes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("plan", "ndim", "expected"),
    [
        (sk.ConvParallel(), 3, {"sp": 1}),  # N W C
        (sk.ConvParallel(), 4, {"sp": 2}),  # N H W C
        (sk.ConvParallel(), 5, {"sp": 3}),  # N D H W C
        (sk.ConvParallel("sp", "H"), 4, {"sp": 1}),
        (sk.ConvParallel({"sd": "D", "sh": "H"}), 5, {"sd": 1, "sh": 2}),
        (sk.ConvParallel("sp", -3), 4, {"sp": 1}),
        (sk.ConvParallel("sp", 2), 5, {"sp": 2}),
        (sk.ConvParallel(("a", "b")), 4, {("a", "b"): 2}),
    ],
)
def test_spatial_axes_of_a_channels_last_array(plan, ndim, expected):
    assert plan.spatial_axes(ndim) == expected


def test_missing_dims():
    assert sk.ConvParallel({"sh": "H", "sw": "W"}).missing_dim(1) == "H"
    assert sk.ConvParallel({"sh": "H", "sw": "W"}).missing_dim(2) is None
    assert sk.ConvParallel("sp", "D").missing_dim(2) == "D"
    assert sk.ConvParallel("sp", -2).missing_dim(1) is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (({"sp": "W"}, "H"), ValueError, "already names the dims; leave dim='H' out"),
        (("tp", {"sp": "W"}), ValueError, "doesn't name axis='tp'"),
        (({},), ValueError, "needs at least one mesh axis"),
        ((3,), TypeError, "a mesh axis is a name or a tuple of names, got 3"),
        ((("sp", 1),), TypeError, "a mesh axis is a name or a tuple of names"),
        (({1: "W"},), TypeError, "a mesh axis is a name or a tuple of names"),
        (("sp", "X"), ValueError, 'dim=\'X\' is unknown; use "D", "H", "W" or a number'),
        (("sp", "C"), ValueError, "dim='C' is unknown"),
        (("sp", 1.5), ValueError, "dim=1.5 is unknown"),
        (("sp", True), ValueError, "dim=True is unknown"),
        (({"sp": None},), ValueError, "dim=None is unknown"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        sk.ConvParallel(*arguments)


def test_the_mapping_may_be_given_as_dim():
    assert sk.ConvParallel(dim={"sh": "H", "sw": "W"}) == sk.ConvParallel({"sh": "H", "sw": "W"})
