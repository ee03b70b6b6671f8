"""`initialize`: this process and the others of its job become one program, wherever they were started."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax

from shardkit.hosts.watching import DEAD_TIMEOUT, STUCK_TIMEOUT, watch
from shardkit.launch import calling, environment, meeting, ports
from shardkit.launch.leaving import leave_on_failure

_log = logging.getLogger(__name__)

# Coordinator, number of processes, and number of this one, as far as they were known when they were connected.
_Who = tuple[str | None, int | None, int | None]
_connected: list[_Who] = []


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    cluster_detection_method: str | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    coordinator_bind_address: str | None = None,
    stuck_timeout: float | None = STUCK_TIMEOUT,
    dead_timeout: float = DEAD_TIMEOUT,
) -> None:
    """Connects this process with the others of its job; a process alone goes on as it is.

    Call it first in a script: before anything makes an array or asks for devices. What isn't given is found out: from
    ``python -m shardkit.launch``, else as ``jax.distributed.initialize`` does it, under SLURM, Open MPI, Kubernetes and
    on TPU pods. In a process that nothing of the kind has started it does nothing, and so it does where the job has one
    process. To call it again does nothing.

    Where all is known beforehand (from the arguments or the launcher), processes that don't come in time, of which
    there are two, or that were told another number of processes, are named, in all of them; JAX by itself aborts each.

    From then on an exception that nobody catches ends the process at once. One that ends otherwise waits for the others
    first, even by ``sys.exit(1)``: to report a failure, raise. SIGTERM doesn't end it any more: JAX takes it for
    ``jax.experimental.multihost_utils.reached_preemption_sync_point``. A handler of your own must be set after this
    call, and takes it from there.

    Args:
      coordinator_address: host and port of process 0.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      local_device_ids: which GPUs of this machine are this process's. None: all; one each under the launcher, SLURM and
        Open MPI.
      cluster_detection_method: as in ``jax.distributed.initialize``, such as "mpi4py" or "deactivate".
      initialization_timeout: seconds to wait for all processes.
      heartbeat_timeout_seconds: seconds of silence after which JAX takes a process for dead, and aborts all.
      shutdown_timeout_seconds: how many seconds a process that ends waits for the others.
      coordinator_bind_address: where process 0 listens. None: all addresses of its machine, on the coordinator's port;
        the loopback alone if the coordinator's address is one of it.
      stuck_timeout: seconds without progress after which a process that the others wait for is taken for stuck, and
        all are ended (``shardkit.hosts.watch``). None: never.
      dead_timeout: seconds of silence after which a process is taken for dead, and all are ended.

    Raises:
      ValueError: the number of processes differs from what the launcher or the cluster says; not all is known; numbers
        or an address that can't be.
      TypeError: a number that is none.
      RuntimeError: JAX has been used already, or is connected otherwise.
      shardkit.hosts.MissingProcessError: not all came in time.
      shardkit.hosts.ProcessMismatchError: two have one number, or were told different numbers of processes.
      shardkit.launch.PortTakenError: in process 0: something listens at the coordinator's port.

    Example:
      >>> import jax, shardkit as sk
      >>> sk.initialize()  # a process alone
      >>> jax.process_count()
      1
    """
    environ = os.environ
    calling.called(environ)
    told = environment.told(environ)
    address, count, number = _who(coordinator_address, num_processes, process_id, told, environ)
    if jax.distributed.is_initialized():
        _same_again((coordinator_address, num_processes, process_id))
        return
    if told is not None and told.devices is not None:
        _simulate(told.devices)
    if count == 1 or (count is None and _alone(environ)):
        return
    if _started():
        if (
            (address, count, number) == (None, None, None)
            and not environment.several(environ)
            and jax.process_count() == 1
        ):
            return
        raise RuntimeError(
            "initialize was called too late: JAX has already been used, and took this process for one alone. Call "
            "sk.initialize() first in the script, before any line or import that makes an array or asks for devices"
        )
    timeouts: dict[str, Any] = {
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "shutdown_timeout_seconds": shutdown_timeout_seconds,
    }
    if jax.config.jax_cpu_collectives_implementation is None:  # type: ignore[attr-defined]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A cluster around the launcher has nothing to add.
    alone = told is not None or environment.lone_pod(environ)
    method = cluster_detection_method or ("deactivate" if alone else None)
    if address is None or count is None or number is None:
        if not _detect((address, count, number), local_device_ids, method, initialization_timeout, timeouts):
            return
        cluster = environment.cluster(environ)
        if cluster is not None:
            count = cluster.processes if count is None else count
            number = cluster.process if number is None else number
    else:
        bind = coordinator_bind_address or environ.get("JAX_COORDINATOR_BIND_ADDRESS") or _loopback(address)
        if not getattr(jax.config, "jax_mtls_cert_file", None):  # what's said at the meeting isn't encrypted
            card = meeting.Card(number, count, jax.__version__, socket.gethostname(), os.getpid())
            meeting.meet(address, card, bind=bind, timeout=initialization_timeout)
        if told is not None and told.devices is None and local_device_ids is None:
            # As JAX does it under SLURM and Open MPI; of no consequence to CPUs and TPUs.
            local_device_ids = None if environ.get("JAX_LOCAL_DEVICE_IDS") else told.process
        jax.distributed.initialize(
            address,
            count,
            number,
            local_device_ids,
            cluster_detection_method=method,
            initialization_timeout=initialization_timeout,
            coordinator_bind_address=bind,
            **timeouts,
        )
    _connected[:] = [(address, count, number)]
    leave_on_failure()
    # After it, so that at the end the others hear of a failure first. Who this is JAX says only with its devices.
    known = {} if count is None or number is None else {"process": number, "processes": count}
    watch(stuck_timeout, dead_timeout, **known)


def _who(
    address: str | None,
    count: int | None,
    number: int | None,
    told: environment.Told | None,
    environ: Mapping[str, str],
) -> _Who:
    """What is known before any cluster is asked: the arguments first, then the launcher."""
    if count is not None:
        says = environment.Cluster(environment.PROCESSES, told.processes) if told else environment.cluster(environ)
        # Whoever gives this process's number, too, has a numbering of their own.
        if number is None and says is not None and says.processes != count:
            raise ValueError(
                f"initialize was given num_processes={count}, but {says.name} says that there are {says.processes}: "
                f"start {count} processes, or leave num_processes out"
            )
    address = address or (told.coordinator if told else None) or environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = told.processes if count is None and told else count
    number = told.process if number is None and told else number
    for name, value in {"num_processes": count, "process_id": number}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be a whole number; got {value!r}")
    if count is not None and count < 1:
        raise ValueError(f"num_processes must be 1 or more; got {count}")
    if number is not None and (number < 0 or (count is not None and number >= count)):
        most = "" if count is None else f" to {count - 1}, as num_processes is {count}"
        raise ValueError(f"process_id must be a number from 0{most}; got {number}")
    if address is not None:
        ports.split(address)
    return address, count, number


def _alone(environ: Mapping[str, str]) -> bool:
    """Whether SLURM or an MPI says that there's one process: JAX would leave it one GPU of several."""
    cluster = environment.cluster(environ)
    return cluster is not None and cluster.processes == 1


