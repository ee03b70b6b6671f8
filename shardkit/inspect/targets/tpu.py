"""TPUs described by libtpu, which comes with ``jax[tpu]`` and needs no TPU to compile for one."""

from __future__ import annotations

import math
from typing import Any

import jax

from shardkit.inspect.targets.environment import environment
from shardkit.inspect.targets.names import GENERATIONS, TargetName

# libtpu asks the machine it believes to run on what it is; these answer for it. It also lets only one process
# have it, which makes sense where there is a TPU to have.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def tpu_devices(name: TargetName) -> list[Any]:
    """The described devices, in the topology's own order.

    Raises:
      ValueError: a topology that libtpu refuses.
    """
    from jax.experimental import topologies

    generation, accelerator, _, _ = GENERATIONS[name.model]
    chips = math.prod(name.topology)
    size = "x".join(map(str, name.topology))
    with environment(_ENVIRONMENT | {"TPU_ACCELERATOR_TYPE": f"{accelerator}-{chips}"}):
        try:
            topology = topologies.get_topology_desc(f"{generation}:{size}", platform="tpu", **_host(name))
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"target '{name}': libtpu doesn't describe it: {str(error).splitlines()[0]} Sizes that exist are on "
                "https://docs.cloud.google.com/tpu/docs/ (hosts have 2x2 chips, so even numbers do in general)."
            ) from error
    return list(topology.devices)


def _host(name: TargetName) -> dict[str, list[int]]:
    # A host is 2x2(x1) chips unless said otherwise; of v5e and v6e there are single chips, and hosts of eight.
    if name.model in ("v5e", "v6e") and name.topology in ((1, 1), (2, 4)):
        return {"chips_per_host_bounds": [*name.topology, 1]}
    return {}
