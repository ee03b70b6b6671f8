"""``target_mesh``: a mesh of devices that are described, not owned."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from shardkit.inspect.targets.gpu import gpu_devices
from shardkit.inspect.targets.names import TargetName, parse_target
from shardkit.inspect.targets.tpu import tpu_devices
from shardkit.meshes import axis_types_of, fill_sizes, make_mesh

# Platform -> (the compiler's module, the extra that brings it).
_COMPILERS = {"tpu": ("libtpu", "tpu-target"), "gpu": ("jax_plugins.xla_cuda12", "gpu-target")}


def target_mesh(
    target: str, axes: Mapping[str, int], *, axis_types: str | AxisType | Mapping[str, str | AxisType] = "auto"
) -> Mesh:
    """A mesh on hardware that needn't be here: programs are compiled for it, by its own compiler, and not run.

    Everything that only looks works on it: ``jax.jit(f).lower(...).compile()``, ``sk.collectives``, ``sk.memory``,
    ``sk.explain``, ``sk.show``, ``sk.partition(...).program(...)``. Arguments are ``jax.ShapeDtypeStruct`` with
    shardings on this mesh, since nothing can be placed there. It can be made at any time, beside the devices that are
    really here, and for several kinds of hardware in one process; environment variables that the compilers read are set
    while they look and put back.

    Args:
      target: "tpu:<generation>:<chips along each dim of the torus>", such as "tpu:v5e:2x4", "tpu:v5p:4x8x8"; or
        "gpu:<card>:<cards>", such as "gpu:h100:8", several hosts as "gpu:h100:2x8". A TPU v2, v3, v4 or TPU7x chip is
        two devices to the compiler.
      axes: size of each axis, major first; one may be -1: whatever devices are left. A TPU's program takes the whole
        slice; of GPUs, fewer than the target has are the first ones.
      axis_types: "auto", "explicit", or a mapping by axis name, as for ``sk.make_mesh``.

    Returns:
      A mesh whose devices are in the order in which ``sk.make_mesh`` would put them.

    Raises:
      ValueError: an unknown target (the message lists those known), a topology that doesn't exist, a mesh that doesn't
        fit the target.
      ImportError: the compiler isn't installed; names the extra.

    Example:
      >>> import jax, shardkit as sk
      >>> def lookup():
      ...     mesh = sk.target_mesh("tpu:v5e:4x4", {"dp": 4, "tp": -1})
      ...     x = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=sk.to_named_sharding({"dp": sk.Shard(0)}, mesh))
      ...     return sk.explain(lambda x: (x @ x).sum(), x)
    """
    name = parse_target(target)
    sizes = _sizes(axes, name.devices, target)
    _need(*_COMPILERS[name.platform], target)
    devices = _described(name)[: math.prod(sizes.values())]
    if name.platform == "tpu" and name.model == "v4":
        # Its chips run as one device each, which this compiler can't describe, and JAX arranges no other.
        order = np.asarray(devices).reshape(tuple(sizes.values()))
        return Mesh(order, tuple(sizes), axis_types=axis_types_of(axis_types, tuple(sizes)))
    return make_mesh(sizes, axis_types=axis_types, devices=devices)


@functools.cache  # the same devices for every mesh on a target, so that meshes of equal axes are equal
def _described(name: TargetName) -> tuple[Any, ...]:
    return tuple(tpu_devices(name) if name.platform == "tpu" else gpu_devices(name))


def _sizes(axes: Mapping[str, int], devices: int, target: str) -> dict[str, int]:
    """The sizes of the axes, which take at most the target's devices."""
    try:
        sizes = fill_sizes(axes, devices)
    except ValueError as error:
        raise ValueError(f"target {target!r} has {devices} devices: {error}") from error
    needed, whole = math.prod(sizes.values()), parse_target(target).platform == "tpu"
    if needed > devices or (whole and needed != devices):
        rule = "is the number of devices, or a slice of that size" if whole else "is at most the number of devices"
        raise ValueError(
            f"target {target!r} has {devices} devices, but axes {dict(axes)} need {needed}; choose sizes whose product "
            f"{rule}."
        )
    return sizes


def _need(module: str, extra: str, target: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"compiling for {target!r} needs its compiler, which the extra {extra!r} brings: "
            f"pip install 'shardkit[{extra}]'"
        ) from error
