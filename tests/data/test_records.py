"""Batches of records: which, in which order, on which devices; positions; bad input."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.data import DataLoader, shard_dataloader

PLACEMENTS = {"x": {"dp": sk.Shard(0), "tp": sk.Shard(1)}, "y": {"dp": sk.Shard(0)}}


def columns(count=24):
    return {"x": np.arange(4 * count, dtype=np.float32).reshape(count, 4), "y": np.arange(count)}


class Source:
    """As a torch-style data set: records by number."""

    def __init__(self, count=24):
        self.data, self.read = columns(count), []

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, row):
        self.read.append(row)
        return {"x": self.data["x"][row], "y": int(self.data["y"][row])}


def labels(loader):
    return [np.asarray(batch["y"]).tolist() for batch in loader]


@pytest.fixture
def mesh(mesh_for):
    return mesh_for({"dp": 4, "tp": 2})


@pytest.mark.parametrize("source", [columns, Source, lambda: list(map(Source().__getitem__, range(24)))])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches(source, prefetch, axis_types, mesh_for, ambient):
    mesh = mesh_for({"dp": 4, "tp": 2}, axis_types)
    loader = shard_dataloader(
        source(), PLACEMENTS, mesh, batch_size=8, shuffle=True, seed=5, epochs=2, prefetch=prefetch
    )
    assert isinstance(loader, DataLoader) and iter(loader) is loader and len(loader) == 6
    wanted = np.concatenate([np.random.default_rng([5, epoch]).permutation(24) for epoch in (0, 1)])
    with ambient(mesh):
        for number, batch in enumerate(loader):
            assert loader.position == number + 1
            rows = wanted[8 * number : 8 * number + 8]
            np.testing.assert_array_equal(batch["y"], rows)
            np.testing.assert_array_equal(batch["x"], columns()["x"][rows])
            assert batch["x"].sharding == NamedSharding(mesh, PartitionSpec("dp", "tp"))
            assert batch["y"].sharding == NamedSharding(mesh, PartitionSpec("dp"))
            assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int64)
    assert loader.position == 6
    with pytest.raises(StopIteration):
        next(loader)


def test_the_same_batches_on_any_mesh(mesh_for):
    found = [
        labels(shard_dataloader(columns(), {"dp": sk.Shard(0)}, mesh_for(shape), batch_size=8, shuffle=True))
        for shape in ({"dp": 1}, {"dp": 8}, {"dp": 2, "tp": 4})
    ]
    assert found[0] == found[1] == found[2]


def test_other_kinds_of_records(mesh):
    rows = np.arange(16.0)
    for source in (rows, jax.numpy.asarray(rows), list(rows)):
        found = shard_dataloader(source, {"dp": sk.Shard(0)}, mesh, batch_size=8)
        np.testing.assert_array_equal(np.concatenate(list(found)), rows)
    first, second = next(shard_dataloader((rows, 2 * rows), {"dp": sk.Shard(0)}, mesh, batch_size=8))
    np.testing.assert_array_equal(second, 2 * first)


class OnDisk:
    """As h5py: rows in ascending order only, and nothing is read before it's asked for."""

    def __init__(self, data):
        self.data, self.read = data, 0
        self.shape, self.dtype = data.shape, data.dtype

    def __getitem__(self, index):
        rows, *_ = index
        assert (np.diff(rows) > 0).all()
        self.read += self.data[index].size
        return self.data[index]


def test_arrays_on_disk(mesh, tmp_path):
    np.save(tmp_path / "x.npy", columns()["x"])
    lazy = OnDisk(columns()["x"])
    data = {"map": np.load(tmp_path / "x.npy", mmap_mode="r"), "lazy": lazy}
    cut = {"dp": sk.Shard(0), "tp": sk.Shard(1)}
    batch = next(shard_dataloader(data, cut, mesh, batch_size=8, shuffle=True, epochs=np.int64(1), prefetch=0))
    wanted = columns()["x"][np.random.default_rng([0, 0]).permutation(24)[:8]]
    np.testing.assert_array_equal(batch["map"], wanted)
    np.testing.assert_array_equal(batch["lazy"], wanted)
    assert lazy.read == 8 * 4  # each element once


def test_each_record_is_read_once_when_its_needed(mesh):
    source = Source()
    loader = shard_dataloader(source, PLACEMENTS, mesh, batch_size=8, prefetch=0)
    assert source.read == []
    next(loader)
    assert sorted(source.read) == list(range(8))
    next(loader)
    assert sorted(source.read) == list(range(16))


