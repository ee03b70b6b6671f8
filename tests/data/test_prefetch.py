"""The thread that reads ahead: how far, and that it always ends."""

import gc
import threading
import time
import weakref

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.data import shard_dataloader

ROWS = {"dp": sk.Shard(0)}


class Counting:
    """An endless iterator that says how far it was read."""

    def __init__(self):
        self.made = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.made += 1
        return np.full((8,), self.made)


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("shardkit shard_dataloader")]


@pytest.fixture(autouse=True)
def all_threads_end():
    gc.collect()
    wait_for(lambda: not readers())
    yield
    gc.collect()
    wait_for(lambda: not readers())


@pytest.fixture
def mesh(mesh_for):
    return mesh_for({"dp": 4})


@pytest.mark.parametrize("prefetch", [1, 3])
def test_so_many_ahead(prefetch, mesh):
    source = Counting()
    with shard_dataloader(source, ROWS, mesh, prefetch=prefetch) as loader:
        assert source.made == 0 and not readers()  # until the first is asked for
        for taken in (1, 2, 3):
            assert int(next(loader)[0]) == taken
            wait_for(lambda taken=taken: source.made == taken + prefetch)
        time.sleep(0.02)
        assert source.made == 3 + prefetch and loader.position == 3


def test_none_ahead(mesh):
    source = Counting()
    loader = shard_dataloader(source, ROWS, mesh, prefetch=0)
    next(loader)
    assert source.made == 1 and not readers()


def test_a_batch_is_kept_by_its_user_alone(mesh):
    """While the next one is awaited no memory is held for the last."""
    for prefetch in (0, 2):
        for source, options in ((iter([np.zeros(8)] * 3), {}), (np.zeros(24), {"batch_size": 8})):
            loader = shard_dataloader(source, ROWS, mesh, prefetch=prefetch, **options)
            batch = weakref.ref(next(loader))
            gc.collect()
            assert batch() is None
            loader.close()


def test_it_ends_with_the_loader(mesh):
    loader = shard_dataloader(Counting(), ROWS, mesh)
    next(loader)
    assert len(readers()) == 1 and readers()[0].daemon
    loader.close()
    assert not readers()
    loader = shard_dataloader(Counting(), ROWS, mesh)
    next(loader)
    del loader
    wait_for(lambda: not readers())
    assert len(list(shard_dataloader([np.zeros(8)] * 3, ROWS, mesh))) == 3
    wait_for(lambda: not readers())


def test_one_at_a_time_after_a_new_state(mesh):
    loader = shard_dataloader(np.arange(64), ROWS, mesh, batch_size=8)
    state = loader.get_state()
    for _ in range(3):
        next(loader)
        loader.set_state(state)
        assert not readers()


def test_an_error_ends_it(mesh):
    def fails():
        yield np.zeros(8)
        raise SystemExit("no more")

    loader = shard_dataloader(fails(), ROWS, mesh)
    next(loader)
    with pytest.raises(SystemExit, match="no more"):
        next(loader)
    wait_for(lambda: not readers())


def test_closing_doesnt_wait_for_slow_data(mesh, monkeypatch):
    monkeypatch.setattr("shardkit.data.prefetch._WAIT", 0.01)
    go_on = threading.Event()

    def slow():
        yield np.zeros(8)
        go_on.wait(20)
        yield np.zeros(8)

    loader = shard_dataloader(slow(), ROWS, mesh)
    next(loader)
    loader.close()
    assert readers()
    go_on.set()
    wait_for(lambda: not readers())


def test_settings_of_the_thread_that_made_the_loader(mesh):
    """Whether 64 bits are on is a setting of a thread."""
    with jax.enable_x64(False):
        assert next(shard_dataloader(np.arange(8), ROWS, mesh, batch_size=8)).dtype == np.int32
    assert next(shard_dataloader(np.arange(8), ROWS, mesh, batch_size=8)).dtype == np.int64
