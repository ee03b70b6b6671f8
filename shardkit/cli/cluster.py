"""Whether this is one of several processes, by the variables that launchers set. Nothing is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from shardkit.cli.findings import NOTE, PROBLEM, Finding


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A launcher that was found.

    Attributes:
      name: such as "SLURM".
      evidence: the variables that say so.
      processes: how many there are; None if not said.
      index: which one this is; None if not said.
      start: what ``sk.initialize`` needs to be told there.
    """

    name: str
    evidence: tuple[str, ...]
    processes: int | None
    index: int | None
    start: str


@dataclasses.dataclass(frozen=True)
class _Launcher:
    name: str
    mark: str
    size: tuple[str, ...]
    rank: tuple[str, ...]
    start: str


_ALL = "sk.initialize(coordinator_address=..., num_processes=..., process_id=...)"
_ALONE = "sk.initialize(): JAX finds out by itself"

# All of which JAX asks for.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

# In the order in which JAX asks them (jax.distributed.initialize, jax 0.10 to 0.12).
_LAUNCHERS = (
    _Launcher("Open MPI", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",), _ALONE),
    _Launcher("SLURM", "SLURM_JOB_ID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_PROCID",), _ALONE),
    _Launcher(
        "MPI (PMI)",
        "PMI_SIZE",
        ("PMI_SIZE",),
        ("PMI_RANK",),
        'sk.initialize(cluster_detection_method="mpi4py"), with mpi4py installed',
    ),
    _Launcher("Cloud TPU", "TPU_WORKER_HOSTNAMES", (), ("TPU_WORKER_ID",), _ALONE),
    _Launcher("Cloud TPU, several slices", "MEGASCALE_COORDINATOR_ADDRESS", (), ("MEGASCALE_SLICE_ID",), _ALONE),
    _Launcher(
        "Kubernetes",
        "KUBERNETES_SERVICE_HOST",
        (),
        ("JOB_COMPLETION_INDEX",),
        "sk.initialize(), with the kubernetes package installed; else tell it everything",
    ),
    _Launcher("JAX's own variables", "JAX_COORDINATOR_ADDRESS", (), (), _ALL),
)


def detect(env: Mapping[str, str]) -> list[Cluster]:
    """The launchers whose variables are set.

    Example:
      >>> found = detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"})
      >>> [(c.name, c.index, c.processes) for c in found]
      [('SLURM', 1, 4)]
    """
    found = []
    for launcher in _LAUNCHERS:
        if launcher.mark in env:
            names = (launcher.mark, *launcher.size, *launcher.rank)
            processes = _number(env, launcher.size)
            if launcher.name == "Cloud TPU":
                processes = len([host for host in env[launcher.mark].split(",") if host]) or None
            seen = tuple(dict.fromkeys(name for name in names if name in env))
            found.append(Cluster(launcher.name, seen, processes, _number(env, launcher.rank), launcher.start))
    return found


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    values = (env[name] for name in names if name in env)
    return next((int(value) for value in values if value.strip().isdigit()), None)


def several(clusters: list[Cluster]) -> bool:
    """Whether more than one process is said to run."""
    return any((cluster.processes or 1) > 1 for cluster in clusters)


def check_cluster(
    clusters: list[Cluster], env: Mapping[str, str], version_of: Callable[[str], str | None]
) -> list[Finding]:
    """What keeps processes from finding each other.

    Args:
      clusters: those detected.
      env: the environment.
      version_of: a package's installed version, or None.

    Example:
      >>> env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "5"}
      >>> [f.level for f in check_cluster(detect(env), env, {}.get)]
      ['problem', 'note']
    """
    findings = []
    for cluster in clusters:
        if cluster.processes is not None and cluster.index is not None and cluster.index >= cluster.processes:
            what = f"{cluster.name} says that this is process {cluster.index} of {cluster.processes}, counted from 0"
            findings.append(Finding(PROBLEM, cluster.name, what, f"look at {', '.join(cluster.evidence)}"))
    names = [cluster.name for cluster in clusters]
    if "Open MPI" in names and "OMPI_MCA_orte_hnp_uri" not in env and version_of("mpi4py") is None:
        what = "its coordinator isn't in the environment (Open MPI 5); JAX finds it with mpi4py, which isn't installed"
        todo = 'pip install mpi4py, and sk.initialize(cluster_detection_method="mpi4py")'
        findings.append(Finding(NOTE, "Open MPI", what, todo, "jax-ml/jax#14576, jax-ml/jax#40512"))
    if "Kubernetes" in names and len(names) == 1 and version_of("kubernetes") is None:
        what = "a pod, but JAX finds the others only with the kubernetes package, which isn't installed"
        findings.append(Finding(NOTE, "Kubernetes", what, f"if there are others: pip install kubernetes, or {_ALL}"))
    absent = [name for name in _SLURM if name not in env]
    if "SLURM" in names and absent:
        what = f"a job, but {', '.join(absent)} isn't set, so that JAX doesn't take this for one of its processes"
        findings.append(Finding(NOTE, "SLURM", what, "start it with srun, if it's meant to be one"))
    if "JAX_COORDINATOR_ADDRESS" in env and ":" not in env["JAX_COORDINATOR_ADDRESS"]:
        what = f"JAX_COORDINATOR_ADDRESS={env['JAX_COORDINATOR_ADDRESS']!r} has no port"
        findings.append(Finding(PROBLEM, "JAX_COORDINATOR_ADDRESS", what, "write it as host:port"))
    proxies = [name for name in ("http_proxy", "https_proxy", "all_proxy") if env.get(name) or env.get(name.upper())]
    if several(clusters) and proxies:
        what = f"{', '.join(proxies)} set: processes may look for each other through the proxy, and hang"
        findings.append(
            Finding(NOTE, "proxies", what, "unset them, or no_proxy for the hosts", "jax.distributed warns of it")
        )
    return findings
