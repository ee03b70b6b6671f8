"""What grain makes: data sources as records, loaders and data sets as iterators of batches."""

import json

import numpy as np
import pytest

import shardkit as sk
from shardkit.data import shard_dataloader

grain = pytest.importorskip("grain")


class Source:
    def __len__(self):
        return 32

    def __getitem__(self, row):
        return {"x": np.full((2,), row, np.float32)}

    def __repr__(self):
        return "Source"


def data_loader():
    sampler = grain.samplers.IndexSampler(32, shard_options=grain.sharding.NoSharding(), shuffle=True, seed=1)
    batch = grain.transforms.Batch(8, drop_remainder=True)
    return grain.DataLoader(data_source=Source(), sampler=sampler, operations=[batch], worker_count=0)


def map_dataset():
    return grain.MapDataset.source(Source()).shuffle(seed=1).batch(8)


def iter_dataset():
    return grain.MapDataset.source(Source()).shuffle(seed=1).to_iter_dataset().batch(8)


def rows(batch):
    return np.asarray(batch["x"])[:, 0].tolist()


def first(loader, count=4):
    return [rows(next(loader)) for _ in range(count)]


@pytest.mark.parametrize("make", [data_loader, map_dataset, iter_dataset])
def test_iterators_and_their_states(make, mesh_for):
    mesh = mesh_for({"dp": 4})
    plain = iter(make())
    wanted = [rows(next(plain)) for _ in range(4)]
    with shard_dataloader(make(), {"dp": sk.Shard(0)}, mesh) as loader:
        assert first(loader, 2) == wanted[:2]
        state = json.loads(json.dumps(loader.get_state()))
        assert state["states"][0] is not None
        assert first(loader, 2) == wanted[2:]
        loader.set_state(state)
        assert first(loader, 2) == wanted[2:]
    with shard_dataloader(make(), {"dp": sk.Shard(0)}, mesh) as other:
        other.set_state(state)
        assert first(other, 2) == wanted[2:]


def test_records(mesh_for):
    """A data set with random access, without batches: its records."""
    records = grain.MapDataset.source(Source())
    loader = shard_dataloader(records, {"dp": sk.Shard(0)}, mesh_for({"dp": 4}), batch_size=8)
    assert np.concatenate(first(loader)).tolist() == list(range(32))
