"""Two processes that save and restore what is the same in both, and what isn't; each says what came of it."""

import json
import os
import resource
import signal
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkit as sk

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


class Position:
    """Something that has a state, and may not take one."""

    def __init__(self, at, taken=True):
        self.at, self.taken = at, taken

    def get_state(self):
        return self.at

    def set_state(self, state):
        if not self.taken:
            raise ValueError("not taken")
        self.at = state


def on_all(x=X):
    mesh = sk.make_mesh({"a": 4})
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec("a")), lambda index: x[index])


def on_own(x):
    """On a mesh of this process's devices."""
    return jax.device_put(x, NamedSharding(Mesh(np.array(jax.local_devices()), ("own",)), PartitionSpec("own")))


def on_one_process(number):
    """An array of which the other process has no part."""
    mesh = Mesh(np.array([d for d in jax.devices() if d.process_index == number]), ("own",))
    halves = zip(mesh.devices.flat, (X[:4], X[4:]), strict=True)
    parts = [jax.device_put(half, device) for device, half in halves if device.process_index == me()]
    return jax.make_array_from_single_device_arrays(
        X.shape, NamedSharding(mesh, PartitionSpec("own")), parts, dtype=X.dtype
    )


def me():
    return jax.process_index()


def same(path):
    def tree(factor):
        one = jnp.full(4, 3.0 * factor)  # on this process's first device
        keys = on_own(jax.random.split(jax.random.key(factor), 4))
        return {
            "all": on_all(X * factor),
            "own": on_own(X * factor),
            "one": one,
            "keys": keys,
            "n": np.arange(3) * factor,
        }

    sk.save(path, tree(1), 1)
    found = sk.restore(path, tree(0))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree(1)), strict=True):
        if isinstance(a, jax.Array):
            assert a.sharding == b.sharding
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            for p, q in zip(a.addressable_shards, b.addressable_shards, strict=True):
                np.testing.assert_array_equal(p.data, q.data)
        else:
            np.testing.assert_array_equal(a, b)


def other_numpy(path):
    sk.save(path, {"same": 1, "n": np.full(3, me()), "all": on_all()}, 1)


def other_own(path):
    sk.save(path, {"n": jnp.full(3, me())}, 1)


def other_number(path):
    sk.save(path, {"n": me()}, 1)


def other_tree(path):
    sk.save(path, {"n": 1} | ({"m": 2} if me() else {}), 1)


def other_value(path):
    sk.save(path, {"n": object() if me() else 1}, 1)


def other_path(path):
    sk.save(f"{path}-{me()}", {"n": 1}, 1)


def own_states(path):
    position = Position({"at": me()})
    sk.save(path, {"position": position}, 1)
    position.at = None
    sk.restore(path, {"position": position})
    assert position.at == {"at": me()}


def not_taken(path):
    position = Position(1)
    sk.save(path, {"position": position}, 1)
    position.at, position.taken = 5, me() == 0
    try:
        sk.restore(path, {"position": position})
    finally:
        assert position.at == 5


def part_nowhere(path):
    sk.save(path, {"x": on_one_process(1)}, 1)


def other_target(path):
    sk.save(path, {"x": on_all()}, 1)
    sk.restore(path, {"x": on_all()} if me() else {"y": on_all()})


def restored_elsewhere(path):
    sk.save(path, {"n": 1}, 1)
    sk.restore(f"{path}-nowhere" if me() else path, {"n": 1})


def below_a_file(path):
    if me() == 0:
        path.write_text("x")
    sk.save(path / "run", {"x": on_all()}, 1)


def full_disk(path):
    """Of the second process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if me() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        sk.save(path, {"x": on_all(np.random.default_rng(0).normal(size=(4, 40_000)))}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert sk.latest_step(path) is None


def damaged(path):
    sk.save(path, {"x": on_all()}, 1)
    sk.save(path, {"x": on_all()}, 2)
    with sk.Checkpointer(path) as checkpoints:
        if me() == 0:
            (path / "2" / "manifest.ocdbt").write_bytes(b"")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = checkpoints.resume({"x": on_all()}, damaged="previous")[1]
        assert found == 1
        assert sum("manifest.ocdbt" in str(one.message) for one in told) == 1
        checkpoints.save({"x": on_all()}, 2)
        checkpoints.save({"x": on_all(X + 1)}, 2, force=True)
        found = checkpoints.restore({"x": on_all()})["x"]
        np.testing.assert_array_equal(found.addressable_shards[0].data, on_all(X + 1).addressable_shards[0].data)
        assert checkpoints.steps() == [1, 2]


def preempted(path):
    with sk.Checkpointer(path, every=10_000) as checkpoints:
        for step in range(1, 10_000):
            if (step, me()) == (3, 1):
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.save({"x": on_all()}, step)
            if checkpoints.preempted:
                assert checkpoints.steps() == [step]
                return
            jax.block_until_ready(jax.jit(jnp.sum)(on_all()))


CASES = [same, other_numpy, other_own, other_number, other_tree, other_value, other_path, own_states, not_taken]
CASES += [part_nowhere, other_target, restored_elsewhere, below_a_file, full_disk, damaged, preempted]


def main():
    sk.initialize()
    folder = Path(sys.argv[1])
    said = {}
    for case in CASES:
        try:
            case(folder / case.__name__)
            said[case.__name__] = "done"
        except Exception as error:
            said[case.__name__] = f"{type(error).__name__}: {error}"
    (folder / f"said-{me()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
