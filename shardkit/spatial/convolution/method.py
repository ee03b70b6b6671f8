"""Which form a convolution runs in: the caller's choice, or the table that the benchmark filled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from shardkit.spatial.convolution.blocks import cut_into_chunks, why_not_chunks
from shardkit.spatial.convolution.overlap import why_not_overlap
from shardkit.spatial.convolution.spec import Chunks, LocalConv

METHODS = ("auto", "concat", "overlap", "blocks")


@dataclasses.dataclass(frozen=True)
class Regime:
    """What the choice depends on.

    Attributes:
      platform: "cpu", "gpu", "tpu".
      images: batch elements on a device.
      images_known: False where mesh axes left to the compiler may cut the batch further.
      elements: of a device's block, in space.
      features: the fewer of the features that come in and go out, in one group.
    """

    platform: str
    images: int
    images_known: bool
    elements: int
    features: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """Up to ``images`` on a device: these chunks (0: the form isn't "blocks")."""

    images: float
    method: str
    chunks: int = 0
    major: bool = False


# From `python benchmarks/ring_conv.py --targets` (benchmarks/README.md has the figures), the first row that fits.
# TPU: its matrix unit takes 8 images side by side, so fewer images are cut into 8 chunks; more are left as
# they are. GPU: no form is faster, "overlap" keeps least. CPU: no form is better than "concat".
_TABLE = {
    "tpu": (_Row(7, "blocks", 8), _Row(math.inf, "blocks", 2, True)),
    "gpu": (_Row(math.inf, "overlap"),),
    "cpu": (_Row(math.inf, "concat"),),
}
# Below these, a layer is too small for its form to matter, and cutting it up would only add copies.
_LEAST_ELEMENTS, _LEAST_FEATURES = 2**14, 64


def choose_form(conv: LocalConv, method: str, regime: Regime, what: str) -> LocalConv:
    """``conv`` in the form asked for.

    Raises:
      ValueError: the form can't run this convolution; says why.
    """
    conv = dataclasses.replace(conv, shift_kernel=regime.platform == "tpu")
    if method == "auto":
        return _by_table(conv, regime)
    if method == "overlap":
        reason = why_not_overlap(conv)
        if reason is not None:
            raise ValueError(f"{what}: method='overlap' can't run this convolution: {reason}; method='concat' can")
        return dataclasses.replace(conv, method="overlap")
    if method == "blocks":
        row = _row("tpu", regime)
        found, reason = _blocks(conv, [row.chunks, 8, 4, 2], row.major, regime)
        if found is None:
            raise ValueError(f"{what}: method='blocks' can't run this convolution: {reason}; method='concat' can")
        return found
    return conv


def _by_table(conv: LocalConv, regime: Regime) -> LocalConv:
    if regime.elements < _LEAST_ELEMENTS or regime.features < _LEAST_FEATURES:
        return conv
    row = _row(regime.platform, regime)
    if row.method == "overlap" and why_not_overlap(conv) is None:
        return dataclasses.replace(conv, method="overlap")
    if row.method == "blocks":
        found, _ = _blocks(conv, [row.chunks], row.major, regime)
        return found or conv
    return conv


def _row(platform: str, regime: Regime) -> _Row:
    """Where the number of images isn't known, the row for few: with more, its form is good as well."""
    images = regime.images if regime.images_known else 1
    return next(r for r in _TABLE.get(platform, _TABLE["cpu"]) if images <= r.images)


def _blocks(conv: LocalConv, counts: Sequence[int], major: bool, regime: Regime) -> tuple[LocalConv | None, str | None]:
    """In the first number of chunks that some dim can be cut into: sharded dims first, the last of them first."""
    # A batch that is cut further must stay the major part of the merged dim, or the compiler gathers it: the
    # rows for an unknown number of images aren't major.
    assert regime.images_known or not major
    positions = sorted(range(len(conv.windows)), key=lambda p: (conv.axes[p] is None, -p))
    first = None
    for count in counts:
        for position in positions:
            reason = why_not_chunks(conv, position, count)
            if reason is None:
                return cut_into_chunks(conv, Chunks(position, count, major)), None
            first = first or reason
    return None, first


def regime_of(conv: LocalConv, platform: str, block: Sequence[int], kernel: Sequence[int], free: bool) -> Regime:
    """The regime of a convolution.

    Args:
      conv: the convolution.
      platform: of the mesh's devices.
      block: shape of a device's block.
      kernel: shape of the kernel a device uses.
      free: mesh axes are left to the compiler.
    """
    return Regime(
        platform=platform,
        images=block[conv.lhs_spec[0]],
        images_known=not free,
        elements=math.prod(block[d] for d in conv.lhs_spec[2:]),
        features=min(kernel[conv.rhs_spec[1]], kernel[conv.rhs_spec[0]] // conv.feature_groups),
    )
