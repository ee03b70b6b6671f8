"""A plan for convolutional models: their spatial dims cut, halos exchanged."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.parallel.plans import ConvParallel
from shardkit.parallel.ready.guessing import Choice, Found, ReadyPlan
from shardkit.placements import AnyMesh

_KINDS = ("conv", "norm", "spatial norm", "dropout")


def unet(sp: str | Sequence[str] = "sp", dims: str = "W", *, verbose: bool = True) -> ReadyPlan:
    """Spatial parallelism for a U-Net, or any model of convolutions, norms and elementwise layers.

    Args:
      sp: the mesh axis, or one for each letter of ``dims``.
      dims: the spatial dims that are cut, of "D", "H", "W" (channels last). One axis with several letters cuts the
        first of them.
      verbose: print what was chosen.

    Returns:
      A dictionary: what you set in it stands in for the guess.

    Raises:
      ValueError: unknown letters, or more axes than letters.

    Example:
      >>> import shardkit as sk
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0)), nnx.relu)
      >>> sk.plans.unet(sp=("sh", "sw"), dims="HW", verbose=False).guess(model)
      {'layers/0': [ConvParallel(dims=(('sh', 'H'), ('sw', 'W')))]}
    """
    axes = (sp,) if isinstance(sp, str) else tuple(sp)
    if not dims or any(letter not in "DHW" for letter in dims) or len(set(dims)) != len(dims):
        raise ValueError(f'unet: dims={dims!r} names spatial dims, different letters of "DHW"')
    if not 1 <= len(axes) <= len(dims):
        raise ValueError(f"unet: sp={sp!r} names {len(axes)} mesh axes for the {len(dims)} dims of dims={dims!r}")
    plan = ConvParallel(dict(zip(axes, dims, strict=False)))

    def guess(layers: Sequence[Found], mesh: AnyMesh | None) -> list[Choice]:
        return [Choice(layer.path, layer.name, (plan,), layer.kind) for layer in layers if layer.kind in _KINDS]

    return ReadyPlan(f"sk.plans.unet(sp={sp!r}, dims={dims!r})", guess, verbose)