def _detect(
    who: _Who, local_device_ids: int | Sequence[int] | None, method: str | None, seconds: int, timeouts: dict[str, Any]
) -> bool:
    """Has JAX find out what isn't known; False if there's nothing to be found: a process alone."""
    cluster = environment.cluster(os.environ)
    try:
        with _says_who_did_not_come(seconds, None if cluster is None else cluster.processes):
            jax.distributed.initialize(
                *who, local_device_ids, cluster_detection_method=method, initialization_timeout=seconds, **timeouts
            )
    except ValueError as error:
        if "must be defined" not in str(error) and "should be defined" not in str(error):
            raise
        if cluster is not None:
            raise ValueError(
                f"{cluster.name} says that this is one of {cluster.processes} processes, but JAX {jax.__version__} "
                'does not find out more by itself. Call initialize(cluster_detection_method="mpi4py"), with mpi4py '
                "installed, or give coordinator_address, num_processes and process_id"
            ) from error
        known = dict(zip(("coordinator_address", "num_processes", "process_id"), who, strict=True))
        given = [f"{name}={value!r}" for name, value in known.items() if value is not None]
        if given:
            missing = [name for name, value in known.items() if value is None]
            raise ValueError(
                f"initialize knows {' and '.join(given)}, but not {' and '.join(missing)}, and found no launcher or "
                "cluster that says so: give all three, or start the script by python -m shardkit.launch"
            ) from error
        return False
    return True


@contextlib.contextmanager
def _says_who_did_not_come(seconds: int, count: int | None) -> Generator[None]:
    """JAX aborts when not all come in time, without a word of that. Where they'd meet only JAX knows, so they can't."""
    of = "all" if count is None else f"all {count}"
    timer = threading.Timer(
        seconds,
        _log.error,
        [f"not {of} processes of the job came within {seconds} s (initialization_timeout): JAX ends this one. See "
         "which of them were not started, or ended before they called initialize()"],
    )  # fmt: skip
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _simulate(devices: int) -> None:
    """So many CPU devices, whatever the script asked for before: the command line is the later word."""
    if jax.config.jax_num_cpu_devices == devices:  # type: ignore[attr-defined]
        return
    if _started():
        raise RuntimeError(
            f"initialize was called too late for {devices} simulated devices (--devices-per-process): JAX has already "
            "been used, with others. Call sk.initialize() first in the script"
        )
    jax.config.update("jax_num_cpu_devices", devices)


def _started() -> bool:
    """Whether JAX has been used, so that its devices can't become others."""
    before = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        # JAX refuses a change once it has started, which nothing else says without starting it.
        jax.config.update("jax_num_cpu_devices", before + 1 if before > 0 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def _same_again(asked: _Who) -> None:
    """A second call may only ask for what there is."""
    if not _connected:  # by jax.distributed.initialize itself: what it was told can't be asked
        return
    names = ("coordinator_address", "num_processes", "process_id")
    for name, new, old in zip(names, asked, _connected[0], strict=True):
        if new is not None and old is not None and new != old:
            raise RuntimeError(
                f"initialize was called before, with {name}={old!r}, and now with {new!r}: a process can be part of "
                "one job only. Call it once"
            )


def _loopback(address: str) -> str | None:
    """Nobody from outside has to reach a coordinator on the loopback."""
    return address if ports.loopback(ports.split(address)[0]) else None
