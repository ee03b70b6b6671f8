"""`check_same`: every process holds the same tree, or all of them say where it differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardkit.hosts.agreeing import ProcessMismatchError, exchange
from shardkit.hosts.digests import digest_of_text
from shardkit.hosts.leaves import array_of, describe, leaves
from shardkit.hosts.words import processes
from shardkit.meshes import no_ambient_mesh

_MOST = 20  # lines of an error


def check_same(tree: Any, what: str = "tree", *, values: bool = False) -> None:
    """Refuses a pytree that isn't the same in all processes, in all of them alike, before any collective hangs on it.

    Looks at structure (the paths of leaves), dtypes, shapes and, of JAX arrays, placements: spec, the mesh's axes,
    their types and devices. Every process must call it. No device has a part in it; what's sent is a digest, and
    descriptions only where digests differ.

    Args:
      tree: any pytree: batches, parameters, optimizer state. ``sk.Padded`` and ``sk.PartialArray`` count as leaves.
      what: its name in the error. Processes that give different names wait for each other in vain.
      values: also the elements, bit by bit: of NumPy arrays and numbers, and of JAX arrays wherever two devices, of one
        or several processes, hold the same part. It reads all of them to the host.

    Raises:
      ProcessMismatchError: it names processes, leaf, and what each has.
      MissingProcessError: a process didn't call it.
      TypeError: called within jit.

    Example:
      >>> import numpy as np
      >>> from shardkit.hosts import check_same
      >>> check_same({"x": np.zeros(3)}, "the batch")
    """
    found = leaves(tree)
    if any(isinstance(array_of(leaf), Tracer) for _, leaf in found):
        raise TypeError(f"check_same({what!r}) was called within jit or another transformation: call it outside")
    facts: dict[str, str] = {path: describe(leaf) for path, leaf in found}
    _compare(f"check_same/{what}", what, facts, "differ")
    if not values:
        return
    # Which processes hold a part is known to all of them; those that hold the same ones compare a digest of all these.
    parts: dict[str, dict[str, str]] = {}
    torn: list[str] = []
    everyone = _words(range(jax.process_count()))
    for path, leaf in found:
        for holders, part, digests in _parts(leaf, everyone):
            texts = sorted(set(digests.values()))
            parts.setdefault(holders, {})[path + part] = texts[0] if len(texts) == 1 else "not the same on its devices"
            if len(texts) > 1:
                torn.append(f"  {path}{part}: " + "; ".join(f"{device}: {text}" for device, text in digests.items()))
    _values(f"check_same/{what}/values", what, parts, torn)


def _compare(channel: str, what: str, facts: Mapping[str, str], verb: str) -> None:
    """Raises where processes have other facts. A process speaks for all that have the same."""
    digests = exchange(channel, _digest(facts))
    groups: dict[str, list[int]] = {}
    for process, digest in enumerate(digests):
        groups.setdefault(digest, []).append(process)
    if len(groups) == 1:
        return
    shown = sorted(groups.values(), key=len)[-8:]  # the few that differ from most come first
    speak = jax.process_index() in [who[0] for who in shown]
    said = exchange(channel, dict(facts) if speak else None)
    lines = different([(who, said[who[0]]) for who in shown])
    raise ProcessMismatchError(f"{what}: processes {verb}, before anything was sent:\n" + "\n".join(lines))


def different(groups: Sequence[tuple[Sequence[int], Mapping[str, str]]]) -> list[str]:
    """A line for each fact in which groups of processes differ: what each has."""
    lines = []
    for name in dict.fromkeys(name for _, facts in groups for name in facts):
        texts: dict[str, list[int]] = {}
        for who, facts in groups:
            texts.setdefault(facts.get(name, "no such leaf"), []).extend(who)
        if len(texts) > 1:
            ordered = sorted(texts.items(), key=lambda item: len(item[1]))
            lines.append(f"  {name}: " + "; ".join(f"{processes(sorted(who))}: {text}" for text, who in ordered))
    if not lines:
        lines = ["  the order of the leaves"]
    return lines[:_MOST] + ([f"  and {len(lines) - _MOST} more leaves"] if len(lines) > _MOST else [])


def _values(channel: str, what: str, parts: Mapping[str, Mapping[str, str]], torn: Sequence[str]) -> None:
    """Raises where processes, or devices of one, hold different elements."""
    said = exchange(channel, {"parts": {who: _digest(part) for who, part in parts.items()}, "torn": torn[:_MOST]})
    lines = [f"{line} (process {p})" for p, one in enumerate(said) for line in one["torn"]]
    differ = {
        who
        for one in said
        for who, digest in one["parts"].items()
        if any(other["parts"].get(who, digest) != digest for other in said)
    }
    if differ:
        details = exchange(channel, {who: dict(part) for who, part in parts.items() if who in differ})
        for who in sorted(differ):
            groups = [([p], one[who]) for p, one in enumerate(details) if who in one]
            lines += different(groups)
    if lines:
        raise ProcessMismatchError(
            f"{what}: the elements differ where they should be the same (sha256 of each part):\n"
            + "\n".join(lines[:_MOST])
        )


def _parts(leaf: Any, everyone: str) -> list[tuple[str, str, dict[str, str]]]:
    """Of the parts of a leaf that this process holds: which processes hold it, where it is in the array, and a digest a
    device."""
    array = array_of(leaf)
    if not isinstance(array, jax.Array):
        return [(everyone, "", {"host": _bytes(array)})]
    if not array.shape or (array.is_fully_addressable and jax.process_count() > 1):
        indices = {}
    else:
        indices = array.sharding.devices_indices_map(array.shape)
    holders: dict[str, set[int]] = {}
    for device, index in indices.items():
        holders.setdefault(_index(index, array.shape), set()).add(device.process_index)
    parts: dict[str, tuple[str, str, dict[str, str]]] = {}
    for shard in array.addressable_shards:
        index = _index(shard.index, array.shape)
        who = _words(holders[index]) if index in holders else everyone
        part = parts.setdefault(index, (who, index if index != _index((), array.shape) else "", {}))
        part[2][f"device {shard.device.id}"] = _bytes(shard.data)
    return list(parts.values())


def _index(index: Any, shape: tuple[int, ...]) -> str:
    full = (*index, *[slice(None)] * len(shape))[: len(shape)]  # an array of keys has an index too many
    ranges = [part.indices(size) for part, size in zip(full, shape, strict=True)]
    return (
        "["
        + ", ".join(":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b, _), n in zip(ranges, shape, strict=True))
        + "]"
    )


def _words(who: Any) -> str:
    return ",".join(map(str, sorted(who)))


def _digest(facts: Mapping[str, str]) -> str:
    return digest_of_text(json.dumps(list(facts.items())))[:32]


def _bytes(value: Any) -> str:
    """A digest of the elements; of what has none, of what it looks like."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        with no_ambient_mesh():
            value = jax.random.key_data(value)
    if isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        array = np.asarray(value)
        data = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
    elif isinstance(value, str | bytes | type(None)):
        data = repr(value).encode()
    else:  # it may show its address
        return "not compared"
    return hashlib.sha256(data).hexdigest()[:16]
