"""The variables by which a launcher tells a process who it is: ours, and what others' say. Nothing is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

COORDINATOR = "SHARDKIT_COORDINATOR"
PROCESSES = "SHARDKIT_NUM_PROCESSES"
PROCESS = "SHARDKIT_PROCESS_ID"
DEVICES = "SHARDKIT_DEVICES_PER_PROCESS"
UNCALLED = "SHARDKIT_UNCALLED"

# All of which JAX asks for before it takes a process for a task of SLURM (jax 0.10 to 0.12).
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
_PMI = "PMI_SIZE"
_TPU = ("TPU_PROCESS_ADDRESSES_PATH", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS")
_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_INDEXED_JOB = "JOB_COMPLETION_INDEX"


@dataclasses.dataclass(frozen=True)
class Told:
    """What the launcher tells a process.

    Attributes:
      coordinator: host and port of process 0.
      processes: how many there are.
      process: which one this is.
      devices: simulated devices of each; None where it has real ones.
    """

    coordinator: str
    processes: int
    process: int
    devices: int | None = None


def variables(told: Told) -> dict[str, str]:
    """The environment that says so.

    Example:
      >>> told(variables(Told("127.0.0.1:4000", 2, 1))) == Told("127.0.0.1:4000", 2, 1)
      True
    """
    found = {COORDINATOR: told.coordinator, PROCESSES: str(told.processes), PROCESS: str(told.process)}
    return found | ({} if told.devices is None else {DEVICES: str(told.devices)})


def told(environ: Mapping[str, str]) -> Told | None:
    """What our launcher said, if it started this process.

    Raises:
      ValueError: only some of its variables are there, or one isn't a number.
    """
    needed = (COORDINATOR, PROCESSES, PROCESS)
    missing = [name for name in needed if not environ.get(name)]
    if len(missing) == len(needed):
        return None
    if missing:
        raise ValueError(
            f"the environment has some of {', '.join(needed)}, but not {', '.join(missing)}: "
            "`python -m shardkit.launch` sets all of them; set all by hand, or none"
        )
    devices = environ.get(DEVICES)
    return Told(
        environ[COORDINATOR],
        _number(environ, PROCESSES),
        _number(environ, PROCESS),
        _number(environ, DEVICES) if devices else None,
    )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What SLURM or an MPI tells a process.

    Attributes:
      name: the variable that says how many processes there are.
      processes: how many.
      process: which one this is; None if that isn't said.
    """

    name: str
    processes: int
    process: int | None = None


def cluster(environ: Mapping[str, str]) -> Cluster | None:
    """What SLURM or an MPI said, if one started this process.

    The body of a batch script has variables of SLURM without being a task of it; that's a process alone.

    Example:
      >>> cluster({"OMPI_COMM_WORLD_SIZE": "4"}), cluster({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
      (Cluster(name='OMPI_COMM_WORLD_SIZE', processes=4, process=None), None)
    """
    for needed, size, rank in (
        ((_OPEN_MPI,), _OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (_SLURM, "SLURM_NTASKS", "SLURM_PROCID"),
        ((_PMI,), _PMI, "PMI_RANK"),
    ):
        if all(name in environ for name in needed):
            return Cluster(size, _number(environ, size), _number(environ, rank) if rank in environ else None)
    return None


def lone_pod(environ: Mapping[str, str]) -> bool:
    """Whether this runs in Kubernetes and yet isn't one of several processes that JAX could find: a notebook, say.

    JAX asks the cluster about any pod, and fails where it may not ask or where the pod isn't of a job.
    """
    return (
        _KUBERNETES in environ
        and _INDEXED_JOB not in environ
        and not any(name in environ for name in _TPU)
        and cluster(environ) is None
    )


def several(environ: Mapping[str, str]) -> str | None:
    """A variable that says that there are several processes; None if none does."""
    found = cluster(environ)
    if found is not None:
        return found.name if found.processes > 1 else None
    if "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return "TPU_WORKER_HOSTNAMES"
    marks = ("MEGASCALE_COORDINATOR_ADDRESS", _INDEXED_JOB, "JAX_COORDINATOR_ADDRESS")
    return next((name for name in marks if environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"the environment says {name}={environ[name]!r}, which is no number") from None
