"""GPUs described to XLA's CUDA plugin, which needs no GPU to compile for one.

A card is described by a few figures of its own (XLA's `GpuTargetConfigProto`, as text): those of its data sheet, and
the limits of its compute capability in the CUDA programming guide.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from shardkit.inspect.targets.environment import environment
from shardkit.inspect.targets.names import TargetName

# The plugin looks for a CUDA driver before it registers itself, unless told not to.
_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

_HOPPER: dict[str, float] = {
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "core_count": 132,
    "fpus_per_core": 128,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
}
# Name -> (what it calls itself, compute capability, its figures).
_CARDS: dict[str, tuple[str, tuple[int, int], dict[str, float]]] = {
    "a100": (
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        {
            "shared_memory_per_core": 167936,
            "shared_memory_per_block_optin": 166912,
            "core_count": 108,
            "fpus_per_core": 64,
            "l2_cache_size": 41943040,
            "clock_rate_ghz": 1.41,
            "memory_bandwidth": 2039040000000,
            "device_memory_size": 85100068864,
        },
    ),
    "h100": (
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        _HOPPER | {"memory_bandwidth": 3352320000000, "device_memory_size": 84942979072},
    ),
    "h200": (
        "NVIDIA H200",
        (9, 0),
        _HOPPER | {"memory_bandwidth": 4800000000000, "device_memory_size": 150754820096},
    ),
    "b200": (
        "NVIDIA B200",
        (10, 0),
        _HOPPER
        | {
            "core_count": 148,
            "l2_cache_size": 132644864,
            "clock_rate_ghz": 1.965,
            "memory_bandwidth": 7672320000000,
            "device_memory_size": 191514411008,
        },
    ),
}
_COMMON: dict[str, float] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
}


def gpu_devices(name: TargetName) -> list[Any]:
    """The described devices, host by host."""
    from jax.experimental import topologies

    hosts, cards = name.topology
    options = {"platform": "cuda", "topology": f"1x{hosts}x{cards}", "target_config": target_config(name.model)}
    with environment(_ENVIRONMENT):
        try:
            topology = topologies.get_topology_desc(name.model, **options)
        except NotImplementedError:
            # JAX looked for its plugins earlier, when this one refused to be had for want of a driver.
            with contextlib.suppress(ImportError):
                importlib.import_module("jax_plugins.xla_cuda12").initialize()
            topology = topologies.get_topology_desc(name.model, **options)
    return list(topology.devices)


def target_config(card: str) -> str:
    """XLA's description of a card, as the text of a GpuTargetConfigProto."""
    itself, (major, minor), figures = _CARDS[card]
    lines = "\n".join(f"  {key}: {value}" for key, value in (_COMMON | figures).items())
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 8 }}\ndevice_description_str: "{itself}"\n'
    )
