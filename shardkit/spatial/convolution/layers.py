"""What the choice of a form knows of a convolution: its regime, and which layer it is."""

from __future__ import annotations

import dataclasses

from shardkit.spatial.convolution.spec import LocalConv


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
class Layer:
    """A convolution as it's recognised again: its windows and how they are cut, its dims, its regime.

    Attributes:
      conv: without what says nothing of its work: names of mesh axes, precision, the form.
      regime: where it runs.
    """

    conv: LocalConv
    regime: Regime


def layer_of(conv: LocalConv, regime: Regime) -> Layer:
    """The layer of a convolution that has no form yet."""
    plain = dataclasses.replace(
        conv,
        axes=(None,) * len(conv.axes),
        precision=None,
        preferred_element_type=None,
        split_groups=False,
        sum_over=(),
        shift_kernel=False,
    )
    return Layer(plain, regime)
