"""Run by test_initialize.py, once a process: `program.py MODE`."""

import os
import sys

mode = sys.argv[1]
number, count = os.environ["SHARDKIT_PROCESS_ID"], os.environ["SHARDKIT_NUM_PROCESSES"]
port = int(os.environ["SHARDKIT_COORDINATOR"].rpartition(":")[2])


def started_by(variables):
    """Only another launcher's variables are left, as if it had started this process."""
    for name in [name for name in os.environ if name.startswith("SHARDKIT_")]:
        del os.environ[name]
    os.environ.update(variables)


# JAX makes the coordinator's port of the job's number, in both.
if mode == "slurm" or "TASKS" in os.environ:
    started_by(
        {
            "SLURM_JOB_ID": os.environ["JOB"],
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": os.environ.get("TASKS", count),
            "SLURM_PROCID": number,
            "SLURM_LOCALID": number,
        }
    )
elif mode == "open_mpi":
    started_by(
        {
            "OMPI_MCA_orte_hnp_uri": f"{int(os.environ['JOB']) * 4096}.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": count,
            "OMPI_COMM_WORLD_RANK": number,
            "OMPI_COMM_WORLD_LOCAL_RANK": number,
        }
    )

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from shardkit.launch import initialize  # noqa: E402


def write(text):
    sys.stdout.write(f"{text}\n")


def refused(kind, part, call):
    with pytest.raises(kind, match=part):
        call()
    write(f"refused: {part}")


if mode == "arguments":
    started_by({})
    initialize(f"127.0.0.1:{port}", int(count), int(number))
elif mode == "impatient":
    initialize(initialization_timeout=5)
elif mode == "late":
    jax.devices()
    refused(RuntimeError, "too late", initialize)
    sys.exit()
else:
    initialize()

assert (jax.process_index(), jax.process_count()) == (int(number), int(count))
everyone = multihost_utils.process_allgather(np.array([jax.process_index()]))
assert everyone.ravel().tolist() == list(range(int(count)))
write(f"{jax.local_device_count()} devices, {jax.device_count()} in all")

if mode == "launcher":
    initialize()
    initialize(num_processes=int(count))
    refused(RuntimeError, "part of one job only", lambda: initialize(process_id=7 - int(number), num_processes=8))
    refused(ValueError, f"SHARDKIT_NUM_PROCESSES says that there are {count}", lambda: initialize(num_processes=9))
elif mode == "failing":
    if int(number) == 1:
        raise ValueError("one fails")
    multihost_utils.sync_global_devices("the other waits for it")
