"""Run by test_processes.py, once a process: two processes with two devices each."""

import sys

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.launch import initialize

initialize()

mesh = sk.make_mesh({"x": 2, "y": 2})
value = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def check(array, wanted):
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])


def block(index):
    return value[4 * index["x"] :, 4 * index["y"] :][:4, :4]


x = sk.from_local(block, [sk.Shard(0), sk.Shard(1)], mesh)
check(x, value)
assert [local.shape for local in sk.to_local(x)] == [(4, 4)] * 2

turned = sk.reshard(x, [sk.Shard(1), sk.Shard(0)])
assert sk.placements(turned) == (sk.Shard(1), sk.Shard(0))
check(turned, value)
check(sk.unshard(x), value)

partial = sk.from_local(lambda index: value * (1 + index["x"]), [sk.Partial(), sk.Replicate()], mesh)
check(partial.reduce(), 3 * value)
check(sk.reshard(partial, [sk.Shard(1), sk.Shard(0)]), 3 * value)

odd = sk.shard_tensor(value[:5], [sk.Shard(0), sk.Replicate()], mesh, uneven="pad")
check(sk.reshard(odd, [sk.Replicate(), sk.Shard(1)]).array, value[:5])

half = sk.make_mesh({"s": 2}, devices=jax.devices()[:2])
with pytest.raises(ValueError, match="can't address the devices of processes"):
    sk.reshard(x, [sk.Shard(0)], half)
sys.stdout.write("all is well")