@pytest.mark.parametrize("prefetch", [0, 3])
def test_short_batches(prefetch, mesh):
    """What doesn't fill a batch: refused at once, left out, or filled up with rows of zeros."""
    options = {"batch_size": 8, "epochs": 2, "prefetch": prefetch, "shuffle": True}
    for source in (columns(21), Source(21)):
        with pytest.raises(ValueError, match=r"21 records don't make whole batches of 8; uneven=.* leaves 5 rec"):
            shard_dataloader(source, PLACEMENTS, mesh, **options)
        orders = [np.random.default_rng([0, epoch]).permutation(21).tolist() for epoch in (0, 1)]
        dropped = shard_dataloader(source, PLACEMENTS, mesh, uneven="drop", **options)
        assert len(dropped) == 4
        assert np.concatenate(labels(dropped)).tolist() == orders[0][:16] + orders[1][:16]
        loader = shard_dataloader(source, PLACEMENTS, mesh, uneven="pad", **options)
        assert len(loader) == 6
        found = []
        for batch, mask in loader:
            assert batch["x"].shape == (8, 4) and mask.sharding == NamedSharding(mesh, PartitionSpec("dp"))
            assert not np.asarray(batch["x"])[~np.asarray(mask)].any()
            found += np.asarray(batch["y"])[np.asarray(mask)].tolist()
        assert found == orders[0] + orders[1]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5, 6])
def test_positions(prefetch, taken, mesh):
    """From any batch on, in another loader on another mesh, and back."""
    options = {"batch_size": 8, "shuffle": True, "seed": 1, "epochs": 2, "prefetch": prefetch}
    whole = labels(shard_dataloader(columns(), PLACEMENTS, mesh, **options))
    loader = shard_dataloader(columns(), PLACEMENTS, mesh, **options)
    for _ in range(taken):
        next(loader)
    state = json.loads(json.dumps(loader.get_state()))
    assert state == {
        "kind": "records",
        "epoch": taken // 3,
        "batch": taken % 3,
        "seed": 1,
        "shuffle": True,
        "batch_size": 8,
        "records": 24,
    }
    rest = labels(loader)
    assert rest == whole[taken:]
    loader.set_state(state)
    assert loader.position == taken and labels(loader) == rest
    other = shard_dataloader(Source(), {"a": sk.Shard(0)}, sk.make_mesh({"a": 2}), **options)
    next(other)
    other.set_state(state)
    assert labels(other) == rest and other.get_state() == loader.get_state()


def test_a_state_between_padding_and_dropping(mesh):
    """The end of an epoch is where the loader's own epochs end."""
    options = {"batch_size": 8, "epochs": 2}
    padded = shard_dataloader(columns(20), PLACEMENTS, mesh, uneven="pad", **options)
    next(padded), next(padded)
    dropped = shard_dataloader(columns(20), PLACEMENTS, mesh, uneven="drop", **options)
    dropped.set_state(padded.get_state())
    assert dropped.get_state()["epoch"] == 1 and len(list(dropped)) == 2


def test_for_ever(mesh):
    loader = shard_dataloader(columns(), PLACEMENTS, mesh, batch_size=8, epochs=None)
    with pytest.raises(TypeError, match="epochs=None has no length"):
        len(loader)
    found = [np.asarray(next(loader)["y"]).tolist() for _ in range(7)]
    assert found[0] == found[3] == found[6]
    assert loader.position == 7
    loader.close()


class Broken(Source):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def __getitem__(self, row):
        if row == 9:
            raise self.error
        return super().__getitem__(row)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_dataset_that_fails(prefetch, mesh):
    """Its error comes out where its batch would have, with the line that raised it; the loader can go back."""
    source = Broken(OSError("no such file"))
    loader = shard_dataloader(source, PLACEMENTS, mesh, batch_size=8, prefetch=prefetch)
    next(loader)
    for _ in range(2):
        with pytest.raises(OSError, match="no such file") as caught:
            next(loader)
        assert "raise self.error" in str(caught.traceback[-1].statement)
    source.error = None
    state = loader.get_state()
    assert state["batch"] == 1
    source.__class__ = Source
    loader.set_state(state)
    assert len(labels(loader)) == 2
    with pytest.raises(RuntimeError, match="reading record 9 raised StopIteration"):
        list(shard_dataloader(Broken(StopIteration()), PLACEMENTS, mesh, batch_size=8, prefetch=prefetch))


class Unlike(Source):
    def __getitem__(self, row):
        return {"x": np.zeros(4 if row < 9 else 5), "y": 0} if row != 7 else {"x": np.zeros(4)}


def test_records_that_are_not_alike(mesh):
    with pytest.raises(ValueError, match="record 7 is PyTreeDef"):
        list(shard_dataloader(Unlike(), PLACEMENTS, mesh, batch_size=8))
    loader = shard_dataloader(Unlike(), PLACEMENTS, mesh, batch_size=8)
    loader.set_state(loader.get_state() | {"batch": 1})
    with pytest.raises(ValueError, match=r"record 9\['x'\] is float64\[5\], but the first one read is float64\[4\]"):
        next(loader)


