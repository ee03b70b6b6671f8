"""Devices described, not owned: their compilers run here, so a program can be judged without hardware.

Internal for now; `sk.target_mesh` will stand on it.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

# libtpu asks the machine it believes to run on what it is; these answer for it. It also lets only one process
# have it, which makes sense where there is a TPU to have.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Device name -> what libtpu calls a host of it in TPU_ACCELERATOR_TYPE.
_TPU_ACCELERATORS = {"v4": "v4", "v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e"}

# XLA's description of a card (a GpuTargetConfigProto as text). Figures from NVIDIA's H100 SXM data sheet and
# the CUDA programming guide's table of limits for compute capability 9.0.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def target_devices(target: str) -> np.ndarray:
    """The devices that ``target`` describes, as an array in the topology's own order.

    Args:
      target: "tpu:<generation>:<topology>", for example "tpu:v5e:2x4"; or "gpu:h100:<count>".

    Raises:
      ValueError: a target that isn't known.
      ImportError: the compiler for it isn't installed; names the package.
    """
    found = re.fullmatch(r"(tpu|gpu):(\w+):(\d+(?:x\d+)*)", target)
    if found is None:
        raise ValueError(f'target {target!r} is unknown; write for example "tpu:v5e:2x4" or "gpu:h100:8"')
    platform, name, size = found.groups()
    return _tpu(name, size, target) if platform == "tpu" else _gpu(name, size, target)


def _tpu(name: str, size: str, target: str) -> np.ndarray:
    if name not in _TPU_ACCELERATORS:
        raise ValueError(f"target {target!r}: TPU generation {name!r} is unknown; use one of {list(_TPU_ACCELERATORS)}")
    _need("libtpu", "jax[tpu]", target)
    chips = math.prod(int(n) for n in size.split("x"))
    environment = _TPU_ENVIRONMENT | {"TPU_ACCELERATOR_TYPE": f"{_TPU_ACCELERATORS[name]}-{chips}"}
    with _environment(environment):
        return _devices(f"{name}:{size}", platform="tpu")


def _gpu(name: str, size: str, target: str) -> np.ndarray:
    if name != "h100" or "x" in size:
        raise ValueError(f'target {target!r}: write "gpu:h100:<count>"; other cards and several hosts are unknown yet')
    _need("jax_plugins.xla_cuda12", "jax-cuda12-plugin jax-cuda12-pjrt", target)
    return _devices(name, platform="cuda", topology=f"1x1x{size}", target_config=_H100)


def _need(module: str, package: str, target: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise ImportError(f"compiling for {target!r} needs its compiler: pip install {package}") from err


def _devices(name: str, **options: Any) -> np.ndarray:
    from jax.experimental import topologies

    return np.asarray(topologies.get_topology_desc(name, **options).devices)


def described_mesh(target: str, axes: Mapping[str, int]) -> Mesh:
    """A mesh of Auto axes on the first devices of ``target``; arrays can't be placed there, programs compiled."""
    shape = tuple(axes.values())
    devices = target_devices(target)
    if math.prod(shape) > devices.size:
        raise ValueError(f"target {target!r} has {devices.size} devices, but axes {dict(axes)} need {math.prod(shape)}")
    return Mesh(
        devices.ravel()[: math.prod(shape)].reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * len(shape)
    )
