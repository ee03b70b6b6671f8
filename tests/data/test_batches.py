"""Batches from iterators, in one process: ends, positions, states of iterators, bad input."""

import json

import numpy as np
import pytest

import shardkit as sk
from shardkit.data import shard_dataloader

ROWS = {"dp": sk.Shard(0)}


def parts(count=5, rows=8):
    return [{"x": np.full((rows, 2), number, np.float32)} for number in range(count)]


def generator(count=5):
    yield from parts(count)


def numbers(loader):
    return [int(batch["x"][0, 0]) for batch in loader]


class Restartable:
    """Iterates anew each time, without a state to keep."""

    def __iter__(self):
        return generator()


class Stateful:
    """As grain's iterators: it can say where it is, and go there."""

    def __init__(self, kind, count=5):
        self.kind, self.count, self.next = kind, count, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        return parts(self.count)[self.next - 1]

    def get_state(self):
        state = {"next": np.int64(self.next), "list": np.arange(2)}
        return json.dumps({"next": self.next}).encode() if self.kind == "bytes" else state

    def set_state(self, state):
        assert isinstance(state, bytes) is (self.kind == "bytes")
        self.next = (json.loads(state) if isinstance(state, bytes) else state)["next"]


@pytest.fixture
def mesh(mesh_for):
    return mesh_for({"dp": 4, "tp": 2})


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", [parts, generator, Restartable, lambda: iter(parts()), lambda: Stateful("dict")])
def test_batches(source, prefetch, mesh):
    loader = shard_dataloader(source(), ROWS, mesh, prefetch=prefetch)
    for number, batch in enumerate(loader):
        np.testing.assert_array_equal(batch["x"], parts()[number]["x"])
        assert sk.placements(batch["x"]) == (sk.Shard(0), sk.Replicate())
        assert loader.position == number + 1
    assert loader.position == 5
    assert next(loader, None) is None


def test_length(mesh):
    assert len(shard_dataloader(parts(), ROWS, mesh)) == 5
    with pytest.raises(TypeError, match="has no len"):
        len(shard_dataloader(generator(), ROWS, mesh))


def short(rows=(8, 8, 5), after=()):
    return [{"x": np.full((n, 2), number, np.float32)} for number, n in enumerate((*rows, *after))]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_short_last_batch(prefetch, mesh):
    loader = shard_dataloader(short(), ROWS, mesh, prefetch=prefetch)
    next(loader), next(loader)
    with pytest.raises(ValueError, match=r"dim 0 of batch\['x'\] has 5 elements"):
        next(loader)
    assert numbers(shard_dataloader(short(), ROWS, mesh, uneven="drop", prefetch=prefetch)) == [0, 1]
    found = list(shard_dataloader(short(), ROWS, mesh, uneven="pad", prefetch=prefetch))
    assert [batch["x"].shape for batch, _ in found] == [(8, 2)] * 3  # as those before it
    np.testing.assert_array_equal(found[2][1], np.arange(8) < 5)


def test_a_short_batch_amid_others_is_never_dropped(mesh):
    loader = shard_dataloader(short(after=(8,)), ROWS, mesh, uneven="drop")
    next(loader), next(loader)
    with pytest.raises(ValueError, match="5 elements"):
        next(loader)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", [parts, Restartable, lambda: Stateful("dict"), lambda: Stateful("bytes")])
def test_positions(source, prefetch, mesh):
    for taken in (0, 2, 5):
        given = source()
        loader = shard_dataloader(given, ROWS, mesh, prefetch=prefetch)
        for _ in range(taken):
            next(loader)
        state = json.loads(json.dumps(loader.get_state()))
        assert (state["kind"], state["batch"], state["processes"]) == ("batches", taken, 1)
        assert numbers(loader) == list(range(taken, 5))
        loader.set_state(state)
        assert loader.get_state() == state and loader.position == taken
        assert numbers(loader) == list(range(taken, 5))
        other = shard_dataloader(source(), ROWS, mesh, prefetch=prefetch)
        other.set_state(state)
        assert numbers(other) == list(range(taken, 5))


def test_in_the_middle_of_reading_ahead(mesh):
    """The reader that is left behind takes nothing from the iterator that both use."""
    loader = shard_dataloader(Stateful("dict", 40), ROWS, mesh, prefetch=3)
    state = None
    for _ in range(10):
        if state is not None:
            loader.set_state(state)
        assert [int(next(loader)["x"][0, 0]) for _ in range(4)] == [0, 1, 2, 3]
        state = state or loader.get_state() | {"batch": 0, "states": None}
    loader.close()


def test_an_iterator_that_has_begun_already(mesh):
    source = Stateful("dict")
    next(source)
    loader = shard_dataloader(source, ROWS, mesh)
    state = loader.get_state()
    assert numbers(loader) == [1, 2, 3, 4]
    loader.set_state(state)
    assert numbers(loader) == [1, 2, 3, 4]


def test_a_padded_batch_after_a_restart(mesh):
    """A state keeps how large batches were, so that the last one has the same shape."""
    loader = shard_dataloader(short(), ROWS, mesh, uneven="pad")
    next(loader), next(loader)
    other = shard_dataloader(short(), ROWS, mesh, uneven="pad")
    other.set_state(loader.get_state())
    assert next(other)[0]["x"].shape == (8, 2)


def test_what_cannot_go_back(mesh):
    loader = shard_dataloader(generator(), ROWS, mesh)
    loader.set_state(loader.get_state() | {"batch": 2})  # not begun yet: it can be skipped
    assert numbers(loader) == [2, 3, 4]
    loader.set_state(loader.get_state() | {"batch": 2})
    with pytest.raises(ValueError, match="an iterator that has begun can't go back; give something"):
        next(loader)
    loader = shard_dataloader(parts(), ROWS, mesh)
    loader.set_state(loader.get_state() | {"batch": 9})
    with pytest.raises(ValueError, match="the state says batch 9, but there are 5 only"):
        next(loader)
    loader.set_state(loader.get_state() | {"batch": 2, "states": [{"json": {"next": 1}}]})
    with pytest.raises(ValueError, match="list_iterator has no set_state"):
        next(loader)


class Secret(Stateful):
    def get_state(self):
        return {"secret": object()}


@pytest.mark.parametrize(
    ("source", "options", "kind", "message"),
    [
        (generator(), {"shuffle": True}, ValueError, "shuffle can't be had of an iterator"),
        (generator(), {"seed": 3, "epochs": 2}, ValueError, "seed, epochs can't be had of an iterator"),
        ([], {}, ValueError, "the iterable is empty"),
        (Secret("dict"), {}, TypeError, "get_state.. has a object in it; only bytes, or what JSON can hold"),
        (np.zeros((8, 2)), {}, ValueError, "ndarray holds records, so say batch_size="),
    ],
)
def test_bad_input(source, options, kind, message, mesh):
    with pytest.raises(kind, match=message):
        shard_dataloader(source, ROWS, mesh, **options)


def test_bad_batches(mesh):
    for bad, message in (
        ([{"x": np.zeros(8), "n": 1}], r"batch\['n'\] has 0 dims"),
        ([{"x": np.array([None] * 8)}], "dtype object"),
        ([None], "has no arrays in it"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            next(shard_dataloader(bad, ROWS, mesh))


def test_states_of_others(mesh):
    loader = shard_dataloader(parts(), ROWS, mesh)
    for change, message in (
        ({"processes": 4}, "the state is of 4 processes, .* but here are 1; .*batch_size="),
        ({"batch": -1}, "batch -1"),
        ({"kind": "records"}, "a loader of records .* this one is of batches"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.set_state(loader.get_state() | change)
