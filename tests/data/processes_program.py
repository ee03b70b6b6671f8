"""Run by test_processes.py in several processes of two devices each: what each case finds goes to stdout."""

import contextlib
import functools
import sys
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from shardkit.launch import initialize

initialize()

import shardkit as sk  # noqa: E402
from shardkit.data import shard_batch, shard_dataloader  # noqa: E402
from shardkit.hosts import ProcessMismatchError  # noqa: E402

ME, COUNT = jax.process_index(), jax.process_count()
DEVICES = jax.devices()
ROWS = sk.make_mesh({"dp": 2 * COUNT}, devices=DEVICES)
# Every row of blocks is in one process, and every column in all: "tp" goes across.
ACROSS = sk.make_mesh({"tp": COUNT, "dp": 2}, devices=DEVICES)
# Process by process in turn: its blocks are no neighbours.
IN_TURN = jax.sharding.Mesh(np.array(DEVICES).reshape(COUNT, 2).T.reshape(-1), ("dp",))


def check(array, wanted):
    assert array.shape == wanted.shape and array.dtype == wanted.dtype, (array.shape, array.dtype, wanted.shape)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])


def mismatch(*patterns):
    """The error that every process raises; each of the patterns is in it, in any order."""
    return pytest.raises(ProcessMismatchError, match="(?s)" + "".join(f"(?=.*{pattern})" for pattern in patterns))


def table(rows, columns=4):
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def rows_of_each_process():
    whole = {"x": table(4 * COUNT), "y": np.arange(4 * COUNT, dtype=np.int32)}
    own = jax.tree.map(lambda c: c[4 * ME : 4 * ME + 4], whole)
    batch = shard_batch(own, {"dp": sk.Shard(0)}, ROWS)
    jax.tree.map(check, batch, whole)
    assert float(jax.jit(lambda x: x.sum())(batch["x"])) == whole["x"].sum()
    check(shard_batch(own, {"dp": sk.Shard(0)}, ROWS, check=False)["x"], whole["x"])


def parts_of_a_mesh_in_turn():
    whole = table(4 * COUNT)
    blocks = whole.reshape(2, COUNT, 2, 4)
    check(shard_batch(blocks[:, ME].reshape(4, 4), {"dp": sk.Shard(0)}, IN_TURN), whole)


def a_dim_across_processes():
    whole = table(6, 2 * COUNT)
    own = whole[:, 2 * ME : 2 * ME + 2]
    check(shard_batch(own, {"dp": sk.Shard(0), "tp": sk.Shard(1)}, ACROSS), whole)
    with mismatch(r"parts of dim 1 of batch\['x'\] don't make blocks of one size", "process 1: 3 for 1 of its"):
        shard_batch({"x": table(6, 3 if ME == 1 else 2)}, {"dp": sk.Shard(0), "tp": sk.Shard(1)}, ACROSS)


def replicas():
    """All processes hold all rows: they must give the same."""
    whole = table(4)
    check(shard_batch(whole, {"dp": sk.Shard(0)}, ACROSS), whole)
    other = {"good": whole, "bad": whole + (ME == 1)}
    with mismatch("same part gave different data", r"batch\['bad'\].*process 1: ") as caught:
        shard_batch(other, {"dp": sk.Shard(0)}, ACROSS)
    assert "good" not in str(caught.value)


def what_differs():
    rows = {"dp": sk.Shard(0)}
    own = table(4)
    odd = ME == 1
    with mismatch(r"batch\['x'\]: ", "process 1: float16 of 2 dims", ": float32 of 2 dims"):
        shard_batch({"x": own.astype(np.float16) if odd else own}, rows, ROWS)
    with mismatch(r"batch\['y'\]: ", "process 1: int32", ": nothing"):
        shard_batch({"x": own} | ({"y": np.zeros(4, np.int32)} if odd else {}), rows, ROWS)
    with mismatch(r"process 1: float32 of 2 dims, placed \w+\(None, None\)", r"placed \w+\('dp'"):
        shard_batch({"x": own}, {} if odd else rows, ROWS)
    with mismatch("mesh: .*device order"):
        shard_batch({"x": own}, rows, ROWS if odd else IN_TURN)
    with mismatch("uneven: ", "process 1: pad"):
        shard_batch({"x": own}, rows, ROWS, uneven="pad" if odd else "error")
    with mismatch(r"process 1: 6 for 2 of its"):
        shard_batch({"x": table(6) if odd else own}, rows, ROWS)
    with pytest.raises(ValueError, match=r"3 elements in each process's part.* of which a process holds 2"):
        shard_batch({"x": table(3)}, rows, ROWS)
    # What fails in one process ends the call in all.
    kind = TypeError if odd else ProcessMismatchError
    with pytest.raises(kind, match="dtype object" if odd else "process 1: TypeError: .*dtype object"):
        shard_batch({"x": np.array([None] * 4) if odd else own}, rows, ROWS)


