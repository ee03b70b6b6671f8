"""What links and chips of a platform take, for the choice of how often to exchange: orders of magnitude.

Only ratios of these matter: between the time a message takes to begin with, and the work of a rim that is done twice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Platform:
    """One kind of device.

    Attributes:
      latency: seconds from the call of a permute to its first byte.
      link: bytes a second that a device sends to one neighbour.
      flops: of a device, a second, at the precision it's made for.
      memory: bytes a second.
      lanes: features that the matrix unit takes side by side, used or not.
    """

    latency: float
    link: float
    flops: float
    memory: float
    lanes: int = 1


# TPU: cloud.google.com/tpu/docs (v5e 1,600 Gb/s over 4 links, v5p 4,800 over 6, v6e 3,584 over 4; bf16 peak, HBM);
# a permute between neighbours takes about a microsecond. GPU: H100 SXM data sheet; a point-to-point NCCL
# call takes some 10 us. CPU: simulated devices of one process meet at a barrier of threads.
_KINDS = (
    ("v5 lite", Platform(1e-6, 50e9, 197e12, 819e9, 128)),
    ("v5e", Platform(1e-6, 50e9, 197e12, 819e9, 128)),
    ("v6", Platform(1e-6, 112e9, 918e12, 1640e9, 128)),
    ("v5", Platform(1e-6, 100e9, 459e12, 2765e9, 128)),
)
_OTHERS = {
    "tpu": Platform(1e-6, 50e9, 197e12, 819e9, 128),
    "gpu": Platform(10e-6, 450e9, 989e12, 3350e9, 16),
    "cpu": Platform(50e-6, 4e9, 30e9, 10e9),
}


def platform_figures(mesh: Any, platform: str) -> Platform:
    """Of the devices of a mesh: by their kind, else by their platform."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else getattr(mesh, "abstract_device", None)
    kind = getattr(device, "device_kind", "")
    for name, found in _KINDS:
        if platform == "tpu" and name in str(kind).lower():
            return found
    return _OTHERS.get(platform, _OTHERS["cpu"])
