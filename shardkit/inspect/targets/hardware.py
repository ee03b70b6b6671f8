"""Public figures of accelerators, a device (as JAX counts them) a row. No JAX here.

They serve estimates only: peaks that no program reaches. Nothing here was measured by us.
"""

from __future__ import annotations

import dataclasses

_GB, _GIB, _TERA = 10**9, 2**30, 10**12
_TPU = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "NVIDIA's data sheet of the SXM module"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one device can do at best.

    Attributes:
      name: how a target names it: "v5e", "h100".
      kind: JAX's `device_kind` of it.
      flops: floating-point operations a second on its matrix units, bfloat16, without sparsity.
      memory: bytes.
      memory_bandwidth: bytes a second.
      link: bytes a second that a device receives from devices it has fast links to. For a TPU that of one ring through
        the torus, in both directions (two of its links); for a GPU that of its NVLinks together. None: unknown.
      network: bytes a second that a device receives from another host where the fast links end; None where they don't.
      source: where the figures stand.
    """

    name: str
    kind: str
    flops: float
    memory: int
    memory_bandwidth: float
    link: float | None
    network: float | None
    source: str


# Interconnect: the pages give a chip's bandwidth over all links, in both directions; a link has it by the number of
# links, twice (4 links on v5e and v6e; 6 on v4, v5p and TPU7x), and a ring in both directions receives on two.
# v2, v3, v4 and TPU7x chips are two devices each to the compiler, which share the chip's figures evenly.
HARDWARE: tuple[Hardware, ...] = (
    Hardware("v2", "TPU v2", 45 * _TERA / 2, 8 * _GIB, 700 * _GB / 2, None, None, _TPU + "v2"),
    Hardware("v3", "TPU v3", 123 * _TERA / 2, 16 * _GIB, 900 * _GB / 2, None, None, _TPU + "v3"),
    Hardware("v4", "TPU v4", 275 * _TERA / 2, 16 * _GIB, 1200 * _GB / 2, 100 * _GB / 2, None, _TPU + "v4"),
    Hardware("v5e", "TPU v5 lite", 197 * _TERA, 16 * _GIB, 819 * _GB, 100 * _GB, None, _TPU + "v5e"),
    Hardware("v5p", "TPU v5", 459 * _TERA, 95 * _GIB, 2765 * _GB, 200 * _GB, None, _TPU + "v5p"),
    Hardware("v6e", "TPU v6 lite", 918 * _TERA, 32 * _GIB, 1638 * _GB, 200 * _GB, None, _TPU + "v6e"),
    Hardware("tpu7x", "TPU7x", 2307 * _TERA / 2, 96 * _GIB, 7380 * _GB / 2, 200 * _GB / 2, None, _TPU + "tpu7x"),
    # Between hosts: a 200 Gb/s adapter a GPU in a DGX A100, 400 Gb/s in a DGX H100, H200 or B200.
    Hardware("a100", "NVIDIA A100-SXM4-80GB", 312 * _TERA, 80 * _GIB, 2039 * _GB, 300 * _GB, 25 * _GB, _NVIDIA),
    Hardware("h100", "NVIDIA H100 80GB HBM3", 989 * _TERA, 80 * _GIB, 3350 * _GB, 450 * _GB, 50 * _GB, _NVIDIA),
    Hardware("h200", "NVIDIA H200", 989 * _TERA, 141 * _GB, 4800 * _GB, 450 * _GB, 50 * _GB, _NVIDIA),
    Hardware("b200", "NVIDIA B200", 2250 * _TERA, 180 * _GB, 7700 * _GB, 900 * _GB, 50 * _GB, _NVIDIA),
)


def hardware_of(device_kind: str) -> Hardware | None:
    """The row of a `device_kind`; None for hardware that isn't in the table (a CPU, say).

    Example:
      >>> hardware_of("TPU v5 lite").name
      'v5e'
    """
    return next((row for row in HARDWARE if row.kind == device_kind), None)
