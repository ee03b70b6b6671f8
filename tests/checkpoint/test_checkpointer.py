"""The training loop's side: when it saves, what it keeps, how it goes on, and what SIGTERM does."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk


def run(path, until, *, start_from=None, **options):
    """A loop that counts; returns the steps at which it saved, and what it was told at the end."""
    with sk.Checkpointer(path, **options) as checkpoints:
        state, done = checkpoints.resume({"count": jnp.zeros(3), "key": jax.random.key(0)})
        if start_from is not None:
            assert done == start_from
        saved = []
        for step in range(done + 1, until + 1):
            state = {"count": state["count"] + 1, "key": jax.random.fold_in(state["key"], step)}
            if checkpoints.save(state, step):
                saved.append(step)
            if checkpoints.preempted:
                break
        return state, saved


def test_goes_on_where_it_was(tmp_path):
    whole, saved = run(tmp_path / "a", 9, every=3, start_from=0)
    assert saved == [3, 6, 9]
    run(tmp_path / "b", 5, every=3)
    again, saved = run(tmp_path / "b", 9, every=3, start_from=3)
    assert saved == [6, 9]
    np.testing.assert_array_equal(again["count"], whole["count"])
    assert jax.random.normal(again["key"], ()) == jax.random.normal(whole["key"], ())


@pytest.mark.parametrize(("keep", "left"), [(1, [7]), (3, [5, 6, 7]), (None, [1, 2, 3, 4, 5, 6, 7])])
def test_keeps_the_newest(tmp_path, keep, left):
    run(tmp_path, 7, keep=keep)
    assert sorted(int(n) for n in os.listdir(tmp_path)) == left
    assert sk.latest_step(tmp_path) == 7


def test_one_that_is_not_whole_does_not_count_as_kept(tmp_path):
    run(tmp_path, 4, keep=None)
    (tmp_path / "4" / "SHA256SUMS").unlink()
    (tmp_path / "3" / "SHA256SUMS").unlink()
    with sk.Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3, 4]
        checkpoints.save({"x": jnp.ones(2)}, 5)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4, 5]


def test_what_a_killed_job_left_is_cleared(tmp_path):
    run(tmp_path, 2)
    (tmp_path / "3.orbax-checkpoint-tmp" / "d").mkdir(parents=True)
    (tmp_path / "1.deleted").mkdir()
    (tmp_path / "notes").mkdir()
    run(tmp_path, 3, start_from=2)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3", "notes"]


def test_a_donated_array_is_saved_as_it_was(tmp_path):
    """The next step may write over it while the files are written."""
    mesh = sk.make_mesh({"a": 8})
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    one = {"cut": sk.shard_tensor(np.zeros((8, 1 << 14)), {"a": sk.Shard(0)}, mesh), "alone": jnp.zeros(1 << 16)}
    one["whole"] = sk.shard_tensor(np.zeros(1 << 14), {}, mesh)
    with sk.Checkpointer(tmp_path, keep=None) as checkpoints:
        for number in range(1, 6):
            one = jax.block_until_ready(step(one))
            checkpoints.save(one, number)
        like = jax.tree.map(jnp.zeros_like, one)
        for number in range(1, 6):
            for x in jax.tree.leaves(checkpoints.restore(like, number)):
                np.testing.assert_array_equal(x, float(number))


def test_sigterm_saves_and_ends_the_loop(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with sk.Checkpointer(tmp_path, every=100) as checkpoints:
            assert not checkpoints.save({"x": jnp.ones(2)}, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpoints.save({"x": jnp.ones(2)}, 2)
            assert checkpoints.preempted
            assert sk.latest_step(tmp_path) == 2
        assert heard == [1]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_is_left_alone_if_wanted(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with sk.Checkpointer(tmp_path, preemption=False):
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


def test_restores_what_is_being_written(tmp_path):
    with sk.Checkpointer(tmp_path, every=2) as checkpoints:
        checkpoints.save({"x": jnp.arange(4.0)}, 2)
        np.testing.assert_array_equal(checkpoints.restore({"x": jnp.zeros(4)})["x"], np.arange(4.0))
        assert checkpoints.path == str(tmp_path)
        assert checkpoints.save({"x": jnp.ones(4)}, 2, force=True)
        np.testing.assert_array_equal(checkpoints.restore({"x": jnp.zeros(4)})["x"], np.ones(4))
