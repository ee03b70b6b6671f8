"""One program for many leaves, each at a layout, on every device's blocks of them: what `reduce` and `gather` run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardkit.meshes import platform_of
from shardkit.optim.buckets import best_limit
from shardkit.placements import AnyMesh, Layout


def on_blocks(
    body: Callable[..., Any], mesh: AnyMesh, sources: Sequence[Layout], targets: Sequence[Layout], ndims: Sequence[int]
) -> Callable[..., Any]:
    """``body``, from the blocks of all leaves to those of all results, compiled.

    Args:
      body: a function of a list of blocks that returns one.
      mesh: all of its axes are manual within.
      sources, targets: of each leaf; of a Partial one, the block of its stack.
      ndims: of each leaf.
    """

    def specs(layouts: Sequence[Layout]) -> list[Any]:
        return [layout.stack_spec(ndim) for layout, ndim in zip(layouts, ndims, strict=True)]

    # Types needn't be checked: it says where everything is, and isn't differentiated.
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(specs(sources),), out_specs=specs(targets), check_vma=False)
    )


def limit_on(mesh: AnyMesh, bucket_bytes: int | None) -> int | None:
    """The bound on a bucket: the caller's, or what is best on the mesh's platform."""
    return best_limit(platform_of(mesh)) if bucket_bytes is None else bucket_bytes
