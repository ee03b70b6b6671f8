"""Batches from any iterator of each process's own parts."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardkit.data import skeleton
from shardkit.data.batch import Part, put_part, read_part
from shardkit.data.cuts import mesh_text
from shardkit.data.settling import UnevenRowsError, same_facts
from shardkit.data.telling import ask, refuse_failed, tell_error
from shardkit.hosts import MissingProcessError, ProcessMismatchError
from shardkit.hosts.agreeing import processes

_END: Any = object()
# How long a reader that ends early waits for the others' readers, in seconds: they come at once, or needn't know.
_GOODBYE = 60.0


@dataclasses.dataclass(frozen=True)
class Spot:
    """Behind so many batches, with the state of this process's iterator there, if it has one.

    Attributes:
      batch: batches before it.
      own: the iterator's state, as JSON holds it.
      share: rows of a unit of dim 0 so far at most: a padded batch has no fewer, so that shapes stay.
    """

    batch: int = 0
    own: Any = None
    share: int = 0


class Batches:
    """A source of batches whose place is their number, and what the iterator says of itself."""

    source: Any
    placements: Any
    mesh: Mesh
    uneven: str
    check: bool
    what: str
    lock: threading.Lock
    state_keys: tuple[str, ...] = ("batch", "share", "processes", "states")

    def __init__(self, source: Any, placements: Any, mesh: Mesh, *, uneven: str, check: bool, what: str):
        self.source, self.placements, self.mesh = source, placements, mesh
        self.uneven, self.check, self.what = uneven, check, what
        self.lock = threading.Lock()
        self._one_shot = hasattr(source, "__next__")
        self._taken = False
        # An iterator may have gone some way before it came here.
        self._start = _encoded(source) if self._one_shot and _keeps_state(source) else None
        if not check and uneven != "error" and jax.process_count() > 1:
            raise ValueError(
                f'{what}: uneven="{uneven}" needs to know when iterators of other processes end, which check=False '
                'leaves out; use check=True, or uneven="error"'
            )

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        return {"input": "an iterator of batches", "mesh": mesh_text(self.mesh), "uneven": self.uneven}

    def first(self) -> Spot:
        return Spot(own=self._start)

    def position(self, place: Spot) -> int:
        return place.batch

    def __len__(self) -> int:
        if self.uneven != "error" and jax.process_count() > 1:
            raise TypeError("how many batches there are isn't known, as processes may end at different times")
        return len(self.source)

    def state_of(self, place: Spot, channel: str) -> dict[str, Any]:
        everyone = [{"batch": place.batch, "own": place.own}]
        if jax.process_count() > 1 and (self.check or place.own is not None):
            everyone = ask(channel, everyone[0])
            same_facts(
                {p: {"facts": {"batches delivered": said["batch"]}} for p, said in enumerate(everyone)},
                f"{self.what}: get_state",
            )
        states = [said["own"] for said in everyone]
        return {
            "kind": "batches",
            "batch": place.batch,
            "share": place.share,
            "processes": jax.process_count(),
            "states": states if any(own is not None for own in states) else None,
        }

    def place_of(self, state: Mapping[str, Any]) -> Spot:
        count = jax.process_count()
        if state["processes"] != count:
            raise ValueError(
                f"{self.what}: the state is of {state['processes']} processes, each with an iterator of its own, but "
                f"here are {count}; go on with as many processes, or read records (batch_size=), whose position "
                "holds for any number"
            )
        if int(state["batch"]) < 0:
            raise ValueError(f"{self.what}: the state says batch {state['batch']}")
        own = None if state["states"] is None else state["states"][jax.process_index()]
        return Spot(int(state["batch"]), own if state["batch"] or own is not None else self._start, int(state["share"]))

    def run(self, place: Spot, channel: str, alive: Callable[[], bool], ahead: bool) -> Iterator[tuple[Any, Spot]]:
        """Batches from a place on, each with the place behind it."""
        talks = self.check and jax.process_count() > 1
        rounds = _Rounds(channel, talks, self.what)
        try:
            yield from self._run(place, rounds, alive)
            rounds.over = True
        finally:
            # Others may wait for this reader's next words; without threads all are where this one is.
            if ahead and talks and not rounds.over:
                with contextlib.suppress(MissingProcessError, ProcessMismatchError, jax.errors.JaxRuntimeError):
                    ask(channel, {"closed": True}, timeout=_GOODBYE)

    def _run(self, place: Spot, rounds: _Rounds, alive: Callable[[], bool]) -> Iterator[tuple[Any, Spot]]:
        reader = _Reader(self, place, alive)
        like: Part | None = None
        left_out: UnevenRowsError | None = None
        while True:
            part = rounds.local(lambda: self._next_part(reader))
            if not alive():
                return
            everyone = rounds.hear(part, place.batch)
            ended = [p for p, words in everyone.items() if "end" in words]
            there = {p: words for p, words in everyone.items() if "end" not in words}
            with rounds.alike():
                if left_out is not None and not ended:
                    raise left_out
                if not there or (ended and self.uneven == "drop"):
                    return
                if ended and self.uneven == "error":
                    raise ProcessMismatchError(
                        f"{self.what}: the iterators of {processes(ended)} ended after {place.batch} batches, those of "
                        f'{processes(list(there))} have more; give all equally many, or use uneven="drop" (end with '
                        'the first) or "pad" (rows of zeros and a mask)'
                    )
                if ended:
                    self._check_structure(there)
                like = part or like or self._part_in_words(there)
            with rounds.alike():
                try:
                    sizes = like.settled(there, place.share, ended)
                except UnevenRowsError as error:
                    if self.uneven != "drop":
                        raise
                    left_out = error  # if it's the last one; the next words will say
                    continue
            place = Spot(place.batch + 1, reader.state, sizes.share)
            # No name for the batch here: it would keep its memory until the next one is there.
            yield put_part(part if part is not None else like.emptied(sizes), sizes), place

    def _next_part(self, reader: _Reader) -> Part | None:
        """This process's next part; None where there's none any more."""
        batch = reader.next()
        if batch is _END:
            return None
        uneven = "pad" if self.uneven == "pad" else "error"
        part = read_part(batch, self.placements, self.mesh, uneven, self.what)
        return dataclasses.replace(part, structure=skeleton.to_words(batch))

    def _check_structure(self, there: Mapping[int, Mapping[str, Any]]) -> None:
        """Refuses a process that has ended at once (later no structure is told) and can't know what a batch is like."""
        if any(words.get("structure", "") is None for words in there.values()):
            raise ValueError(
                f"{self.what}: the iterator of a process had nothing at all, and the structure of the others' batches "
                "can't be told in words (it has nodes other than dict, list and tuple); give each at least one batch"
            )

    def _part_in_words(self, there: Mapping[int, Mapping[str, Any]]) -> Part:
        """What a part looks like, from what others say of theirs in the first round."""
        words = next(iter(there.values()))["structure"]
        return read_part(skeleton.from_words(words), self.placements, self.mesh, self.uneven, self.what)

    def open(self, place: Spot) -> tuple[Iterator[Any], bool]:
        """An iterator at that place, and whether it had ended before."""
        if self._one_shot and self._taken and not _keeps_state(self.source):
            raise ValueError(
                f"{self.what}: an iterator that has begun can't go back; give something that can be iterated anew (a "
                "list, an object whose __iter__ starts over), or an iterator with get_state and set_state, as grain's"
            )
        iterator = iter(self.source)
        self._taken = True
        if place.own is not None:
            if not _keeps_state(iterator):
                raise ValueError(
                    f"{self.what}: the state holds one of an iterator, but {type(iterator).__name__} has no set_state"
                )
            iterator.set_state(_decoded(place.own))  # type: ignore[attr-defined]
            return iterator, False
        for number in range(place.batch):
            if next(iterator, _END) is _END:
                if self.uneven == "pad" and jax.process_count() > 1:
                    return iterator, True
                raise ValueError(f"{self.what}: the state says batch {place.batch}, but there are {number} only")
        return iterator, False


