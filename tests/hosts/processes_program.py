"""Run by test_processes.py, once a process: two processes with one device each, in which something goes wrong."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
me, case = int(sys.argv[2]), sys.argv[3]
# JAX's own patience is longer than what is tested, and shorter than the test's.
jax.distributed.initialize(sys.argv[1], 2, me, heartbeat_timeout_seconds=60, shutdown_timeout_seconds=60)

import shardkit as sk  # noqa: E402
from shardkit.hosts import (  # noqa: E402
    MissingProcessError,
    ProcessMismatchError,
    check_finite,
    check_same,
    exchange,
    progress,
    watch,
)

OTHER = 1 - me
watching = {"stuck_timeout": None if case == "agreements" else 4.0, "dead_timeout": 4.0, "interval": 0.25}
watch(**watching, process=me, processes=2)
mesh = sk.make_mesh({"x": 2})


def on_mesh(value, spec="x", on=mesh):
    return jax.make_array_from_callback(
        value.shape, NamedSharding(on, PartitionSpec(spec)), lambda index: np.asarray(value[index])
    )


total = jax.jit(jnp.sum)
ones = on_mesh(np.ones(4, np.float32))
total(ones).block_until_ready()  # connects them; what happens before that isn't tested here


def stuck():
    """Process 1 sleeps, where process 0 got further and waits for it."""
    progress("step", 2)
    if me == 1:
        time.sleep(300)
    progress("step", 3)
    total(ones).block_until_ready()


def killed():
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total(ones).block_until_ready()


def killed_first():
    if me == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    total(ones).block_until_ready()


def stopped():
    if me == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    total(ones).block_until_ready()


def stopped_first():
    time.sleep(1)  # so that it has been heard of
    if me == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    total(ones).block_until_ready()


def failed():
    if me == 1:
        raise RuntimeError("the disk is full")
    total(ones).block_until_ready()


def failed_first():
    if me == 0:
        raise RuntimeError("the disk is full")
    total(ones).block_until_ready()


def agreements():
    """What differs is named in both; then one ends long before the other, which is no death."""
    check_same({"x": ones, "n": 3}, values=True)
    for what, other, says in (
        ("dtype", ones.astype(jnp.bfloat16), r"\['x'\]: process 0: float32\[4\].*; process 1: bfloat16\[4\]"),
        ("shape", on_mesh(np.ones(6, np.float32)), r"\['x'\]: process 0: float32\[4\].*; process 1: float32\[6\]"),
        ("spec", on_mesh(np.ones(4, np.float32), None), r"process 0:.*\('x',?\) on.*process 1:.*\(None"),
        (
            "types",
            on_mesh(np.ones(4, np.float32), on=sk.make_mesh({"x": 2}, axis_types="explicit")),
            "process 0:.*Auto.*process 1:.*Explicit",
        ),
        (
            "devices",
            on_mesh(np.ones(4, np.float32), on=sk.make_mesh({"x": 2}, devices=jax.devices()[::-1])),
            "process 0:.*devices .*process 1:.*devices ",
        ),
        ("numpy", np.ones(4, np.float32), r"process 1: NumPy float32\[4\]"),
    ):
        with pytest.raises(ProcessMismatchError, match=f"(?s)batch of {what}: processes differ.*{says}"):
            check_same({"x": ones if me == 0 else other}, f"batch of {what}")
    with pytest.raises(ProcessMismatchError, match=r"\['y'\]: process 0: no such leaf; process 1: NumPy float64\[\]"):
        check_same({"x": ones} | ({"y": np.float64(3)} if me else {}))

    # Elements: the parts of a cut array may differ, copies of one part may not.
    check_same({"cut": on_mesh(np.arange(4.0)), "local": jnp.ones(3)}, "parts", values=True)
    with pytest.raises(ProcessMismatchError, match=r"elements differ.*\n  \['w'\]: process 0: [0-9a-f]+; process 1: "):
        check_same({"w": on_mesh(np.full(4, 1.0 + me), None)}, "weights", values=True)
    with pytest.raises(ProcessMismatchError, match=r"\['seed'\]: process 0: "):
        check_same({"seed": me, "w": ones}, "seed", values=True)

    # One number anywhere stops both, with the same words.
    check_finite({"x": ones, "n": jnp.arange(3)})
    bad = np.ones(4, np.float32)
    bad[3] = np.nan
    with pytest.raises(FloatingPointError) as caught:
        check_finite({"g": {"w": on_mesh(bad)}, "x": ones}, "gradients", step=7)
    holder = mesh.devices[1].id
    wanted = f"gradients at step 7: not all are finite:\n  process 1, ['g']['w'] (device {holder}): 1 NaN of 2 elements"
    assert str(caught.value) == wanted, caught.value
    with pytest.raises(FloatingPointError, match=r"  process 0, \['loss'\] \(host\): 1 infinite of 1 elements"):
        check_finite({"loss": np.inf if me == 0 else 1.0})

    # Whoever comes alone is told so, and no answer goes to another question.
    began = time.monotonic()
    if me == 0:
        with pytest.raises(
            MissingProcessError, match="alone: waited 1 s for process 1, which did not come; process 0 "
        ):
            exchange("alone", me, timeout=1)
    with pytest.raises(MissingProcessError, match=f"channel {me}: waited 1 s for process {OTHER}"):
        exchange(f"channel {me}", me, timeout=1)
    # The one that comes last doesn't hear the one that went, or a job would go on with half of its processes.
    exchange("together again", me)
    if me == 0:
        time.sleep(2.5)
    with pytest.raises(MissingProcessError, match=f"late: waited 1 s for process {OTHER}"):
        exchange("late", me, timeout=1)
    assert time.monotonic() - began < 60
    assert exchange("late", me) == [0, 1]  # both are in step again

    # Threads have channels of their own; one's keys aren't within another's.
    found = {}

    def talk(channel):
        found[channel] = [exchange(channel, [me, channel, number]) for number in range(5)]

    threads = [threading.Thread(target=talk, args=[channel]) for channel in ("a", "a/0", "a/1", "über alles")]
    for thread in threads[:: 1 - 2 * me]:
        thread.start()
    for thread in threads:
        thread.join()
    for channel, rounds in found.items():
        assert rounds == [[[0, channel, number], [1, channel, number]] for number in range(5)]
    assert exchange("large", "x" * 3_000_000) == ["x" * 3_000_000] * 2

    progress("all of it")
    if me == 0:
        time.sleep(5)


globals()[case]()
sys.stdout.write("all is well")
