"""Replica groups and mesh axes: tables of integers and round trips."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.inspect import groups

DP = ((0, 4), (1, 5), (2, 6), (3, 7))
SP = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", ()),
        ("{{}}", ()),
        ("{{0,1,2,3},{4,5,6,7}}", SP),
        ("{{0, 4}, {1, 5}, {2, 6}, {3, 7}}", DP),
        ("[2,4]<=[8]", SP),
        ("[4,2]<=[2,4]T(1,0)", DP),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['dp'=2,'sp'=4] {'sp'}", SP),
        ("mesh['dp'=2,'sp'=4] {'dp'}", DP),
        ("mesh['dp'=2,'sp'=4] {'dp','sp'}", (tuple(range(8)),)),
        ("mesh['dp'=2,'sp'=4] {'sp','dp'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['dp'=2,'sp'=4] {}", tuple((i,) for i in range(8))),
        ("mesh[dp=2,sp=4] {sp}", SP),
        ("mesh['a'=8,'b'=1] {'a'}", (tuple(range(8)),)),
        ("mesh['a'=8,'b'=1] {'b'}", tuple((i,) for i in range(8))),
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", SP),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", DP),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=8] {'a':(1)2}", DP),
        ("mesh['a'=8] {'a':(2)4}", SP),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_spellings(text, expected):
    assert groups.parse_groups(text) == expected


@pytest.mark.parametrize("text", ["all", "[2,4]", "maximal_mesh[device_id=0] {}"])
def test_refuses_an_unknown_spelling(text):
    with pytest.raises(ValueError, match="not known"):
        groups.parse_groups(text)


@pytest.mark.parametrize(
    ("given_groups", "replicas", "partitions", "channel", "flag", "expected"),
    [
        (((0, 4),), 1, 8, True, True, ((0, 4),)),  # positions
        ((), 1, 4, True, True, ((0, 1, 2, 3),)),
        (((0, 1), (2, 3)), 1, 4, True, None, ((0, 1), (2, 3))),  # partitions
        ((), 1, 4, True, None, ((0, 1, 2, 3),)),
        (((0, 1),), 2, 2, True, None, ((0, 1), (2, 3))),  # ... of each replica
        (((0, 1), (2, 3)), 4, 1, False, False, ((0, 1), (2, 3))),  # replicas
        ((), 4, 1, False, False, ((0, 1, 2, 3),)),
        (((0, 1),), 2, 2, False, False, ((0, 2), (1, 3))),  # ... for each partition
        ((), 2, 2, False, None, ((0, 2), (1, 3))),
        (((0,),), 1, 4, True, False, ((0, 1, 2, 3),)),  # replicas with all of their partitions
        (((0,), (1,)), 2, 2, True, False, ((0, 1), (2, 3))),
        ((), 2, 2, True, False, ((0, 1, 2, 3),)),
        (((0, 1), (2, 3)), 1, 1, False, False, ((0, 1), (2, 3))),  # a module without a header
    ],
)
def test_what_the_ids_mean(given_groups, replicas, partitions, channel, flag, expected):
    found = groups.device_groups(
        given_groups, num_replicas=replicas, num_partitions=partitions, has_channel=channel, global_ids=flag
    )
    assert found == expected


@st.composite
def meshes_and_axes(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    names = tuple(f"a{i}" for i in range(len(sizes)))
    chosen = draw(st.sets(st.sampled_from(names)))
    return names, sizes, tuple(name for name in names if name in chosen)


@given(meshes_and_axes(), st.randoms(use_true_random=False))
def test_groups_over_axes_map_back_to_these_axes(mesh, random):
    names, sizes, chosen = mesh
    made = [list(group) for group in groups.groups_over_axes(chosen, names, sizes)]
    random.shuffle(made)
    for group in made:
        random.shuffle(group)
    expected = tuple(name for name, size in zip(names, sizes, strict=True) if name in chosen and size > 1)
    assert groups.axes_of_groups(tuple(map(tuple, made)), names, sizes) == expected


@given(meshes_and_axes())
def test_every_spelling_gives_the_same_groups(mesh):
    names, sizes, chosen = mesh
    expected = groups.groups_over_axes(chosen, names, sizes)
    listed = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in expected) + "}"
    assert groups.parse_groups(listed) == expected
    axes = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    assert groups.parse_groups(f"mesh[{axes}] {{{','.join(map(repr, chosen))}}}") == expected
    order = [i for i, n in enumerate(names) if n not in chosen] + [i for i, n in enumerate(names) if n in chosen]
    shape = f"[{len(expected)},{len(expected[0])}]"
    dims, perm = ",".join(map(str, sizes)), ",".join(map(str, order))
    assert groups.parse_groups(f"{shape}<=[{dims}]T({perm})") == expected


@given(meshes_and_axes(), st.data())
@pytest.mark.not_smoke
def test_shifts_map_to_the_axes_they_move_along(mesh, data):
    names, sizes, chosen = mesh
    moved = [name in chosen and size > 1 for name, size in zip(names, sizes, strict=True)]
    pairs = []
    for index in itertools.product(*map(range, sizes)):
        target = [(i + 1) % n if yes else i for i, n, yes in zip(index, sizes, moved, strict=True)]
        pairs.append((_position(index, sizes), _position(target, sizes)))
    expected = tuple(name for name, yes in zip(names, moved, strict=True) if yes)
    assert groups.axes_of_pairs(tuple(pairs), names, sizes) == expected
    kept = data.draw(st.sampled_from(pairs))
    assert groups.axes_of_pairs((kept,), names, sizes) == expected


def _position(index, sizes):
    return sum(i * math.prod(sizes[axis + 1 :]) for axis, i in enumerate(index))


@pytest.mark.parametrize(
    "bad",
    [
        ((0, 1), (2, 3), (4, 5), (6, 7)),  # half of sp
        ((0, 5), (1, 4), (2, 6), (3, 7)),  # crossed
        ((0, 1, 2, 3),),  # some devices only
        ((0, 1, 2, 3), (4, 5, 6, 8)),  # a device that is not there
    ],
)
def test_groups_of_no_set_of_axes(bad):
    assert groups.axes_of_groups(bad, ("dp", "sp"), (2, 4)) is None


def test_pairs_outside_the_mesh():
    assert groups.axes_of_pairs(((0, 8),), ("dp", "sp"), (2, 4)) is None


def test_axes_of_size_one_are_never_named():
    assert groups.axes_of_groups(((0, 1), (2, 3)), ("a", "b", "c"), (2, 1, 2)) == ("c",)


@pytest.mark.parametrize(
    ("pairs", "length"),
    [((), 0), (((0, 1),), 2), (((0, 1), (1, 2), (2, 3)), 4), (((0, 1), (1, 0), (4, 5), (5, 6)), 3)],
)
def test_largest_chain(pairs, length):
    assert groups.largest_chain(pairs) == length