D, N = columns(), {"batch_size": 8}


@pytest.mark.parametrize(
    ("source", "placements", "options", "kind", "message"),
    [
        (D, PLACEMENTS, N | {"uneven": "fill"}, ValueError, 'uneven=\'fill\' is unknown; use "error", "pad" or "drop"'),
        (
            D,
            PLACEMENTS,
            {"batch_size": 6},
            ValueError,
            "by the 4 blocks .*give a multiple of 4, e.g. 4 or 8",
        ),
        (D, PLACEMENTS, {"batch_size": 3}, ValueError, "give a multiple of 4, e.g. 4"),
        (D, PLACEMENTS, {"batch_size": 0}, ValueError, "batch_size=0 must be an integer of at least 1"),
        (D, PLACEMENTS, {"batch_size": 8.0}, ValueError, "batch_size=8.0 must be"),
        (D, {"x": {"tp": sk.Shard(-2)}, "y": {"dp": sk.Shard(-1)}}, {"batch_size": 6}, ValueError, "e.g. 4 or 8"),
        (D, PLACEMENTS, N | {"seed": -1}, ValueError, "seed=-1 must be"),
        (D, PLACEMENTS, N | {"epochs": 0}, ValueError, "epochs=0 must be .*None for ever"),
        (D, PLACEMENTS, N | {"prefetch": -1}, ValueError, "prefetch=-1 must be"),
        (D, PLACEMENTS, {}, ValueError, "dict holds records, so say batch_size="),
        (Source(), PLACEMENTS, {}, ValueError, "Source holds records, so say batch_size="),
        (iter([D]), PLACEMENTS, N, ValueError, "list_iterator can only be iterated: .*leave batch_size out"),
        ([], PLACEMENTS, N, ValueError, "there are no records"),
        (columns(0), PLACEMENTS, N, ValueError, "there are no records"),
        (columns(5), PLACEMENTS, N | {"uneven": "drop"}, ValueError, "5 records don't make one batch of 8"),
        ({"x": D["x"], "y": D["y"][:3]}, PLACEMENTS, N, ValueError, r"equal first dims, got .*24.*3"),
        ({"x": D["x"], "y": 3}, PLACEMENTS, N, ValueError, "equal first dims, got .*no rows"),
        (D, {"dp": sk.Partial()}, N, ValueError, "shard_dataloader takes .* Partial over"),
        (D, {"dp": sk.Shard(1)}, N, ValueError, r"batch\['y'\] has 1 dims. Shard\(1\) .*Give placements per leaf"),
        ({"x": np.zeros((24, 3))}, {"tp": sk.Shard(1)}, N, ValueError, "dim 1 of batch.* has 3 elements.*2 blocks"),
        ({"x": np.array([None] * 24)}, {}, N, TypeError, r"batch\['x'\] has dtype object"),
        (7, {}, {}, TypeError, "takes records .* or an iterable of batches, got int"),
    ],
)
def test_bad_input(source, placements, options, kind, message, mesh):
    with pytest.raises(kind, match=message):
        shard_dataloader(source, placements, mesh, **options)


def test_bad_records_are_known_at_the_first(mesh):
    with pytest.raises(TypeError, match=r"batch\['x'\] has dtype <U1"):
        next(shard_dataloader([{"x": "a"}] * 8, {}, mesh, batch_size=8))


def test_no_mesh():
    with pytest.raises(ValueError, match="shard_dataloader found no mesh"):
        shard_dataloader(D, {"dp": sk.Shard(0)}, batch_size=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7, "batch_size": 4}, "seed: 7 in the state, 0 here; batch_size: 4 in the state, 8 here"),
        ({"records": 99}, "records: 99 in the state, 24 here"),
        ({"shuffle": True}, "shuffle: True in the state, False here"),
        ({"batch": 4}, "batch 4 of epoch 0, but an epoch has 3 batches"),
        ({"kind": "batches"}, "a loader of batches .* this one is of records"),
        ({"more": 1}, "a loader of records .*more.* this one is of records"),
    ],
)
def test_states_of_others(change, message, mesh):
    loader = shard_dataloader(D, PLACEMENTS, mesh, batch_size=8)
    with pytest.raises(ValueError, match=message):
        loader.set_state(loader.get_state() | change)
    with pytest.raises(ValueError, match="set_state takes what get_state gave, got 3"):
        loader.set_state(3)
    assert len(list(loader)) == 3  # it is where it was


def test_closed(mesh):
    with shard_dataloader(D, PLACEMENTS, mesh, batch_size=8) as loader:
        state = loader.get_state()
        next(loader)
    loader.close()
    with pytest.raises(ValueError, match="the loader is closed"):
        next(loader)
    with pytest.raises(ValueError, match="the loader is closed"):
        loader.set_state(state)