class _Reader:
    """This process's iterator, opened when first asked, and its state behind the last batch."""

    def __init__(self, batches: Batches, place: Spot, alive: Callable[[], bool]):
        self.batches, self.place, self.alive = batches, place, alive
        self.state = place.own
        self.iterator: Iterator[Any] | None = None
        self.ended = False

    def next(self) -> Any:
        with self.batches.lock:  # a reader that was left behind must not take batches from this one
            if not self.alive() or self.ended:
                return _END
            if self.iterator is None:
                self.iterator, self.ended = self.batches.open(self.place)
            batch: Any = _END if self.ended else next(self.iterator, _END)
            self.ended = bool(batch is _END)
            if _keeps_state(self.iterator):
                self.state = _encoded(self.iterator)
            return batch


class _Rounds:
    """What processes tell each other about each batch, and whether it's all said."""

    def __init__(self, channel: str, talks: bool, what: str):
        self.channel, self.talks, self.what = channel, talks, what
        self.over = False
        self._begun = False

    def local(self, work: Callable[[], Part | None]) -> Part | None:
        """Does what may fail in one process; the others hear of it."""
        if not self.talks:
            return work()
        try:
            return work()
        except Exception as error:
            self.over = True
            tell_error(self.channel, error)
            raise

    def hear(self, part: Part | None, batch: int) -> dict[int, dict[str, Any]]:
        """The words of all about their next parts."""
        words: dict[str, Any] = {"end": True} if part is None else dict(part.words)
        if not self.talks:
            return {jax.process_index(): words}
        if part is not None and not self._begun:
            words["structure"] = part.structure
        self._begun = True
        everyone = ask(self.channel, words)
        with self.alike():
            refuse_failed(everyone, self.what)
            gone = [p for p, said in enumerate(everyone) if "closed" in said]
            if gone:
                raise ProcessMismatchError(
                    f"{self.what}: {processes(gone)} closed the loader or set another state after {batch} batches, "
                    "while others go on; do it in all processes behind the same batch"
                )
        return dict(enumerate(everyone))

    @contextlib.contextmanager
    def alike(self) -> Generator[None]:
        """What fails here fails in all processes, so that nobody waits for another word."""
        try:
            yield
        except Exception:
            self.over = True
            raise


def _keeps_state(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def _encoded(iterator: Any) -> Any:
    """An iterator's state as JSON holds it, apart from the iterator's own memory."""
    state = iterator.get_state()
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    return {"json": json.loads(json.dumps(state, default=_plain))}


def _decoded(words: Mapping[str, Any]) -> Any:
    return base64.b64decode(words["bytes"]) if "bytes" in words else words["json"]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(
        f"the iterator's get_state() has a {type(value).__name__} in it; only bytes, or what JSON can hold, can be kept"
    )
