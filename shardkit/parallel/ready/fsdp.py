"""A plan that shards all parameters between uses."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.parallel.plans import FullyShard
from shardkit.parallel.ready.guessing import Choice, Found, ReadyPlan
from shardkit.placements import AnyMesh


def fsdp(axis: str = "dp", *, min_size: int = 0, verbose: bool = True) -> ReadyPlan:
    """Every parameter sharded over the batch's axis, and the batch spread over it: ``sk.FullyShard`` for a whole model.

    Args:
      axis: the mesh axis.
      min_size: parameters with fewer elements stay whole.
      verbose: print what was chosen.

    Returns:
      A dictionary: what you set in it stands in for the guess.

    Example:
      >>> import shardkit as sk
      >>> from flax import nnx
      >>> sk.plans.fsdp("dp", verbose=False).guess(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
      {'': [FullyShard(axis='dp', min_size=0, first_dim=0)]}
    """
    plan = FullyShard(axis, min_size)

    def guess(layers: Sequence[Found], mesh: AnyMesh | None) -> list[Choice]:
        name = next((layer.name for layer in layers if layer.path == ""), "")
        return [Choice("", name, (plan,), "all parameters, the lowest dim that divides")]

    return ReadyPlan(f"sk.plans.fsdp({axis!r})", guess, verbose)
