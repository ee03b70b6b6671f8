"""The training loop's side: when it saves, what it keeps, how it goes on, and what SIGTERM does."""

import concurrent.futures
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import shardkit as sk
from shardkit.checkpoint.writing import Handler


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


def test_sigterm_whatever_the_order_in_which_they_are_closed(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    first, second = (sk.Checkpointer(tmp_path / name, every=100) for name in "ab")
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert second.save({"x": 1}, 1)
    assert second.preempted
    second.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_hands_on_is_no_circle(tmp_path):
    heard = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with sk.Checkpointer(tmp_path / "a") as first:
            ours = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *given: heard.append(1) or ours(*given))
            with sk.Checkpointer(tmp_path / "b") as second:
                os.kill(os.getpid(), signal.SIGTERM)
                assert heard == [1]
                assert first.save({"x": 1}, 1)
                assert second.save({"x": 1}, 1)
                assert first.preempted
                assert second.preempted
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_that_nobody_closed_does_not_keep_sigterm(tmp_path):
    """As in a notebook."""
    program = (
        "import gc, os, signal, sys, shardkit as sk\n"
        "sk.Checkpointer(sys.argv[1])\n"
        "gc.collect()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program, tmp_path], env=environment, check=False)
    assert done.returncode == -signal.SIGTERM


def test_a_closed_one_says_so(tmp_path):
    checkpoints = sk.Checkpointer(tmp_path)
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(sk.CheckpointError, match="is closed; make another one to save step 1"):
        checkpoints.save({"x": 1}, 1)


def test_steps_are_integers_of_any_kind(tmp_path):
    with sk.Checkpointer(tmp_path, every=np.int64(1), keep=np.int64(5)) as checkpoints:
        for step in (np.int64(1), jnp.int32(2), 10**20):
            assert checkpoints.save({"x": 1}, step)
        assert checkpoints.restore({"x": 0}, np.int64(1)) == {"x": 1}
        assert checkpoints.steps() == [1, 2, 10**20]
        for step in (-1, 1.0, "3", True):
            with pytest.raises(ValueError, match="give an integer, 0 or more"):
                checkpoints.save({"x": 1}, step)
            with pytest.raises(ValueError, match="give an integer, 0 or more"):
                checkpoints.restore({"x": 1}, step)


@pytest.mark.parametrize(
    "options", [{"every": 1.5}, {"every": None}, {"keep": True}, {"keep": "3"}, {"timeout": 0}], ids=str
)
def test_options_that_are_none(tmp_path, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=rf"{name}={value!r}: give .*(1 or more|more than 0)"):
        sk.Checkpointer(tmp_path, **options)


def test_two_of_one_folder_leave_each_other_alone(tmp_path):
    tree = {"x": np.zeros(1 << 20)}
    with sk.Checkpointer(tmp_path, keep=None) as one, sk.Checkpointer(tmp_path, keep=None) as other:
        for step in range(1, 5):
            one.save(tree, 2 * step)
            other.save(tree, 2 * step + 1)
        one.wait()
        one.save(tree, 20)
        with pytest.raises(sk.CheckpointError, match=r"(is being written|holds step 20) already"):
            other.save(tree, 20)
    assert one.steps() == [*range(2, 10), 20]


def test_what_may_be_written_over_says_by_which_argument(tmp_path):
    text = r"sk\.save takes overwrite=True, Checkpointer\.save takes force=True"
    sk.save(tmp_path, {"x": 1}, 1)
    with pytest.raises(sk.CheckpointError, match=text):
        sk.save(tmp_path, {"x": 2}, 1)
    with sk.Checkpointer(tmp_path) as checkpoints, pytest.raises(sk.CheckpointError, match=text):
        checkpoints.save({"x": 2}, 1)
    sk.save(tmp_path, {"x": 2}, 1, overwrite=True)
    with sk.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save({"x": 3}, 1, force=True)
    assert sk.restore(tmp_path, {"x": 0}) == {"x": 3}


def test_a_step_that_another_process_wrote_before(tmp_path):
    """As processes do that were started together and never connected."""
    sk.save(tmp_path, {"x": 1}, 1)
    with pytest.raises(
        sk.CheckpointError, match=r"If another process of this job wrote it: .* call sk\.initialize\(\)"
    ):
        sk.save(tmp_path, {"x": 1}, 1)


def deleted(directory):
    shutil.rmtree(directory)


def written_first(directory):
    (directory.parent / "1").mkdir()


def mixed(directory):
    raise ValueError(f"FAILED_PRECONDITION: Error writing to {directory}: Configuration mismatch")


def unlisted(directory):
    raise ValueError(
        f"No ArrayMetadata found for process_index=0 in the checkpoint directory: {directory}. But input PyTree "
        "contains at least one jax.Array param_info: ParamInfo(name='x', path=<etils.Path object at 0x7f36f5c40634>)."
    )


def half_listed(directory):
    raise ValueError(
        "No ArrayMetadata found for param_info: ParamInfo(name='x', at=<etils.Path object at 0x7f36f5c40634>), "
        f"checkpoint directory: {directory}, process_index=0."
    )


@pytest.mark.parametrize("meanwhile", [deleted, written_first, mixed, unlisted, half_listed])
def test_another_process_writes_at_the_same_time(tmp_path, monkeypatch, meanwhile):
    """Two saves of one step take each other's files away."""
    finalize = Handler.finalize

    def interfered(self, directory):
        meanwhile(directory)
        finalize(self, directory)

    monkeypatch.setattr(Handler, "finalize", interfered)
    text = r"to which another process writes, too: .* call sk\.initialize\(\) first.* What was noticed: \S+"
    with pytest.raises(sk.CheckpointError, match=text) as raised:
        sk.save(tmp_path, {"x": jnp.arange(4.0)}, 1)
    assert " at 0x" not in str(raised.value)


def test_errors_name_no_addresses(tmp_path, monkeypatch):
    def odd(self, directory):
        raise ValueError("<orbax.Info object at 0x7f36f5c40634> is odd.")

    monkeypatch.setattr(Handler, "finalize", odd)
    with pytest.raises(sk.CheckpointError, match=r"could not be written to \S+: orbax\.Info is odd; there is no"):
        sk.save(tmp_path, {"x": jnp.arange(4.0)}, 1)


def test_other_failures_are_no_other_processs(tmp_path, monkeypatch):
    def full(self, directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Handler, "finalize", full)
    with pytest.raises(sk.CheckpointError, match=r"could not be written to \S+: \[Errno 28\] No space left"):
        sk.save(tmp_path, {"x": jnp.arange(4.0)}, 1)


def test_saves_of_many_threads(tmp_path):
    def work(number):
        for step in range(3):
            path = tmp_path / str(number)
            sk.save(path, {"x": jnp.full(10, number + step)}, step)
            assert sk.restore(path, {"x": jnp.zeros(10, int)})["x"][0] == number + step
            sk.save(tmp_path / "all", {"x": number}, 10 * number + step)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    assert len(os.listdir(tmp_path / "all")) == 12


def test_a_reader_never_sees_half_of_one(tmp_path):
    """One that is deleted while it's read is told as that; one that is read is whole."""
    like = {"x": np.zeros(1000)}
    done, found = threading.Event(), []
    sk.save(tmp_path, {"x": np.zeros(1000)}, 0)

    def read():
        while not done.is_set():
            try:
                found.append(set(sk.restore(tmp_path, like)["x"].tolist()))
            except sk.CheckpointError as error:
                found.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with sk.Checkpointer(tmp_path, keep=1) as checkpoints:
            for step in range(1, 12):
                checkpoints.save({"x": np.full(1000, float(step))}, step)
    finally:
        done.set()
        reader.join()
    values = [x for x in found if isinstance(x, set)]
    assert values
    assert all(len(x) == 1 for x in values)
    told = "could not be read|is damaged|holds no|was deleted while it was read"
    assert all(re.search(told, x) for x in found if isinstance(x, str)), found


def test_written_over_in_a_loop(tmp_path):
    with sk.Checkpointer(tmp_path) as checkpoints:
        for number in range(4):
            checkpoints.save({"x": number}, 7, force=True)
        assert checkpoints.restore({"x": 0}) == {"x": 3}
    assert os.listdir(tmp_path) == ["7"]


def test_nothing_is_left_open(tmp_path):
    def open_now():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def once(number):
        sk.save(tmp_path / str(number), {"x": jnp.ones(2)}, 1)
        sk.restore(tmp_path / str(number), {"x": jnp.zeros(2)})

    once(0)
    before = open_now()
    for number in range(1, 6):
        once(number)
    assert open_now() <= (before[0] + 2, before[1] + 2)


def test_interrupted_while_it_waits(tmp_path, monkeypatch):
    """Ctrl-C ends the waiting, not the writing."""

    def interrupted(_):
        raise KeyboardInterrupt

    with sk.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save({"x": np.ones(1 << 20)}, 1)
        with monkeypatch.context() as patch:
            patch.setattr(ocp.AsyncCheckpointer, "wait_until_finished", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.wait()
        checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_a_failed_save_waits_for_what_still_writes(tmp_path, monkeypatch):
    """Orbax writes its own small files in a thread, which mustn't find the folder gone."""
    from etils.epath import backend

    opened = backend._OsPathBackend.open

    def slowly(self, path, mode):
        if "_CHECKPOINT_METADATA" in str(path) and "w" in mode:
            time.sleep(0.2)
        return opened(self, path, mode)

    def fails(self, directory):
        raise ValueError("no")

    monkeypatch.setattr(backend._OsPathBackend, "open", slowly)
    with sk.Checkpointer(tmp_path, preemption=False) as checkpoints:
        with monkeypatch.context() as broken:
            broken.setattr(Handler, "finalize", fails)
            checkpoints.save({"x": jnp.arange(4.0)}, 1)
            with pytest.raises(sk.CheckpointError, match=r"could not be written to \S+: no; there is no whole one yet"):
                checkpoints.wait()
        checkpoints.save({"x": jnp.arange(4.0)}, 2)
    assert checkpoints.steps() == [2]
    monkeypatch.setattr(Handler, "finalize", fails)
    with pytest.raises(sk.CheckpointError, match="could not be written"):
        sk.save(tmp_path, {"x": jnp.arange(4.0)}, 3)
    assert sk.latest_step(tmp_path) == 2
