"""From what every process says of its part to the sizes of the whole, or to an error that names who differs.

Nothing here knows of devices or of JAX: a process is a number, what it said a dictionary.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.data import parts
from shardkit.hosts import ProcessMismatchError
from shardkit.hosts.agreeing import processes

Said = Mapping[int, Mapping[str, Any]]

_PAD = 'uneven="pad" fills each part up with zeros and gives a mask of the rows that are real'
_OTHER = "pad or crop it yourself, or cut another dim"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a batch comes to.

    Attributes:
      blocks: of each leaf, the sizes of one block.
      share: rows of a unit of dim 0 (``parts.row_units``); 0 where nothing is padded.
    """

    blocks: tuple[tuple[int, ...], ...]
    share: int = 0


class UnevenRowsError(ValueError):
    """Rows that don't come out even, which padding would mend."""


class UnequalRowsError(UnevenRowsError, ProcessMismatchError):
    """The same, as processes gave unequal parts."""


def settle(
    said: Said,
    cuts: Sequence[parts.Cut],
    owners: Sequence[int],
    *,
    uneven: str,
    what: str,
    least: int = 0,
    ended: Sequence[int] = (),
) -> Sizes:
    """The sizes of the blocks that all parts make together.

    Args:
      said: by process; each has "facts" (a mapping that must be the same in all), "names" of the leaves, their local
        "shapes", and "shared": for each leaf, digests of the blocks that other processes hold, too.
      cuts: of the leaves.
      owners: the process of each device, in mesh order.
      uneven: "error" or "pad", of dim 0.
      what: starts the messages.
      least: rows of a unit at the least, for "pad".
      ended: processes that have nothing any more, and said nothing; for "pad".

    Raises:
      ProcessMismatchError: facts, sizes or shared data differ between processes.
      ValueError: sizes that the mesh doesn't divide.
    """
    same_facts(said, what)
    padded = uneven == "pad"
    units, share = _padded_rows(said, cuts, owners, what, ended) if padded else (1, 0)
    share = max(share, least)
    names: Sequence[str] = next(iter(said.values()))["names"]
    blocks = []
    for leaf, (name, given) in enumerate(zip(names, cuts, strict=True)):
        grids = parts.grids(given, owners)
        shapes = {p: said[p]["shapes"][leaf] for p in sorted(said)}
        sizes = []
        for dim, count in enumerate(given.counts):
            if padded and dim == 0:
                sizes.append(share * units // count)
            else:
                own = {p: (shape[dim], len(grids[p][dim])) for p, shape in shapes.items()}
                sizes.append(_block_size(own, count, dim, name, what))
        blocks.append(tuple(sizes))
    _same_where_shared(said, names, what)
    return Sizes(tuple(blocks), share)


def who_says(said: Mapping[int, Any]) -> str | None:
    """Who says what, the fewest first; None where all say the same.

    Example:
      >>> who_says({0: 8, 1: 8, 2: 6})
      'process 2: 6; processes 0, 1: 8'
    """
    groups: dict[str, list[int]] = {}
    for process, value in said.items():
        groups.setdefault(value if isinstance(value, str) else json.dumps(value), []).append(process)
    if len(groups) < 2:
        return None
    ordered = sorted(groups.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{processes(who)}: {text}" for text, who in ordered)


def same_facts(said: Said, what: str) -> None:
    """Refuses facts that aren't the same in all.

    Raises:
      ProcessMismatchError: it names who differs, and in what.
    """
    names = dict.fromkeys(itertools.chain.from_iterable(words["facts"] for words in said.values()))
    found = {name: who_says({p: words["facts"].get(name, "nothing") for p, words in said.items()}) for name in names}
    lines = [f"  {name}: {text}" for name, text in found.items() if text is not None]
    if lines:
        raise ProcessMismatchError(f"{what}: processes differ, before anything was sent:\n" + "\n".join(lines))


def _padded_rows(
    said: Said, cuts: Sequence[parts.Cut], owners: Sequence[int], what: str, ended: Sequence[int]
) -> tuple[int, int]:
    """Units of dim 0, and the rows of one: as many as the fullest process needs."""
    first = next((leaf for leaf, given in enumerate(cuts) if given.counts), None)
    if first is None:
        raise ValueError(f'{what}: uneven="pad" fills up dim 0, but no leaf of the batch has one')
    try:
        units, held = parts.row_units([given for given in cuts if given.counts], owners)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    groups: dict[tuple[int, ...], list[int]] = {}
    for process, own in held.items():
        groups.setdefault(own, []).append(process)
    if sum(map(len, groups)) > units:
        raise ValueError(
            f"{what}: processes hold rows that overlap without being the same (in units of dim 0: {held}), which "
            "can't be padded; give the mesh its devices in an order that keeps those of a process together"
        )
    names = next(iter(said.values()))["names"]
    whole = [name for name, given in zip(names, cuts, strict=True) if not given.counts]
    if ended and whole:
        raise ValueError(
            f"{what}: {processes(ended)} had no batch any more, so nothing to give for {whole}, which has no rows to "
            "pad; leave it out of the batch"
        )
    rows = {p: words["shapes"][first][0] for p, words in said.items()} | dict.fromkeys(ended, 0)
    for group in groups.values():
        unlike = who_says({p: f"{rows[p]} rows" for p in group if p in rows})
        if unlike is not None:
            raise ProcessMismatchError(
                f"{what}: {processes(group)} hold the same rows on their devices, but gave different numbers of them: "
                f"{unlike}; give them the same rows"
            )
    return units, max(-(-count // len(held[p])) for p, count in rows.items())


def _block_size(own: Mapping[int, tuple[int, int]], count: int, dim: int, name: str, what: str) -> int:
    """The size of a block along one dim: what each process has over how many blocks, if that's one number."""
    if all(size % blocks == 0 for size, blocks in own.values()):
        sizes = {size // blocks for size, blocks in own.values()}
        if len(sizes) == 1:
            return sizes.pop()
    unlike = who_says({p: f"{size} for {blocks} of its {count} blocks" for p, (size, blocks) in own.items()})
    if unlike is None:
        size, blocks = next(iter(own.values()))
        share = "" if blocks == count else f" of which a process holds {blocks}"
        kind = ValueError if dim else UnevenRowsError
        raise kind(
            f"{what}: dim {dim} of {name} has {size} elements in {'each' if len(own) > 1 else 'this'} process's part, "
            f"and the mesh cuts it into {count} blocks{share}, which doesn't come out even; {_OTHER if dim else _PAD}"
        )
    kind = ProcessMismatchError if dim else UnequalRowsError
    raise kind(
        f"{what}: the processes' parts of dim {dim} of {name} don't make blocks of one size, before anything was sent: "
        f"{unlike}. Each gives its own part of the batch; {_OTHER if dim else _PAD}"
    )


def _same_where_shared(said: Said, names: Sequence[str], what: str) -> None:
    """Processes that hold the same block must have given the same data for it."""
    lines = []
    for leaf, name in enumerate(names):
        found: dict[str, dict[int, str]] = {}
        for process, words in said.items():
            for block, text in words["shared"][leaf].items():
                found.setdefault(block, {})[process] = text
        lines += [f"  {name}: {text}" for text in map(who_says, found.values()) if text is not None]
    if lines:
        raise ProcessMismatchError(
            f"{what}: processes whose devices hold the same part gave different data (sha256 of it):\n"
            + "\n".join(dict.fromkeys(lines))
            + "\nGive them the same rows: which part a process holds follows from the mesh, not from its number"
        )