def padded_parts():
    own = table(4)[: 3 if ME == 1 else 4] + 100 * ME
    wanted = np.concatenate([table(4) + 100 * p for p in range(COUNT)])
    wanted[7] = 0
    batch, mask = shard_batch({"x": own}, {"dp": sk.Shard(0)}, ROWS, uneven="pad")
    check(batch["x"], wanted)
    check(mask, np.arange(4 * COUNT) != 7)
    with mismatch("hold the same rows on their devices, but gave different numbers of them", "process 1: 2 rows"):
        shard_batch(table(2 if ME == 1 else 4), {"dp": sk.Shard(0)}, ACROSS, uneven="pad")


def a_mesh_without_one_process():
    mesh = sk.make_mesh({"dp": 2}, devices=DEVICES[:2])
    with pytest.raises(ValueError, match=f"process {ME} has no device on mesh" if ME else "process 1: ValueError"):
        shard_batch(table(4), {"dp": sk.Shard(0)}, mesh)
    if ME == 0:
        check(shard_batch(table(4), {"dp": sk.Shard(0)}, mesh, check=False), table(4))


class Source:
    """Records that remember who asked."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        self.read.append(row)
        return {"x": np.full(2 * COUNT, row, np.float32), "y": row}


def records():
    """The same batches for any number of processes, each of which reads the rows that it needs."""
    count, size = 16 * COUNT, 8 * COUNT
    source = Source(count)
    options = {"batch_size": size, "shuffle": True, "seed": 3, "epochs": 2}
    with shard_dataloader(source, {"dp": sk.Shard(0)}, ROWS, **options) as loader:
        found = [np.asarray(s.data) for b in loader for s in b["y"].addressable_shards]
    orders = [np.random.default_rng([3, epoch]).permutation(count) for epoch in (0, 1)]
    mine = np.concatenate(orders).reshape(4, COUNT, 8)[:, ME]
    np.testing.assert_array_equal(np.concatenate(found), mine.reshape(-1))
    assert sorted(source.read) == sorted(mine.reshape(-1).tolist())
    # Rows of the whole batch, and of each a part.
    source = Source(count)
    with shard_dataloader(source, {"x": {"tp": sk.Shard(1)}, "y": {}}, ACROSS, **options) as loader:
        batch = next(loader)
        check(batch["x"], np.repeat(orders[0][:size, None], 2 * COUNT, 1).astype(np.float32))
        assert set(source.read[:size]) == set(orders[0][:size].tolist())
        state = loader.get_state()
    assert (state["epoch"], state["batch"]) == (0, 1)
    with mismatch("records: ", "process 1: 64", ": 32"):
        shard_dataloader(Source(64 if ME == 1 else 32), {"dp": sk.Shard(0)}, ROWS, batch_size=32)
    with pytest.raises(ValueError, match="don't make whole batches"):
        shard_dataloader(Source(33 if ME == 1 else 32), {"dp": sk.Shard(0)}, ROWS, batch_size=32)
    unlike = [{"x": np.zeros(3 if ME == 1 else 2)}] * 32
    with shard_dataloader(unlike, {"dp": sk.Shard(0)}, ROWS, batch_size=32) as loader:
        with mismatch(r"batch\['x'\]: .*process 1: float32\[32, 3\]"):
            next(loader)
        loader.set_state(loader.get_state())
        with mismatch(r"batch\['x'\]: .*process 1: float32\[32, 3\]"):
            next(loader)
    with shard_dataloader(Source(32), {"dp": sk.Shard(0)}, ROWS, batch_size=16) as loader:
        state = loader.get_state()
        with mismatch("set_state: ", " batch: .*process 1: 1"):
            loader.set_state(state | {"batch": int(ME == 1)})
        loader.set_state(state)


def parts(count, rows=4):
    return [{"x": np.full((rows, 2), 10 * ME + number, np.float32)} for number in range(count)]


class Pair(NamedTuple):
    x: object
    y: object


def firsts(loader):
    return [[float(s.data[0, 0]) for s in b["x"].addressable_shards] for b in loader]


def iterators(prefetch):
    make = functools.partial(shard_dataloader, placements={"dp": sk.Shard(0)}, mesh=ROWS, prefetch=prefetch)
    assert firsts(make(iter(parts(3)))) == [[10.0 * ME + k] * 2 for k in range(3)]
    fewer = 2 if ME == 1 else 4
    loader = make(parts(fewer))
    next(loader), next(loader)
    with mismatch("iterators of process 1 ended after 2 batches", "those of process(es)? 0.* have more"):
        next(loader)
    assert len(firsts(make(parts(fewer), uneven="drop"))) == 2
    found = list(make(parts(fewer), uneven="pad"))
    assert len(found) == 4
    for number, (batch, mask) in enumerate(found):
        there = np.repeat([not (p == 1 and number >= 2) for p in range(COUNT)], 4)
        check(mask, there)
        values = np.repeat([10.0 * p + number for p in range(COUNT)], 4) * there
        check(batch["x"], np.repeat(values[:, None], 2, 1).astype(np.float32))
    # A process without any batch learns from the others what one looks like.
    assert len(list(make(parts(0 if ME == 1 else 2) or iter(()), uneven="pad"))) == 2
    unusual = make(iter(()) if ME == 1 else [Pair(np.zeros(4), np.zeros(4))], uneven="pad")
    with pytest.raises(ValueError, match="had nothing at all, and the structure"):
        next(unusual)
    # The last batches are short, in one process more than in the others: all keep their shape.
    short = [*parts(2), *parts(1, rows=1 if ME == 1 else 3)]
    assert [b["x"].shape[0] for b, _ in make(short, uneven="pad")] == [4 * COUNT] * 3
    assert len(firsts(make(short, uneven="drop"))) == 2

    def fails():
        yield from parts(1)
        if ME == 1:
            raise OSError("no such shard")
        yield from parts(5)

    loader = make(fails())
    next(loader)
    failed = pytest.raises(OSError, match="no such shard") if ME == 1 else mismatch("process 1: OSError: no such shard")
    with failed:
        next(loader)
    with mismatch(r"process 1: float32 of 3 dims"):
        next(make([np.zeros((2, 2, 2), np.float32) if ME == 1 else np.zeros((2, 2), np.float32)]))
    assert len(make(parts(3))) == 3
    with pytest.raises(TypeError):
        len(make(parts(3), uneven="drop"))
    with pytest.raises(ValueError, match="check=False leaves out"):
        make(parts(1), uneven="drop", check=False)
    assert len(firsts(make(parts(3), check=False))) == 3


class Resumable:
    """As grain's iterators."""

    def __init__(self, batches):
        self.batches, self.next = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.batches):
            raise StopIteration
        self.next += 1
        return self.batches[self.next - 1]

    def get_state(self):
        return {"next": self.next, "process": ME}

    def set_state(self, state):
        assert state["process"] == ME
        self.next = state["next"]


