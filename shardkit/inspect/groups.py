"""Who talks to whom: replica groups in every spelling, and the mesh axes they run over.

Pure integer arithmetic. Devices are positions in the program's device assignment, which for JAX
programs is the order of `mesh.devices.flat`; a mesh is given by its axis names and sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Hashable, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?$")
_MESH = re.compile(r"mesh\[(.*?)\](?:\s*,\s*device_ids=\((.*)\))?\s*\{(.*)\}$")
_RESHAPED = re.compile(r"\[([\d,]*)\](?:T\(([\d,]*)\))?$")
_MESH_AXIS = re.compile(r"""(['"]?)(.*?)\1=(\d+)(?:,|$)""")
_AXIS_REFERENCE = re.compile(r"""(['"]?)([^'",:]+)\1(?::\((\d+)\)(\d+))?(?:,|$)""")
_LIST = re.compile(r"\{([\d,\s]*)\}")


@functools.lru_cache(maxsize=1024)
def parse_groups(text: str) -> Groups:
    """Reads `replica_groups` or `source_target_pairs`.

    Understood are lists `{{0,1},{2,3}}`, the empty list `{}` (which stands for "all", returned as
    `()`), iota lists `[4,2]<=[2,4]T(1,0)` (count the devices, reshape, transpose, reshape to groups x
    size), and mesh lists `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}`, whose axis names are
    often the compiler's own (`axis_0`), and whose axes may be parts of axes, `'b':(1)2`.

    Raises:
      ValueError: the spelling is none of these.

    Example:
      >>> parse_groups("[4,2]<=[2,4]T(1,0)")
      ((0, 4), (1, 5), (2, 6), (3, 7))
      >>> parse_groups("mesh['a'=2,'b'=4] {'a'}")
      ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    text = text.strip()
    if text.startswith("{"):
        groups = (_integers(group) for group in _LIST.findall(text[1:-1]))
        return tuple(group for group in groups if group)
    if iota := _IOTA.match(text):
        return _rows(_iota(iota[2], iota[3]).reshape(_integers(iota[1])))
    if mesh := _MESH.match(text):
        return _mesh_groups(*mesh.groups())
    raise ValueError(f"replica groups in a spelling that is not known: {text!r}")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _rows(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    shape = _integers(dims)
    array = np.arange(math.prod(shape)).reshape(shape)
    return array.transpose(_integers(permutation)) if permutation else array


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    """The groups of a mesh list; the formulas are those of XLA's `MeshAxesReplicaGroupList`."""
    sizes = {name: int(size) for _, name, size in _MESH_AXIS.findall(axes)}
    devices = _device_order(device_ids, math.prod(sizes.values()))
    references = [
        (name.strip(), int(before or 1), int(size or sizes[name.strip()]))
        for _, name, before, size in _AXIS_REFERENCE.findall(grouped)
    ]
    # Split each axis where a reference to a part of it begins and ends: `b:(2)2` of a `b` of size 8 is
    # the middle of 2 x 2 x 2.
    dims: list[int] = []
    part_at: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        cuts = {1, size}
        for other, before, part in references:
            if other == name:
                cuts |= {before, before * part}
        ordered = sorted(cuts)
        for low, high in itertools.pairwise(ordered):
            part_at[name, low] = len(dims)
            dims.append(high // low)
    # A reference of size 1 has no part of its own, and adds nothing to a group.
    last = [part_at[name, before] for name, before, size in references if size > 1]
    first = [dim for dim in range(len(dims)) if dim not in last]
    array = devices.reshape(dims).transpose(first + last)
    return _rows(array.reshape(-1, math.prod(dims[dim] for dim in last)))


def _device_order(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    if reshaped := _RESHAPED.match(text):
        return _iota(reshaped[1], reshaped[2]).reshape(-1)
    return np.array(_integers(text))


def device_groups(
    groups: Groups,
    *,
    num_replicas: int,
    num_partitions: int,
    has_channel: bool,
    global_ids: bool | None,
) -> Groups:
    """Replica groups as positions in the device assignment, `replica * num_partitions + partition`.

    What the numbers in a group mean depends on the instruction (XLA's `GetCollectiveOpGroupMode`):
    without a channel they are replicas; with one and `use_global_device_ids` they are positions
    already; with one and without, for instructions that have that flag, they are replicas and all
    partitions of these take part; for instructions that have no such flag they are partitions.

    Args:
      groups: as `parse_groups` returns them; `()` stands for one group of all.
      num_replicas, num_partitions: of the module.
      has_channel: the instruction has a `channel_id`.
      global_ids: its `use_global_device_ids`, or None for an instruction that has no such flag
        (all-to-all, permute, broadcast).
    """
    count = num_replicas * num_partitions
    if not groups and (has_channel or num_partitions == 1):
        if has_channel and global_ids is None:
            groups = (tuple(range(num_partitions)),)
        else:
            return (tuple(range(count)),)
    elif not groups:
        groups = (tuple(range(num_replicas)),)
    if has_channel and global_ids:
        return groups
    partitions, replicas = range(num_partitions), range(num_replicas)
    if has_channel and global_ids is None:
        return tuple(tuple(r * num_partitions + p for p in group) for group in groups for r in replicas)
    if max(map(max, groups)) >= num_replicas:
        return groups  # More ids than replicas: they can only be positions (hand-written modules).
    if has_channel:
        return tuple(tuple(r * num_partitions + p for r in group for p in partitions) for group in groups)
    return tuple(tuple(r * num_partitions + p for r in group) for group in groups for p in partitions)


def coordinates(device: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Position of a device on each mesh axis; the last axis varies fastest.

    Example:
      >>> coordinates(6, (2, 4))
      (1, 2)
    """
    found = []
    for size in reversed(axis_sizes):
        device, index = divmod(device, size)
        found.append(index)
    return tuple(reversed(found))


def groups_over_axes(axes: Sequence[Hashable], axis_names: Sequence[Hashable], axis_sizes: Sequence[int]) -> Groups:
    """The groups of a collective over some axes: devices that differ on these axes only.

    Example:
      >>> groups_over_axes(("dp",), ("dp", "sp"), (2, 4))
      ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    grouped = [axis for axis, name in enumerate(axis_names) if name in axes]
    others = [axis for axis, name in enumerate(axis_names) if name not in axes]
    array = np.arange(math.prod(axis_sizes)).reshape(tuple(axis_sizes)).transpose(others + grouped)
    return _rows(array.reshape(-1, math.prod(axis_sizes[axis] for axis in grouped)))


@functools.lru_cache(maxsize=4096)
def axes_of_groups(
    groups: Groups, axis_names: tuple[Hashable, ...], axis_sizes: tuple[int, ...]
) -> tuple[Hashable, ...] | None:
    """The mesh axes whose groups these are, in mesh order; None if they are those of no set of axes.

    The order of groups, and of devices in a group, does not matter. Axes of size 1 are never named.

    Example:
      >>> axes_of_groups(((0, 4), (1, 5), (2, 6), (3, 7)), ("dp", "sp"), (2, 4))
      ('dp',)
      >>> axes_of_groups(((0, 1), (2, 3), (4, 5), (6, 7)), ("dp", "sp"), (2, 4)) is None
      True
    """
    count = math.prod(axis_sizes)
    if sorted(device for group in groups for device in group) != list(range(count)):
        return None
    varying = axes_of_pairs(
        tuple((group[0], device) for group in groups for device in group[1:]), axis_names, axis_sizes
    )
    if varying is None:
        return None
    expected = groups_over_axes(varying, axis_names, axis_sizes)
    same = set(map(frozenset, groups)) == set(map(frozenset, expected))
    return varying if same else None


@functools.lru_cache(maxsize=4096)
def axes_of_pairs(
    pairs: Groups, axis_names: tuple[Hashable, ...], axis_sizes: tuple[int, ...]
) -> tuple[Hashable, ...] | None:
    """The mesh axes along which source and target of some pair differ, in mesh order.

    None if a device lies outside the mesh.

    Example:
      >>> axes_of_pairs(((0, 1), (1, 2), (2, 3), (3, 0)), ("dp", "sp"), (2, 4))
      ('sp',)
    """
    count = math.prod(axis_sizes)
    if any(not 0 <= device < count for pair in pairs for device in pair):
        return None
    differs = [False] * len(axis_sizes)
    for source, target in pairs:
        if source != target:
            ends = zip(coordinates(source, axis_sizes), coordinates(target, axis_sizes), strict=True)
            differs = [known or a != b for known, (a, b) in zip(differs, ends, strict=True)]
    return tuple(name for name, yes in zip(axis_names, differs, strict=True) if yes)


def largest_chain(pairs: Groups) -> int:
    """Number of devices in the largest connected set of a permutation's pairs: the ring's length.

    Example:
      >>> largest_chain(((0, 1), (1, 0), (2, 3), (3, 4)))
      3
    """
    leader: dict[int, int] = {}

    def find(device: int) -> int:
        while leader.setdefault(device, device) != device:
            leader[device] = device = leader[leader[device]]
        return device

    for source, target in pairs:
        leader[find(source)] = find(target)
    sizes: dict[int, int] = {}
    for device in list(leader):
        root = find(device)
        sizes[root] = sizes.get(root, 0) + 1
    return max(sizes.values(), default=0)
