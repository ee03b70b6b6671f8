"""Differences between supported JAX versions, and nothing else."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec


def spec_entries(spec: PartitionSpec) -> tuple[Any, ...]:
    """One entry a dim. Iterating a spec that carries ``unreduced`` axes is refused by newer versions."""
    partitions = getattr(spec, "partitions", None)
    return tuple(spec) if partitions is None else tuple(partitions)