class Loader:
    """What a ``Resumable`` is made of anew each time."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return Resumable(self.batches)


def states_of_iterators(prefetch):
    make = functools.partial(shard_dataloader, placements={"dp": sk.Shard(0)}, mesh=ROWS, prefetch=prefetch)
    for source in (parts(5), Loader(parts(5))):
        whole = firsts(make(source))
        loader = make(source)
        next(loader), next(loader)
        state = loader.get_state()
        assert state["batch"] == 2 and state["processes"] == COUNT
        if not isinstance(source, list):
            assert [s["json"] for s in state["states"]] == [{"next": 2, "process": p} for p in range(COUNT)]
        next(loader)
        loader.set_state(state)
        assert loader.get_state() == state
        assert firsts(loader) == whole[2:]
        again = make(source)
        again.set_state(state)
        assert firsts(again) == whole[2:]
        with pytest.raises(ValueError, match=rf"state is of 7 processes.*here are {COUNT}"):
            loader.set_state(state | {"processes": 7})
    loader = make(parts(5))
    if ME == 1:
        # Positions that differ.
        loader._place = type(loader._place)(1)
    with mismatch("batches delivered: .*process 1: 1"):
        loader.get_state()


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("shardkit shard_dataloader")]


def one_leaves():
    """A process that closes its loader early doesn't leave the others waiting."""
    loader = shard_dataloader(parts(9), {"dp": sk.Shard(0)}, ROWS)
    next(loader)
    if ME == 1:
        loader.close()
    else:
        with mismatch("process 1 closed the loader or set another state after [123] batches"):
            list(loader)
    # All leave, with readers at different batches.
    for number in range(3):
        loader = shard_dataloader(parts(9), {"dp": sk.Shard(0)}, ROWS)
        next(loader)
        if ME == 0:
            time.sleep(0.02 * number)
        loader.close()
    until = time.monotonic() + 30
    while time.monotonic() < until and any(
        t.name.startswith("shardkit shard_dataloader") for t in threading.enumerate()
    ):
        time.sleep(0.01)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("shardkit shard_dataloader")]


def cost():
    own = table(4)
    for checked in (True, False):
        shard_batch(own, {"dp": sk.Shard(0)}, ROWS, check=checked)
        start = time.perf_counter()
        for _ in range(50):
            shard_batch(own, {"dp": sk.Shard(0)}, ROWS, check=checked)
        sys.stdout.write(f"check={checked}: {(time.perf_counter() - start) / 50 * 1e3:.2f} ms a call\n")


CASES = [
    rows_of_each_process,
    parts_of_a_mesh_in_turn,
    a_dim_across_processes,
    replicas,
    what_differs,
    padded_parts,
    a_mesh_without_one_process,
    records,
    functools.partial(iterators, 2),
    functools.partial(iterators, 0),
    functools.partial(states_of_iterators, 2),
    functools.partial(states_of_iterators, 0),
    one_leaves,
    cost,
]

for case in CASES:
    name = case.func.__name__ + str(case.args) if isinstance(case, functools.partial) else case.__name__
    start = time.perf_counter()
    case()
    sys.stdout.write(f"{name}: well, {time.perf_counter() - start:.2f} s\n")
    sys.stdout.flush()

# At its end the program leaves a loader open, whose thread may wait for the others.
left = shard_dataloader((b for b in parts(99)), {"dp": sk.Shard(0)}, ROWS)
with contextlib.suppress(StopIteration):
    next(left)
sys.stdout.write("all is well\n")
